"""The simulated disk loses what a real one may lose, and nothing else."""

from __future__ import annotations

import asyncio
import errno

import pytest

from cosmodrome.errors import DirectoryInUse
from cosmodrome.sim.disk import PAGE_BYTES, PowerCut, SimDisk
from cosmodrome.sim.loop import JumpLoop, Stuck

PATH = "/d/file"


def after_cuts(prepare: object, count: int = 200) -> set[bytes | None]:
    """Everything found at PATH after power cuts, over many seeds."""
    found: set[bytes | None] = set()
    for seed in range(count):
        disk = SimDisk(seed)
        prepare(disk)  # type: ignore[operator]
        disk.restart(power=True)
        found.add(disk.read(PATH) if disk.exists(PATH) else None)
    return found


def synced_file(disk: SimDisk, size: int = 2 * PAGE_BYTES) -> None:
    file = disk.create_segment(PATH, size)
    file.write(b"a" * size, 0)
    file.sync()


def test_synced_data_is_safe() -> None:
    assert after_cuts(synced_file) == {b"a" * 2 * PAGE_BYTES}


def test_unsynced_pages_survive_or_revert_by_sectors() -> None:
    def prepare(disk: SimDisk) -> None:
        synced_file(disk)
        disk.open_segment(PATH).write(b"b" * 2 * PAGE_BYTES, 0)

    found = after_cuts(prepare)
    assert b"a" * 2 * PAGE_BYTES in found and b"b" * 2 * PAGE_BYTES in found
    assert b"a" * PAGE_BYTES + b"b" * PAGE_BYTES in found  # the later page alone
    mixed = {data[:PAGE_BYTES] for data in found if data} - {b"a" * PAGE_BYTES, b"b" * PAGE_BYTES}
    assert mixed  # torn within a page, but never within a sector
    assert all(len(set(data[at : at + 512])) == 1 for data in mixed for at in range(0, 4096, 512))


def test_a_kill_keeps_everything_written() -> None:
    disk = SimDisk(1)
    disk.create_segment(PATH, 10).write(b"x", 3)
    disk.cut()
    with pytest.raises(PowerCut):
        disk.exists(PATH)
    disk.restart(power=False)
    assert disk.read(PATH) == b"\0\0\0x" + bytes(6)


def test_a_new_file_may_be_short_until_it_is_synced() -> None:
    found = after_cuts(lambda disk: disk.create_segment(PATH, 100))
    assert {len(data) for data in found if data is not None} >= {0, 100}
    assert None not in found  # its directory was synced
    assert all(not any(data) for data in found if data)


def test_a_removal_may_be_undone() -> None:
    def prepare(disk: SimDisk) -> None:
        synced_file(disk, 5)
        disk.remove(PATH)

    assert after_cuts(prepare) == {b"aaaaa", None}


def test_replace_is_whole_and_lasting() -> None:
    def prepare(disk: SimDisk) -> None:
        disk.replace(PATH, b"old")
        disk.replace(PATH, b"new")
        assert disk.read(PATH + ".bak") == b"old"

    assert after_cuts(prepare) == {b"new"}
    found: set[bytes] = set()
    for step in range(1, 9):
        disk = SimDisk(step)
        disk.replace(PATH, b"old")
        disk.cut_after(step)
        try:
            disk.replace(PATH, b"new")
        except PowerCut:
            disk.restart(power=True)
        found.add(disk.read(PATH))
    assert found == {b"old", b"new"}


def test_a_failed_sync_lies_from_then_on() -> None:
    def prepare(disk: SimDisk) -> None:
        synced_file(disk, 5)
        file = disk.open_segment(PATH)
        file.write(b"b", 0)
        disk.faults.sync_error = "file"
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
        disk.faults.sync_error = None
        file.sync()
        assert bytes(file.view) == b"baaaa"

    assert after_cuts(prepare) == {b"aaaaa", b"baaaa"}


def test_a_full_disk_takes_a_part() -> None:
    disk = SimDisk(1)
    file = disk.create_segment(PATH, 4 * PAGE_BYTES)
    disk.faults.capacity_pages = 2
    with pytest.raises(OSError, match="space") as caught:
        file.write(b"z" * 3 * PAGE_BYTES, 0)
    assert caught.value.errno == errno.ENOSPC
    assert bytes(file.view) == b"z" * 2 * PAGE_BYTES + bytes(2 * PAGE_BYTES)
    file.write(b"y", 0)  # pages it has are its own
    with pytest.raises(OSError, match="space"):
        disk.create_segment("/d/other", 1)
    assert disk.usage("/d").free_bytes == 0
    disk.remove(PATH)
    disk.create_segment("/d/other", 1)


def test_what_is_stable_is_known_of_a_dead_machine_too() -> None:
    disk = SimDisk(1)
    synced_file(disk, 5)
    disk.open_segment(PATH).write(b"b", 0)
    disk.cut()
    assert (disk.visible(PATH), disk.stable(PATH)) == (b"baaaa", b"aaaaa")
    assert disk.visible("/d/other") == disk.stable("/d/other") == b""


def test_another_disk_is_empty() -> None:
    disk = SimDisk(1)
    synced_file(disk)
    disk.cut()
    disk.restart(power=False)
    disk.wipe()
    assert not disk.exists(PATH) and disk.used_pages == 0
    synced_file(disk)


def test_every_step_can_be_the_last() -> None:
    steps = 0
    while True:
        steps += 1
        disk = SimDisk(steps)
        disk.cut_after(steps)
        try:
            synced_file(disk)
        except PowerCut:
            assert disk.dead
            continue
        break
    assert steps > 4


def test_locks() -> None:
    disk = SimDisk(1)
    lock = disk.lock("/d/lock")
    with pytest.raises(DirectoryInUse):
        disk.lock("/d/lock")
    lock.release()
    disk.lock("/d/lock")
    disk.restart(power=False)
    disk.lock("/d/lock")


def test_the_loop_jumps_and_reports_a_dead_end() -> None:
    loop = JumpLoop()
    try:
        loop.run_until_complete(asyncio.sleep(3600))
        assert loop.time() >= 3600
        with pytest.raises(Stuck):
            loop.run_until_complete(loop.create_future())
    finally:
        loop.close()
