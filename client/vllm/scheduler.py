"""What only vLLM's scheduler knows and the workers need: how many tokens of a request count in the end, and its cache salt.

It travels as two attributes of the SchedulerOutput, which vLLM hands or pickles to the workers anyway.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

DISCARDED = -1
"""In place of a length: nothing of the request is kept."""

_ENDS, _SALTS = "draftd_ends", "draftd_salts"
_PENDING = "_draftd_ends"


def ends_of(output: Any) -> dict[str, int]:
    """By id of a request that ended or was preempted: its tokens that count, prompt included, or `DISCARDED`.

    Empty where the scheduler was not hooked.
    """
    ends: dict[str, int] = getattr(output, _ENDS, {})
    return ends


def salt_of(output: Any, request_id: str) -> str | None:
    """A hash of the cache salt of a request that begins with this output; empty without one, None where the scheduler was not hooked."""
    salts: dict[str, str] | None = getattr(output, _SALTS, None)
    return None if salts is None else salts.get(request_id, "")


def salted(salt: str) -> str:
    """What stands for a cache salt where others can read it: 16 hex digits."""
    return hashlib.sha256(salt.encode()).hexdigest()[:16]


def hook_scheduler(scheduler: Any) -> None:
    """Makes vLLM's Scheduler class tell the workers.

    With asynchronous scheduling a worker samples past a stop before the scheduler sees it; and of a preempted request only the scheduler
    knows what was delivered.
    """
    free, preempt, schedule = scheduler._free_request, scheduler._preempt_request, scheduler.schedule

    @functools.wraps(free)
    def _free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        failed = getattr(request.status, "name", "") == "FINISHED_ERROR"
        _note(self, request, DISCARDED if failed else request.num_tokens)
        return free(self, request, *args, **kwargs)

    @functools.wraps(preempt)
    def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _note(self, request, request.num_tokens)
        return preempt(self, request, *args, **kwargs)

    @functools.wraps(schedule)
    def schedule_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        setattr(output, _ENDS, self.__dict__.pop(_PENDING, {}))
        begun = ((new.req_id, self.requests.get(new.req_id)) for new in output.scheduled_new_reqs)
        setattr(output, _SALTS, {name: salted(request.cache_salt) for name, request in begun if request is not None and request.cache_salt})
        return output

    scheduler._free_request, scheduler._preempt_request, scheduler.schedule = _free_request, _preempt_request, schedule_and_tell


def _note(scheduler: Any, request: Any, length: int) -> None:
    scheduler.__dict__.setdefault(_PENDING, {})[request.request_id] = length
