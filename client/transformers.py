"""Hugging Face transformers: inside `drafting(model, drafter)`, `model.generate(...)` drafts from a service.

transformers' own assisted decoding verifies, greedy or sampling; this gives it candidates, and commits what it accepted.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList, StopStringCriteria
from transformers.generation.candidate_generator import CandidateGenerator

from draftd.client.drafter import Drafter
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.groups import check_group

_log = logging.getLogger("draftd.client")

_OLDEST, _TOO_NEW = Version("4.57"), Version("6.dev0")
_TESTED = "4.57.6, 5.0.0 and 5.24.0"
_HOOK = "_get_candidate_generator"
_HOOK_PARAMETERS = {"generation_config", "input_ids", "target_tokenizer"}
_OTHER_WAYS = ("assistant_model", "assistant_early_exit", "custom_generate", "prompt_lookup_num_tokens", "use_mtp")

# Drafters and, by id since they need not be hashable, models that are inside a `drafting`.
_drafters: weakref.WeakSet[Drafter] = weakref.WeakSet()
_models: set[int] = set()
_entering = threading.Lock()

# The call of `generate` that this thread is in.
_current: ContextVar[_Call | None] = ContextVar("draftd_generate", default=None)


class Drafting:
    """Drafts for the calls of one model's `generate`; each call is a row of the drafter while it runs.

    Threads may call `generate` at the same time; they take turns with the drafter.

    Attributes:
        calls: Calls that took a row.
        undrafted_calls: Calls that had none, or not to their end: all rows were taken, the prompt or the output was longer than the
            drafter's `max_length`, or transformers chose a decoding that takes no candidates, such as beam search.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.calls = 0
        self.undrafted_calls = 0
        self.drafter = drafter
        self.config = drafter.config
        self.lock = threading.Lock()
        self._free = list(reversed(range(self.config.max_rows)))

    def take(self, prompt: list[int], namespace: str | None, private: bool, group: str) -> int | None:
        """A row that holds a prompt, or None if there is none for it."""
        with self.lock:
            if not self._free or len(prompt) > self.config.max_length:
                return None
            row = self._free[-1]
            self.drafter.start(row, prompt, namespace=namespace, private=private, group=group)
            self.calls += 1
            return self._free.pop()

    def give_back(self, row: int, discard: bool) -> None:
        """Ends a row's request."""
        with self.lock:
            self._free.append(row)
            self.drafter.finish(row, discard)

    def count_undrafted(self, why: str) -> None:
        """Counts a call that went without drafts; the first one is logged."""
        with self.lock:
            self.undrafted_calls += 1
            first = self.undrafted_calls == 1
        if first:
            _log.warning("engine %s: generate goes on without drafts: %s", self.config.engine, why)


