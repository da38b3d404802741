"""Blocks of shared memory: who may see them, how long they stay, and what is refused."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from draftd.drafter.layout import ArraySpec, BlockSpec, control_block_spec
from draftd.drafter.shm import SharedBlock, ShmDir, default_root, private_directory


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_and_blocks_are_the_users_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        run = ShmDir.create(tmp_path / "root")
        SharedBlock.create(str(run.path / "block"), 100)
    finally:
        os.umask(previous)
    assert _mode(tmp_path / "root") == 0o700
    assert _mode(run.path) == 0o700
    assert _mode(run.path / "block") == 0o600
    assert _mode(run.path / "lock") == 0o600
    run.close()


def test_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    private_directory(root)
    assert _mode(root) == 0o700


def test_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "root").stat().st_uid + 1)
    with pytest.raises(PermissionError):
        ShmDir.create(tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_symlink_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        ShmDir.create(tmp_path / "root")


def test_dead_runs_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    live = ShmDir.create(tmp_path)
    (live.path / "block").write_bytes(b"live")
    dead = tmp_path / "0123456789abcdef"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "index-1").write_bytes(b"dead")
    half_made = tmp_path / ".0123456789abcdef"
    half_made.mkdir()
    (half_made / "lock").touch()
    foreign = tmp_path / "not-a-run"
    foreign.mkdir()
    new = ShmDir.create(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {live.instance, new.instance, "not-a-run"}
    assert (live.path / "block").read_bytes() == b"live"
    live.close()
    new.close()
    assert [p.name for p in tmp_path.iterdir()] == ["not-a-run"]


def test_lock_is_held_while_the_run_lives(tmp_path: Path) -> None:
    run = ShmDir.create(tmp_path)
    with (run.path / "lock").open("w") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run.close()


def test_default_root_names_the_user() -> None:
    assert default_root() == Path(f"/dev/shm/draftd-{os.getuid()}")


def test_block_is_zeroed_shared_and_outlives_its_name(tmp_path: Path) -> None:
    path = str(tmp_path / "block")
    writer = SharedBlock.create(path, 1000)
    reader = SharedBlock.open(path, 1000)
    assert not reader.buf.any()
    writer.unlink()
    writer.unlink()
    writer.buf[7] = 9
    assert reader.buf[7] == 9
    assert not Path(path).exists()


def test_block_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    SharedBlock.create(str(tmp_path / "block"), 10).buf[0] = 5
    with pytest.raises(FileExistsError):
        SharedBlock.create(str(tmp_path / "block"), 10)
    assert SharedBlock.open(str(tmp_path / "block"), 10).buf[0] == 5


def test_too_small_file_is_refused(tmp_path: Path) -> None:
    """Reading past the end of the file would kill the process."""
    (tmp_path / "block").write_bytes(bytes(99))
    with pytest.raises(ValueError, match="smaller than 100 bytes"):
        SharedBlock.open(str(tmp_path / "block"), 100)
    assert SharedBlock.open(str(tmp_path / "block"), 99).size == 99


def test_symlink_in_place_of_a_block_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(100))
    (tmp_path / "block").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        SharedBlock.open(str(tmp_path / "block"), 100)


def test_read_only_unless_asked(tmp_path: Path) -> None:
    SharedBlock.create(str(tmp_path / "block"), 10)
    with pytest.raises(ValueError, match="read-only"):
        SharedBlock.open(str(tmp_path / "block"), 10).buf[0] = 1
    SharedBlock.open(str(tmp_path / "block"), 10, writable=True).buf[0] = 1


def test_other_layout_version_is_refused(tmp_path: Path) -> None:
    spec = control_block_spec(str(tmp_path / "control"))
    for version in (spec.layout_version - 1, spec.layout_version + 1):
        with pytest.raises(ValueError, match="layout version"):
            SharedBlock.from_spec(replace(spec, layout_version=version), create=True)
    assert not (tmp_path / "control").exists()


@pytest.mark.parametrize(
    "array",
    [
        ArraySpec("a", 0, "int64", (65,)),
        ArraySpec("a", 8, "int64", (64,)),
        ArraySpec("a", -8, "int64", (1,)),
        ArraySpec("a", 0, "int32", (-1, 4)),
        ArraySpec("a", 0, "int32", (2**40, 2**40)),
    ],
    ids=["too large", "too far", "before the block", "negative shape", "shape whose product overflows"],
)
def test_array_outside_its_block_is_refused(tmp_path: Path, array: ArraySpec) -> None:
    spec = control_block_spec(str(tmp_path / "control"))
    SharedBlock.from_spec(spec, create=True)
    with pytest.raises(ValueError, match="array a does not lie in its block"):
        SharedBlock.from_spec(BlockSpec(spec.handle, spec.byte_size, spec.layout_version, (array,)))


def test_reserving_takes_memory(tmp_path: Path) -> None:
    block = SharedBlock.create(str(tmp_path / "block"), 1 << 20)
    before = block.resident_bytes()
    block.reserve(0, 0)
    assert block.resident_bytes() == before
    block.reserve(1 << 16, 1 << 16)
    assert before + (1 << 16) <= block.resident_bytes() < 1 << 20


def test_reserving_more_than_there_is_is_an_error_not_a_signal(tmp_path: Path) -> None:
    block = SharedBlock.create(f"/dev/shm/draftd-test-{os.getpid()}", 1 << 44)
    try:
        with pytest.raises(OSError, match=r"space|large"):
            block.reserve(0, 1 << 44)
    finally:
        block.unlink()
