"""`draftd replay`: what sharing a corpus gains on recorded sessions, measured with real engines' calls on a real service."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import MAX_DEPTH, MAX_K, DraftParams
from draftd.server.cli.channel import check_answers
from draftd.server.cli.failure import Failure, UsageFailure
from draftd.server.replay.processes import EngineFailed
from draftd.server.replay.report import print_report
from draftd.server.replay.run import ReplaySettings, run_replay, service_for
from draftd.server.replay.service import ServiceFailed
from draftd.server.replay.trace import Session, TraceError, load_trace, vocab_size_of

_DEFAULT = DraftParams()


class TransportChoice(StrEnum):
    """--transport"""

    auto = "auto"
    mapped = "mapped"
    handle = "handle"
    inline = "inline"


class CorpusChoice(StrEnum):
    """--corpus"""

    shared = "shared"
    silo = "silo"
    none = "none"


class PolicyChoice(StrEnum):
    """--policy"""

    calibrated = "calibrated"
    tree = "tree"


class VisibilityChoice(StrEnum):
    """--visibility"""

    step = "step"
    free = "free"


def replay(
    trace: Annotated[str, typer.Argument(help="Sessions, JSON lines, plain, gzip or zstd; - is standard input.", show_default=False)],
    engines: Annotated[int, typer.Option(help="Engine processes.", min=1, max=256)] = 1,
    transport: Annotated[TransportChoice, typer.Option(help="How engines draft.")] = TransportChoice.auto,
    corpus: Annotated[
        CorpusChoice, typer.Option(help="One corpus for all engines, one each, or none: each request's own tokens only.")
    ] = CorpusChoice.shared,
    concurrency: Annotated[int, typer.Option(help="Sessions at a time, in each engine.", min=1, max=4096)] = 16,
    k: Annotated[int, typer.Option("--k", help="Most tokens of a draft.", min=1, max=MAX_K)] = _DEFAULT.k,
    max_depth: Annotated[
        int, typer.Option(help="Policy tree: most tokens of match and draft together.", min=2, max=MAX_DEPTH)
    ] = _DEFAULT.max_depth,
    policy: Annotated[PolicyChoice, typer.Option(help="Drafting policy.")] = PolicyChoice.calibrated,
    tau: Annotated[
        float, typer.Option(help="Policy calibrated: smallest survival probability of a drafted token.", min=0, max=1)
    ] = _DEFAULT.tau,
    spec_factor: Annotated[
        float, typer.Option(help="Policy tree: a match of L tokens drafts at most factor x L + offset.")
    ] = _DEFAULT.spec_factor,
    spec_offset: Annotated[float, typer.Option(help="See --spec-factor; tokens.")] = _DEFAULT.spec_offset,
    min_token_prob: Annotated[
        float, typer.Option(help="Policy tree: smallest survival probability of a drafted token.")
    ] = _DEFAULT.min_token_prob,
    visibility: Annotated[
        VisibilityChoice,
        typer.Option(
            help="step: wait each step until all is visible, so that figures repeat (with --policy tree exactly); free: as fast as it can."
        ),
    ] = VisibilityChoice.free,
    step_ms: Annotated[float, typer.Option(help="Least time of a step, ms: what a model would take to decode.", min=0)] = 0.0,
    timeout_ms: Annotated[
        float | None, typer.Option(help="Longest wait of a draft. Default: 2 ms; with --visibility step 5 s.", show_default=False)
    ] = None,
    endpoint: Annotated[str, typer.Option(help="Service to use; a private one is started otherwise.", show_default=False)] = "",
    http: Annotated[
        str,
        typer.Option(help="With --endpoint: the service's HTTP root, for visibility and refresh times.", show_default=False),
    ] = "",
    namespace: Annotated[str, typer.Option(help="Namespace; with --corpus silo, /0, /1 and so on are added.")] = "replay",
    groups: Annotated[
        bool,
        typer.Option("--groups", help="Requests carry their session's group: those of one prompt draft from one another."),
    ] = False,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary size; default: the smallest that has all tokens of the trace.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where the private service drafts: cpu, cuda, or cuda:N.")] = "cpu",
    limit_sessions: Annotated[int | None, typer.Option(help="Replay only so many sessions.", min=1, show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay recorded sessions with engines that draft, and show what it gains.

    Engines verify greedily against the recorded outputs: a draft's tokens count as long as they are the recorded ones.
    """
    try:
        settings = ReplaySettings(
            engines=engines,
            sharing=corpus.value,
            transport=transport.value,
            params=DraftParams(k, max_depth, spec_factor, spec_offset, min_token_prob, policy=policy.value, tau=tau),
            concurrency=concurrency,
            step=visibility is VisibilityChoice.step,
            step_ms=step_ms,
            timeout_ms=timeout_ms,
            vocab_size=vocab_size,
            namespace=namespace,
            groups=groups,
            device=device,
        )
    except InvalidArgument as error:
        raise UsageFailure(str(error)) from None
    console = Console(stderr=True)
    try:
        sessions = load_trace(trace, limit_sessions)
        if vocab_size is not None and vocab_size < (least := vocab_size_of(sessions)):
            raise UsageFailure(f"--vocab-size is {vocab_size}; the trace has token {least - 1}")
        if endpoint:
            check_answers(endpoint)
            figures = replay_with_progress(console, settings, sessions, endpoint, http.rstrip("/"))
        else:
            with console.status("starting a service (the first start on a machine compiles kernels)"):
                service = service_for(settings, sessions)
                service.start()
            with service:
                figures = replay_with_progress(console, settings, sessions, service.endpoint, service.http_url)
    except (TraceError, ServiceFailed, EngineFailed) as error:
        raise Failure(str(error)) from None
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        print_report(Console(), figures, f"{trace}: {len(sessions):,} sessions, corpus {corpus.value}, policy {policy.value}")
    if not figures["outputs_exact"]:
        raise Failure("an output differs from the recorded one")


def replay_with_progress(
    console: Console, settings: ReplaySettings, sessions: list[Session], endpoint: str, http_url: str, label: str = "replay"
) -> dict[str, Any]:
    """run_replay with a progress bar on a terminal."""
    total = sum(len(turn.output) for session in sessions for turn in session.turns)
    with _progress(console, label, total) as update:
        return run_replay(settings, sessions, endpoint, http_url, update)


@contextlib.contextmanager
def _progress(console: Console, label: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda tokens: bar.update(task, completed=tokens)
