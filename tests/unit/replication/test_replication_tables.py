"""Tables of a master reach its slave, row by row and as a whole."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.unit.replication.tables_kit import Side, build_side, pair, side, until

from cosmodrome.broker.members.groups import GroupDeleted
from cosmodrome.broker.members.table_file import VERSION_ROW
from cosmodrome.broker.replicate.tables import BEHIND_LOG, REPLICATED
from cosmodrome.replication.tables import AppliedTables, Rows
from cosmodrome.wire.bodies import (
    SQL92,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)


def topic(name: str, queues: int = 4) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues)


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith(("row_refused", "rows_refused"))
    ]


def test_the_list_names_every_table(tmp_path: Path) -> None:
    assert tuple(build_side(tmp_path).tables) == tuple(REPLICATED)
    assert set(REPLICATED) >= BEHIND_LOG


# --- topics and groups -----------------------------------------------------------------------


async def test_topics_follow_with_their_version(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        ours, theirs = slave.rooms.members.topics, master.rooms.members.topics
        changed: list[list[str]] = []
        deleted: list[str] = []
        gone: list[str] = []
        theirs.put(topic("Early"))
        ours.put(topic("Mine"))
        ours.changed.subscribe(lambda rows: changed.append([row.topic_name for row in rows]))
        ours.deleted.subscribe(deleted.append)
        ours.gone.subscribe(gone.append)
        stop = slave.follow(master)
        assert dict(ours.table) == dict(theirs.table)
        assert ours.version == theirs.version
        assert ["Early"] in changed
        assert gone == ["Mine"]
        theirs.put(topic("dataVersion", 7))  # a topic may be called so
        theirs.delete("Early")
        assert changed[-2:] == [["dataVersion"], []]
        assert ours.table["dataVersion"].read_queue_nums == 7
        assert ours.version == theirs.version
        assert gone == ["Mine", "Early"]
        assert deleted == []  # queues and offsets follow by tables of their own
        theirs.mark_ordered({"dataVersion"})
        assert ours.table["dataVersion"].order
        ours.mark_ordered(())  # what name servers tell a slave is its master's business
        ours.follow_settings()
        assert ours.table["dataVersion"].order
        assert ours.version == theirs.version
        stop()
        theirs.put(topic("Late"))
        assert "Late" not in ours.table
    saved = json.loads((slave.config / "topics.json").read_text())
    assert saved["topicConfigTable"]["dataVersion"]["readQueueNums"] == 7
    assert saved["dataVersion"]["counter"] == ours.version.counter


async def test_a_row_that_is_known_changes_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        master.rooms.members.topics.put(topic("T"))
        slave.follow(master)
        topics = slave.rooms.members.topics
        row = topics.table["T"]
        fired: list[object] = []
        topics.changed.subscribe(fired.append)
        slave.applied.take("topics", master.tables["topics"].rows(), whole=True)
        assert topics.table["T"] is row  # plans of the fast lane hold on to it
        assert fired == []


async def test_members_of_rows_that_nobody_here_knows_are_kept(tmp_path: Path) -> None:
    async with side(tmp_path, slave=True) as slave:
        row = {"readQueueNums": 3, "colour": "blue"}
        slave.applied.take("topics", {"T": row}, whole=False)
        rows = slave.tables["topics"].rows()
        assert rows["T"]["colour"] == "blue"
        slave.applied.take("topics", {"T": {"readQueueNums": 3}}, whole=False)
        assert "colour" not in slave.tables["topics"].rows()["T"]


async def test_bad_topics_are_refused_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with side(tmp_path, slave=True) as slave:
        topics = slave.rooms.members.topics
        slave.applied.take("topics", {"T": {"readQueueNums": 2}}, whole=False)
        caplog.clear()
        bad: dict[str, Any] = {
            "T": {"readQueueNums": -1},
            "a b": {},
            "Text": "no row",
            "Number": 5,
            "List": [1],
            "Perm": {"perm": 99},
            "Type": {"perm": {}},
            VERSION_ROW: {"counter": "many"},
            "Good": {"readQueueNums": 5},
        }
        version = topics.version
        slave.applied.take("topics", bad, whole=False)
        assert len(refused(caplog)) == 8
        assert topics.table["Good"].read_queue_nums == 5
        assert topics.table["T"].read_queue_nums == 2
        assert topics.version == version
        assert not {"a b", "Text", "Number", "List", "Perm", "Type"} & set(topics.table)


async def test_a_flood_of_bad_rows_is_a_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with side(tmp_path, slave=True) as slave:
        slave.applied.take("topics", {f"bad {number}": {} for number in range(5000)}, whole=False)
        assert len(refused(caplog)) == 11
        assert "count=5000" in refused(caplog)[-1]


async def test_a_whole_table_without_a_version_is_no_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with side(tmp_path, slave=True) as slave:
        before = dict(slave.rooms.members.topics.table)
        slave.applied.take("topics", {}, whole=True)
        slave.applied.take("subscriptionGroup", {"g": {}}, whole=True)
        assert dict(slave.rooms.members.topics.table) == before
        assert "g" not in slave.rooms.members.groups.table
        assert len(refused(caplog)) == 2


async def test_groups_follow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path) as (master, slave):
        ours, theirs = slave.rooms.members.groups, master.rooms.members.groups
        gone: list[GroupDeleted] = []
        ours.deleted.subscribe(gone.append)
        slave.rooms.members.offsets.commit("g", "T", 0, 5)
        slave.follow(master)
        theirs.put(SubscriptionGroupConfig(group_name="g", retry_max_times=3))
        assert ours.table["g"].retry_max_times == 3
        assert ours.version == theirs.version
        theirs.delete("g", remove_offsets=True)
        assert "g" not in ours.table
        assert gone == [GroupDeleted("g", remove_offsets=False)]
        assert ours.version == theirs.version
        slave.applied.take("subscriptionGroup", {"h": {"retryQueueNums": 1 << 20}}, whole=False)
        assert "h" not in ours.table
        assert len(refused(caplog)) == 1


# --- offsets ---------------------------------------------------------------------------------


async def test_ten_thousand_offsets_follow(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        theirs, ours = master.rooms.members.offsets, slave.rooms.members.offsets
        for number in range(10_000):
            theirs.commit(f"g{number}", "T", number % 8, number)
        slave.follow(master)
        assert ours.rows() == theirs.rows()
        for number in range(10_000):
            theirs.commit(f"g{number}", "T", 9, number + 1)
        assert ours.rows() == theirs.rows()
        theirs.commit("g7", "T", 9, 2)  # also back
        assert ours.query("g7", "T", 9) == 2
        theirs.remove("g8")
        theirs.clone("g7", "g9", "T")
        theirs.remove_topic("U")
        assert ours.rows() == theirs.rows()
        assert ours.query("g8", "T", 0) == -1


async def test_a_commit_without_a_link_tells_nobody(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        offsets = master.rooms.members.offsets
        assert offsets.committed.listeners == ()
        stop = slave.follow(master)
        assert len(offsets.committed.listeners) == 1
        stop()
        assert offsets.committed.listeners == ()


async def test_a_whole_table_of_offsets_replaces(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        await slave.hand_back.stop()
        slave.rooms.members.offsets.commit("old", "T", 0, 5)
        master.rooms.members.offsets.commit("g", "T", 0, 3)
        slave.follow(master)
        assert slave.rooms.members.offsets.rows() == {"T@g": {0: 3}}
    saved = json.loads((slave.config / "consumerOffset.json").read_text().replace("0:3", '"0":3'))
    assert saved["offsetTable"] == {"T@g": {"0": 3}}


async def test_bad_offsets_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with side(tmp_path, slave=True) as slave:
        bad: dict[str, Any] = {
            "T@g": {"0": 1},
            "T": {"0": 1},
            "@g": {"0": 1},
            "T@a": {"0": "x"},
            "T@b": {"-1": 1},
            "T@c": {"0": -5},
            "T@d": {"0": 1 << 63},
            "T@e": [1],
            "T@f": 7,
            "T@h": {"0": None},
        }
        slave.applied.take("consumerOffset", bad, whole=False)
        assert slave.rooms.members.offsets.rows() == {"T@g": {0: 1}}
        assert len(refused(caplog)) == 9


# --- filters, settings -----------------------------------------------------------------------


def subscription(text: str, version: int = 1) -> SubscriptionData:
    return SubscriptionData(topic="T", sub_string=text, expression_type=SQL92, sub_version=version)


async def test_filters_follow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path) as (master, slave):
        theirs, ours = master.rooms.receive.expressions, slave.rooms.receive.expressions
        slave.follow(master)
        theirs.heard("g", [subscription("a > 1")])
        found = ours.find("T", "g")
        assert found is not None
        assert found.text == "a > 1"
        assert found.expression is not None
        assert not found.dead
        theirs.heard("g", [subscription("a > 2", 2)])
        found = ours.find("T", "g")
        assert found is not None
        assert found.text == "a > 2"
        # A member is connected here too: what the master forgets stays for it.
        ours.heard("g", [subscription("a > 2", 3)])
        theirs.left("g")
        found = ours.find("T", "g")
        assert found is not None
        assert not found.dead
        slave.applied.take("consumerFilter", {"T@g": None}, whole=False)
        slave.applied.take("consumerFilter", {}, whole=True)
        assert ours.find("T", "g") is found
        ours.left("g")
        slave.applied.take("consumerFilter", {"T@g": None}, whole=False)
        assert ours.find("T", "g") is None
        bad = {"T@x": {"expression": 5}, "T@y": 7, "nothing": {"expression": "a > 1"}, "T@z": {}}
        slave.applied.take("consumerFilter", bad, whole=False)
        assert len(refused(caplog)) == 4
        assert ours.rows() == {}


async def test_settings_that_must_agree_follow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path) as (master, slave):
        slave.follow(master)
        settings = master.rooms.operate.settings
        await settings._live.update({"transactionCheckMax": "3", "fileReservedTime": "1"})
        settings.changed.fire(frozenset(("transactionCheckMax", "fileReservedTime")))
        await until(lambda: slave.base.options.transaction_check_max == 3)
        assert slave.base.store_options.file_reserved_time != 1
        text = (slave.config / "brokerOverrides.properties").read_text()
        assert "transactionCheckMax=3" in text
        assert "fileReservedTime" not in text
        rows = {"fileReservedTime": "1", "transactionTimeOut": 5, "transactionCheckInterval": "x"}
        slave.applied.take("brokerOverrides", rows, whole=False)
        await slave.rooms.operate.settings.stop()
        assert len(refused(caplog)) == 2
        assert "setting_not_followed key=transactionCheckInterval" in caplog.text
        assert slave.base.store_options.file_reserved_time != 1


# --- where rows go ---------------------------------------------------------------------------


@dataclasses.dataclass
class Recorded:
    name: str
    leads: ClassVar[bool] = False
    taken: list[tuple[Rows, bool]] = dataclasses.field(default_factory=list)

    def rows(self) -> Rows:
        return {}

    def on_change(self, changed: Any) -> Any:
        return lambda: None

    def apply(self, rows: Rows, *, whole: bool) -> None:
        if "bad" in rows:
            raise RuntimeError("this row is bad")
        self.taken.append((rows, whole))


def test_an_unknown_table_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    applied = AppliedTables((), (), lambda: 0)
    for _ in range(3):
        applied.take("newTable", {"a": 1}, whole=True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    for number in range(1000):
        applied.take(f"table{number}", {}, whole=True)
    assert len(caplog.records) == 100


def test_a_table_that_fails_does_not_stop_others(caplog: pytest.LogCaptureFixture) -> None:
    one, two = Recorded("one"), Recorded("two")
    applied = AppliedTables((one, two), (), lambda: 0)
    applied.take("one", {"bad": 1}, whole=False)
    applied.take("two", {"a": 1}, whole=False)
    assert one.taken == []
    assert two.taken == [({"a": 1}, False)]
    assert "table_not_applied name=one" in caplog.text


async def test_progress_waits_for_the_log() -> None:
    end = 100
    table = Recorded("p")
    applied = AppliedTables((table,), ("p",), lambda: end)
    applied.take("p", {"a": 1}, whole=True, log_offset=100)
    assert table.taken == [({"a": 1}, True)]
    applied.take("p", {"a": 2}, whole=False, log_offset=150)
    for offset in range(160, 500):
        applied.take("p", {"a": offset, "b": 1}, whole=False, log_offset=offset)
    assert len(table.taken) == 1
    end = 150
    applied._look()
    assert table.taken[1:] == [({"a": 2}, False)]  # never put off by what is newer
    applied.take("p", {"c": 1}, whole=False, log_offset=500)
    assert len(table.taken) == 2
    end = 600
    await applied.start()
    await until(lambda: len(table.taken) == 4)
    await applied.stop()
    assert table.taken[2:] == [({"a": 499, "b": 1}, False), ({"c": 1}, False)]


def test_what_waits_for_the_log_is_replaced_by_a_whole_table() -> None:
    end = 0
    table = Recorded("p")
    applied = AppliedTables((table,), ("p",), lambda: end)
    for offset in (1, 2, 3):
        applied.take("p", {f"r{offset}": offset}, whole=offset == 3, log_offset=offset)
    end = 3
    applied._look()
    assert table.taken == [({"r1": 1}, False), ({"r3": 3}, True)]


def test_behind_a_whole_table_no_more_waits_than_the_table_has() -> None:
    end = 0
    table = Recorded("p")
    applied = AppliedTables((table,), ("p",), lambda: end)
    applied.take("p", {"a": 1, "b": 1}, whole=True, log_offset=1000)
    for number in range(500):
        applied.take("p", {f"n{number}": 1, "a": number}, whole=False, log_offset=1001 + number)
        applied.take("p", {f"n{number}": None}, whole=False, log_offset=1001 + number)
    assert [len(held.rows) for held in applied._held["p"]] == [2, 2]
    end = 5000
    applied._look()
    assert table.taken == [({"a": 1, "b": 1}, True), ({"a": 499, "b": 1}, True)]


def test_what_an_earlier_link_said_is_forgotten_unless_the_log_has_it() -> None:
    end = 0
    table = Recorded("p")
    applied = AppliedTables((table,), ("p",), lambda: end)
    applied.take("p", {"a": 1}, whole=True, log_offset=10)
    applied.take("p", {"a": 2}, whole=False, log_offset=20)
    end = 10
    applied.begin()
    end = 30  # of a master that had lost the log which it spoke of
    applied._look()
    assert table.taken == [({"a": 1}, True)]


async def test_everything_at_once_is_the_same_on_both(tmp_path: Path) -> None:
    def fill(master: Side, number: int) -> None:
        members = master.rooms.members
        members.topics.put(topic(f"T{number}"))
        members.groups.put(SubscriptionGroupConfig(group_name=f"g{number}"))
        members.offsets.commit(f"g{number}", f"T{number}", 1, number)
        master.rooms.receive.expressions.heard(f"g{number}", [subscription("a = 1")])

    async with pair(tmp_path) as (master, slave):
        fill(master, 1)
        slave.follow(master)
        fill(master, 2)
        for name, table in master.tables.items():
            assert slave.tables[name].rows() == table.rows(), name
