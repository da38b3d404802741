"""Corpora as Parquet files, which people open with their own tools: a row a document, and in the file's metadata what it must fit.

Written and read in row groups, so that neither side holds a corpus in memory.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.cli.failure import Failure
from draftd.server.cli.files import Header

FORMAT = 1
_PREFIX = "draftd."
_GROUP_TOKENS = 2**20
_GROUP_DOCUMENTS = 2**16
_READ_DOCUMENTS = 1024
_SCHEMA = pa.schema(
    [
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("document_id", pa.string(), nullable=False),
        pa.field("generation", pa.int64(), nullable=False),
        pa.field("committed_at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
    ]
)


class ParquetWriter:
    """Writes documents to a new file; a context manager that completes it.

    Args:
        path: The file.
        header: Goes into its metadata.
    """

    def __init__(self, path: Path, header: Header) -> None:
        metadata = {
            "format": str(FORMAT),
            "namespace": header.namespace,
            "vocab_size": str(header.vocab_size),
            "tokenizer_fingerprint": header.fingerprint,
            "generation": str(header.generation),
        }
        self._namespace = header.namespace
        self._schema = _SCHEMA.with_metadata({_PREFIX + name: value for name, value in metadata.items()})
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=["namespace"])
        self._waiting: list[pb.StoredDocument] = []
        self._waiting_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def write(self, documents: Sequence[pb.StoredDocument]) -> None:
        """Adds documents."""
        for document in documents:
            self._waiting.append(document)
            self._waiting_tokens += len(document.packed_tokens) // 4
            if self._waiting_tokens >= _GROUP_TOKENS or len(self._waiting) >= _GROUP_DOCUMENTS:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        parts = [np.frombuffer(document.packed_tokens, "<i4") for document in self._waiting]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
        columns = [
            pa.array([self._namespace] * len(parts), pa.string()),
            pa.array([document.document_id for document in self._waiting], pa.string()),
            pa.array([document.generation for document in self._waiting], pa.int64()),
            pa.array([document.committed_us for document in self._waiting], pa.timestamp("us", "UTC")),
            pa.ListArray.from_arrays(offsets, np.concatenate(parts), type=_SCHEMA.field("tokens").type),
        ]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self._waiting, self._waiting_tokens = [], 0


class ParquetFile:
    """A file of documents to read, of draftd's or anybody else's making: it needs the columns document_id and tokens.

    Attributes:
        documents: How many it has.

    Raises:
        Failure: It cannot be read, or is not such a file. So do the methods.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with self._failing():
            # Arrow's own message about a missing file is long.
            Path(path).stat()
            self._file = pq.ParquetFile(path)
        self.documents: int = self._file.metadata.num_rows
        schema = self._file.schema_arrow
        self._has = set(schema.names)
        for name, fits in (("document_id", _is_text), ("tokens", _is_tokens), ("generation", pa.types.is_integer), ("namespace", _is_text)):
            if name in ("document_id", "tokens") and name not in self._has:
                raise Failure(f"{path}: has no column {name}")
            if name in self._has and not fits(schema.field(name).type):
                raise Failure(f"{path}: column {name} is {schema.field(name).type}")
        self.header = self._header(schema.metadata or {})

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise Failure(f"{self._path}: {getattr(error, 'strerror', None) or error}") from None

    def _header(self, metadata: dict[bytes, bytes]) -> Header:
        said = {name: metadata.get((_PREFIX + name).encode(), b"").decode(errors="replace") for name in
                ("format", "namespace", "vocab_size", "tokenizer_fingerprint", "generation")}  # fmt: skip
        try:
            numbers = {name: int(said[name] or 0) for name in ("format", "vocab_size", "generation")}
        except ValueError:
            raise Failure(f"{self._path}: its draftd metadata is damaged") from None
        if numbers["format"] > FORMAT:
            raise Failure(f"{self._path}: has format {numbers['format']}; this version of draftd reads up to {FORMAT}")
        return Header(said["namespace"], numbers["vocab_size"], said["tokenizer_fingerprint"], numbers["generation"])

    def check_tokens(self, vocab_size: int) -> None:
        """Makes sure that every token is in [0, vocab_size): from the statistics of the file where it has them, else by reading it."""
        with self._failing():
            for group in range(self._file.num_row_groups):
                bounds = self._bounds(group)
                if bounds and (bounds[0] < 0 or bounds[1] >= vocab_size):
                    wrong = bounds[0] if bounds[0] < 0 else bounds[1]
                    raise Failure(f"{self._path}: has the token {wrong}, which is not in the vocabulary of {vocab_size}")

    def _bounds(self, group: int) -> tuple[int, int] | None:
        """Least and greatest token of a row group; None if it has none."""
        about = self._file.metadata.row_group(group)
        for i in range(about.num_columns):
            column = about.column(i)
            if column.path_in_schema.split(".")[0] == "tokens" and column.statistics is not None and column.statistics.has_min_max:
                return int(column.statistics.min), int(column.statistics.max)
        tokens = self._file.read_row_group(group, ["tokens"]).column("tokens")
        bounds = pc.min_max(pc.list_flatten(tokens))
        return (int(bounds["min"].as_py()), int(bounds["max"].as_py())) if bounds["min"].is_valid else None

    def read(self, namespace: str) -> Iterator[list[pb.StoredDocument]]:
        """The documents, in the file's order, some at a time; with a `namespace`, all must be of it."""
        names = [name for name in ("document_id", "tokens", "generation", "namespace") if name in self._has]
        batches = self._file.iter_batches(_READ_DOCUMENTS, columns=names)
        while True:
            with self._failing():
                batch = next(batches, None)
                if batch is None:
                    return
                documents = self._documents(batch, namespace)
            yield documents

    def _documents(self, batch: Any, namespace: str) -> list[pb.StoredDocument]:
        columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
        if any(column.null_count for column in columns.values()):
            raise Failure(f"{self._path}: has a row with an empty cell")
        if namespace and "namespace" in columns and pc.any(pc.not_equal(columns["namespace"], namespace)).as_py():
            raise Failure(f"{self._path}: has documents of other namespaces than {namespace!r}; give --namespace to take them all into one")
        tokens = columns["tokens"]
        values: NDArray[np.int32] = tokens.values.to_numpy(zero_copy_only=False).astype("<i4", copy=False)
        offsets = tokens.offsets.to_numpy().tolist()
        ids = columns["document_id"].to_pylist()
        generations = columns["generation"].to_pylist() if "generation" in columns else [0] * len(ids)
        return [
            pb.StoredDocument(document_id=ids[i], generation=generations[i], packed_tokens=values[offsets[i] : offsets[i + 1]].tobytes())
            for i in range(len(ids))
        ]


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_tokens(kind: Any) -> bool:
    return bool((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and kind.value_type in (pa.int32(), pa.int64()))
