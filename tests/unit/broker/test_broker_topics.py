"""Topics and the file behind them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.goldens import Golden, each_golden
from tests.unit.broker.broker_fakes import FakeConnection, call_of

from cosmodrome.broker.members import table_file
from cosmodrome.broker.members.table_file import TableFile
from cosmodrome.broker.members.topics import Topics
from cosmodrome.broker.role import SLAVE
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused, StoreCorrupt
from cosmodrome.wire import bodies, fastjson
from cosmodrome.wire.bodies import (
    QUEUES_MAX,
    TOPICS_MAX,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
)
from cosmodrome.wire.commands.topic import (
    DeleteTopicInBroker,
    GetAllTopicConfig,
    GetSystemTopicListFromBroker,
    GetTopicConfig,
    UpdateAndCreateTopic,
)
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Call

OPTIONS = BrokerOptions(broker_name="broker-a")


class Peer:
    peer = ("192.0.2.7", 4711)


CALL = Call(Frame(code=0, opaque=0), Peer())  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "config" / "topics.json")


@pytest.fixture
async def topics(path: str) -> AsyncIterator[Topics]:
    service = Topics(OPTIONS, path, real_env())
    await service.start()
    yield service
    await service.stop()


def ask(topic: str = "T", **changes: Any) -> UpdateAndCreateTopic:
    fields: dict[str, Any] = {
        "topic": topic,
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
        "order": False,
    }
    return UpdateAndCreateTopic(**(fields | changes))


# --- built-in topics --------------------------------------------------------------------------


async def test_built_in_topics(topics: Topics) -> None:
    shapes = {
        name: (config.read_queue_nums, config.write_queue_nums, config.perm)
        for name, config in topics.table.items()
    }
    assert shapes == {
        "SELF_TEST_TOPIC": (1, 1, 6),
        "TBW102": (8, 8, 7),
        "BenchmarkTest": (1024, 1024, 6),
        "DefaultCluster": (16, 16, 7),
        "broker-a": (1, 1, 7),
        "OFFSET_MOVED_EVENT": (1, 1, 6),
        "SCHEDULE_TOPIC_XXXX": (18, 18, 6),
        "DefaultCluster_REPLY_TOPIC": (1, 1, 6),
    }
    assert topics.version.counter == 0


async def test_built_in_topics_follow_the_settings(path: str) -> None:
    first = Topics(OPTIONS, path, real_env())
    await first.start()
    await first.stop()
    options = BrokerOptions(
        broker_name="broker-a",
        auto_create_topic_enable=False,
        cluster_topic_enable=False,
        broker_topic_enable=False,
        trace_topic_enable=True,
    )
    topics = Topics(options, path, real_env())
    await topics.start()
    assert topics.get("TBW102") is None
    assert topics.table["DefaultCluster"].perm == 1
    assert topics.table["broker-a"].perm == 1
    assert topics.table["RMQ_SYS_TRACE_TOPIC"].write_queue_nums == 1
    assert topics.version.counter == 1  # name servers must see the difference
    await topics.stop()


# --- creation ---------------------------------------------------------------------------------


async def test_create_on_send_takes_the_smaller_queue_count(topics: Topics) -> None:
    changed: list[Sequence[TopicConfig]] = []
    topics.changed.subscribe(changed.append)
    small = topics.create_on_send("Small", "TBW102", 4, 0)
    large = topics.create_on_send("Large", "TBW102", 100, 2)
    assert (small.read_queue_nums, small.write_queue_nums, small.perm) == (4, 4, 6)
    assert (large.write_queue_nums, large.topic_sys_flag) == (8, 2)
    assert changed == [(small,), (large,)]
    assert topics.version.counter == 2
    assert topics.create_on_send("Small", "Nonsense", -1, 0) is small


@pytest.mark.parametrize(
    ("default_topic", "queues", "why"),
    [
        ("TBW102", -1, "-1 queues"),
        ("TBW102", 0, "0 queues"),
        ("Unknown", 4, "'Unknown' does not exist"),
        ("SELF_TEST_TOPIC", 4, "may not be used as a template"),
    ],
)
async def test_create_on_send_refused(
    topics: Topics, default_topic: str, queues: int, why: str
) -> None:
    with pytest.raises(Refused, match=why) as refused:
        topics.create_on_send("New", default_topic, queues, 0)
    assert refused.value.code == Code.TOPIC_NOT_EXIST
    assert topics.get("New") is None
    retry = topics.create_on_send("%RETRY%g", default_topic, queues, 0)
    assert (retry.write_queue_nums, retry.perm) == (1, 6)


async def test_create_on_send_checks_the_name(topics: Topics) -> None:
    with pytest.raises(Refused, match="not allowed"):
        topics.create_on_send("../etc", "TBW102", 4, 0)


async def test_no_auto_creation_even_with_an_old_template(path: str) -> None:
    options = BrokerOptions(broker_name="broker-a", auto_create_topic_enable=False)
    topics = Topics(options, path, real_env())
    await topics.start()
    topics.put(TopicConfig(topic_name="TBW102", perm=7))
    with pytest.raises(Refused, match="autoCreateTopicEnable is off"):
        topics.create_on_send("New", "TBW102", 4, 0)
    await topics.stop()


async def test_ensure_keeps_what_is_there(topics: Topics) -> None:
    made = topics.ensure("%RETRY%g", 2, 6, 2)
    assert (made.read_queue_nums, made.topic_sys_flag) == (2, 2)
    assert topics.ensure("%RETRY%g", 9, 4) is made


async def test_the_table_fits_into_one_answer(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New topics are refused before slaves or name servers could get no more of them."""
    limit = len(bodies.encode(topics.wrapper())) + 1000
    monkeypatch.setattr(table_file, "TABLE_BYTES_MAX", limit)
    made = []
    with pytest.raises(Refused, match="delete unused ones first") as refused:
        for number in range(100):
            topics.create_on_send(f"Long{'x' * 40}{number}", "TBW102", 4, 0)
            made.append(f"Long{'x' * 40}{number}")
    assert refused.value.code == Code.SYSTEM_ERROR
    assert len(made) > 2
    # Beside the rows an answer has a version, for which there is room in a frame.
    assert limit - 400 < len(bodies.encode(topics.wrapper())) < limit + 200
    with pytest.raises(Refused, match="bytes with this one"):
        await topics.update_and_create(ask("Another" * 8), CALL)
    await topics.update_and_create(ask(made[0], perm=4), CALL)  # those that are there still change
    for name in made[:2]:
        assert topics.delete(name)
    await topics.update_and_create(ask("Another" * 8), CALL)


