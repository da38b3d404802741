"""Stores that are damaged anywhere: what comes back is what was written, the service starts or says in one line why not, and goes on."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.server.store.database import FILE
from draftd.server.store.directory import StoreError
from tests.fuzz.conftest import fuzz_settings
from tests.server.test_store import Kept

REFUSED = ("is not a store of draftd", "has format", "the store cannot be opened", "the store cannot be read")
NAMES = ("a", "b", "team/c")
QUOTA = 2**17


class Written(NamedTuple):
    """A store's files, and the tokens of its documents by namespace and id."""

    files: dict[str, bytes]
    documents: dict[str, dict[str, list[int]]]


def _held(made: Kept) -> dict[str, dict[str, list[int]]]:
    return {info.name: {d.document_id: d.tokens.tolist() for d in made.documents(info.name)} for info in made.corpus.namespaces()}


def _files(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(data.glob(f"{FILE}*"))}


class Stores:
    """Short to print, as hypothesis does."""

    def __init__(self, found: list[Written]) -> None:
        self.found = found


@pytest.fixture(scope="module")
def stores() -> Iterator[Stores]:
    """One that was closed, and one that was killed: half of it is in the log."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        data = Path(directory)
        made = Kept(data, quota_tokens=QUOTA)
        found = []
        for part in range(2):
            for i in range(60):
                tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 150))]
                made.add(f"document-{part}-{i}", tokens, NAMES[i % 3])
            made.corpus.advance_generation("b", keep=5)
            made.settle()
            killed = Written(_files(data), _held(made))
            made.close()
            found = [Written(_files(data), killed.documents), killed]
            if part == 0:
                made = Kept(data, quota_tokens=QUOTA)
        assert len(found[1].files) > 1
        yield Stores(found)


def _damaged(source: random.Random, content: bytes) -> bytes:
    """With some bytes changed, cut off, or in another place."""
    out = bytearray(content)
    for _ in range(source.choice((1, 1, 2, 8))):
        at = source.randrange(len(out) + 1)
        match source.randrange(6):
            case 0 | 1 if out:
                out[at % len(out)] ^= 1 << source.randrange(8)
            case 2:
                # The pages with the schema and the namespaces are the first ones.
                at %= 5 * 4096
                out[at : at + 1] = source.randbytes(1)
            case 3:
                out[at : at + 300] = source.randbytes(len(out[at : at + 300]))
            case 4:
                page, other = 4096 * (at // 4096), 4096 * source.randrange(len(out) // 4096 + 1)
                out[page : page + 4096] = out[other : other + 4096]
            case _ if source.random() < 0.3:
                del out[at:]
    return bytes(out)


@fuzz_settings
@given(source=st.randoms(use_true_random=False), which=st.integers(0, 1))
def test_nothing_comes_back_that_was_not_written(stores: Stores, source: random.Random, which: int) -> None:
    written = stores.found[which]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        data = Path(directory)
        victim = source.choice(sorted(written.files))
        for name, content in written.files.items():
            (data / name).write_bytes(_damaged(source, content) if name == victim else content)
        refused = ""
        try:
            made = Kept(data, quota_tokens=QUOTA)
        except StoreError as error:
            refused = str(error)
        if refused:
            assert any(said in refused for said in REFUSED), refused
            return
        try:
            for name, documents in _held(made).items():
                assert name in written.documents, "a namespace that there never was"
                assert documents.items() <= written.documents[name].items()
            made.add("new", [1, 2, 3], "new")
            made.settle()
            before = _held(made)
        finally:
            made.close()
        shutil.rmtree(data / "shm", ignore_errors=True)
        again = Kept(data, quota_tokens=QUOTA)
        try:
            assert _held(again) == before
            assert again.store.counts.damaged_documents == 0, "what was set aside stays aside"
        finally:
            again.close()
