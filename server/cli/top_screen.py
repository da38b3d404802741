"""The screen of `draftd top`: figures as text, from what `summarize` says. It fits 80 x 24, and asks nobody for anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
KEYS = "q quit   e engines   n namespaces   s sort   r reverse   w window"
_NONE = "-"
_HEAD_LINES = 8
_EVENT_LINES = 5
_LEAST_ROWS = 3
_BAR_CELLS = 8
_STYLES = {"info": "", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a list.

    Attributes:
        key: What to sort by, and the name that `--sort` takes.
        cell: A row's text.
        wide: It gives way where the screen is narrow.
    """

    key: str
    heading: str
    cell: Callable[[Row], str]
    wide: bool = False


def number(value: float | None) -> str:
    """A count or a rate in at most six characters."""
    if value is None:
        return _NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'K' else size):.3g}{unit}"
    return f"{value:.1f}" if 0 < value < 10 and value != int(value) else f"{value:.0f}"


def length(value: float | None) -> str:
    """An acceptance length."""
    return _NONE if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share."""
    return _NONE if value is None else f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def duration(seconds: float | None) -> str:
    """A time in two or three digits and its unit."""
    if seconds is None:
        return _NONE
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.{2 if seconds * scale < 100 else 3}g} {unit}"
    return f"{seconds:.1f} s"


def age(seconds: float) -> str:
    """A long time, roughly."""
    for unit, size in (("days", 172_800), ("h", 7200), ("min", 120)):
        if seconds >= size:
            return f"{seconds / {'days': 86_400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(amount: int) -> str:
    """Bytes."""
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"


def _namespaces_of(engine: Row) -> str:
    names = engine["namespaces"]
    return names[0] if len(names) == 1 else f"{names[0]} +{len(names) - 1}"


def _quota(space: Row) -> str:
    share = space["tokens"] / space["quota_tokens"]
    full = round(min(1.0, share) * _BAR_CELLS)
    return f"{'█' * full}{'░' * (_BAR_CELLS - full)} {percent(share):>5}"


ENGINE_COLUMNS = (
    Column("engine", "ENGINE", lambda row: row["engine"], wide=True),
    Column("transport", "OVER", lambda row: row["transport"]),
    Column("namespaces", "NAMESPACE", _namespaces_of, wide=True),
    Column("rows", "ROWS", lambda row: f"{row['rows']}/{row['max_rows']}"),
    Column("lease_left_ms", "LEASE", lambda row: f"{max(0, row['lease_left_ms']) / 1000:.1f}s"),
    Column("proposals_per_s", "CALLS/S", lambda row: number(row["proposals_per_s"])),
    Column("committed_tokens_per_s", "TOK/S", lambda row: number(row["committed_tokens_per_s"])),
    Column("acceptance_length", "LEN", lambda row: length(row["acceptance_length"])),
    Column("acceptance_rate", "RATE", lambda row: percent(row["acceptance_rate"])),
    Column("fail_opens", "FAILED", lambda row: number(row["fail_opens"])),
)
NAMESPACE_COLUMNS = (
    Column("name", "NAMESPACE", lambda row: row["name"], wide=True),
    Column("tokens", "QUOTA USED", _quota),
    Column("documents", "DOCS", lambda row: number(row["documents"])),
    Column("open_documents", "OPEN", lambda row: number(row["open_documents"])),
    Column("evicted_tokens", "EVICTED", lambda row: number(row["evicted_tokens"])),
    Column("generation", "GEN", lambda row: str(row["generation"])),
    Column("attachments", "ENGINES", lambda row: str(row["attachments"])),
    Column("committed_tokens_per_s", "TOK/S", lambda row: number(row["committed_tokens_per_s"])),
    Column("acceptance_length", "LEN", lambda row: length(row["acceptance_length"])),
    Column("acceptance_rate", "RATE", lambda row: percent(row["acceptance_rate"])),
)
COLUMNS = {"engine": ENGINE_COLUMNS, "namespace": NAMESPACE_COLUMNS}


@dataclass(slots=True)
class View:
    """What the person at the terminal chose.

    Attributes:
        by: Which list: `engine` or `namespace`.
        sort: Key of a column of that list; empty: by name.
        window_s: Time that rates and ratios are of.
    """

    by: str = "engine"
    sort: str = ""
    reverse: bool = False
    window_s: int = 60

    def columns(self) -> Sequence[Column]:
        """The columns of the list."""
        return COLUMNS[self.by]

    def sorted(self, rows: Sequence[Row]) -> list[Row]:
        """By name, or by numbers with the largest first, where None is last."""
        name = self.columns()[0].key
        ordered = sorted(rows, key=lambda row: str(row[name]))
        if self.sort in ("", name):
            return ordered[::-1] if self.reverse else ordered
        known = [row for row in ordered if row[self.sort] is not None]
        numbers = not known or isinstance(known[0][self.sort], int | float)
        known.sort(key=lambda row: row[self.sort], reverse=numbers != self.reverse)
        return known + [row for row in ordered if row[self.sort] is None]

    def next_sort(self) -> None:
        """Sorts by the next column."""
        keys = [column.key for column in self.columns()]
        self.sort = keys[(keys.index(self.sort or keys[0]) + 1) % len(keys)]


def screen(figures: Row, events: Sequence[Row], view: View, height: int, silent_s: float | None) -> RenderableType:
    """Everything.

    Args:
        events: Newest first.
        height: Lines that there are; 0 is no limit.
        silent_s: Seconds since the service answered, if it does not answer now.
    """
    rows = figures["engines"] if view.by == "engine" else figures["namespaces"]
    room = max(_LEAST_ROWS, height - _HEAD_LINES - _EVENT_LINES - 3) if height else len(rows)
    parts: list[RenderableType] = [*_head(figures, view, silent_s), _list(view, rows, room, silent_s is not None)]
    if len(rows) > room:
        parts.append(Text(f"and {len(rows) - room} more", style="dim"))
    parts += [Text(), *(_event(event) for event in events[:_EVENT_LINES])]
    return Group(*parts)


def _head(figures: Row, view: View, silent_s: float | None) -> list[Text]:
    state = ("READY", "bold green") if figures["ready"] else ("NOT READY", "bold yellow")
    if silent_s is not None:
        state = (f"NO ANSWER for {age(silent_s)}; these are the last figures", "bold red")
    about = f"  {figures['version']}  run {figures['run'][:8]}  up {age(figures['uptime_s'])}  last {view.window_s} s"
    visible = figures["visibility"]
    tokens = sum(space["tokens"] for space in figures["namespaces"])
    quota = sum(space["quota_tokens"] for space in figures["namespaces"])
    documents = sum(space["documents"] for space in figures["namespaces"])
    store = figures["store"]
    kept = "no store" if store is None else f"store {size(store['bytes'])}, {number(store['pending_documents'])} documents not on disk"
    if store is not None and store["failure"]:
        kept = f"STORE CANNOT BE WRITTEN: {store['failure']}"
    lines = [
        _line(("draftd  ", "bold"), state, (about, "dim")),
        Text(),
        _line(
            ("accept   ", "dim"),
            (length(figures["acceptance_length"]), "bold"),
            " tokens a draft  ",
            (percent(figures["acceptance_rate"]), "bold"),
            " of draft tokens  ",
            (number(figures["committed_tokens_per_s"]), "bold"),
            " tokens/s committed",
        ),
        _line(("propose  ", "dim"), _latencies(figures["propose"]) or "no call"),
        _line(("visible  ", "dim"), f"after p50 {duration(visible['p50_s'])} p99 {duration(visible['p99_s'])}"),
        _line(("refresh  ", "dim"), _latencies(figures["refresh"]) or "none"),
        _line(("corpus   ", "dim"), f"{number(tokens)} tokens of {number(quota)}, {number(documents)} documents; {kept}"),
        Text(),
    ]
    return [_one_line(line) for line in lines]


def _latencies(by_label: dict[str, Row]) -> str:
    return "   ".join(f"{label} p50 {duration(of['p50_s'])} p99 {duration(of['p99_s'])}" for label, of in by_label.items())


def _list(view: View, rows: Sequence[Row], room: int, dim: bool) -> RenderableType:
    if not rows:
        hint = "no engine is attached yet: see `draftd replay --help` for some" if view.by == "engine" else "the corpus is empty"
        return Text(hint, style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True, style="dim" if dim else "")
    sort = view.sort or view.columns()[0].key
    for i, column in enumerate(view.columns()):
        style = "bold reverse" if column.key == sort else "bold"
        left = i == 0 or column.wide or column.key == "transport"
        table.add_column(
            Text(column.heading, style=style),
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if column.wide else None,
        )
    for row in view.sorted(rows)[:room]:
        table.add_row(*(Text(column.cell(row)) for column in view.columns()))
    return table


def _event(event: Row) -> Text:
    at = datetime.fromtimestamp(event["last_s"]).strftime("%H:%M:%S")
    amount = f"{event['amount']:,} " if event["amount"] > 1 else ""
    what = f"{event['subject']} {amount}{event['text']}".strip()
    return _one_line(_line((f"{at}  ", "dim"), (f"{event['kind']:<11} ", _STYLES[event["level"]] or "dim"), what))


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts)


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
