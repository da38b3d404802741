"""What an engine installs: a `Drafter` that drafts for its rows from a corpus shared with the other engines of its node.

It imports the drafting core and the API, and nothing of the server.
"""

from draftd.client.credentials import Credentials
from draftd.client.drafter import Drafter
from draftd.client.failopen import FailOpen

__all__ = ["Credentials", "Drafter", "FailOpen"]
