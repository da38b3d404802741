"""The corpus of a service run: namespaces, their documents and indexes, and the thread that keeps them fresh.

The only writer of the index. Thread-safe; calls that touch documents take a namespace's lock for microseconds.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import rowpoll
from draftd.drafter.attached_rows import AttachedRows
from draftd.drafter.calibration import Calibration
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.documents import NO_TOKENS, Document, Documents, IngestResult
from draftd.drafter.drafts import Drafts
from draftd.drafter.epochs import Epochs
from draftd.drafter.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from draftd.drafter.explain import Explanation, explain
from draftd.drafter.groups import NO_GROUPS, GroupTexts
from draftd.drafter.host_indexes import HostIndexes, Indexes
from draftd.drafter.keeper import Keeper, KeptNamespace, UniqueClock
from draftd.drafter.layout import BlockSpec, control_block_spec
from draftd.drafter.namespace import Namespace
from draftd.drafter.params import MAX_VOCAB, DraftParams
from draftd.drafter.records import Comparison, NamespaceInfo, RowContext, StoredDocument, check_document_id, check_tokens
from draftd.drafter.refresh_cycle import RefreshCycle
from draftd.drafter.segments import RefreshStat, Segments
from draftd.drafter.shm import SharedBlock, ShmDir

if TYPE_CHECKING:
    from draftd.drafter.device_indexes import DeviceIndexes

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_T = TypeVar("_T")
_MAX_LAGS = 100_000
"""Lags that are remembered until somebody asks."""
_EXPLAIN_TRIES = 5
_TELL_S = 10.0
"""How often the keeper is told of what was learned, in seconds."""


class Corpus(RefreshCycle):
    """All namespaces of a service run.

    Args:
        keeper: Told of all that has to outlive the process.
        indexes: Where the indexes are; None: where the configuration says.

    Attributes:
        rows: The row blocks of engines that map.

    Raises:
        OSError: The shared memory cannot be made.
        InvalidArgument, ResourceExhausted: The configured device is not there, or has not that much memory.
    """

    def __init__(self, config: CorpusConfig | None = None, keeper: Keeper | None = None, indexes: Indexes | None = None) -> None:
        self.config = config or CorpusConfig()
        super().__init__(self.config.refresh_interval_ms / 1000)
        self.clock = UniqueClock()
        self._keeper = keeper
        self._dir = ShmDir.create(self.config.shm_root)
        self.instance = self._dir.instance
        self._control_spec = control_block_spec(str(self._dir.path / "control"))
        control = cast(NDArray[np.int64], SharedBlock.from_spec(self._control_spec, create=True)[1]["control"])
        self._epochs = Epochs(control)
        self._epochs.beat()
        self._indexes = indexes or _indexes_of(self.config, self._dir.path, control, self._epochs)
        self._namespaces: dict[str, Namespace] = {}
        self.rows = AttachedRows(self._dir.path, self._epochs, self._ingest_polled, self.commit_owned)
        self._lock = Lock()
        self._executor = ThreadPoolExecutor(1, "draftd-merge")
        self._lags: deque[float] = deque(maxlen=_MAX_LAGS)
        self.refresh_errors = 0
        self.refresh_failure: Exception | None = None

    # -- life ----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Compiles the kernels and starts the refresh thread. Namespaces come afterwards: compiling takes room for a small one."""
        self._warm_up()
        self._start_refreshing()

    def close(self) -> None:
        """Stops the refresh thread after a last refresh and removes the blocks' names."""
        self._stop_refreshing()
        for namespace in self._namespaces.values():
            if namespace.calibration.changes != namespace.told_changes:
                with namespace.lock:
                    self._tell(namespace)
        self._executor.shutdown()
        self._dir.close()

    def abandon(self) -> None:
        """Removes the blocks' names without waiting for any thread, since the process ends now."""
        self._dir.close()

    def _warm_up(self) -> None:
        """Runs every kernel once, on a namespace of its own, so that no caller waits for a compiler."""
        name = "_warm_up"
        namespace = self._make_namespace(name, 16, "", quota=max(1024, 8 * self.config.depth))
        self._indexes.add(name, namespace.index, namespace.calibration.learned)
        for i in range(40):
            tokens = np.arange(i % 7, i % 7 + 60, dtype=np.int32) % 16
            namespace.documents.ingest(str(i), 0, tokens, True, "")
            namespace.segments.refresh()
            namespace.segments.wait_merged()
        row = np.arange(40, dtype=np.int32) % 16
        self._indexes.warm_up(name, row)
        self._calibrate([namespace])
        self._indexes.remove(name)
        namespace.index.close()

    def refresh_all(self) -> None:
        """See RefreshCycle."""
        self._epochs.beat()
        with self._lock:
            namespaces = list(self._namespaces.values())
        polled = self.rows.poll()
        self._calibrate(namespaces)
        for namespace in namespaces:
            with namespace.lock:
                arrivals, namespace.arrivals = namespace.arrivals, []
            try:
                namespace.segments.refresh()
            except Exception as error:  # noqa: BLE001 - the old version stays in force; counted, kept, and tried again at the next refresh
                self.refresh_errors += 1
                self.refresh_failure = error
            now = time.perf_counter()
            self._lags.extend(now - t for t in arrivals)
        self.rows.mark_visible(polled)

    def _calibrate(self, namespaces: Sequence[Namespace]) -> None:
        """Takes in what readers have learned."""
        learned: dict[str, list[NDArray[np.float32]]] = {}
        for name, delta in self.rows.take_learned():
            learned.setdefault(name, []).append(delta)
        now = time.monotonic()
        for namespace in namespaces:
            calibration = namespace.calibration
            own = calibration.learned.take()
            calibration.take_in([*learned.get(namespace.name, ()), *(() if own is None else (own,))])
            if calibration.changes != namespace.told_changes and now - namespace.told_at > _TELL_S:
                with namespace.lock:
                    self._tell(namespace)

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Waits until no merge into `main` is running or due; False if that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.wait_visible(self.ticket(), deadline - time.monotonic()):
                return False
            with self._lock:
                namespaces = list(self._namespaces.values())
            if all(n.segments.settled for n in namespaces):
                return True
            time.sleep(0.002)
        return False

    # -- namespaces ----------------------------------------------------------------------------------------------------------

    def ensure_namespace(self, name: str, vocab_size: int, fingerprint: str = "") -> None:
        """Creates a namespace, or checks that the one there fits.

        Raises:
            InvalidArgument: The name or the vocabulary size is not allowed.
            FailedPrecondition: The namespace has another vocabulary size or tokenizer.
            ResourceExhausted: There are as many namespaces as may be.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgument("namespace must be 1 to 128 characters of letters, digits and . _ : / -", "namespace")
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise InvalidArgument(f"vocab_size is {vocab_size}; it must be in [1, {MAX_VOCAB}]", "vocab_size")
        with self._lock:
            there = self._namespaces.get(name)
            if there is None:
                self._check_room()
                namespace = self._make_namespace(
                    name, vocab_size, fingerprint, self.config.quota_of(name), self.clock.now_us(), self._keeper
                )
                self._add(namespace)
                self._tell(namespace)
                return
        if there.vocab_size != vocab_size:
            raise FailedPrecondition(f"vocab_size is {vocab_size}; namespace {name!r} has {there.vocab_size}", "vocab_size")
        if fingerprint and there.fingerprint and fingerprint != there.fingerprint:
            raise FailedPrecondition(f"tokenizer_fingerprint is not that of namespace {name!r}", "tokenizer_fingerprint")
        if fingerprint and not there.fingerprint:
            there.fingerprint = fingerprint
            with there.lock:
                self._tell(there)

    def restore(self, kept: KeptNamespace, newest_first: Iterable[StoredDocument]) -> NamespaceInfo:
        """Makes a namespace from what its keeper has, with the newest documents that fit its quota; it can be drafted from at once.

        Args:
            newest_first: Documents of generations from kept.evict_before on, each with at least one token, all in the vocabulary.

        Raises:
            ResourceExhausted: There are as many namespaces as may be.
            OSError: There is no shared memory for it.
        """
        name = kept.name
        self._check_room()
        quota = self.config.quota_of(name)
        namespace = self._make_namespace(name, kept.vocab_size, kept.fingerprint, quota, kept.key, self._keeper, kept.calibration)
        namespace.documents.generation = kept.generation
        try:
            namespace.segments.load(newest_first, kept.evict_before)
            with self._lock:
                self._check_room()
                self._add(namespace)
        except BaseException:
            namespace.index.close()
            raise
        return namespace.info()

    def _check_room(self) -> None:
        if len(self._namespaces) >= self.config.max_namespaces:
            raise ResourceExhausted(f"there are {self.config.max_namespaces} namespaces, as many as may be", "namespace")

    def _add(self, namespace: Namespace) -> None:
        self._namespaces[namespace.name] = namespace
        self._indexes.add(namespace.name, namespace.index, namespace.calibration.learned)

    def _remove(self, name: str) -> Namespace:
        with self._lock:
            namespace = self._get(name)
            del self._namespaces[name]
        self._indexes.remove(name)
        namespace.index.close()
        return namespace

    def _tell(self, namespace: Namespace) -> None:
        """Tells the keeper of a namespace's state. Nobody else may change it meanwhile."""
        namespace.told_changes, namespace.told_at = namespace.calibration.changes, time.monotonic()
        if self._keeper is not None:
            self._keeper.namespace_changed(namespace.kept())

    def idle_for_s(self, name: str) -> float:
        """Seconds since a call named the namespace; 0 while it has documents in flight.

        Raises:
            NotFound: It does not exist.
        """
        namespace = self._namespaces.get(name)
        if namespace is None:
            raise NotFound(f"namespace {name!r} does not exist", "namespace")
        return 0.0 if namespace.documents.open else time.monotonic() - namespace.used_at

    def put_to_sleep(self, name: str) -> tuple[KeptNamespace, NamespaceInfo]:
        """Gives the memory of a namespace back; its keeper must have all its documents, from which `restore` brings it back.

        Raises:
            NotFound: It does not exist.
        """
        info = self._get(name).info()
        return self._remove(name).kept(), info

    def _make_namespace(
        self, name: str, vocab_size: int, fingerprint: str, quota: int, key: int = 0, keeper: Keeper | None = None, calibration: bytes = b""
    ) -> Namespace:
        index = self._indexes.make(vocab_size, quota)
        documents, lock = Documents(key, self.clock, keeper), Lock()
        segments = Segments(name, index, documents, lock, self._executor)
        return Namespace(name, vocab_size, fingerprint, index, documents, segments, lock, Calibration(index, calibration))

    def has_namespace(self, name: str) -> bool:
        """The namespace exists."""
        return name in self._namespaces

    def vocab_size(self, name: str) -> int:
        """A namespace's vocabulary size.

        Raises:
            NotFound: It does not exist.
        """
        return self._get(name).vocab_size

    def has_vocabulary(self, name: str, vocab_size: int) -> bool:
        """The namespace exists and has that vocabulary size: tokens checked against it may meet its index."""
        namespace = self._namespaces.get(name)
        return namespace is not None and namespace.vocab_size == vocab_size

    def _get(self, name: str) -> Namespace:
        namespace = self._namespaces.get(name)
        if namespace is None:
            raise NotFound(f"namespace {name!r} does not exist", "namespace")
        namespace.used_at = time.monotonic()
        return namespace

    def names(self) -> list[str]:
        """Names of all namespaces."""
        return list(self._namespaces)

    def namespaces(self) -> list[NamespaceInfo]:
        """All namespaces, by name."""
        with self._lock:
            return [n.info() for _, n in sorted(self._namespaces.items())]

    def namespace(self, name: str) -> NamespaceInfo:
        """One namespace.

        Raises:
            NotFound: It does not exist.
        """
        return self._get(name).info()

    def drop_namespace(self, name: str) -> tuple[int, int]:
        """Forgets a namespace and answers how many committed documents and tokens it held.

        Raises:
            NotFound: It does not exist.
        """
        info = self._get(name).info()
        namespace = self._remove(name)
        if self._keeper is not None:
            self._keeper.namespace_dropped(namespace.documents.key)
        return info.documents, info.tokens

    def advance_generation(self, name: str, keep: int | None = None) -> tuple[int, int]:
        """Starts a new generation and has those evicted that are no longer kept.

        Args:
            keep: Generations to keep, the new one included; None: the configuration's.

        Returns:
            The new generation, and the tokens that the next refresh evicts.

        Raises:
            NotFound: The namespace does not exist.
            InvalidArgument: `keep` is below 1.
        """
        namespace = self._get(name)
        keep = self.config.keep_generations if keep is None else keep
        if keep < 1:
            raise InvalidArgument(f"keep_generations is {keep}; it must be at least 1", "keep_generations")
        with namespace.lock:
            namespace.documents.generation += 1
            namespace.documents.changed += 1
            generation = namespace.documents.generation
            evicted = namespace.segments.evict_generations(generation - keep + 1)
            self._tell(namespace)
        self.refresh_soon()
        return generation, evicted

    def raise_generation(self, name: str, generation: int, evict_before: int) -> bool:
        """Brings a namespace to at least that generation, and has those below `evict_before` evicted; False if it was there already.

        Raises:
            NotFound: The namespace does not exist.
        """
        space = self._get(name)
        with space.lock:
            documents, segments = space.documents, space.segments
            if generation <= documents.generation and evict_before <= segments.evict_before:
                return False
            documents.generation = max(documents.generation, generation)
            documents.changed += 1
            segments.evict_generations(evict_before)
            self._tell(space)
        self.refresh_soon()
        return True

    def kept(self, key: int) -> KeptNamespace | None:
        """What a keeper was told of the namespace with that key; None if it is gone or asleep."""
        with self._lock:
            return next((space.kept() for space in self._namespaces.values() if space.documents.key == key), None)

    # -- documents -----------------------------------------------------------------------------------------------------------

    def ingest(
        self,
        namespace: str,
        document_id: str,
        offset: int,
        tokens: NDArray[np.int32],
        complete: bool,
        owner: str = "",
        lead: NDArray[np.int32] = NO_TOKENS,
    ) -> IngestResult:
        """Appends generated tokens to a document, which is opened at offset 0. Idempotent by document id and offset.

        Args:
            tokens: int32 [n].
            complete: The document ends with these tokens and is committed.
            owner: The attachment that opens it; only it may append.
            lead: int32 [m] in the vocabulary; what stands before the document, if it is opened: the prompt, of which the end counts.

        Raises:
            NotFound: The namespace does not exist.
            InvalidArgument: A token outside the vocabulary, an id that is empty or too long, or a gap before `offset`.
            FailedPrecondition: See draftd.drafter.documents.Documents.ingest. Or the document is committed with other tokens there; of one
                that is evicted in part this is not known.
        """
        space = self._get(namespace)
        check_document_id(document_id)
        check_tokens(tokens, space.vocab_size)
        if offset < 0:
            raise InvalidArgument(f"offset is {offset}; it must be at least 0", "offset")
        with space.lock:
            done = space.documents.committed.get(document_id)
            if done is not None and offset + len(tokens) <= done.length and not space.agrees(done, offset, tokens):
                raise FailedPrecondition(f"document_id {document_id!r} is committed with other tokens", "document_id")
            result = space.documents.ingest(document_id, offset, tokens, complete, owner, lead=lead)
            if result.kept_tokens:
                space.arrivals.append(time.perf_counter())
        return result

    def add(self, namespace: str, document_id: str, tokens: NDArray[np.int32], generation: int) -> int:
        """Adds a whole document of a generation, to which the namespace's is raised, and answers how many tokens were kept.

        None are where the id is there already, or the generation has been given up.

        Raises:
            NotFound: The namespace does not exist.
            InvalidArgument: A token outside the vocabulary, or an id that is empty or too long.
        """
        space = self._get(namespace)
        check_document_id(document_id)
        check_tokens(tokens, space.vocab_size)
        with space.lock:
            documents = space.documents
            if document_id in documents.committed or document_id in documents.open or generation < space.segments.evict_before:
                return 0
            if generation > documents.generation:
                documents.generation = generation
                self._tell(space)
            kept = documents.ingest(document_id, 0, tokens, True, "", generation).kept_tokens
            if kept:
                space.arrivals.append(time.perf_counter())
        return kept

    def commit(self, namespace: str, document_id: str, owner: str = "") -> IngestResult:
        """Commits an open document as it is; see draftd.drafter.documents.Documents.commit for errors."""
        space = self._get(namespace)
        with space.lock:
            return space.documents.commit(document_id, owner)

    def discard(self, namespace: str, document_id: str, owner: str = "") -> IngestResult:
        """Forgets an open document; see draftd.drafter.documents.Documents.discard for errors."""
        space = self._get(namespace)
        with space.lock:
            return space.documents.discard(document_id, owner)

    def commit_owned(self, owner: str) -> int:
        """Commits all open documents of an attachment and answers how many they were."""
        count = 0
        with self._lock:
            spaces = list(self._namespaces.values())
        for space in spaces:
            with space.lock:
                for document_id in space.documents.owned_by(owner):
                    space.documents.commit(document_id, owner)
                    count += 1
        return count

    def documents(self, namespace: str) -> Iterator[StoredDocument]:
        """The committed documents of which nothing was evicted, oldest first, as they are when each is reached.

        Raises:
            NotFound: The namespace does not exist.
        """
        space = self._get(namespace)
        with space.lock:
            wanted = [d.id for d in space.documents.complete()]
        for document_id in wanted:
            with space.lock:
                document = space.documents.committed.get(document_id)
                if document is None or document.gone:
                    continue
                tokens = space.tokens_of(document)
            yield StoredDocument(document_id, tokens, document.generation, document.committed_us)

    def read_committed(self, namespace: str, key: int, documents: Sequence[Document]) -> list[NDArray[np.int32] | None]:
        """int32 [n] tokens of each document that the keeper was told of; None where something of it was evicted since."""
        space = self._namespaces.get(namespace)
        if space is None or space.documents.key != key:
            return [None] * len(documents)
        with space.lock:
            return [None if document.gone else space.tokens_of(document) for document in documents]

    def committed_since(self, committed_us: int) -> list[tuple[int, Document]]:
        """Committed documents that are whole and not older than that, with their namespace's key, oldest first."""
        with self._lock:
            spaces = list(self._namespaces.values())
        found: list[tuple[int, Document]] = []
        for space in spaces:
            with space.lock:
                found += [(space.documents.key, d) for d in space.documents.complete() if d.committed_us >= committed_us]
        return sorted(found, key=lambda item: item[1].committed_us)

    def compare(self, namespace: str, document_id: str, tokens: NDArray[np.int32]) -> Comparison:
        """What the namespace holds under an id: nothing, a document in flight, these tokens, or others.

        Of a document that is evicted in part only the length is compared.

        Raises:
            NotFound: The namespace does not exist.
        """
        space = self._get(namespace)
        with space.lock:
            document = space.documents.committed.get(document_id)
            if document is None:
                return Comparison.IN_FLIGHT if document_id in space.documents.open else Comparison.ABSENT
            same = document.length == len(tokens) and space.agrees(document, 0, tokens)
            return Comparison.SAME if same else Comparison.OTHER

    def document_count(self, namespace: str) -> int:
        """Committed documents of a namespace.

        Raises:
            NotFound: It does not exist.
        """
        return len(self._get(namespace).documents.committed)

    # -- drafting ------------------------------------------------------------------------------------------------------------

    def propose(self, rows: list[RowContext], params: DraftParams) -> Drafts:
        """Drafts for rows given by their tokens.

        Raises:
            NotFound: A row's namespace does not exist.
            InvalidArgument: A token outside the namespace's vocabulary, or max_depth above the index depth.
        """
        if params.max_depth > self.config.depth:
            raise InvalidArgument(
                f"parameters.max_depth is {params.max_depth}; it must be at most the index depth {self.config.depth}",
                "parameters.max_depth",
            )
        for i, row in enumerate(rows):
            check_tokens(row.tokens, self._get(row.namespace).vocab_size, f"rows[{i}].tokens")
        return self.draft_checked(rows, params)

    def draft_checked(self, rows: list[RowContext], params: DraftParams, groups: GroupTexts = NO_GROUPS) -> Drafts:
        """`propose` for rows whose tokens were checked as they came; `groups`: of the rows."""
        tokens = [np.ascontiguousarray(row.tokens, np.int32) for row in rows]
        return self._indexes.draft(tokens, ["" if row.private else row.namespace for row in rows], params, groups)

    def explain(self, namespace: str, tokens: NDArray[np.int32], params: DraftParams, limit: int = 10) -> Explanation:
        """Every matched suffix of `tokens` with its exact counts, next tokens and documents, and the draft that follows.

        Raises:
            NotFound: The namespace does not exist.
            InvalidArgument: As for `propose`.
        """
        space = self._get(namespace)
        drafts = self.propose([RowContext(tokens, namespace, False)], params)
        tokens = np.ascontiguousarray(tokens, np.int32)
        for _ in range(_EXPLAIN_TRIES):
            with self._indexes.pinned():
                explanation = explain(space.index.host_copy(), space.segments, tokens, params, limit, drafts)
            if space.index.is_whole(explanation.version):
                return explanation
        raise ResourceExhausted("the index is refreshed faster than it can be explained; try again", "namespace")

    # -- what others map -----------------------------------------------------------------------------------------------------

    def control_spec(self) -> BlockSpec:
        """The control block."""
        return self._control_spec

    def index_spec(self, namespace: str) -> BlockSpec:
        """A namespace's index block.

        Raises:
            NotFound: It does not exist.
            FailedPrecondition: The index is not in host memory.
        """
        return self._indexes.spec(self._get(namespace).index)

    def index_handle(self, namespace: str) -> str:
        """What a namespace's index is told apart by from those before it; see index_spec for errors."""
        return self._indexes.handle(self._get(namespace).index)

    @property
    def device_indexes(self) -> list[DeviceIndexes]:
        """The indexes on each GPU; none where they are in host memory."""
        if self.config.device == "cpu":
            return []
        from draftd.drafter.device_fleet import DeviceFleet
        from draftd.drafter.device_indexes import DeviceIndexes

        if isinstance(self._indexes, DeviceFleet):
            return self._indexes.members
        return [self._indexes] if isinstance(self._indexes, DeviceIndexes) else []

    @property
    def device_failure(self) -> str:
        """Why a GPU does nothing more for this process; empty if all do. See cuda_memory.device_failure."""
        return next((failure for part in self.device_indexes if (failure := part.memory.failure)), "")

    @property
    def directory(self) -> Path:
        """Where this run keeps its files in shared memory; nobody else can open it."""
        return self._dir.path

    def memory_use(self) -> str:
        """What memory the indexes take, for people."""
        return self._indexes.memory_use()

    def device_bytes(self) -> dict[str, int]:
        """Bytes of GPU memory by part: indexes, free for others, working memory; empty without a GPU."""
        return self._indexes.device_bytes()

    def _ingest_polled(
        self,
        namespace: str,
        document_id: str,
        offset: int,
        lead: NDArray[np.int32],
        tokens: NDArray[np.int32],
        state: rowpoll.Take,
        owner: str,
        seen: float,
    ) -> None:
        space = self._get(namespace)
        check_tokens(lead, space.vocab_size)
        check_tokens(tokens, space.vocab_size)
        with space.lock:
            if state is rowpoll.Take.DISCARD:
                if document_id in space.documents.open:
                    space.documents.discard(document_id, owner)
                return
            result = space.documents.ingest(document_id, offset, tokens, state is rowpoll.Take.COMMIT, owner, lead=lead)
            if result.kept_tokens:
                space.arrivals.append(seen)

    # -- what is counted -----------------------------------------------------------------------------------------------------

    def refresh_stats(self) -> list[RefreshStat]:
        """The refreshes since the last call."""
        out: list[RefreshStat] = []
        with self._lock:
            namespaces = list(self._namespaces.values())
        for namespace in namespaces:
            out += _drain(namespace.segments.stats)
        return out

    def visibility_lags(self) -> list[float]:
        """Seconds from arrival to visibility of what became visible since the last call.

        What came through a row block counts as arrived when the poll before the one that found it had ended: an upper bound.
        """
        return _drain(self._lags)

    @property
    def calibrations_refused(self) -> int:
        """Times that an engine handed over what it cannot have learned, in the namespaces that there are."""
        return sum(namespace.calibration.refused for namespace in list(self._namespaces.values()))

    @property
    def readers_passed_over(self) -> int:
        """Times that a reader did not move on and was no longer waited for."""
        return self._epochs.passed_over + sum(part.memory.readers.passed_over for part in self.device_indexes)


def _drain(items: deque[_T]) -> list[_T]:
    return [items.popleft() for _ in range(len(items))]


def _indexes_of(config: CorpusConfig, directory: Path, control: NDArray[np.int64], epochs: Epochs) -> Indexes:
    if config.device == "cpu":
        return HostIndexes(directory, config, control, epochs)
    # PyTorch and Triton are needed here only.
    try:
        from draftd.drafter.device_fleet import DeviceFleet
        from draftd.drafter.device_indexes import DeviceIndexes
    except ImportError as error:
        raise InvalidArgument(f"device is {config.device}; it needs PyTorch and Triton: pip install draftd[gpu]", "device") from error
    devices = config.device.split(",")
    return DeviceFleet(config, devices) if len(devices) > 1 else DeviceIndexes(config, devices[0])
