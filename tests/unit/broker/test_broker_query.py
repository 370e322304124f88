from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import FakeStore, call_of, open_store

from cosmodrome.broker.operate import query as module
from cosmodrome.broker.operate.query import Query
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Draft, Found
from cosmodrome.wire import table
from cosmodrome.wire.commands.consume import QueryMessage, ViewMessageById
from cosmodrome.wire.message import pack_host
from cosmodrome.wire.record import iter_records

CALL = call_of()


def make(store: Any) -> Query:
    return Query(BrokerOptions(default_query_max_num=7), store)


def ask(**changes: Any) -> QueryMessage:
    fields = {"topic": "T", "key": "k", "max_num": 32, "begin_timestamp": 1, "end_timestamp": 9}
    return QueryMessage(**{**fields, **changes})


def test_a_record_by_its_offset() -> None:
    store = FakeStore()
    store.records[100] = b"record"
    reply = make(store).view_message_by_id(ViewMessageById(offset=100), CALL)
    assert (reply.code, reply.body) == (Code.SUCCESS, b"record")


@pytest.mark.parametrize("offset", [101, -1])
def test_an_unknown_offset_is_refused(offset: int) -> None:
    store = FakeStore()
    store.records[-1] = b"never asked for"
    with pytest.raises(Refused) as refused:
        make(store).view_message_by_id(ViewMessageById(offset=offset), CALL)
    assert refused.value.code == Code.SYSTEM_ERROR
    assert str(offset) in refused.value.remark


def test_records_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_topic_of", lambda record: "T")
    store = FakeStore()
    store.found = Found([b"one", b"two"], 77, 88)
    reply = make(store).query_message(ask(), CALL)
    assert (reply.code, reply.body) == (Code.SUCCESS, b"onetwo")
    assert table.encode(reply) == {
        "indexLastUpdateTimestamp": "77",
        "indexLastUpdatePhyoffset": "88",
    }
    assert store.asked == [("T", "k", 32, 1, 9)]


@pytest.mark.parametrize(("unique", "count"), [("true", 7), ("false", 32), (None, 32)])
def test_a_unique_key_has_its_own_limit(unique: str | None, count: int) -> None:
    store = FakeStore()
    ext = table.encode(ask())
    if unique is not None:
        ext["_UNIQUE_KEY_QUERY"] = unique
    make(store).query_message(table.decode(QueryMessage, ext, b""), CALL)
    assert store.asked == [("T", "k", count, 1, 9)]


@pytest.mark.parametrize("changes", [{}, {"key": ""}, {"max_num": 0}, {"key": "x" * 40_000}])
def test_nothing_found(changes: dict[str, Any]) -> None:
    reply = make(FakeStore()).query_message(ask(**changes), CALL)
    assert reply.code == Code.QUERY_NOT_FOUND
    assert reply.remark
    assert table.encode(reply) == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}


@pytest.mark.parametrize("topic", ["", "../x", "a b", "x" * 128])
def test_a_bad_topic_is_refused(topic: str) -> None:
    store = FakeStore()
    with pytest.raises(Refused) as refused:
        make(store).query_message(ask(topic=topic), CALL)
    assert refused.value.code == Code.SYSTEM_ERROR
    assert store.asked == []


def test_an_answer_fits_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 10)
    monkeypatch.setattr(module, "_topic_of", lambda record: "T")
    store = FakeStore()
    store.found = Found([b"1234", b"5678", b"9012"], 0, 0)
    assert make(store).query_message(ask(), CALL).body == b"12345678"


async def test_with_the_real_store(tmp_path: Path) -> None:
    host = pack_host("127.0.0.1", 10911)
    async with open_store(tmp_path) as store:
        stored = [
            store.append(Draft("T", 0, b"%d" % n, f"KEYS\x01k{n % 2} all", host, host))
            for n in range(4)
        ]
        await store.durable(stored[-1].end)
        query = make(store)
        reply = query.query_message(ask(key="k1", end_timestamp=2**62), CALL)
        assert {record.body for record in iter_records(reply.body)} == {b"1", b"3"}
        reply = query.query_message(ask(key="all", end_timestamp=2**62, max_num=3), CALL)
        assert len(list(iter_records(reply.body))) == 3
        assert reply.index_last_update_phyoffset == stored[-1].log_offset
        reply = query.query_message(ask(key="none", end_timestamp=2**62), CALL)
        assert reply.code == Code.QUERY_NOT_FOUND
        view = ViewMessageById(offset=stored[2].log_offset)
        (record,) = iter_records(query.view_message_by_id(view, CALL).body)
        assert record.body == b"2"
        with pytest.raises(Refused):
            query.view_message_by_id(ViewMessageById(offset=stored[2].log_offset + 1), CALL)


async def test_a_message_of_another_topic_with_the_same_hash_is_not_found(tmp_path: Path) -> None:
    host = pack_host("127.0.0.1", 10911)
    async with open_store(tmp_path) as store:
        # "Aa" and "BB" have the same hash in Java, and so in the index.
        stored = store.append(Draft("TBB", 0, b"secret", "KEYS\x01k", host, host))
        await store.durable(stored.end)
        assert store.find("TAa", "k", 32, 1, 2**62).records
        reply = make(store).query_message(ask(topic="TAa", end_timestamp=2**62), CALL)
        assert reply.code == Code.QUERY_NOT_FOUND
        reply = make(store).query_message(ask(topic="TBB", end_timestamp=2**62), CALL)
        assert reply.code == Code.SUCCESS
