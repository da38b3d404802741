"""How much of what the service has few of one principal may hold: attachments, and namespaces within its patterns.

What namespaces hold in turn is bounded by their quota of tokens, whoever fills them.
"""

from collections.abc import Iterable

from draftd.drafter.errors import ResourceExhausted
from draftd.server.security.principal import CALLER


def check_attachments(held: int) -> None:
    """Lets the caller make one more attachment beside the `held` that it has.

    Raises:
        ResourceExhausted: That would be beyond its quota.
    """
    caller = CALLER.get()
    if caller is not None and 0 < caller.quotas.attachments <= held:
        raise ResourceExhausted(f"engine: {caller.name!r} has {held} attachments; its limit is max_attachments={caller.quotas.attachments}")


def check_namespaces(wanted: Iterable[str], existing: Iterable[str]) -> None:
    """Lets the caller make those of the `wanted` namespaces that do not exist.

    Whoever made them, all that its patterns fit count: so a restart forgets nothing, and two tokens of one tenant have one quota.

    Raises:
        ResourceExhausted: That would be beyond its quota.
    """
    caller = CALLER.get()
    if caller is None or not caller.quotas.namespaces:
        return
    there = set(existing)
    new = sorted(set(wanted) - there)
    held = sum(map(caller.covers, there))
    if new and held + len(new) > caller.quotas.namespaces:
        raise ResourceExhausted(
            f"namespace {new[0]!r} would be one more than max_namespaces={caller.quotas.namespaces}, the limit of {caller.name!r}; "
            f"{held} that its patterns fit exist",
            "namespace",
        )
