"""Errors that are a caller's business, each with the gRPC status it becomes and the field it is about.

Messages name the field and the limit and nothing internal. Invariants of the core are plain assertions, not these.
"""

from __future__ import annotations


class DraftdError(Exception):
    """An error to answer a caller with.

    Attributes:
        code: Name of the gRPC status code, such as ``INVALID_ARGUMENT``.
        field: The request's field that it is about, such as ``rows[3].tokens``; may be empty.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidArgument(DraftdError):
    """The request is wrong whatever the service's state."""

    code = "INVALID_ARGUMENT"


class NotFound(DraftdError):
    """What the request names does not exist."""

    code = "NOT_FOUND"


class FailedPrecondition(DraftdError):
    """The request does not fit the state of what it names."""

    code = "FAILED_PRECONDITION"


class ResourceExhausted(DraftdError):
    """A limit of the service would be exceeded."""

    code = "RESOURCE_EXHAUSTED"


class AlreadyExists(DraftdError):
    """What the request creates is there already."""

    code = "ALREADY_EXISTS"
