"""The requests of one worker: from vLLM's scheduler outputs to calls of a DeviceSession, on the host and off the GPU's stream."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from draftd.client.vllm.scheduler import DISCARDED, ends_of, salt_of
from draftd.client.vllm.settings import RequestOptions, Settings, unknown_options

log = logging.getLogger("vllm.plugins.draftd")

WARM_UP_NAMES = ("_warmup_", "_v2_mixed_warmup", "_dummy_req_")
"""How the names of requests begin that vLLM makes up to warm itself up."""

_DOCUMENT_ID_BYTES = 128


class Session(Protocol):
    """What of a DeviceSession requests need."""

    def start(
        self,
        row: int,
        tokens: ArrayLike,
        document_id: str | None = None,
        namespace: str | None = None,
        private: bool = False,
        *,
        prompt_length: int | None = None,
    ) -> None: ...

    def finish(self, row: int, length: int | None = None, discard: bool = False) -> None: ...


@dataclass(slots=True)
class Counts:
    """What happened to requests since the start.

    Attributes:
        started: Requests that draftd drafts for; resumed ones count again.
        off: Requests that draftd leaves alone, warm-ups among them.
        unlisted: Requests that were made private, because their namespace is none of the engine's.
        discarded: Requests of which nothing was kept, because nobody said how many of their tokens count.
    """

    started: int = 0
    off: int = 0
    unlisted: int = 0
    discarded: int = 0


class Requests:
    """The rows of one worker, each of which holds one request.

    Args:
        session: Where drafts come from.
        settings: The engine's.
        draft_for: Called with a row and whether to draft for it, when that changes; rows are drafted for until it says otherwise.
    """

    def __init__(self, session: Session, settings: Settings, draft_for: Callable[[int, bool], None]) -> None:
        self.counts = Counts()
        self._session = session
        self._settings = settings
        self._draft_for = draft_for
        self._rows: dict[str, int] = {}
        self._off: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._run = uuid.uuid4().hex[:8]
        self._warned: set[str] = set()

    def begin(self, output: Any, row_of: Mapping[str, int]) -> None:
        """Starts the requests that a scheduler output brings into the batch: new ones, and those that come back after a preemption.

        Args:
            output: vLLM's SchedulerOutput.
            row_of: The row of each request that has one.
        """
        for new in output.scheduled_new_reqs:
            name, row = new.req_id, row_of[new.req_id]
            if name in self._rows or name in self._off:
                # A session that streams its input goes on: its last answer is part of the new prompt, and nobody tells how long that was.
                self._end(name, DISCARDED)
            options = self._options(output, new)
            if options is None or options.off:
                self.counts.off += 1
                self._off[name] = row
                self._draft_for(row, False)
                continue
            self.counts.started += 1
            prompt = 0 if options.keep_prompt else len(new.prompt_token_ids)
            tokens = np.asarray(new.prefill_token_ids, np.int32)
            document = f"{self._run}/{self.counts.started}/{name}".encode()[:_DOCUMENT_ID_BYTES].decode(errors="ignore")
            self._rows[name] = row
            self._session.start(
                row, tokens, document, options.namespace, private=options.private, prompt_length=max(prompt, self._kept.pop(name, 0))
            )

    def end(self, output: Any) -> None:
        """Ends the requests that a scheduler output finishes or preempts.

        A preempted request ends as a document of what was delivered, and comes back as another, which begins where that one ended: its
        row may hold tokens that nobody will see, and it may never come back.

        Args:
            output: vLLM's SchedulerOutput.
        """
        ends = ends_of(output)
        for name in output.finished_req_ids:
            self._end(name, ends.get(name))
            self._kept.pop(name, None)
        for name in output.preempted_req_ids or ():
            if name in self._rows:
                self._kept[name] = max(ends.get(name, 0), 0)
            self._end(name, ends.get(name))

    def _end(self, name: str, length: int | None) -> None:
        row = self._off.pop(name, None)
        if row is not None:
            self._draft_for(row, True)
        row = self._rows.pop(name, None)
        if row is None:
            return
        if length is None:
            self.counts.discarded += 1
            self._warn("lengths", "the scheduler does not say how long outputs are: nothing that vLLM generates is kept")
        discard = length is None or length == DISCARDED
        self._session.finish(row, length=None if discard else length, discard=discard)

    def _options(self, output: Any, new: Any) -> RequestOptions | None:
        """A request's options; None if it is none to draft for."""
        params = new.sampling_params
        if params is None or new.prompt_token_ids is None or new.req_id.startswith(WARM_UP_NAMES):
            return None
        adapter = "" if new.lora_request is None else new.lora_request.lora_name
        options = RequestOptions.of(self._settings, params.extra_args, adapter, salt_of(output, new.req_id))
        for wrong in unknown_options(params.extra_args):
            self._warn(wrong, f"a request has {wrong}, which draftd does not know")
        if options.unlisted:
            self.counts.unlisted += 1
            self._warn(
                options.unlisted,
                f"namespace {options.unlisted!r} is not in DRAFTD_VLLM_NAMESPACES: its requests draft from their own tokens only",
            )
        return options

    def _warn(self, about: str, text: str) -> None:
        """Logs a line about a thing once, about at most 100 things."""
        if about not in self._warned and len(self._warned) < 100:
            self._warned.add(about)
            log.warning("draftd: %s", text)
