from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.broker.receive import expressions as module
from cosmodrome.broker.receive.bloom import bit_positions
from cosmodrome.broker.receive.expressions import Expressions
from cosmodrome.env.real import real_env
from cosmodrome.wire.bodies import SubscriptionData

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000

# As 4.9.7 wrote it.
UPSTREAM: dict[str, Any] = {
    "filterDataByTopic": {
        "GSql": {
            "groupFilterData": {
                "g_sql": {
                    "bloomFilterData": {"bitNum": 112, "bitPos": [31, 74, 5]},
                    "bornTime": 1794771847090,
                    "clientVersion": 1794771847135,
                    "consumerGroup": "g_sql",
                    "dead": True,
                    "deadTime": 1794771849682,
                    "expression": "(a between 3 and 7 and b = 'even') or TAGS is null",
                    "expressionType": "SQL92",
                    "topic": "GSql",
                }
            },
            "topic": "GSql",
        }
    }
}


class HandClock:
    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms


class Desk:
    """The table with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "consumerFilter.json"
        self.clock = HandClock()
        self._env = dataclasses.replace(real_env(seed=1), clock=self.clock)
        self.table = self.new()

    def new(self) -> Expressions:
        return Expressions(str(self.path), self._env, keep_dead_ms=24 * HOUR_MS)

    async def again(self) -> Expressions:
        await self.table.stop()
        self.table = self.new()
        await self.table.start()
        return self.table

    def hear(self, text: str = "a > 1", version: int = 1, **changes: Any) -> None:
        self.table.heard("G", [subscribed(text, version, **changes)])

    def saved(self) -> Any:
        return json.loads(self.path.read_text())

    @property
    def state(self) -> tuple[str, int, bool] | None:
        row = self.table.find("T", "G")
        return None if row is None else (row.text, row.client_version, row.dead)


def subscribed(
    text: str = "a > 1", version: int = 1, topic: str = "T", kind: str = "SQL92"
) -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=text, sub_version=version, expression_type=kind)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    await desk.table.start()
    yield desk
    await desk.table.stop()


async def test_a_heartbeat_registers(desk: Desk) -> None:
    desk.hear("a > 1", version=7)
    assert desk.state == ("a > 1", 7, False)
    row = desk.table.find("T", "G")
    assert row is not None
    assert row.expression is not None
    assert row.expression.matches({"a": "2"})
    assert row.born_ms == START_MS
    assert desk.table.find("T", "other") is desk.table.find("other", "G") is None


async def test_only_a_newer_version_changes_a_live_row(desk: Desk) -> None:
    desk.hear("a > 1", version=5)
    desk.clock.ms += 10
    desk.hear("a > 2", version=5)
    desk.hear("a > 2", version=4)
    assert desk.state == ("a > 1", 5, False)
    desk.hear("a > 1", version=6)
    row = desk.table.find("T", "G")
    assert row is not None
    assert (row.client_version, row.born_ms) == (6, START_MS), "it is still the same filter"
    desk.hear("a > 2", version=7)
    row = desk.table.find("T", "G")
    assert row is not None
    assert (row.text, row.born_ms) == ("a > 2", START_MS + 10)


async def test_a_row_dies_with_its_group_and_comes_back(desk: Desk) -> None:
    desk.hear(version=5)
    desk.table.left("G")
    assert desk.state == ("a > 1", 5, True)
    desk.hear(version=5)
    assert desk.state == ("a > 1", 5, False)
    desk.table.left("G")
    desk.hear(version=3)
    assert desk.state == ("a > 1", 5, False)


async def test_who_finds_a_dead_row_is_believed(desk: Desk) -> None:
    """The clock of the new consumer may be behind that of the old one."""
    desk.hear("a > 1", version=500)
    desk.table.left("G")
    desk.hear("a > 2", version=3)
    assert desk.state == ("a > 2", 3, False)


async def test_a_row_dies_when_the_topic_is_no_longer_filtered(desk: Desk) -> None:
    desk.table.heard("G", [subscribed(), subscribed(topic="U")])
    desk.table.heard("G", [subscribed("*", 2, kind="TAG")])
    for topic in ("T", "U"):
        row = desk.table.find(topic, "G")
        assert row is not None
        assert row.dead
    desk.table.heard("G", [])
    assert desk.state == ("a > 1", 1, True)


@pytest.mark.parametrize("text", ["", "  "])
async def test_an_empty_expression_is_not_registered(desk: Desk, text: str) -> None:
    desk.hear(text)
    assert desk.state is None


async def test_a_bad_expression_is_logged_once_and_ends_the_old_one(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.hear("a > 1", version=1)
    with caplog.at_level(logging.WARNING):
        for version in range(2, 6):
            desk.hear("a >", version=version)
    assert desk.state is None
    (record,) = caplog.records
    assert "character 4" in record.getMessage()
    desk.hear("a > 3", version=9)
    assert desk.state == ("a > 3", 9, False)


@pytest.mark.parametrize("changes", [{"kind": "JS"}, {"topic": "no/topic"}])
async def test_what_cannot_be_kept_is_not_kept(desk: Desk, changes: dict[str, Any]) -> None:
    item = subscribed(**changes)
    desk.table.heard("G", [item])
    assert desk.table.find(item.topic, "G") is None


async def test_the_table_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_MAX", 2)
    monkeypatch.setattr(module, "CHARACTERS_MAX", 20)
    desk.table.heard("G", [subscribed(topic=f"T{n}") for n in range(3)])
    assert [desk.table.find(f"T{n}", "G") is None for n in range(3)] == [False, False, True]
    desk.table.heard("G", [subscribed(f"a > {'1' * 9}", 2, topic="T0")])
    row = desk.table.find("T0", "G")
    assert row is not None
    assert row.client_version == 2
    desk.table.heard("G", [subscribed(f"a > 1 {' ' * 20}", 3, topic="T0")])
    row = desk.table.find("T0", "G")
    assert row is not None
    assert row.client_version == 2


async def test_the_dead_are_removed_after_a_day(desk: Desk) -> None:
    desk.hear()
    desk.clock.ms += 30 * HOUR_MS
    desk.table.expire()
    assert desk.state is not None, "only the dead"
    desk.table.left("G")
    desk.clock.ms += 24 * HOUR_MS - 1
    desk.table.expire()
    assert desk.state is not None
    desk.clock.ms += 1
    desk.table.expire()
    assert desk.state is None
    await desk.again()
    assert desk.saved() == {"filterDataByTopic": {}}


async def test_the_file_has_upstreams_shape(desk: Desk) -> None:
    desk.table.heard("CG", [subscribed(topic="TopicE"), subscribed(topic="TopicA", version=9)])
    await desk.table.stop()
    assert desk.saved() == {
        "filterDataByTopic": {
            topic: {
                "groupFilterData": {
                    "CG": {
                        "bloomFilterData": {"bitNum": 112, "bitPos": positions},
                        "bornTime": START_MS,
                        "clientVersion": version,
                        "consumerGroup": "CG",
                        "dead": False,
                        "deadTime": 0,
                        "expression": "a > 1",
                        "expressionType": "SQL92",
                        "topic": topic,
                    }
                },
                "topic": topic,
            }
            for topic, positions, version in (
                ("TopicA", [36, 20, 4], 9),
                ("TopicE", [4, 70, 33], 1),
            )
        }
    }


def test_bit_positions_are_upstreams() -> None:
    assert bit_positions("g_sql", "GSql") == [31, 74, 5]
    # Longer than two blocks of the hash.
    assert all(0 <= position < 112 for position in bit_positions("g" * 40, "中文" * 20))


async def test_upstreams_file_is_read_and_written_back(desk: Desk) -> None:
    document = json.loads(json.dumps(UPSTREAM))
    document["later"] = {"x": 1}
    row = document["filterDataByTopic"]["GSql"]["groupFilterData"]["g_sql"]
    row["bloomFilterData"] = {"bitNum": 64, "bitPos": [1, 2]}
    row["also"] = "kept"
    desk.clock.ms = 1794771849682 + HOUR_MS
    desk.path.write_text(json.dumps(document))
    table = await desk.again()
    found = table.find("GSql", "g_sql")
    assert found is not None
    assert found.dead
    assert found.expression is not None
    assert found.expression.matches({"a": "4", "b": "even", "TAGS": "x"})
    table.heard("G", [subscribed()])
    await table.stop()
    saved = desk.saved()
    del saved["filterDataByTopic"]["T"]
    assert saved == document


async def test_rows_alive_at_the_stop_are_dead_at_the_start(desk: Desk) -> None:
    desk.hear(version=5)
    desk.clock.ms += HOUR_MS
    await desk.again()
    row = desk.table.find("T", "G")
    assert row is not None
    assert row.dead
    assert row.dead_ms == START_MS + HOUR_MS - 30_000
    desk.hear(version=5)
    assert desk.state == ("a > 1", 5, False)


async def test_entries_that_make_no_sense_are_left_out(desk: Desk) -> None:
    good = UPSTREAM["filterDataByTopic"]["GSql"]["groupFilterData"]["g_sql"]
    table: dict[str, Any] = {
        "A": None,
        "B": {"groupFilterData": []},
        "C": {"groupFilterData": {"g": None, "h": {}, "i": {"expression": 5}}},
        "D": {"groupFilterData": {"g": {"expression": "a > 1", "bornTime": "x"}}},
        "E": {"groupFilterData": {"bad/group": good, "g": {**good, "expression": "a >"}}},
    }
    desk.clock.ms = 1794771849682
    desk.path.write_text(json.dumps({"filterDataByTopic": table}))
    await desk.again()
    left = [(topic, group) for topic in "ABCDE" for group in "ghi" if desk.table.find(topic, group)]
    assert left == [("E", "g")]
    row = desk.table.find("E", "g")
    assert row is not None
    assert row.expression is None, "kept for upstream, but it filters nothing"
    desk.table.heard("g", [subscribed("a > 1", version=1, topic="E")])
    row = desk.table.find("E", "g")
    assert row is not None
    assert row.expression is not None


async def test_a_damaged_file_does_not_stop_the_start(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.path.write_text("{")
    await desk.again()
    assert "filters_lost" in caplog.text
    desk.hear()
    await desk.again()
    assert desk.state == ("a > 1", 1, True)


async def test_expiry_runs_by_itself(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCAN_SECONDS", 0.005)
    desk.hear()
    desk.table.left("G")
    await desk.again()
    desk.clock.ms += 48 * HOUR_MS
    async with asyncio.timeout(60):
        while desk.state is not None:
            await asyncio.sleep(0.005)
    await desk.table.start()  # once more changes nothing
    await desk.table.stop()
    await desk.table.stop()