async def test_the_table_is_told_in_steps(topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_file, "ROWS_PER_STEP", 3)
    telling = asyncio.create_task(topics.get_all(GetAllTopicConfig(), CALL))
    turns = 0
    while not telling.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= len(topics.table) // 3
    assert (await telling).body == bodies.encode(topics.wrapper())


async def test_sends_do_not_create_topics_without_end(path: str) -> None:
    options = BrokerOptions(broker_name="b", auto_create_topics_per_minute_by_address=3)
    service = Topics(options, path, real_env())
    await service.start()
    one = call_of(FakeConnection(("192.0.2.7", 1)))
    other = call_of(FakeConnection(("192.0.2.8", 1)))
    for number in range(3):
        service.create_on_send(f"T{number}", "TBW102", 4, 0, one)
    with pytest.raises(Refused, match="create 3 topics per minute"):
        service.create_on_send("T3", "TBW102", 4, 0, one)
    service.create_on_send("T2", "TBW102", 4, 0, one)  # it is there
    service.create_on_send("T4", "TBW102", 4, 0, other)
    await service.stop()


async def test_topic_count_is_bounded(topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOPICS_MAX >= 10_000
    fewer = dataclasses.replace(topics._table._kind, rows_max=len(topics.table))
    monkeypatch.setattr(topics._table, "_kind", fewer)
    with pytest.raises(Refused, match="delete unused"):
        topics.ensure("OneMore", 1, 6)
    topics.put(topics.table["TBW102"])  # replacing is still possible


# --- requests ---------------------------------------------------------------------------------


async def test_update_is_on_disk_and_announced_before_the_answer(topics: Topics, path: str) -> None:
    announced: list[str] = []

    async def announce() -> None:
        announced.append("yes")

    topics.announced = announce
    reply = await topics.update_and_create(
        ask(read_queue_nums=8, perm=4, order=True, topic_filter_type="MULTI_TAG"), CALL
    )
    assert reply.code == 0
    row = fastjson.loads(Path(path).read_bytes())["topicConfigTable"]["T"]
    assert row == {
        "order": True,
        "perm": 4,
        "readQueueNums": 8,
        "topicFilterType": "MULTI_TAG",
        "topicName": "T",
        "topicSysFlag": 0,
        "writeQueueNums": 4,
    }
    assert announced == ["yes"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"topic": ""}, "empty"),
        ({"topic": "a/b"}, "not allowed"),
        ({"topic": "x" * 128}, "shorten"),
        ({"topic": "TBW102"}, "system topic"),
        ({"topic": "broker-a"}, "system topic"),
        ({"topic": "DefaultCluster"}, "system topic"),
        ({"topic": "rmq_sys_x"}, "system topic"),
        ({"perm": 8}, "perm is 8"),
        ({"perm": -1}, "perm is -1"),
        ({"read_queue_nums": 0}, "readQueueNums is 0"),
        ({"write_queue_nums": QUEUES_MAX + 1}, "writeQueueNums"),
        ({"topic_filter_type": "NONE"}, "topicFilterType"),
    ],
)
async def test_update_refused(topics: Topics, changes: dict[str, Any], why: str) -> None:
    before = dict(topics.table)
    with pytest.raises(Refused, match=why) as refused:
        await topics.update_and_create(ask(**changes), CALL)
    assert refused.value.code == Code.SYSTEM_ERROR
    assert topics.table == before


