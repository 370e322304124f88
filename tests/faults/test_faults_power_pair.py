"""A pair of broker processes on real file systems of which one or both lose power under load.

Promised is what a SYNC_MASTER with SYNC_FLUSH answered SEND_OK before the cut began (see
`test_faults_power.py`): it is on both disks afterwards. The slave may have more than its master
then, which nobody was promised.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.crash.test_crash_pair import Machine, Places, check, killed_at_the_end, load
from tests.faults.fault_kit import cut_power, make_ext4, mounted

CUTS = int(os.environ.get("POWER_CUTS", "1"))


class Disk:
    """A file system of one machine."""

    def __init__(self, folder: Path) -> None:
        self._image, self.mount = folder.with_suffix(".image"), folder
        make_ext4(self._image, 128)

    def plugged_in(self) -> AbstractContextManager[Path]:
        return mounted(self.mount, "-o", "loop", str(self._image))


async def promised_before_a_cut(
    disks: tuple[Disk, Disk], victims: tuple[int, ...], seconds: float
) -> Places:
    """Run a pair until power goes; what it had promised by then."""
    master, slave = (Machine(disk.mount / "store") for disk in disks)
    acknowledged: Places = {}
    with disks[0].plugged_in(), disks[1].plugged_in(), killed_at_the_end(master, slave):
        await master.start("SYNC_MASTER")
        await slave.start("SLAVE", master)
        await slave.until_in_step()
        senders = await load(master, "p", acknowledged)
        await asyncio.sleep(seconds)
        promised = dict(acknowledged)
        for victim in victims:
            cut_power(disks[victim].mount)
        master.kill()
        slave.kill()
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)  # some heard of the failed disk
    return promised


@pytest.mark.timeout(300 + 60 * CUTS)
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["master", "slave", "both"])
async def test_what_a_pair_promised_is_on_both_disks(
    tmp_path: Path, victims: tuple[int, ...]
) -> None:
    chance = random.Random(f"power-pair-{victims}")
    for cut in range(CUTS):
        folder = tmp_path / str(cut)
        folder.mkdir()
        disks = (Disk(folder / "m"), Disk(folder / "s"))
        seconds = chance.uniform(0.2, 0.6)
        promised = await promised_before_a_cut(disks, victims, seconds)
        assert promised
        for disk in disks:  # each for itself, as if the other were lost
            with disk.plugged_in():
                alone = Machine(disk.mount / "store")
                with killed_at_the_end(alone):
                    await alone.start("ASYNC_MASTER")
                    await check(alone, promised)