class _Call:
    """One call of `generate`: what it asked for, and the row that it has."""

    def __init__(self, drafting: Drafting, namespace: str | None, private: bool, group: str, criteria: StoppingCriteriaList | None) -> None:
        self.drafting = drafting
        self._namespace = namespace
        self._private = private
        self._group = group
        self._criteria = criteria
        self._asked = False
        self._row: int | None = None
        self._length = 0

    def candidates(self, *, input_ids: torch.Tensor, generation_config: Any, target_tokenizer: Any = None, **_: Any) -> Candidates:
        """Begins the request; what transformers calls once it has prepared its inputs."""
        if input_ids.shape[0] != 1:
            raise ValueError(
                f"generate got {input_ids.shape[0]} prompts; assisted decoding, and so drafting, takes one a call: "
                "call it for one prompt at a time, or with draft=False"
            )
        criteria = StoppingCriteriaList(self._criteria or [])
        if generation_config.stop_strings is not None:
            criteria.append(StopStringCriteria(tokenizer=target_tokenizer, stop_strings=generation_config.stop_strings))
        self._asked = True
        self._length = input_ids.shape[1]
        self._row = self.drafting.take(input_ids[0].tolist(), self._namespace, self._private, self._group)
        if self._row is None:
            self.drafting.count_undrafted("all rows are taken, or the prompt is longer than the drafter's max_length")
        return Candidates(self, generation_config, criteria)

    def propose(self, at_most: int) -> list[int]:
        """A draft of the row."""
        if self._row is None or at_most <= 0:
            return []
        with self.drafting.lock:
            drafts = self.drafting.drafter.propose([self._row])
        return drafts.row(0)[:at_most]

    def commit(self, input_ids: torch.Tensor) -> None:
        """Appends what is new in the accepted tokens, int64 [1, n]; ends the row if they no longer fit."""
        tokens = input_ids[0, self._length :].tolist()
        room = self.drafting.config.max_length - self._length
        self._length += len(tokens)
        if self._row is None or not tokens:
            return
        with self.drafting.lock:
            self.drafting.drafter.append(self._row, tokens[:room])
        if len(tokens) > room:
            self.end(discard=False)
            self.drafting.count_undrafted("the output is longer than the drafter's max_length")

    def end(self, discard: bool) -> None:
        """Ends the request, if it is not ended yet."""
        row, self._row = self._row, None
        if row is not None:
            self.drafting.give_back(row, discard)

    def close(self, failed: bool) -> None:
        """What the end of `generate` means; the output of a call that failed is not kept."""
        self.end(discard=failed)
        if not self._asked and not failed:
            self.drafting.count_undrafted("transformers did not ask for candidates, as in beam search")


