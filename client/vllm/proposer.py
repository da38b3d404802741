"""vLLM's V1 model runner: `{"method": "custom_class", "model": "draftd.client.vllm.proposer.DraftdProposer"}`.

It drafts on the host, from the tokens that the runner has there, by the client that every engine can use.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftd.client.drafter import Drafter
from draftd.client.vllm.plugin import KNOWN_RELEASE, installed_release, is_known
from draftd.client.vllm.requests import WARM_UP_NAMES
from draftd.client.vllm.scheduler import DISCARDED, ends_of, salt_of
from draftd.client.vllm.settings import RequestOptions, Settings

log = logging.getLogger("vllm.plugins.draftd")

_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"


@dataclass(slots=True)
class _Drafted:
    """A request of the runner: its options, id and, while it has one, its row and the tokens that the drafter has of it."""

    options: RequestOptions
    document_id: str
    row: int | None = None
    length: int = 0
    stopped: bool = False


class DraftdProposer:
    """What vLLM's V1 runner takes for a custom proposer. Only rank 0 drafts: the scheduler hands its drafts to all.

    Args:
        vllm_config: vLLM's configuration.
        drafter: For tests; None makes one from the environment.

    Raises:
        RuntimeError: DRAFTD_ENDPOINT is not set, or this release of vLLM is not known.
    """

    def __init__(self, vllm_config: Any, drafter: Drafter | None = None) -> None:
        if not os.environ.get("DRAFTD_ENDPOINT"):
            raise RuntimeError("DraftdProposer needs DRAFTD_ENDPOINT, such as unix:/run/draftd.sock")
        if drafter is None and not is_known(installed_release()):
            raise RuntimeError(f"draftd does not know vLLM {installed_release()}, only {KNOWN_RELEASE}")
        parallel = vllm_config.parallel_config
        self._settings = settings = Settings.of(vllm_config)
        self._drafts_here = parallel.rank % parallel.tensor_parallel_size == 0
        self._max_length = vllm_config.model_config.max_model_len
        self._max_rows = vllm_config.scheduler_config.max_num_seqs
        self._requests: dict[str, _Drafted] = {}
        self._free = list(range(self._max_rows))
        self._run = uuid.uuid4().hex[:8]
        self._started = 0
        self._names: Sequence[str] = ()
        self._states: dict[str, Any] = {}
        self._salts: dict[str, str | None] = {}
        if self._drafts_here:
            self._drafter = drafter or Drafter(
                settings.endpoint,
                engine=settings.engine,
                vocab_size=vllm_config.model_config.get_vocab_size(),
                k=vllm_config.speculative_config.num_speculative_tokens,
                max_rows=self._max_rows,
                max_length=self._max_length,
                namespace=settings.namespace,
                extra_namespaces=settings.extra_namespaces,
            )
        if _RUNNER_MODULE in sys.modules:
            hook_v1_runner(sys.modules[_RUNNER_MODULE].GPUModelRunner)

    def see_batch(self, names: Sequence[str], states: dict[str, Any]) -> None:
        """Takes what the next `propose` is about: request ids in the batch's order, and vLLM's CachedRequestState of each."""
        self._names, self._states = names, states

    def see_scheduled(self, output: Any) -> None:
        """Ends the requests that vLLM's SchedulerOutput finishes, of which what was generated up to their stop is kept, and notes the cache
        salts of those that begin."""
        for new in output.scheduled_new_reqs:
            self._salts[new.req_id] = salt_of(output, new.req_id)
        ends = ends_of(output)
        for name in output.finished_req_ids:
            self._salts.pop(name, None)
            request = self._requests.pop(name, None)
            if request is not None and request.row is not None:
                length = ends.get(name)
                self._drafter.finish(request.row, length == DISCARDED, length=None if length == DISCARDED else length)
                self._free.append(request.row)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: NDArray[Any], token_ids_cpu: NDArray[Any], slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts for a batch.

        Args:
            sampled_token_ids: Per request what this step sampled; empty while its prompt is not computed.
            num_tokens_no_spec: Integers [requests]; tokens of each request, the sampled ones included.
            token_ids_cpu: Integers [requests, max_model_len]; those tokens.
            slot_mappings: Not used.

        Returns:
            Per request at most k tokens.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._drafts_here or len(self._names) < len(sampled_token_ids):
            return drafts
        places: list[int] = []
        rows: list[int] = []
        for place, sampled in enumerate(sampled_token_ids):
            if not sampled:
                continue
            row = self._take(self._names[place], sampled, token_ids_cpu[place, : int(num_tokens_no_spec[place])])
            if row is not None:
                places.append(place)
                rows.append(row)
        if rows:
            found = self._drafter.propose(np.array(rows))
            for i, place in enumerate(places):
                # The token after the draft needs a place too.
                room = self._max_length - int(num_tokens_no_spec[place]) - 1
                drafts[place] = found.row(i)[: max(room, 0)]
        return drafts

    def _take(self, name: str, sampled: list[int], tokens: NDArray[Any]) -> int | None:
        """Gives the drafter a request's new tokens. Answers its row, or None if there is nothing to draft for."""
        state = self._states[name]
        request = self._requests.get(name)
        if request is None:
            self._started += 1
            adapter = "" if state.lora_request is None else state.lora_request.lora_name
            options = RequestOptions.of(self._settings, state.sampling_params.extra_args, adapter, self._salts.get(name))
            if name.startswith(WARM_UP_NAMES) or state.prompt_token_ids is None:
                options = RequestOptions(off=True)
            document = f"{self._run}/{self._started}/{name}".encode()[:128].decode(errors="ignore")
            request = self._requests[name] = _Drafted(options, document)
        if request.options.off or request.stopped:
            return None
        before = len(tokens) - len(sampled)
        count = count_until_stop(sampled, before - len(state.prompt_token_ids), state.sampling_params)
        request.stopped = count is not None
        tokens = tokens[: before + (len(sampled) if count is None else count)]
        if request.row is None:
            request.row = self._free.pop() if self._free else self._park()
            prompt = 0 if request.options.keep_prompt else len(state.prompt_token_ids)
            self._drafter.start(
                request.row, tokens, request.document_id, request.options.namespace, request.options.private, prompt_length=prompt
            )
        else:
            self._drafter.append(request.row, tokens[request.length :])
        request.length = len(tokens)
        return None if request.stopped else request.row

    def _park(self) -> int:
        """Takes the row of a request that is not in the batch: it was preempted, and comes back with all its tokens."""
        batch = set(self._names)
        name = next(name for name, request in self._requests.items() if request.row is not None and name not in batch)
        request = self._requests[name]
        row, request.row = request.row, None
        assert row is not None
        self._drafter.preempt(row)
        return row