async def test_a_slave_refuses_changes(path: str) -> None:
    topics = Topics(OPTIONS, path, real_env(), role=SLAVE)
    await topics.start()
    with pytest.raises(Refused, match="slave"):
        await topics.update_and_create(ask(), CALL)
    with pytest.raises(Refused, match="slave"):
        await topics.delete_in_broker(DeleteTopicInBroker(topic="T"), CALL)
    await topics.stop()


async def test_delete(topics: Topics, path: str) -> None:
    await topics.update_and_create(ask(), CALL)
    gone: list[str] = []
    changed: list[Sequence[TopicConfig]] = []
    topics.deleted.subscribe(gone.append)
    topics.changed.subscribe(changed.append)
    await topics.delete_in_broker(DeleteTopicInBroker(topic="T"), CALL)
    await topics.delete_in_broker(DeleteTopicInBroker(topic="T"), CALL)
    assert gone == ["T"]
    assert changed == [()]
    assert "T" not in fastjson.loads(Path(path).read_bytes())["topicConfigTable"]
    with pytest.raises(Refused, match="system topic"):
        await topics.delete_in_broker(DeleteTopicInBroker(topic="BenchmarkTest"), CALL)


async def test_queries(topics: Topics) -> None:
    topics.put(TopicConfig(topic_name="T", write_queue_nums=3))
    everything = bodies.decode(
        TopicConfigSerializeWrapper, (await topics.get_all(GetAllTopicConfig(), CALL)).body
    )
    assert everything.topic_config_table == topics.table
    assert everything.data_version == topics.version
    one = bodies.decode(TopicConfig, topics.get_one(GetTopicConfig(topic="T"), CALL).body)
    assert one == topics.get("T")
    with pytest.raises(Refused) as refused:
        topics.get_one(GetTopicConfig(topic="U"), CALL)
    assert refused.value.code == Code.TOPIC_NOT_EXIST
    system = bodies.decode(TopicList, topics.get_system(GetSystemTopicListFromBroker(), CALL).body)
    assert {"TBW102", "broker-a", "DefaultCluster"} <= set(system.topic_list)
    assert "T" not in system.topic_list


