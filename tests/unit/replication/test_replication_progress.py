"""A slave keeps and saves how far its master delivered what waited, and goes on there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.later_kit import START_MS, SetClock, later

from cosmodrome.broker.replicate.tables import ProgressTable
from cosmodrome.broker.role import SLAVE
from cosmodrome.replication.tables import Rows


async def test_a_master_says_what_it_delivered(tmp_path: Path) -> None:
    clock = SetClock()
    async with later(tmp_path, clock) as kit:
        said: list[Rows] = []
        timed: list[Rows] = []
        stop = ProgressTable(kit.delays).on_change(said.append)
        ProgressTable(kit.timers).on_change(timed.append)
        await kit.put(b"one", "DELAY\x011")
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"one"])
        await kit.until(lambda: {"1": 1} in said)
        stop()
        clock.ms += 1000
        await kit.put(b"two", "DELAY\x011")
        await kit.put(b"timed", f"TIMER_DELIVER_MS\x01{clock.ms + 5000}")
        clock.ms += 6000
        await kit.until(lambda: len(kit.bodies()) == 3)
        await kit.until(lambda: bool(timed) and timed[-1]["progress"]["lowOffset"] == 1)
        assert {"1": 2} not in said
        assert ProgressTable(kit.delays).rows() == {"1": 2}
        assert timed[-1]["progress"]["scannedOffset"] == 1


async def test_a_slave_keeps_progress_and_saves_it(tmp_path: Path) -> None:
    clock = SetClock()
    state = {"scannedOffset": 900, "deliveredMs": START_MS, "lowOffset": 800}
    async with later(tmp_path, clock, role=SLAVE) as kit:
        delays, timers = ProgressTable(kit.delays), ProgressTable(kit.timers)
        delays.apply({"1": 5, "2": 7}, whole=True)
        delays.apply({"2": 9}, whole=False)
        timers.apply({"progress": state}, whole=True)
        assert delays.rows() == {"1": 5, "2": 9}
        # The queue is not here yet; the numbers are the master's all the same.
        assert timers.rows() == {"progress": state}
        delays.apply({"2": 10}, whole=True)
        assert delays.rows() == {"2": 10}
        delays.apply({"2": None, "3": 1}, whole=False)
        assert delays.rows() == {"3": 1}
    config = tmp_path / "config"
    assert json.loads((config / "timerOffset.json").read_text()) == state
    assert "3:1" in (config / "delayOffset.json").read_text().replace(" ", "")
    async with later(tmp_path, clock, role=SLAVE) as kit:
        assert ProgressTable(kit.delays).rows() == {"3": 1}
        assert ProgressTable(kit.timers).rows() == {"progress": state}


async def test_a_slave_saves_while_it_runs(tmp_path: Path) -> None:
    async with later(tmp_path, SetClock(), role=SLAVE, save_interval_ms=5) as kit:
        ProgressTable(kit.delays).apply({"1": 5}, whole=True)
        path = tmp_path / "config" / "delayOffset.json"
        await kit.until(lambda: path.exists() and "1:5" in path.read_text().replace(" ", ""))


async def test_a_slave_that_becomes_the_master_goes_on(tmp_path: Path) -> None:
    clock = SetClock()
    async with later(tmp_path, clock) as kit:
        for body in (b"1", b"2", b"3"):
            await kit.put(body, "DELAY\x011")
        for number in range(3):
            await kit.put(b"t%d" % number, f"TIMER_DELIVER_MS\x01{clock.ms + 5000 + number}")
    (tmp_path / "config" / "delayOffset.json").unlink()
    (tmp_path / "config" / "timerOffset.json").unlink()
    async with later(tmp_path, clock, role=SLAVE) as kit:
        ProgressTable(kit.delays).apply({"1": 2}, whole=True)
        done = {"scannedOffset": 3, "deliveredMs": clock.ms + 5001, "lowOffset": 2}
        ProgressTable(kit.timers).apply({"progress": done}, whole=True)
        clock.ms += 60_000
        await kit.pause()
        assert kit.bodies() == []
    async with later(tmp_path, clock) as kit:
        await kit.until(lambda: len(kit.bodies()) >= 2)
        await kit.pause()
        assert sorted(kit.bodies()) == [b"3", b"t2"]


async def test_bad_progress_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with later(tmp_path, SetClock(), role=SLAVE) as kit:
        delays, timers = ProgressTable(kit.delays), ProgressTable(kit.timers)
        bad: dict[str, Any] = {"0": 1, "x": 1, "1": -1, "2": "x", "3": [], "4": 1 << 63, "5": 5}
        delays.apply(bad, whole=False)
        assert delays.rows() == {"5": 5}
        before = timers.rows()
        for row in (5, None, {}, {"scannedOffset": 1}, {**before["progress"], "lowOffset": -1}):
            timers.apply({"progress": row}, whole=True)
        timers.apply({}, whole=True)
        assert timers.rows() == before
        lines = [line for line in caplog.messages if line.startswith("row_refused")]
        assert len(lines) == 11


async def test_a_master_takes_no_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with later(tmp_path, SetClock()) as kit:
        ProgressTable(kit.delays).apply({"1": 5}, whole=True)
        assert ProgressTable(kit.delays).rows() == {}
        assert "this broker is a master" in caplog.text