def count_until_stop(sampled: Sequence[int], before: int, params: Any) -> int | None:
    """How many sampled tokens the scheduler will keep; None if it keeps them all and the request goes on.

    Args:
        sampled: Tokens of one step.
        before: Output tokens before them.
        params: vLLM's SamplingParams.
    """
    for i, token in enumerate(sampled, 1):
        if token == params.eos_token_id or token in (params.stop_token_ids or ()):
            return i
        if params.max_tokens is not None and before + i >= params.max_tokens:
            return i
    return None


def hook_v1_runner(runner: Any) -> None:
    """Makes vLLM's V1 GPUModelRunner class tell its proposer, where that is draftd's, whose tokens it gets and which requests ended."""
    if hasattr(runner, "_draftd_hooked"):
        return
    runner._draftd_hooked = True
    update, propose = runner._update_states, runner.propose_draft_token_ids

    @functools.wraps(update)
    def _update_states(self: Any, scheduler_output: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, DraftdProposer):
            drafter.see_scheduled(scheduler_output)
        return update(self, scheduler_output)

    @functools.wraps(propose)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, DraftdProposer):
            drafter.see_batch(list(self.input_batch.req_ids), self.requests)
        return propose(self, *args, **kwargs)

    runner._update_states, runner.propose_draft_token_ids = _update_states, propose_draft_token_ids
