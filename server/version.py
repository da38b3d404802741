"""The version of the installed package."""

from importlib import metadata


def version() -> str:
    """Such as 0.1.0."""
    return metadata.version("draftd")
