"""The cache of compiled kernels: named after all sources, private, and done without where nothing can be written."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftd.drafter.ops import kernel as module
from draftd.drafter.ops.kernel import cache_directory, kernel


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sources and a cache of the test's own."""
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_text("b = 1\n")
    monkeypatch.setattr(module, "_sources", lambda: [tmp_path / "a.py", tmp_path / "b.py"])
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    cache_directory.cache_clear()
    yield
    cache_directory.cache_clear()


SOURCES = module._sources()
PACKAGE = module._PACKAGE


def test_every_file_with_a_kernel_is_a_source() -> None:
    """What is not looked at when it changes would go on running as it was."""
    with_kernels = {p for p in PACKAGE.rglob("*.py") if re.search(r"^@(kernel|intrinsic)\b", p.read_text(), re.MULTILINE)}
    assert len(with_kernels) >= 6
    assert with_kernels <= set(SOURCES)


def _again() -> Path | None:
    cache_directory.cache_clear()
    return cache_directory()


def test_directory_changes_with_any_source(tmp_path: Path) -> None:
    """A kernel is inlined into others, which numba's own cache does not notice."""
    first = _again()
    assert first is not None
    assert first == _again()
    (tmp_path / "b.py").write_text("b = 2\n")
    second = _again()
    assert second != first
    (tmp_path / "b.py").write_text("b = 1\n")
    assert _again() == first


def test_directory_is_the_users_alone(tmp_path: Path) -> None:
    path = _again()
    assert path is not None
    assert path.parent == tmp_path / "cache"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = _again()
    assert path is not None
    assert path.parent == tmp_path / "xdg" / "draftd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    path = _again()
    assert path is not None
    assert path.parent == tmp_path / "home" / ".cache" / "draftd"


def test_kernels_work_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert _again() is None

    @kernel
    def twice(x: int) -> int:
        return 2 * x

    assert twice(21) == 42


def test_compiled_kernel_is_kept(tmp_path: Path) -> None:
    path = _again()
    assert path is not None

    @kernel(inline="never")  # type: ignore[untyped-decorator, unused-ignore]
    def thrice(x: int) -> int:
        return 3 * x

    assert thrice(14) == 42
    assert list(path.rglob("*.nbi")), "nothing was written to the cache"
