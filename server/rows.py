"""The service's side of an INLINE or HANDLE attachment's rows: their tokens, and what they were last told to try.

Rows are checked before anything of their request is taken, so that a malformed batch changes nothing. A row's output goes to the corpus
as it grows; the engine's verdict on a draft is read from the tokens that come next.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.corpus import Corpus
from draftd.drafter.documents import LEAD_TOKENS, IngestResult
from draftd.drafter.drafts import Drafts, accepted_of
from draftd.drafter.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from draftd.drafter.groups import NO_GROUPS, Groups, GroupTexts, check_group
from draftd.drafter.layout import MAX_DOCUMENT_ID_BYTES
from draftd.drafter.lessons import Lesson
from draftd.drafter.records import RowContext
from draftd.drafter.stats import EngineStats

_ROOM = 256


@dataclass(slots=True)
class RowUpdate:
    """One row of a request: `tokens` int32 [n] from position `offset` of the row on, validated against the vocabulary."""

    document_id: str
    offset: int
    tokens: NDArray[np.int32]
    prompt_length: int
    namespace: str
    private: bool
    group: str = ""


@dataclass(slots=True, eq=False)
class ServedRow:
    """A row that the service keeps between calls.

    Attributes:
        buffer: int32 [capacity]; the first `length` are the row's tokens, prompt first.
        kept: Output tokens handed to the corpus.
        lost: The corpus dropped the document; nothing more of it is kept.
        refusal: Why the corpus takes no more of the document, if that is its caller's doing.
        lesson: What the last draft was decided from, and its place there, until something came after it.
        draft: The last draft, made when the row had `draft_at` tokens; `draft_at` is 0 once it is settled.
    """

    document_id: str
    namespace: str
    private: bool
    prompt_length: int
    buffer: NDArray[np.int32] = field(default_factory=lambda: np.empty(_ROOM, np.int32))
    length: int = 0
    kept: int = 0
    lost: bool = False
    refusal: FailedPrecondition | None = None
    draft: list[int] = field(default_factory=list)
    draft_at: int = 0
    draft_source: int = 0
    draft_parents: Sequence[int] = ()
    lesson: tuple[Lesson, int] | None = None

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Appends int32 [n]."""
        length = self.length + len(tokens)
        if length > len(self.buffer):
            grown = np.empty(max(length + _ROOM, length + length // 2), np.int32)
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown
        self.buffer[self.length : length] = tokens
        self.length = length


class ServedRows:
    """The rows of one attachment. Not thread-safe: the service's event loop is its only caller.

    With `grouped`, rows of one namespace and group draft from one another's outputs; else groups have no effect.

    `fits` says of a namespace whether rows may still meet its index. At most `2 * max_rows` rows are held, so that preempted requests keep
    their rows while others run.

    `take` only notes what grew. Output becomes visible with the next refresh of the index and not before, so a caller may answer first
    and call `remember` then.
    """

    def __init__(
        self,
        corpus: Corpus,
        fits: Callable[[str], bool],
        owner: str,
        stats: EngineStats,
        max_rows: int,
        max_length: int,
        grouped: bool = False,
    ) -> None:
        self._corpus = corpus
        self._fits = fits
        self._owner = owner
        self._stats = stats
        self._max_rows = max_rows
        self._max_length = max_length
        self._rows: dict[str, ServedRow] = {}
        self._grown: list[ServedRow] = []
        self._finished: OrderedDict[str, IngestResult] = OrderedDict()
        self._grouped = grouped
        self._groups = Groups()

    def __len__(self) -> int:
        return len(self._rows)

    def has_ended(self, document_id: str) -> bool:
        """The row was harvested not long ago."""
        return document_id in self._finished

    def held(self, document_id: str) -> int:
        """Tokens held of a row, prompt included; 0 for an unknown one."""
        row = self._rows.get(document_id)
        return row.length if row else 0

    def check(self, update: RowUpdate, name: str) -> None:
        """Raises what is wrong with an update of the row called `name` in the request, such as rows[3]; changes nothing."""
        end = update.offset + len(update.tokens)
        if end > self._max_length:
            raise InvalidArgument(f"{name} has {end} tokens; the attachment's max_length is {self._max_length}", f"{name}.tokens")
        row = self._rows.get(update.document_id)
        if row is None:
            self._check_new(update, end, name)
            return
        if row.refusal is not None:
            raise row.refusal
        if update.offset == row.length:
            return
        self._check_offset(update, row.length, name)
        again = min(end, row.length) - update.offset
        if not np.array_equal(row.buffer[update.offset : update.offset + again], update.tokens[:again]):
            raise FailedPrecondition(
                f"{name}.tokens differ from what the service holds of {update.document_id!r}; tokens sent again must be the same",
                f"{name}.tokens",
            )
        if end == 0:
            raise InvalidArgument(f"{name}.tokens is empty; a row needs at least 1 token", f"{name}.tokens")

    def _check_new(self, update: RowUpdate, end: int, name: str) -> None:
        if len(update.document_id.encode()) > MAX_DOCUMENT_ID_BYTES:
            raise InvalidArgument(f"{name}.document_id is longer than {MAX_DOCUMENT_ID_BYTES} bytes", f"{name}.document_id")
        check_group(update.group, f"{name}.group")
        self._check_offset(update, 0, name)
        if end == 0:
            raise InvalidArgument(f"{name}.tokens is empty; a row needs at least 1 token", f"{name}.tokens")
        if not 0 <= update.prompt_length <= end:
            raise InvalidArgument(
                f"{name}.prompt_length is {update.prompt_length}; it must be in [0, {end}], the row's tokens", f"{name}.prompt_length"
            )

    def _check_offset(self, update: RowUpdate, held: int, name: str) -> None:
        if update.offset < 0:
            raise InvalidArgument(f"{name}.offset is {update.offset}; it must be >= 0", f"{name}.offset")
        if update.offset > held:
            raise FailedPrecondition(
                f"{name}.offset is {update.offset}, but the service holds {held} tokens of {update.document_id!r}; expected {held}, "
                "or 0 with the whole row",
                f"{name}.offset",
            )

    def check_room(self, updates: Sequence[RowUpdate]) -> None:
        """Raises if a batch names a document twice, or if its new rows do not fit."""
        ids = {update.document_id for update in updates}
        if len(ids) != len(updates):
            seen: set[str] = set()
            for i, update in enumerate(updates):
                if update.document_id in seen:
                    raise InvalidArgument(f"rows[{i}].document_id {update.document_id!r} is in the batch twice", f"rows[{i}].document_id")
                seen.add(update.document_id)
        if len(self._rows) + len(ids) <= 2 * self._max_rows:
            return
        rows = len(self._rows.keys() | ids)
        if rows > 2 * self._max_rows:
            raise ResourceExhausted(
                f"rows: {rows} unfinished rows; the limit is {2 * self._max_rows}, twice the attachment's max_rows; harvest finished rows",
                "rows",
            )

    def take(self, update: RowUpdate) -> RowContext:
        """Takes a checked update and answers the context to draft from.

        Raises:
            FailedPrecondition: The corpus refuses a new row's output, since the document is finished or another's; nothing is taken.
        """
        row = self._rows.get(update.document_id)
        if row is None:
            row = ServedRow(update.document_id, update.namespace, update.private, update.prompt_length)
            row.extend(update.tokens)
            self._keep(row)
            if row.refusal is not None:
                raise row.refusal
            self._rows[update.document_id] = row
            if update.group and not update.private and self._grouped:
                self._groups.start(row, row.namespace, update.group, row.buffer[row.prompt_length : row.length])
            self._finished.pop(update.document_id, None)
        elif update.offset + len(update.tokens) > row.length:
            self._extend(row, update.tokens[row.length - update.offset :])
            self._grown.append(row)
        end = update.offset + len(update.tokens)
        return RowContext(row.buffer[:end], row.namespace, row.private or not self._fits(row.namespace))

    def groups_of(self, updates: Sequence[RowUpdate]) -> GroupTexts:
        """What the groups of rows that were taken have generated, in this order; those without an id have none."""
        if not len(self._groups):
            return NO_GROUPS
        return self._groups.texts([self._rows.get(update.document_id) for update in updates])

    def _extend(self, row: ServedRow, tokens: NDArray[np.int32]) -> None:
        row.extend(tokens)
        self._groups.append(row, tokens)

    def remember(self, indices: Sequence[int], updates: Sequence[RowUpdate], drafts: Drafts) -> None:
        """Keeps up, then remembers what rows were told to try: row `indices[j]` of `drafts` is for `updates[j]`, which was taken."""
        self.keep_up()
        counts = drafts.counts.tolist()
        sources = drafts.source.tolist()
        tokens = drafts.tokens.tolist()
        lessons = {i: (of.lesson, place) for of in drafts.lessons for i, place in zip(of.rows.tolist(), of.places.tolist(), strict=True)}
        for i, update in zip(indices, updates, strict=True):
            row = self._rows.get(update.document_id)
            if row is not None and update.offset + len(update.tokens) == row.length:
                row.draft = tokens[i][: counts[i]]
                row.draft_source = sources[i]
                row.draft_parents = range(-1, counts[i] - 1) if drafts.parents is None else drafts.parents[i, : counts[i]].tolist()
                row.draft_at = row.length
                row.lesson = lessons.get(i)

    def keep_up(self) -> None:
        """Settles the last draft of each row that grew, and hands its new output to the corpus."""
        grown, self._grown = self._grown, []
        for row in grown:
            self._settle(row)
            self._keep(row)

    def check_harvest(self, document_id: str, offset: int, tokens: NDArray[np.int32], name: str) -> None:
        """Raises what is wrong with a row's last tokens; changes nothing. Nothing can be wrong with a row that is not held."""
        row = self._rows.get(document_id)
        if row is not None and len(tokens):
            self.check(RowUpdate(document_id, offset, tokens, row.prompt_length, row.namespace, row.private), name)

    def harvest(
        self,
        document_id: str,
        offset: int,
        tokens: NDArray[np.int32],
        discard: bool,
        name: str,
        end_elsewhere: Callable[[str], IngestResult | None],
    ) -> IngestResult:
        """Ends a row with its last tokens, which have been checked, and commits or discards its document.

        Harvesting a row again answers what was kept the first time, with no token kept anew. `end_elsewhere` finds and ends a
        document that has no row, and answers None if there is none.
        """
        self.keep_up()
        row = self._rows.get(document_id)
        if row is None:
            done = self._finished.get(document_id) or end_elsewhere(document_id)
            if done is None:
                raise NotFound(f"{name}.document_id: the attachment has no row {document_id!r}", f"{name}.document_id")
            return IngestResult(0, done.total_tokens, done.committed)
        self._extend(row, tokens[max(0, row.length - offset) :])
        self._groups.finish(row, discard)
        self._settle(row)
        kept = self._keep(row)
        del self._rows[document_id]
        if row.refusal is not None:
            raise row.refusal
        result = self._finish(row, discard, kept)
        self._finished[document_id] = result
        while len(self._finished) > 4 * self._max_rows:
            self._finished.popitem(last=False)
        return result

    def _finish(self, row: ServedRow, discard: bool, kept: int) -> IngestResult:
        if not row.kept or row.lost:
            return IngestResult(0, 0, False)
        try:
            if discard:
                return self._corpus.discard(row.namespace, row.document_id, self._owner)
            done = self._corpus.commit(row.namespace, row.document_id, self._owner)
        except NotFound:
            # Dropped with its namespace after its last tokens were kept.
            self._stats.lost_tokens[0] += row.kept
            return IngestResult(0, 0, False)
        return IngestResult(kept, done.total_tokens, done.committed)

    def _keep(self, row: ServedRow) -> int:
        """Hands output that the corpus does not have to it; answers how many tokens it kept."""
        output = row.buffer[row.prompt_length + row.kept : row.length]
        if row.private or not len(output) or row.refusal is not None:
            return 0
        kept = 0
        if not row.lost:
            try:
                lead = row.buffer[max(0, row.prompt_length - LEAD_TOKENS) : row.prompt_length]
                kept = self._corpus.ingest(row.namespace, row.document_id, row.kept, output, False, self._owner, lead).kept_tokens
            except FailedPrecondition as error:
                row.refusal = error
                return 0
            except (InvalidArgument, NotFound):
                # The tokens are valid, so the corpus no longer has what came before them: the namespace or the document was dropped.
                row.lost = True
        row.kept += len(output)
        self._stats.committed_tokens[0] += len(output)
        if row.lost:
            self._stats.lost_tokens[0] += len(output)
        return kept

    def _settle(self, row: ServedRow) -> None:
        """Counts how much of the last draft the engine committed, once something came after it."""
        start = row.draft_at
        if not start or row.length <= start:
            return
        if row.lesson is not None:
            lesson, place = row.lesson
            row.lesson = None
            truth = row.buffer[start : min(row.length, start + lesson.ints.shape[1])]
            lesson.learn(np.array([place]), truth[None], np.array([len(truth)]))
        if row.draft:
            truth = row.buffer[start : min(row.length, start + len(row.draft))].tolist()
            accepted = accepted_of(row.draft, row.draft_parents, truth)
            self._stats.count_verified(row.draft_source, len(row.draft), accepted)
        row.draft_at = 0
