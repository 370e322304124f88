"""The real machine: segments, atomic replacement, locks between and inside processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmodrome.env.real import RealDisk, _create_file, _create_named_file, real_env
from cosmodrome.errors import DirectoryInUse


@pytest.fixture
def disk() -> RealDisk:
    return RealDisk()


def test_segment_is_zero_filled_and_shows_writes_at_once(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b" / "0")
    segment = disk.create_segment(path, 8192)
    view = segment.view
    assert bytes(view) == bytes(8192)
    segment.write(b"hello", 4096)
    assert bytes(view[4096:4101]) == b"hello"
    segment.sync()
    with pytest.raises(ValueError, match="do not fit"):
        segment.write(b"x" * 5, 8190)
    held = view[4096:4101]
    segment.close()
    disk.remove(path)
    assert bytes(held) == b"hello", "a slice outlives its file"
    with pytest.raises(FileNotFoundError):
        disk.open_segment(path)


def test_create_refuses_to_overwrite(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "0")
    disk.create_segment(path, 10).close()
    with pytest.raises(FileExistsError):
        disk.create_segment(path, 10)
    assert disk.open_segment(path).size == 10


@pytest.mark.parametrize("create", [_create_file, _create_named_file])
def test_a_file_is_made_with_its_size_or_not_at_all(
    tmp_path: Path, create: Callable[[str, int], int]
) -> None:
    path = tmp_path / "0"
    with pytest.raises(OSError, match="Invalid argument"):
        create(str(path), -1)
    assert not path.exists()
    os.close(create(str(path), 12_345))
    assert path.stat().st_size == 12_345
    with pytest.raises(FileExistsError):
        create(str(path), 1)
    assert path.stat().st_size == 12_345


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="the system has no files without a name")
def test_a_file_has_no_name_before_it_has_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    resize = os.ftruncate
    monkeypatch.setattr(
        os, "ftruncate", lambda fd, size: (seen.append(os.listdir(tmp_path)), resize(fd, size))
    )
    os.close(_create_file(str(tmp_path / "0"), 10))
    assert seen == [[]]


def test_replace_keeps_the_previous_generation(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "config" / "topics.json")
    disk.replace(path, b"one")
    assert not disk.exists(path + ".bak")
    disk.replace(path, b"two")
    disk.replace(path, b"three")
    assert (disk.read(path), disk.read(path + ".bak")) == (b"three", b"two")
    assert disk.list(str(tmp_path / "config")) == ["topics.json", "topics.json.bak"]
    disk.replace(path, b"four", keep=False)
    assert disk.read(path + ".bak") == b"two"


def test_list_and_remove_are_quiet_about_what_is_not_there(disk: RealDisk, tmp_path: Path) -> None:
    assert disk.list(str(tmp_path / "nothing")) == []
    disk.remove(str(tmp_path / "nothing"))
    disk.make_dirs(str(tmp_path / "x" / "y"))
    disk.remove(str(tmp_path / "x" / "y"))
    assert disk.list(str(tmp_path / "x")) == []


def test_lock_inside_one_process(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    lock = disk.lock(path)
    with pytest.raises(DirectoryInUse, match="--data"):
        disk.lock(path)
    lock.release()
    lock.release()
    disk.lock(path).release()
    assert disk.read(path) == b"lock"


def test_lock_between_processes(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    code = (
        "import sys; from cosmodrome.env.real import RealDisk\n"
        f"RealDisk().lock({path!r}); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline().strip() == "held"
        with pytest.raises(DirectoryInUse):
            disk.lock(path)
        child.stdin.close()
        child.wait(60)
    disk.lock(path).release()


def test_usage_of_a_directory_that_does_not_exist_yet(disk: RealDisk, tmp_path: Path) -> None:
    usage = disk.usage(str(tmp_path / "not" / "yet"))
    assert 0.0 <= usage.ratio <= 1.0 and usage.free_bytes > 0


async def test_offload_runs_and_raises() -> None:
    env = real_env(seed=1)
    assert await env.offload(lambda: 40 + 2) == 42

    def broken() -> None:
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="on fire"):
        await env.offload(broken)
    assert env.clock.now_ms() > 1_600_000_000_000