async def test_mark_ordered_sets_and_resets(topics: Topics) -> None:
    topics.put(TopicConfig(topic_name="A", order=True))
    topics.put(TopicConfig(topic_name="B"))
    counter = topics.version.counter
    topics.mark_ordered({"B", "Elsewhere"})
    assert (topics.table["A"].order, topics.table["B"].order) == (False, True)
    assert topics.version.counter == counter + 1
    topics.mark_ordered({"B"})
    assert topics.version.counter == counter + 1


# --- the file ---------------------------------------------------------------------------------


async def test_everything_survives_a_restart(path: str) -> None:
    first = Topics(OPTIONS, path, real_env())
    await first.start()
    first.create_on_send("Auto", "TBW102", 4, 0)
    await first.stop()
    await first.stop()
    second = Topics(OPTIONS, path, real_env())
    await second.start()
    assert second.table == first.table
    assert second.version == first.version
    await second.stop()


async def test_members_of_later_versions_survive(path: str) -> None:
    document = {
        "dataVersion": {"counter": 7, "stateVersion": 3, "timestamp": 9},
        "topicConfigTable": {"T": {"topicName": "T", "perm": 6, "shape": {"a": 1}}},
        "zones": ["x"],
    }
    Path(path).parent.mkdir()
    Path(path).write_bytes(fastjson.dumps(document))
    topics = Topics(OPTIONS, path, real_env())
    await topics.start()
    topics.put(TopicConfig(topic_name="U"))
    await topics.stop()
    saved = fastjson.loads(Path(path).read_bytes())
    assert saved["zones"] == ["x"]
    assert saved["dataVersion"]["stateVersion"] == 3
    assert saved["topicConfigTable"]["T"]["shape"] == {"a": 1}
    assert saved["dataVersion"]["counter"] == 9  # built-in topics, then the new one


@each_golden
async def test_golden_file_round_trip(golden: Golden, path: str) -> None:
    data = (golden.path / "store/config/topics.json").read_bytes()
    Path(path).parent.mkdir()
    Path(path).write_bytes(data)
    options = BrokerOptions(broker_name="broker-a", trace_topic_enable=not golden.is_own)
    topics = Topics(options, path, real_env())
    await topics.start()
    assert topics.version.counter == fastjson.loads(data)["dataVersion"]["counter"]
    await topics._table._file.save()
    assert Path(path).read_bytes() == data
    await topics.stop()


async def test_damaged_file_falls_back(path: str, caplog: pytest.LogCaptureFixture) -> None:
    first = Topics(OPTIONS, path, real_env())
    await first.start()
    await first.update_and_create(ask("Old"), CALL)
    await first.update_and_create(ask("New"), CALL)
    await first.stop()
    Path(path).write_bytes(b'{"dataVersion":{"coun')
    topics = Topics(OPTIONS, path, real_env())
    await topics.start()
    assert topics.get("Old") is not None
    assert path in caplog.text and ".bak" in caplog.text
    await topics.update_and_create(ask("Newer"), CALL)
    # The damaged bytes never became the previous generation.
    assert "Old" in fastjson.loads(Path(path + ".bak").read_bytes())["topicConfigTable"]
    await topics.stop()


