"""The speculator of vLLM's Model Runner V2 that drafts from a service: each step, on vLLM's stream, from vLLM's own token buffer.

Where there is no service at the start it gives way to vLLM's speculator, and it falls back on that if anything goes wrong later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import triton

from draftd.client.vllm.graphs import DraftGraphs
from draftd.client.vllm.kernels import pick_rows, spread_drafts
from draftd.client.vllm.requests import Requests, Session
from draftd.client.vllm.settings import Settings
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.params import MAX_K, DraftParams, Policy

log = logging.getLogger("vllm.plugins.draftd")

_BLOCK = 128
_ADAPTIVE_TAU = 0.02
"""Tokens less likely than this are never worth a place in a batch."""


class DraftingSession(Session, Protocol):
    """What of draftd.client.device.DeviceSession the speculator needs."""

    @property
    def transport(self) -> str: ...

    def propose(self, rows: torch.Tensor, out: DeviceDrafts | None = None) -> DeviceDrafts: ...

    def collect(self, rows: torch.Tensor, drafts: DeviceDrafts) -> None: ...

    def close(self) -> None: ...


class Ranks(Protocol):
    """What of vLLM's GroupCoordinator the speculator needs: the tensor-parallel ranks that must verify the same drafts."""

    world_size: int
    rank_in_group: int

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor: ...

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any: ...


