from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.goldens import Golden, each_golden
from tests.unit.broker.broker_fakes import FakeStore, call_of, open_store

from cosmodrome.broker.members import offset_table
from cosmodrome.broker.members import offsets as module
from cosmodrome.broker.members.offsets import Offsets
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused, StoreCorrupt
from cosmodrome.store.store import Draft
from cosmodrome.wire import bodies, fastjson, table
from cosmodrome.wire.commands.offset import (
    GetAllConsumerOffset,
    GetEarliestMsgStoretime,
    GetMaxOffset,
    GetMinOffset,
    QueryConsumerOffset,
    SearchOffsetByTimestamp,
    UpdateConsumerOffset,
)
from cosmodrome.wire.message import pack_host

CALL = call_of()


def make(path: Path, store: Any = None, *, interval_ms: int = 60_000) -> Offsets:
    options = BrokerOptions(flush_consumer_offset_interval=interval_ms)
    store = store or cast(Any, FakeStore())
    return Offsets(options, str(path / "consumerOffset.json"), store, real_env())


@pytest.fixture
async def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
async def offsets(tmp_path: Path, store: FakeStore) -> AsyncIterator[Offsets]:
    offsets = make(tmp_path, store)
    await offsets.start()
    yield offsets
    await offsets.stop()


def ask(topic: str = "T", queue_id: int = 0, group: str = "G") -> QueryConsumerOffset:
    return QueryConsumerOffset(consumer_group=group, topic=topic, queue_id=queue_id)


# --- the table -------------------------------------------------------------------------------


async def test_commit_and_query(offsets: Offsets) -> None:
    assert offsets.query("G", "T", 0) == -1
    offsets.commit("G", "T", 0, 5)
    offsets.commit("G", "T", 1, 6)
    offsets.commit("H", "T", 0, 7)
    assert offsets.query("G", "T", 0) == 5
    assert offsets.query("G", "T", 2) == -1
    assert offsets.of("G", "T") == {0: 5, 1: 6}
    assert offsets.of("nobody", "T") == {}
    assert offsets.topics_of("G") == {"T"}
    assert offsets.groups_of("T") == {"G", "H"}