async def test_missing_file_falls_back(path: str) -> None:
    Path(path).parent.mkdir()
    Path(path + ".bak").write_bytes(b'{"topicConfigTable":{"T":{"perm":4}}}')
    topics = Topics(OPTIONS, path, real_env())
    await topics.start()
    assert topics.table["T"].perm == 4
    await topics.stop()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"topicConfigTable":{"T":{"perm":"high"}}}'])
async def test_no_readable_generation_is_an_error(path: str, content: bytes) -> None:
    Path(path).parent.mkdir()
    Path(path).write_bytes(content)
    with pytest.raises(StoreCorrupt) as error:
        await Topics(OPTIONS, path, real_env()).start()
    assert path in str(error.value)
    assert "restore" in str(error.value)


async def test_names_that_reach_outside_are_not_loaded(path: str) -> None:
    Path(path).parent.mkdir()
    for name in ("../x", "..", "a/b"):
        Path(path).write_bytes(fastjson.dumps({"topicConfigTable": {name: {}}}))
        with pytest.raises(StoreCorrupt, match="not a topic"):
            await Topics(OPTIONS, path, real_env()).start()


class SlowDisk:
    """Counts overlapping replaces; fails while told to."""

    def __init__(self) -> None:
        self.saved: list[bytes] = []
        self.running = 0
        self.overlaps = 0
        self.fail = False

    def exists(self, path: str) -> bool:
        return False

    def replace(self, path: str, data: bytes, *, keep: bool = True) -> None:
        if self.fail:
            raise OSError(28, "No space left on device")
        self.saved.append(data)


def slow_env(disk: SlowDisk) -> Env:
    async def offload(work: Any) -> Any:
        disk.running += 1
        disk.overlaps += disk.running > 1
        await asyncio.sleep(0.001)
        try:
            return work()
        finally:
            disk.running -= 1

    real = real_env()
    return Env(clock=real.clock, disk=disk, random=real.random, offload=offload)  # type: ignore[arg-type]


async def test_saves_never_overlap_and_the_newest_wins() -> None:
    disk, state = SlowDisk(), {"n": 0}
    file = TableFile("t.json", slow_env(disk), lambda: dict(state))

    async def change() -> None:
        state["n"] += 1
        mine = state["n"]
        await file.save()
        assert fastjson.loads(disk.saved[-1])["n"] >= mine

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(change())
            await asyncio.sleep(0)
    assert disk.overlaps == 0
    assert fastjson.loads(disk.saved[-1]) == {"n": 20}
    assert len(disk.saved) < 20  # shared


async def test_a_failed_save_is_told_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmodrome.broker.members.table_file.RETRY_SAVE_SECONDS", 0.01)
    disk = SlowDisk()
    disk.fail = True
    file = TableFile("t.json", slow_env(disk), lambda: {"n": 1})
    with pytest.raises(OSError, match="space"):
        await file.save()
    disk.fail = False
    for _ in range(100):
        await asyncio.sleep(0.005)
        if disk.saved:
            break
    assert disk.saved
    await file.stop()


async def test_stop_saves_the_rest_or_says_that_it_cannot() -> None:
    disk = SlowDisk()
    file = TableFile("t.json", slow_env(disk), lambda: {"n": 1})
    file.save_soon()
    await file.stop()
    assert len(disk.saved) == 1
    await file.stop()
    assert len(disk.saved) == 1
    disk.fail = True
    failing = TableFile("t.json", slow_env(disk), lambda: {"n": 1})
    failing.save_soon()
    with pytest.raises(OSError, match="space"):
        await failing.stop()


async def test_an_unsaved_change_is_refused(path: str) -> None:
    disk = SlowDisk()
    topics = Topics(OPTIONS, path, slow_env(disk))
    await topics.start()
    disk.fail = True
    with pytest.raises(Refused, match="could not be saved"):
        await topics.update_and_create(ask(), CALL)
    disk.fail = False
    await topics.stop()
    assert b'"T":' in disk.saved[-1]