class Candidates(CandidateGenerator):  # type: ignore[misc] # transformers is not type-checked here
    """What transformers' assisted decoding asks for drafts, one request of one row.

    A draft ends before the first token at which generation would stop. So it stops where it would have without, also for stop strings
    and criteria of the caller's, which assisted decoding checks once a step only.
    """

    def __init__(self, call: _Call, generation_config: Any, criteria: StoppingCriteriaList) -> None:
        ends = generation_config.eos_token_id
        self._call = call
        self._max_length = int(generation_config.max_length)
        self._ends = set() if ends is None else set(torch.as_tensor(ends).reshape(-1).tolist())
        self._criteria = criteria

    def get_candidates(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """The tokens so far with a draft appended.

        Args:
            input_ids: int64 [1, n], on any device.

        Returns:
            int64 [1, n + length of the draft] on the same device, and no logits: a draft is certain of itself.
        """
        # The model gives one token more than was drafted, so that one place is always its own.
        draft = self._call.propose(self._max_length - input_ids.shape[1] - 1)
        draft = draft[: next((i for i, token in enumerate(draft) if token in self._ends), len(draft))]
        if not draft:
            return input_ids, None
        drafted = torch.cat((input_ids, torch.tensor([draft], dtype=input_ids.dtype, device=input_ids.device)), dim=1)
        if len(self._criteria):
            for length in range(input_ids.shape[1] + 1, drafted.shape[1] + 1):
                if bool(self._criteria(drafted[:, :length], None).any()):
                    return drafted[:, : length - 1], None
        return drafted, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Commits what was accepted: `input_ids`, int64 [1, n], is all tokens now."""
        self._call.commit(input_ids)


@contextmanager
def drafting(model: Any, drafter: Drafter) -> Iterator[Drafting]:
    """While it is entered, `model.generate(...)` drafts from the service; only this model object is changed, and put back after.

    `generate` then also takes `draft` (False: without drafts), `draft_namespace`, `draft_private` and `draft_group`; see `Drafter.start`.
    The drafter serves this model only meanwhile; its `max_rows` calls may run at the same time, in threads. Greedy outputs are what they
    were, up to ties that rounding decides: a step of several tokens is computed by other kernels than a step of one.

    Args:
        model: A `GenerationMixin` of transformers on one device or several, not tensor-parallel; a wrapper's inner model.
        drafter: Of the model's vocabulary size.

    Yields:
        The counts of calls with and without drafts.

    Raises:
        RuntimeError: This version of transformers is not known.
        TypeError: The model is none of transformers'.
        ValueError: The vocabulary sizes differ, the model is tensor-parallel, or model or drafter are in use by another `drafting`.
    """
    _check_transformers()
    _check_model(model, drafter)
    with _entering:
        if id(model) in _models or drafter in _drafters:
            raise ValueError("the model or the drafter is inside another `drafting`; each can be in one at a time")
        _models.add(id(model))
        _drafters.add(drafter)
    try:
        state = Drafting(drafter)
        before = {name: model.__dict__.get(name) for name in ("generate", _HOOK)}
        setattr(model, _HOOK, _candidates_of(state, getattr(model, _HOOK)))
        model.generate = _drafted(model.generate, state)
        try:
            yield state
        finally:
            for name, was in before.items():
                if was is None:
                    delattr(model, name)
                else:
                    setattr(model, name, was)
    finally:
        with _entering:
            _models.discard(id(model))
            _drafters.discard(drafter)


def _candidates_of(state: Drafting, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The hook: the running call's candidates, or what the model does without one."""

    def hook(**arguments: Any) -> Any:
        call = _current.get()
        # The call may be another model's, which uses this one for something of its own.
        return otherwise(**arguments) if call is None or call.drafting is not state else call.candidates(**arguments)

    return hook


def _drafted(generate: Callable[..., Any], state: Drafting) -> Callable[..., Any]:
    """A model's `generate` that drafts."""
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def drafted(
        *args: Any,
        draft: bool = True,
        draft_namespace: str | None = None,
        draft_private: bool = False,
        draft_group: str = "",
        **kwargs: Any,
    ) -> Any:
        call = None
        if draft:
            given = signature.bind_partial(*args, **kwargs).arguments
            given = given | given.get("kwargs", {})
            taken = [name for name in _OTHER_WAYS if given.get(name) is not None]
            if taken:
                raise ValueError(f"generate drafts from draftd here, and was given {taken[0]}; pass draft=False to use that instead")
            if draft_namespace is not None and draft_namespace not in state.config.namespaces:
                raise ValueError(f"draft_namespace is {draft_namespace!r}; the drafter's are {', '.join(state.config.namespaces)}")
            try:
                check_group(draft_group, "draft_group")
            except InvalidArgument as error:
                raise ValueError(str(error)) from None
            call = _Call(state, draft_namespace, draft_private, draft_group, given.get("stopping_criteria"))
            # This mode is what makes transformers ask for candidates; the number is not used, drafts are as long as the drafter's k.
            kwargs["prompt_lookup_num_tokens"] = state.config.k
        entered = _current.set(call)
        failed = True
        try:
            result = generate(*args, **kwargs)
            failed = False
        finally:
            _current.reset(entered)
            if call is not None:
                call.close(failed)
        return result

    return drafted


def _check_transformers() -> None:
    """RuntimeError unless transformers has what drafting hooks into."""
    version = Version(transformers.__version__)
    hook = getattr(GenerationMixin, _HOOK, None)
    known = hook is not None and set(inspect.signature(hook).parameters) >= _HOOK_PARAMETERS
    if not _OLDEST <= version < _TOO_NEW or not known or not hasattr(GenerationConfig(), "prompt_lookup_num_tokens"):
        raise RuntimeError(f"transformers {version} is not known to draftd; it works with 4.57 and with 5, tested with {_TESTED}")


def _check_model(model: Any, drafter: Drafter) -> None:
    """An error unless the drafter can draft for the model."""
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"the model is a {type(model).__name__}, not a GenerationMixin of transformers; pass a wrapper's inner model")
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if vocab_size != drafter.config.vocab_size:
        raise ValueError(f"the model's vocabulary has {vocab_size} tokens; the drafter was made for {drafter.config.vocab_size}")
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError("the model is tensor-parallel; its processes would verify different drafts and wait for each other")
