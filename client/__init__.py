"""What an engine installs: a `Drafter` that drafts for its rows from a corpus shared with the other engines of its node.

It imports the drafting core and the API, and nothing of the server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftd.client.credentials import Credentials
    from draftd.client.drafter import Drafter
    from draftd.client.failopen import FailOpen

__all__ = ["Credentials", "Drafter", "FailOpen"]

_MODULES = {"Credentials": "credentials", "Drafter": "drafter", "FailOpen": "failopen"}


def __getattr__(name: str) -> object:
    # Imported when first used: vLLM loads a plugin from this package in every process, also where nothing is drafted.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
