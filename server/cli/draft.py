"""`draftd propose` and `draftd explain`: a draft for a token list or a text, and why it is what it is."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.cli.channel import TIMEOUT_S, EndpointOption, JsonOption, NamespaceOption, channel, message_of, printable, wide_console
from draftd.server.cli.failure import Failure, UsageFailure

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PolicyName(StrEnum):
    """--policy"""

    calibrated = "calibrated"
    tree = "tree"


TokensOption = Annotated[str, typer.Option("--tokens", "-t", help="Context as token ids: 1,2,3 or '1 2 3'.", show_default=False)]
TextOption = Annotated[str, typer.Option("--text", help="Context as text; needs --tokenizer.", show_default=False)]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        help="A tokenizer.json, which turns --text into tokens and drafts into text.", exists=True, dir_okay=False, show_default=False
    ),
]
KOption = Annotated[int | None, typer.Option("--k", help="Most tokens of the draft. [default: the service's]", show_default=False)]
DepthOption = Annotated[int | None, typer.Option("--max-depth", help="Most tokens of match and draft together.", show_default=False)]
FactorOption = Annotated[float | None, typer.Option("--spec-factor", help="Draft tokens a token of the match.", show_default=False)]
OffsetOption = Annotated[float | None, typer.Option("--spec-offset", help="Draft tokens beside those.", show_default=False)]
ProbOption = Annotated[float | None, typer.Option("--min-token-prob", help="Least survival probability of a token.", show_default=False)]

PolicyOption = Annotated[PolicyName | None, typer.Option("--policy", help="The rule. [default: the service's]", show_default=False)]
TauOption = Annotated[float | None, typer.Option("--tau", help="Calibrated: least survival probability of a token.", show_default=False)]
BranchesOption = Annotated[
    int | None,
    typer.Option("--branches", help="Calibrated: most tokens that may follow one; above 1: trees.", show_default=False),
]

POLICIES = {PolicyName.calibrated: pb.POLICY_CALIBRATED, PolicyName.tree: pb.POLICY_TREE}
SOURCES = {pb.SOURCE_UNSPECIFIED: "none", pb.SOURCE_LOCAL: "local", pb.SOURCE_CORPUS: "corpus", pb.SOURCE_GROUP: "group"}


def propose(
    tokens: TokensOption = "",
    text: TextOption = "",
    tokenizer: TokenizerOption = None,
    namespace: NamespaceOption = "",
    k: KOption = None,
    max_depth: DepthOption = None,
    spec_factor: FactorOption = None,
    spec_offset: OffsetOption = None,
    min_token_prob: ProbOption = None,
    policy: PolicyOption = None,
    tau: TauOption = None,
    branches: BranchesOption = None,
    endpoint: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Draft for one context, as an engine would get it."""
    context = Context(tokens, text, tokenizer)
    parameters = message_of(
        pb.DraftParameters,
        k=k,
        max_depth=max_depth,
        spec_factor=spec_factor,
        spec_offset=spec_offset,
        min_token_prob=min_token_prob,
        policy=POLICIES[policy] if policy else None,
        tau=tau,
        branches=branches,
    )
    row = message_of(pb.Row, tokens=context.tokens, namespace=namespace)
    request = pb.ProposeRequest(rows=[row], parameters=parameters)
    with channel(endpoint) as opened:
        response = draftd_pb2_grpc.DrafterServiceStub(opened).Propose(request, timeout=TIMEOUT_S)
    draft = response.drafts[0]
    if as_json:
        typer.echo(json.dumps(context.draft_json(draft)))
        return
    _print_draft(context, draft)