async def test_a_smaller_offset_is_stored_and_logged(
    offsets: Offsets, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    offsets.commit("G", "T", 0, 50)
    offsets.commit("G", "T", 0, 5)
    assert offsets.query("G", "T", 0) == 5
    assert "offset_moved_back topic=T group=G queue=0 from=50 to=5" in caplog.text


async def test_offsets_beyond_the_end_are_taken(offsets: Offsets) -> None:
    offsets.commit("G", "T", 0, 2**63 - 1)
    assert offsets.query("G", "T", 0) == 2**63 - 1


@pytest.mark.parametrize(
    ("group", "topic", "queue_id", "offset"),
    [
        ("G@x", "T", 0, 1),
        ("G", "T@x", 0, 1),
        ("", "T", 0, 1),
        ("G", "", 0, 1),
        ("G", "T", -1, 1),
        ("G", "T", 2**31, 1),
        ("G", "T", 0, -2),
        ("G", "T", 0, 2**63),
    ],
)
async def test_what_cannot_be_a_place_is_refused(
    offsets: Offsets, group: str, topic: str, queue_id: int, offset: int
) -> None:
    with pytest.raises(Refused) as refused:
        offsets.commit(group, topic, queue_id, offset)
    assert refused.value.code == Code.SYSTEM_ERROR
    assert offsets.query(group, topic, queue_id) == -1
    assert offsets.topics_of(group) == set()


async def test_the_table_is_bounded(offsets: Offsets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUES_PER_KEY_MAX", 2)
    room = 2 * (offset_table.ROW_BYTES + len("T@G") + 2 * offset_table.QUEUE_BYTES)
    monkeypatch.setattr(offset_table, "TABLE_BYTES_MAX", room)
    for group in ("G", "H"):
        for queue_id in (0, 1):
            offsets.commit(group, "T", queue_id, 1)
    for group, queue_id in (("I", 0), ("G", 2)):
        with pytest.raises(Refused) as refused:
            offsets.commit(group, "T", queue_id, 1)
        assert refused.value.code == Code.SYSTEM_ERROR
        assert offsets.query(group, "T", queue_id) == -1
    offsets.commit("G", "T", 1, 9)
    assert offsets.query("G", "T", 1) == 9


async def test_one_group_does_not_take_all_room(
    offsets: Offsets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_table, "GROUP_BYTES_MAX", 1000)
    with pytest.raises(Refused, match="offsets of group G take"):
        for number in range(1000):
            offsets.commit("G", f"Topic{number}", 0, 1)
    known = offsets.topics_of("G")
    assert 5 < len(known) < 30
    offsets.commit("H", "T", 0, 1)
    offsets.commit("G", "Topic0", 0, 2)  # what is there still changes
    assert (offsets.query("H", "T", 0), offsets.query("G", "Topic0", 0)) == (1, 2)
    offsets.remove_topic("Topic1")
    offsets.commit("G", "Topic1", 0, 1)
    offsets.remove("G")
    assert offsets.topics_of("G") == offsets.groups_of("Topic0") == set()
    for number in range(len(known)):
        offsets.commit("G", f"Topic{number}", 0, 1)


async def test_the_answer_with_all_offsets_is_made_in_pieces(offsets: Offsets) -> None:
    """And nothing is written twice or left out, whatever changes in between."""
    for number in range(40):
        for queue_id in range(100):
            offsets.commit("G", f"T{number}", queue_id, number)
    wanted = offsets.rows()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    reply = await offsets.get_all_consumer_offset(GetAllConsumerOffset(), CALL)
    counting.cancel()
    assert turns >= 40 * 100 // offset_table.PIECE_QUEUES
    wrapper = bodies.ConsumerOffsetSerializeWrapper(offset_table=wanted)
    assert reply.body == bodies.encode(wrapper)
    pieces = offsets._bounded.pieces()
    parts = [next(pieces)]
    offsets.remove("G")
    told = fastjson.loads(b"".join((*parts, *pieces)))
    assert told == {key: wanted[key] for key in list(wanted)[: len(told)]} and len(told) < 40
    assert list(offsets._bounded.pieces()) == [b"{}"]


async def test_deletions_take_exactly_their_own(offsets: Offsets) -> None:
    for group in ("G", "GG"):
        for topic in ("T", "TT", f"%RETRY%{group}"):
            offsets.commit(group, topic, 0, 1)
    offsets.remove("G")
    assert offsets.topics_of("G") == set()
    assert offsets.topics_of("GG") == {"T", "TT", "%RETRY%GG"}
    offsets.remove_topic("T")
    assert offsets.topics_of("GG") == {"TT", "%RETRY%GG"}
    offsets.remove("nobody")


# --- the file --------------------------------------------------------------------------------


async def test_offsets_survive_a_restart(tmp_path: Path) -> None:
    first = make(tmp_path)
    await first.start()
    await first.start()
    first.commit("G", "T", 0, 5)
    first.commit("G", "T", 11, 6)
    await first.stop()
    await first.stop()
    text = (tmp_path / "consumerOffset.json").read_text()
    assert text == '{\n\t"offsetTable":{\n\t\t"T@G":{0:5,11:6\n\t\t}\n\t}\n}'
    second = make(tmp_path)
    await second.start()
    assert second.of("G", "T") == {0: 5, 11: 6}
    await second.stop()


async def test_changes_are_saved_now_and_then(tmp_path: Path) -> None:
    offsets = make(tmp_path, interval_ms=5)
    await offsets.start()
    path = tmp_path / "consumerOffset.json"
    await asyncio.sleep(0.03)
    assert not path.exists(), "nothing changed, nothing to save"
    for value in (5, 6):
        offsets.commit("G", "T", 0, value)
        for _ in range(1000):
            if path.exists() and f"0:{value}" in path.read_text():
                break
            await asyncio.sleep(0.005)
        assert f"0:{value}" in path.read_text()
    stamp = path.stat().st_mtime_ns
    offsets.commit("G", "T", 0, 6)
    await asyncio.sleep(0.03)
    assert path.stat().st_mtime_ns == stamp, "the same offset is no change"
    await offsets.stop()


async def test_others_run_while_a_large_table_is_saved(tmp_path: Path) -> None:
    offsets = make(tmp_path)
    await offsets.start()
    for number in range(5 * module.ROWS_PER_STEP):
        offsets.commit(f"g{number}", "T", 0, number)
    saving = asyncio.create_task(offsets.stop())
    turns = 0
    while not saving.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5 + 5 * module.ROWS_PER_STEP // fastjson.ROWS_PER_STEP
    again = make(tmp_path)
    await again.start()
    assert again.query("g4999", "T", 0) == 4999
    await again.stop()


async def test_a_removal_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "consumerOffset.json").write_text('{"offsetTable":{"T@G":{0:5}}}')
    offsets = make(tmp_path)
    await offsets.start()
    offsets.remove_topic("T")
    await offsets.stop()
    assert "T@G" not in (tmp_path / "consumerOffset.json").read_text()


async def test_upstreams_forms_are_read_and_unknown_members_kept(tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    path.write_text(
        '{"dataVersion":{"counter":3,"stateVersion":0,"timestamp":9},'
        '"groupTopicMap":{"G":["T"]},"offsetTable":{"T@G":{"0":5,"1":6}}}'
    )
    offsets = make(tmp_path)
    await offsets.start()
    assert offsets.of("G", "T") == {0: 5, 1: 6}
    offsets.commit("G", "T", 0, 7)
    await offsets.stop()
    again = fastjson.loads(path.read_bytes())
    assert again["offsetTable"] == {"T@G": {0: 7, 1: 6}}
    assert again["dataVersion"]["counter"] == 3
    assert again["groupTopicMap"] == {"G": ["T"]}


@each_golden
async def test_upstreams_own_file(golden: Golden) -> None:
    source = golden.path / "store/config/consumerOffset.json"
    options = BrokerOptions()
    offsets = Offsets(options, str(source), FakeStore(), real_env())  # type: ignore[arg-type]
    await offsets.start()
    saved = fastjson.loads(source.read_bytes())["offsetTable"]
    assert len(offsets.of("g_normal", "GNormal")) == 4
    assert offsets.of("g_normal", "GNormal") == saved["GNormal@g_normal"]
    assert offsets.query("g_retry", "%RETRY%g_retry", 0) == 1
    await offsets.stop()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"offsetTable":{"T@G":{0:', b"\xff\xfe", b"[]"])
async def test_a_damaged_file_gives_way_to_the_previous_one(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "consumerOffset.json").write_bytes(damage)
    (tmp_path / "consumerOffset.json.bak").write_text('{"offsetTable":{"T@G":{0:5}}}')
    offsets = make(tmp_path)
    await offsets.start()
    assert offsets.query("G", "T", 0) == 5
    assert any(record.levelno >= logging.ERROR for record in caplog.records)
    await offsets.stop()


@pytest.mark.parametrize(
    "text", ['{"offsetTable":{"T@G":5}}', '{"offsetTable":{"T@G":{"x":1}}}', '{"offsetTable":[1]}']
)
async def test_a_file_that_is_no_table_of_offsets_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "consumerOffset.json").write_text(text)
    with pytest.raises(StoreCorrupt, match=r"consumerOffset\.json"):
        await make(tmp_path).start()


# --- requests --------------------------------------------------------------------------------


async def test_a_committed_offset_is_answered(offsets: Offsets) -> None:
    update = UpdateConsumerOffset(consumer_group="G", topic="T", queue_id=0, commit_offset=8)
    assert offsets.update_consumer_offset(update, CALL).code == Code.SUCCESS
    assert table.encode(offsets.query_consumer_offset(ask(), CALL)) == {"offset": "8"}


async def test_a_new_group_starts_at_zero_on_a_young_warm_queue(
    offsets: Offsets, store: FakeStore
) -> None:
    assert offsets.query_consumer_offset(ask(), CALL).offset == 0, "an empty queue"
    store.arrive("T", 0)
    assert offsets.query_consumer_offset(ask(), CALL).offset == 0
    store.warm = False
    with pytest.raises(Refused) as refused:
        offsets.query_consumer_offset(ask(), CALL)
    assert refused.value.code == Code.QUERY_NOT_FOUND
    assert offsets.query_consumer_offset(ask(queue_id=1), CALL).offset == 0


async def test_a_queue_whose_start_was_deleted_has_no_default(
    offsets: Offsets, store: FakeStore
) -> None:
    store.arrive("T", 0)
    store.first["T", 0] = 3
    with pytest.raises(Refused) as refused:
        offsets.query_consumer_offset(ask(), CALL)
    assert refused.value.code == Code.QUERY_NOT_FOUND


async def test_all_offsets_are_answered_in_upstreams_form(offsets: Offsets) -> None:
    offsets.commit("G", "T", 0, 5)
    offsets.commit("G", "T", 1, 6)
    body = (await offsets.get_all_consumer_offset(GetAllConsumerOffset(), CALL)).body
    assert body == b'{"offsetTable":{"T@G":{0:5,1:6}}}'


async def test_bounds_and_times(offsets: Offsets, store: FakeStore) -> None:
    store.first["T", 1] = 4
    store.arrive("T", 1)
    store.arrive("T", 1)
    assert offsets.get_min_offset(GetMinOffset(topic="T", queue_id=1), CALL).offset == 4
    assert offsets.get_max_offset(GetMaxOffset(topic="T", queue_id=1), CALL).offset == 6
    assert offsets.get_max_offset(GetMaxOffset(topic="nothing", queue_id=9), CALL).offset == 0
    search = SearchOffsetByTimestamp(topic="T", queue_id=1, timestamp=99)
    assert offsets.search_offset_by_timestamp(search, CALL).offset == 17
    earliest = GetEarliestMsgStoretime(topic="T", queue_id=1)
    assert offsets.get_earliest_msg_storetime(earliest, CALL).timestamp == 1234
    nothing = GetEarliestMsgStoretime(topic="nothing", queue_id=1)
    assert offsets.get_earliest_msg_storetime(nothing, CALL).timestamp == -1
    assert store.asked == [("T", 1, 99), ("T", 1, 4), ("nothing", 1, 0)]


async def test_with_the_real_store(tmp_path: Path) -> None:
    host = pack_host("127.0.0.1", 10911)
    async with open_store(tmp_path / "store") as store:
        offsets = make(tmp_path, store)
        await offsets.start()
        stored = store.append(Draft("T", 0, b"body", "", host, host))
        await store.durable(stored.end)
        assert offsets.query_consumer_offset(ask(), CALL).offset == 0
        assert offsets.get_max_offset(GetMaxOffset(topic="T", queue_id=0), CALL).offset == 1
        assert offsets.get_min_offset(GetMinOffset(topic="T", queue_id=0), CALL).offset == 0
        earliest = GetEarliestMsgStoretime(topic="T", queue_id=0)
        assert offsets.get_earliest_msg_storetime(earliest, CALL).timestamp > 1_600_000_000_000
        search = SearchOffsetByTimestamp(topic="T", queue_id=0, timestamp=0)
        assert offsets.search_offset_by_timestamp(search, CALL).offset == 0
        await offsets.stop()
    assert not (tmp_path / "consumerOffset.json").exists()
