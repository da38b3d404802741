"""What names of engines and namespaces, and fingerprints of tokenizers, may look like."""

import re

from draftd.drafter.errors import InvalidArgument

DEFAULT_NAMESPACE = "default"
_MAX_FINGERPRINT_BYTES = 256
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def check_name(name: str, field: str) -> str:
    """Answers `name`; InvalidArgument unless it has 1 to 128 characters of letters, digits and . _ : / -"""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{field} must have 1 to 128 characters of letters, digits and . _ : / -", field)
    return name


def namespace_or_default(name: str, field: str = "namespace") -> str:
    """A valid namespace name; empty means "default"."""
    return check_name(name, field) if name else DEFAULT_NAMESPACE


def check_fingerprint(fingerprint: str) -> str:
    """Answers a tokenizer's fingerprint; InvalidArgument if it has more than 256 bytes."""
    if len(fingerprint.encode()) > _MAX_FINGERPRINT_BYTES:
        raise InvalidArgument(f"tokenizer_fingerprint has more than {_MAX_FINGERPRINT_BYTES} bytes", "tokenizer_fingerprint")
    return fingerprint