def explain(
    tokens: TokensOption = "",
    text: TextOption = "",
    tokenizer: TokenizerOption = None,
    namespace: NamespaceOption = "",
    k: KOption = None,
    max_depth: DepthOption = None,
    spec_factor: FactorOption = None,
    spec_offset: OffsetOption = None,
    min_token_prob: ProbOption = None,
    policy: PolicyOption = None,
    tau: TauOption = None,
    branches: BranchesOption = None,
    limit: Annotated[int, typer.Option(help="Most next tokens and documents a match.")] = 3,
    endpoint: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show every matched suffix of a context, what followed it, where it comes from, and the draft that it gives."""
    context = Context(tokens, text, tokenizer)
    parameters = message_of(
        pb.DraftParameters,
        k=k,
        max_depth=max_depth,
        spec_factor=spec_factor,
        spec_offset=spec_offset,
        min_token_prob=min_token_prob,
        policy=POLICIES[policy] if policy else None,
        tau=tau,
        branches=branches,
    )
    request = message_of(pb.ExplainRequest, namespace=namespace, tokens=context.tokens, parameters=parameters, limit=limit)
    with channel(endpoint) as opened:
        response = draftd_pb2_grpc.CorpusServiceStub(opened).Explain(request, timeout=TIMEOUT_S)
    if as_json:
        typer.echo(json.dumps(_explain_json(context, response)))
        return
    table = Table("source", box=None, pad_edge=False)
    table.add_column("match", justify="right")
    table.add_column("occurrences", justify="right")
    table.add_column("score", justify="right")
    for column in ("next (times)", "documents", "draft"):
        table.add_column(column)
    for match in response.matches:
        following = ", ".join(f"{context.show([item.token])} ({item.count})" for item in match.next_tokens)
        more = match.distinct_next_tokens - len(match.next_tokens)
        table.add_row(
            SOURCES[match.source],
            str(match.length),
            str(match.occurrences),
            f"{match.score:.2f}",
            following + (f", {more} more" if more > 0 else ""),
            ", ".join(f"{printable(item.document_id)}@{item.position}" for item in match.documents),
            context.show(match.draft),
        )
    wide_console().print(table)
    _print_draft(context, response.draft)
    if response.candidates:
        shown = ", ".join(f"{context.show([c.token])} ({c.probability:.2f})" for c in response.candidates)
        typer.echo(f"may come next  {shown}")
    scored = [d for d in response.calibration.deciles if d.drafted]
    if scored:
        shown = ", ".join(f"{d.predicted:.2f} -> {d.accepted:.2f}" for d in scored)
        typer.echo(f"predictions    {shown}  (survival: predicted -> observed; Brier score {response.calibration.brier_score:.3f})")


class Context:
    """The tokens that a command was given, and how to show tokens."""

    def __init__(self, tokens: str, text: str, tokenizer: Path | None) -> None:
        if bool(tokens) == bool(text):
            raise UsageFailure("give --tokens or --text, and at least one token")
        if text and tokenizer is None:
            raise UsageFailure("--text needs --tokenizer")
        self._tokenizer = _load(tokenizer) if tokenizer else None
        self.tokens: list[int] = parse_tokens(tokens) if tokens else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def show(self, tokens: object) -> str:
        """Tokens as text where there is a tokenizer, else as ids."""
        ids = list(tokens)  # type: ignore[call-overload]
        return repr(self._tokenizer.decode(ids)) if self._tokenizer else " ".join(map(str, ids))

    def draft_json(self, draft: pb.Draft) -> dict[str, object]:
        """A draft as JSON values."""
        fields: dict[str, object] = {
            "tokens": list(draft.tokens),
            "probabilities": [round(p, 6) for p in draft.probabilities],
            "source": SOURCES[draft.source],
            "match_length": draft.match_length,
            "occurrences": draft.occurrences,
        }
        if draft.parents:
            fields["parents"] = list(draft.parents)
        if self._tokenizer:
            fields["text"] = self._tokenizer.decode(list(draft.tokens))
        return fields


def parse_tokens(text: str) -> list[int]:
    """Token ids separated by commas or blanks."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UsageFailure("--tokens must be integers separated by commas or blanks") from None


def _load(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception; told to the user
        raise Failure(f"{path}: not a tokenizer.json ({error})") from None


def _print_draft(context: Context, draft: pb.Draft) -> None:
    if not draft.tokens:
        typer.echo("no draft")
        return
    typer.echo(f"draft          {context.show(draft.tokens)}")
    typer.echo(f"probabilities  {' '.join(f'{p:.2f}' for p in draft.probabilities)}")
    if draft.parents:
        typer.echo(f"after          {' '.join(map(str, draft.parents))}  (place of the token before each one)")
    typer.echo(f"from           {SOURCES[draft.source]}: match of {draft.match_length} tokens, {draft.occurrences} occurrences")


def _explain_json(context: Context, response: pb.ExplainResponse) -> dict[str, object]:
    return {
        "matches": [
            {
                "source": SOURCES[match.source],
                "length": match.length,
                "occurrences": match.occurrences,
                "next_tokens": [{"token": item.token, "count": item.count} for item in match.next_tokens],
                "distinct_next_tokens": match.distinct_next_tokens,
                "documents": [
                    {"document_id": item.document_id, "position": item.position, "generation": item.generation} for item in match.documents
                ],
                "draft": list(match.draft),
                "score": round(match.score, 6),
            }
            for match in response.matches
        ],
        "draft": context.draft_json(response.draft),
        "version": response.version,
        "candidates": [{"token": c.token, "probability": round(c.probability, 6)} for c in response.candidates],
        "calibration": {
            "deciles": [
                {"drafted": d.drafted, "predicted": round(d.predicted, 6), "accepted": round(d.accepted, 6)}
                for d in response.calibration.deciles
            ],
            "brier_score": round(response.calibration.brier_score, 6),
        },
    }