def speculator_maker(stock_class: Any) -> Callable[[Any, torch.device, Any], Any]:
    """What vLLM calls in place of its class NgramGPUSpeculator.

    Args:
        stock_class: That class.
    """

    def make(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        from vllm.distributed.parallel_state import get_tp_group

        stock = stock_class(vllm_config, device, req_states)
        return make_speculator(stock, vllm_config, device, req_states, get_tp_group(), open_session)

    return make


def make_speculator(
    stock: Any, vllm_config: Any, device: torch.device, req_states: Any, ranks: Ranks, open_session: Callable[..., DraftingSession]
) -> Any:
    """A `DraftdSpeculator`, or `stock` where rank 0 gets no session. All ranks get the same kind, and one line says which."""
    session, settings, reason = None, None, ""
    if ranks.rank_in_group == 0:
        try:
            settings = Settings.of(vllm_config)
            session = open_session(settings, vllm_config, req_states)
        except Exception as error:  # noqa: BLE001 -- whatever it is, vLLM starts as if there were no service, and says why
            reason = f"{type(error).__name__}: {error}"
    if ranks.world_size > 1:
        reason = ranks.broadcast_object(reason, src=0)
    if reason:
        if ranks.rank_in_group == 0:
            log.warning("draftd is not used, vLLM drafts with ngram_gpu instead: %s", reason)
        return stock
    if session is not None and settings is not None:
        log.info(
            "drafting from draftd at %s as %s, namespace %s, %s", settings.endpoint, settings.engine, settings.namespace, session.transport
        )
    return DraftdSpeculator(stock, vllm_config, device, req_states, ranks, session, settings)


def open_session(settings: Settings, vllm_config: Any, req_states: Any) -> DraftingSession:
    """A session that is attached.

    Raises:
        TimeoutError: The service did not answer in `settings.attach_s`.
        DraftdError, OSError, RuntimeError: There can be none.
    """
    from draftd.client.device import DeviceSession

    session = DeviceSession(
        settings.endpoint,
        engine=settings.engine,
        vocab_size=req_states.vocab_size,
        tokens=req_states.all_token_ids.gpu,
        lengths=req_states.total_len.gpu,
        k=vllm_config.speculative_config.num_speculative_tokens,
        max_batch=req_states.max_num_reqs,
        namespace=settings.namespace,
        extra_namespaces=settings.extra_namespaces,
        params=draft_params(vllm_config.speculative_config, settings.policy),
    )
    if not session.wait_attached(settings.attach_s):
        reason, detail = session.trouble
        session.close()
        raise TimeoutError(f"{settings.endpoint} has not attached within {settings.attach_s:g} s: {detail or reason or 'no answer'}")
    return session


def draft_params(speculative_config: Any, policy: Policy) -> DraftParams:
    """How to draft for vLLM.

    vLLM verifies as many tokens as it was configured for, drafted or not, so a draft may be as long as that however unlikely it is, unless
    adaptive verification chooses from all requests' tokens by their confidence; it chooses better from more of them.

    Raises:
        InvalidArgument: vLLM wants longer drafts than there are.
    """
    k = speculative_config.num_speculative_tokens
    adaptive = speculative_config.enable_adaptive_verification
    if policy == "calibrated":
        return DraftParams(k=k, tau=_ADAPTIVE_TAU if adaptive else 0.0)
    if adaptive or k > MAX_K:
        return DraftParams(k=k, policy="tree")
    return DraftParams(k=k, policy="tree", min_token_prob=0.0, spec_offset=k / 2)


class DraftdSpeculator:
    """What Model Runner V2 takes for its speculator.

    Ranks other than the first have no session: they get what the first one drafted.

    Args:
        stock: vLLM's own speculator for the method `ngram_gpu`.
        vllm_config, device, req_states: What vLLM makes a speculator from.
        ranks: The tensor-parallel ranks.
        session, settings: Of the first rank.
    """

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, stock: Any, vllm_config: Any, device: torch.device, req_states: Any, ranks: Ranks, session: DraftingSession | None,
        settings: Settings | None,
    ) -> None:  # fmt: skip
        config = vllm_config.speculative_config
        rows = req_states.max_num_reqs
        self.num_speculative_steps = k = int(config.num_speculative_tokens)
        self.enable_adaptive_verification = bool(config.enable_adaptive_verification)
        self.draft_token_confidence_probs = torch.zeros((rows, k), dtype=torch.float32, device=device)
        self.pcp_manager: Any = None
        self.failures = 0
        self._stock = stock
        self._ranks = ranks
        self._leads = ranks.rank_in_group == 0
        self._session = session
        self._req_states = req_states
        self._drafts = torch.zeros((rows, k), dtype=torch.int64, device=device)
        self._drafted_for = torch.ones(rows, dtype=torch.int32, device=device)
        self._rows = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._row_slots = torch.zeros(rows, dtype=torch.int32, device=device)
        self._nothing_sampled = torch.zeros(rows, dtype=torch.int32, device=device)
        self._all = DeviceDrafts.empty(rows, k, device)
        # Views are made once: seven of them a step would be felt on the host.
        self._parts: dict[int, tuple[torch.Tensor, DeviceDrafts]] = {}
        self._graphs = DraftGraphs(device, rows, self._draft) if settings is not None and settings.graphs else None
        self._requests = None if session is None or settings is None else Requests(session, settings, self._draft_for)

    # -- what the model runner calls -------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is none: see `capture`."""

    def capture(self) -> None:
        """Captures drafting, where that is wanted; if that fails, its kernels are launched one by one."""
        if self._graphs is None or self._session is None:
            return
        try:
            self._graphs.capture()
        except Exception as error:  # noqa: BLE001 -- whatever it is, drafting works without
            self.failures += 1
            self._graphs = None
            log.warning("draftd drafts without CUDA graphs, which could not be captured: %r", error)

    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Any, aux_hidden_states: Any,
        num_sampled: torch.Tensor, num_rejected: torch.Tensor, last_sampled: torch.Tensor, *more: Any, dummy_run: bool = False,
        num_speculative_tokens: int | None = None, **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Drafts for a batch, after its tokens were sampled and written.

        Args:
            input_batch: vLLM's InputBatch.
            num_sampled: int32 [batch]; tokens that this step sampled.
            dummy_run: There are no requests; the launches are made all the same, so that they are compiled and vLLM can time them.
            num_speculative_tokens: Most tokens of each draft that vLLM will use.
            attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_rejected, last_sampled, more, others: As vLLM's own
                speculator takes them.

        Returns:
            int64 [batch, k] on the device, every place a token.
        """
        batch = input_batch.num_reqs
        if self._leads:
            sampled = self._nothing_sampled if dummy_run else num_sampled
            most = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
            done = self._session is not None and self._guard(lambda: self._propose(input_batch.idx_mapping, sampled, batch, most))
            if not done and not dummy_run:
                own = self._stock.propose(
                    input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected,
                    last_sampled, *more, dummy_run=dummy_run, num_speculative_tokens=num_speculative_tokens, **others,
                )  # fmt: skip
                self._drafts[:batch] = own
                self.draft_token_confidence_probs[:batch] = 1.0
        if self._ranks.world_size > 1 and not dummy_run:
            self._ranks.broadcast(self._drafts[:batch], src=0)
            if self.enable_adaptive_verification:
                self._ranks.broadcast(self.draft_token_confidence_probs[:batch], src=0)
        return self._drafts[:batch]

    # -- what the hooks of the model runner call ---------------------------------------------------------------------------------

    def begin_requests(self, scheduler_output: Any, row_of: Mapping[str, int]) -> None:
        """Notes the requests that enter the batch; see Requests.begin."""
        requests = self._requests
        if requests is not None and self._session is not None:
            self._guard(lambda: requests.begin(scheduler_output, row_of))

    def end_requests(self, scheduler_output: Any) -> None:
        """Notes the requests that leave it; see Requests.end."""
        requests = self._requests
        if requests is not None and self._session is not None:
            self._guard(lambda: requests.end(scheduler_output))

    def close(self) -> None:
        """Ends the session."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # -- behind the guard ----------------------------------------------------------------------------------------------------------

    def _propose(self, slots: torch.Tensor, sampled: torch.Tensor, batch: int, most: int) -> None:
        # A draft of which vLLM takes the beginning only must be counted as that.
        graphs = self._graphs if most >= self.num_speculative_steps else None
        places = batch if graphs is None else graphs.padded(batch)
        pick_rows[(triton.cdiv(places, _BLOCK),)](
            slots, sampled, self._drafted_for, batch, places, self._rows, self._row_slots, BLOCK=_BLOCK, num_warps=1
        )
        if graphs is None:
            self._draft(places, most)
        else:
            graphs.run(places)

    def _draft(self, places: int, most: int | None = None) -> None:
        """Drafts for the first `places` rows of `self._rows`, and hands on what they have become; capturable."""
        assert self._session is not None
        rows, part = self._part(places)
        out = self._session.propose(rows, part)
        k = self.num_speculative_steps
        if most is not None and most < k:
            out.counts.clamp_(max=most)
        spread_drafts[(places,)](
            out.tokens, out.probabilities, out.counts, self._row_slots, self._req_states.last_sampled_tokens, self._req_states.vocab_size,
            self._drafts, self.draft_token_confidence_probs, K=k, LANES=triton.next_power_of_2(k), num_warps=1,
        )  # fmt: skip
        self._session.collect(rows, out)

    def _part(self, places: int) -> tuple[torch.Tensor, DeviceDrafts]:
        """The first `places` rows to draft for and their drafts."""
        part = self._parts.get(places)
        if part is None:
            part = self._parts[places] = (self._rows[:places], self._all.first(places))
        return part

    def _draft_for(self, row: int, wanted: bool) -> None:
        self._drafted_for[row] = int(wanted)

    def _guard(self, action: Callable[[], None]) -> bool:
        """Runs what must not stop vLLM. After the first failure draftd is out of the way until vLLM starts anew: rows may be wrong."""
        try:
            action()
        except Exception as error:
            self.failures += 1
            log.exception("draftd failed, vLLM drafts with ngram_gpu from now on: %r", error)
            self._guarded_close()
            return False
        return True

    def _guarded_close(self) -> None:
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 -- it is closed because something is wrong already
            self.failures += 1
            log.warning("draftd: the session could not be closed: %r", error)
