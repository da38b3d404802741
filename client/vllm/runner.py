"""Tells draftd's speculator which requests a worker of Model Runner V2 begins and ends.

The speculator itself is only told of batches, and not of requests.
"""

from __future__ import annotations

import functools
from typing import Any

from draftd.client.vllm.speculator import DraftdSpeculator


def hook_runner(runner: Any) -> None:
    """Makes vLLM's GPUModelRunner class tell its speculator, where that is draftd's."""
    finish, add, shutdown = runner.finish_requests, runner.add_requests, runner.shutdown

    @functools.wraps(finish)
    def finish_requests(self: Any, scheduler_output: Any) -> Any:
        speculator = self.speculator
        if isinstance(speculator, DraftdSpeculator):
            speculator.end_requests(scheduler_output)
        return finish(self, scheduler_output)

    @functools.wraps(add)
    def add_requests(self: Any, scheduler_output: Any) -> Any:
        result = add(self, scheduler_output)
        speculator = self.speculator
        if isinstance(speculator, DraftdSpeculator) and scheduler_output.scheduled_new_reqs:
            speculator.begin_requests(scheduler_output, self.req_states.req_id_to_index)
        return result

    @functools.wraps(shutdown)
    def shutdown_with_draftd(self: Any) -> Any:
        speculator = getattr(self, "speculator", None)
        if isinstance(speculator, DraftdSpeculator):
            speculator.close()
        return shutdown(self)

    runner.finish_requests, runner.add_requests, runner.shutdown = finish_requests, add_requests, shutdown_with_draftd
