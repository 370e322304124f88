"""The sink against a real node, without a JVM: what rows become and where they go."""

from __future__ import annotations

import asyncio
import datetime
import logging
import pickle
import re
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.spark.sink_kit import (
    Context,
    bodies,
    in_stream,
    marks,
    numbered,
    read,
    schema_of,
    write,
)

from cosmodrome import speed
from cosmodrome.blocking import Node, embedded
from cosmodrome.client.links import Links
from cosmodrome.client.send.failures import BadMessage
from cosmodrome.errors import Code, ConfigError, Refused, TimedOut, Unreachable
from cosmodrome.spark.write import repeats, sending
from cosmodrome.spark.write.options import WriteOptions
from cosmodrome.spark.write.repeats import MARK
from cosmodrome.spark.write.sending import Outbox
from cosmodrome.spark.write.writer import Sent, make_stream_writer, make_writer
from cosmodrome.wire.commands.consume import QueryMessage
from cosmodrome.wire.message import UNIQ_KEY

BODY = "body binary"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with embedded() as node:
        yield node


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory of other tests' streams, and short pauses."""
    monkeypatch.setattr(repeats, "_first_seen", {})
    monkeypatch.setattr(sending, "BACKOFF_FIRST_S", 0.005)


# --- options and columns ----------------------------------------------------------------------


def test_options() -> None:
    parsed = WriteOptions.parse(
        {
            "TOPIC": "orders",
            "namesrv": "127.0.0.1:9876",
            "producerGroup": "g",
            "batchRows": "7",
            "batchBytes": "64k",
            "inFlight": "3",
            "compress": "LZ4",
            "compressAbove": "1k",
            "idempotenceId": "nightly",
            "timeoutMs": "1234",
            "checkpointLocation": "somewhere",
        }
    )
    assert parsed == WriteOptions(
        connection=parsed.connection,
        topic="orders",
        producer_group="g",
        batch_rows=7,
        batch_bytes=65_536,
        in_flight=3,
        compression="lz4",
        compress_above_bytes=1_024,
        idempotence_id="nightly",
    )
    assert parsed.connection.timeout_ms == 1_234
    assert parsed.client_options().call_timeout_ms == 1_234
    assert WriteOptions.parse({"path": "orders"}).topic == "orders"
    assert WriteOptions.parse({}).producer_group == "cosmodrome_spark"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "a"}, "did you mean topic"),
        ({"topic": "a", "path": "b"}, "path and topic"),
        ({"topic": "a b"}, "not allowed"),
        ({"producerGroup": "a b"}, "not allowed"),
        ({"batchBytes": "5m"}, "at most"),
        ({"batchRows": "0"}, "at least 1"),
        ({"compress": "gzip"}, "zlib, lz4, zstd"),
        ({"compressAbove": "10"}, "needs compress"),
        ({"accessKey": "a"}, "belong together"),
    ],
)
def test_bad_options_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WriteOptions.parse(options)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("body int", r"body is int; it must be binary or string.*cast\(\"binary\"\)"),
        ("topic string", "`body`"),
        ("body binary, tag string", "no column 'tag'; it takes body, topic, tags, keys"),
        ("body binary, keys array<int>", "keys is array<int>; it must be string or array<string>"),
        ("body binary, properties map<string,int>", "map<string,string>"),
        ("body binary, deliver_time timestamp_ntz", "must be timestamp"),
        ("body binary, delay_ms string", "must be bigint"),
        ("body binary, BODY binary", "twice"),
    ],
)
def test_bad_columns_are_refused_on_the_driver(schema: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_writer({"topic": "t"}, schema_of(schema), False)


def test_a_topic_must_be_known() -> None:
    with pytest.raises(ConfigError, match="which topic"):
        make_writer({}, schema_of(BODY), False)
    make_writer({}, schema_of("body string, topic string"), False)


def test_a_topic_cannot_be_overwritten() -> None:
    for make in (make_writer, make_stream_writer):
        with pytest.raises(ConfigError, match="cannot be overwritten"):
            make({"topic": "t"}, schema_of(BODY), True)


def test_writers_travel_and_hide_the_secret() -> None:
    writer = make_writer(
        {"topic": "t", "accessKey": "me", "secretKey": "hush"}, schema_of(BODY), False
    )
    again = pickle.loads(pickle.dumps(writer))
    assert again._task._origin == writer._task._origin
    assert "hush" not in repr(writer._task._options)
    other = make_writer({"topic": "t"}, schema_of(BODY), False)
    assert other._task._origin.job_id != writer._task._origin.job_id


def test_outside_a_task_there_is_nothing_to_write(node: Node) -> None:
    writer = make_writer({"topic": "t"}, schema_of(BODY), False)
    with pytest.raises(ConfigError, match="inside a Spark task"):
        writer.write(iter(()))


# --- what a row becomes -----------------------------------------------------------------------


def test_every_column(node: Node, cosmo_topic: str) -> None:
    schema = (
        "queue_key string, Body string, topic string, tags string, keys array<string>, "
        " properties map<string,string>, flag int"
    )
    rows = [
        ["k", "grün", cosmo_topic, "A", ["k1", "k2"], {"a": "1", "b": "zwei", "c": None}, 7],
        ["k", "bare", None, None, None, None, None],
        ["k", "empty", None, "", [], {}, 0],
    ]
    assert write(node.namesrv, schema, rows, topic=cosmo_topic).rows == 3
    ((queue, found),) = [(q, m) for q, m in read(node.namesrv, cosmo_topic).items() if m]
    assert queue.queue_id == abs(speed.java_hash("k")) % 4
    assert [message.body.decode() for message in found] == ["grün", "bare", "empty"]
    first, *others = found
    assert (first.tags, first.keys, first.record.flag) == ("A", ("k1", "k2"), 7)
    assert (first.properties["a"], first.properties["b"]) == ("1", "zwei")
    assert "c" not in first.properties
    for other in others:
        assert (other.tags, other.keys, other.record.flag) == (None, (), 0)
        assert MARK not in other.properties


def test_keys_as_text(node: Node, cosmo_topic: str) -> None:
    write(node.namesrv, "body string, keys string", [["x", "k1 k2"]], topic=cosmo_topic)
    (found,) = [m for queue in read(node.namesrv, cosmo_topic).values() for m in queue]
    assert found.keys == ("k1", "k2")


def test_delayed_rows_come_later(node: Node, cosmo_topic: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    schema = "body string, delay_ms bigint, deliver_time timestamp, delay_level int"
    rows = [
        ["now", None, None, None],
        ["delay", 300, None, None],
        ["time", None, now + datetime.timedelta(milliseconds=600), None],
        ["level", None, None, 1],
        ["now2", None, None, 0],
    ]
    assert write(node.namesrv, schema, rows, topic=cosmo_topic).rows == 5
    for _ in range(600):
        if len(bodies(node.namesrv, cosmo_topic)) == 5:
            break
        time.sleep(0.1)
    queues = read(node.namesrv, cosmo_topic).values()
    found = {message.body: message for queue in queues for message in queue}
    assert sorted(found) == [b"delay", b"level", b"now", b"now2", b"time"]
    waits_ms = {body: m.store_ms - m.born_ms for body, m in found.items()}
    assert waits_ms[b"delay"] >= 300 and waits_ms[b"level"] >= 1_000
    assert found[b"time"].store_ms >= now.timestamp() * 1000 + 600


@pytest.mark.parametrize("compress", ["zlib", "lz4", "zstd"])
def test_compression(node: Node, cosmo_topic: str, compress: str) -> None:
    rows = [[b"x" * 5_000], [b"short"]]
    write(node.namesrv, BODY, rows, topic=cosmo_topic, compress=compress, compressAbove="1k")
    found = [m for queue in read(node.namesrv, cosmo_topic).values() for m in queue]
    assert sorted(len(m.body) for m in found) == [5, 5_000]
    assert min(m.size for m in found if len(m.body) == 5_000) < 1_000


@pytest.mark.parametrize(
    ("schema", "row", "message"),
    [
        (BODY, [None], "body is null"),
        (BODY, [b""], "empty body"),
        ("body string, topic string", ["x", None], "topic is null"),
        ("body string, topic string", ["x", "a b"], "not allowed"),
        ("body string, topic string, tags string", ["x", "t", "a\x01b"], "0x01"),
        ("body string, topic string, delay_ms bigint", ["x", "t", -1], "negative"),
        (
            "body string, topic string, delay_ms bigint, delay_level int",
            ["x", "t", 1, 1],
            "not several",
        ),
        (
            "body string, topic string, properties map<string,string>",
            ["x", "t", {UNIQ_KEY: "1"}],
            "UNIQ_KEY is reserved.*user_properties",
        ),
        (
            "body string, topic string, properties map<string,string>",
            ["x", "t", {"a": "b" * 32_710}],
            "at most 32703 fit",
        ),
    ],
)
def test_bad_rows_are_named(node: Node, schema: str, row: list[Any], message: str) -> None:
    good = [b"ok" if schema == BODY else "ok", "t-ok", *[None] * 8][: len(row)]
    more: dict[str, Any] = {"topic": "t-ok"} if "topic" not in schema else {}
    with pytest.raises(BadMessage, match=f"row 2 of partition 5: .*{message}"):
        write(node.namesrv, schema, [good, good, row], Context(partition=5), **more)


def test_a_message_as_big_as_brokers_take(node: Node, cosmo_topic: str) -> None:
    rows = [[b"a" * (4 << 20)], [b"b"], [b"c" * (300 << 10)], [b"d"]]
    assert write(node.namesrv, BODY, rows, topic=cosmo_topic).rows == 4
    assert [len(body) for body in bodies(node.namesrv, cosmo_topic)] == [4 << 20, 1, 300 << 10, 1]
    with pytest.raises(BadMessage, match=r"row 0 .*at most 4194304"):
        write(node.namesrv, BODY, [[b"a" * ((4 << 20) + 1)]], topic=cosmo_topic)


# --- where rows go ----------------------------------------------------------------------------


def test_runs_of_rows_take_turns(node: Node, cosmo_topic: str) -> None:
    options: dict[str, Any] = {"topic": cosmo_topic, "batchRows": 10}
    write(node.namesrv, BODY, numbered(85), Context(partition=6), **options)
    found = list(read(node.namesrv, cosmo_topic).values())
    numbers = [[int(message.body) // 10 for message in queue] for queue in found]
    # The partition's number says where the first run goes.
    assert [sorted(set(queue)) for queue in numbers] == [[2, 6], [3, 7], [0, 4, 8], [1, 5]]
    assert all(queue == sorted(queue) for queue in numbers)
    assert sum(map(len, numbers)) == 85


def test_placement_is_the_same_whatever_the_batches_of_rows(node: Node, cosmo_topic: str) -> None:
    layouts = []
    for size in (3, 50):
        topic = f"{cosmo_topic}-{size}"
        batches = pa.table({"body": pa.array([row[0] for row in numbered(200)], pa.binary())})
        write(
            node.namesrv,
            BODY,
            iter(batches.to_batches(max_chunksize=size)),
            topic=topic,
            batchRows=7,
            batchBytes="1k",
            inFlight=2,
        )
        found = read(node.namesrv, topic)
        layouts.append([[m.body for m in found[queue]] for queue in sorted(found, key=str)])
    assert layouts[0] == layouts[1]


def test_order_holds_per_key_among_others(node: Node, cosmo_topic: str) -> None:
    rows: list[list[Any]] = [
        [b"%s-%04d" % (b"abcde"[n % 5 : n % 5 + 1], n), "abcde"[n % 5]] for n in range(500)
    ]
    rows += [[b"none", None]]
    write(node.namesrv, "body binary, queue_key string", rows, topic=cosmo_topic, batchRows=16)
    found = read(node.namesrv, cosmo_topic)
    for key in "abcde":
        mine = [
            [m.body for m in queue if m.body.startswith(key.encode() + b"-")]
            for queue in found.values()
        ]
        (together,) = [queue for queue in mine if queue]
        assert together == sorted(together)
        assert len(together) == 100


def test_several_topics(node: Node, cosmo_topic: str) -> None:
    rows = [[str(n), f"{cosmo_topic}-{n % 3}"] for n in range(60)]
    assert write(node.namesrv, "body string, topic string", rows, batchRows=4).rows == 60
    for number in range(3):
        expected = sorted(str(n).encode() for n in range(60) if n % 3 == number)
        assert bodies(node.namesrv, f"{cosmo_topic}-{number}") == expected


def test_a_namespace(node: Node, cosmo_topic: str) -> None:
    write(node.namesrv, BODY, numbered(3), topic=cosmo_topic, namespace="ns")
    assert len(bodies(node.namesrv, f"ns%{cosmo_topic}")) == 3


def test_nothing_to_write(node: Node, cosmo_topic: str) -> None:
    assert write(node.namesrv, BODY, [], topic=cosmo_topic) == Sent(0, 0, 0)


def test_rows_are_not_read_ahead_of_the_window(
    node: Node, cosmo_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing answered, no more is taken than fits the windows."""
    taken = 0
    holds: list[asyncio.Event] = []
    real = Outbox._request

    async def slow(self: Outbox, *args: Any) -> None:
        if taken > 50 and not holds:
            holds.append(asyncio.Event())
            asyncio.get_running_loop().call_later(0.2, holds[0].set)
        if holds and not holds[0].is_set():
            at = taken
            await holds[0].wait()
            assert taken - at <= 3 * 10 + 10  # the other queues' batches and one that waits
        await real(self, *args)

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for number in range(400):
            taken += 1
            yield pa.record_batch([pa.array([b"%d" % number], pa.binary())], names=["body"])

    monkeypatch.setattr(Outbox, "_request", slow)
    sent = write(node.namesrv, BODY, rows(), topic=cosmo_topic, batchRows=10, inFlight=3)
    assert holds
    assert sent.rows == 400


# --- keys and marks ---------------------------------------------------------------------------


def keys(node: Node, topic: str) -> list[str]:
    found = [m for queue in read(node.namesrv, topic).values() for m in queue]
    return [m.msg_id for m in sorted(found, key=lambda m: m.body)]


def test_unique_keys_are_readable(node: Node, cosmo_topic: str) -> None:
    write(
        node.namesrv,
        BODY,
        numbered(3),
        in_stream(258, partition=17),
        stream=True,
        topic=cosmo_topic,
    )
    found = keys(node, cosmo_topic)
    assert all(re.fullmatch(r"[0-9A-F]{12}000102000011000000[0-9A-F]{2}", key) for key in found)
    assert [key[-8:] for key in found] == ["00000000", "00000001", "00000002"]


def test_a_second_attempt_repeats_keys_and_is_marked(node: Node, cosmo_topic: str) -> None:
    """The same rows, the same keys, the same queues; a mark that comes later in order."""
    layouts = []
    for attempt in (0, 1, 2):
        topic = f"{cosmo_topic}-{attempt}"
        context = in_stream(3, partition=1, attempt=attempt, task=40 + attempt)
        write(node.namesrv, BODY, numbered(50), context, stream=True, topic=topic, batchRows=9)
        found = read(node.namesrv, topic)
        layouts.append(
            [[(m.body, m.msg_id) for m in found[queue]] for queue in sorted(found, key=str)]
        )
    assert layouts[0] == layouts[1] == layouts[2]
    values = [set(marks(node, f"{cosmo_topic}-{attempt}")) for attempt in (0, 1, 2)]
    ordered = [value for (value,) in values]
    assert None not in ordered
    assert ordered == sorted(ordered, key=str)


def test_keys_differ_between_writes_batches_and_partitions(node: Node, cosmo_topic: str) -> None:
    for context in (in_stream(1), in_stream(2), in_stream(1, partition=1), in_stream(1, query="q")):
        write(node.namesrv, BODY, [[b"x"]], context, stream=True, topic=cosmo_topic)
    for _ in range(2):
        write(node.namesrv, BODY, [[b"x"]], topic=cosmo_topic)
    assert len(set(keys(node, cosmo_topic))) == 6


def test_big_numbers_go_into_the_hash() -> None:
    def key(batch: int, partition: int) -> str:
        return repeats.RowKeys(repeats.WritePart("w", batch, partition, 0, 0, False)).next()

    low, wrapped, far = key(5, 6), key(5 + (1 << 24), 6), key(5, 6 + (1 << 24))
    assert low[12:] == wrapped[12:] == far[12:]
    assert len({low[:12], wrapped[:12], far[:12]}) == 3
    many = repeats.RowKeys(repeats.WritePart("w", 5, 6, 0, 0, False))
    many._row = (1 << 32) - 2
    assert many.next().endswith("FFFFFFFF")
    assert many.next() == f"{many._prefix}00000000" != low


def test_a_later_batch_of_a_run_is_not_marked(node: Node, cosmo_topic: str) -> None:
    """The first batch after a start may be a repetition; this process saw that one."""
    seen: list[bool] = []
    for batch, run in ((4, "run-1"), (5, "run-1"), (5, "run-2"), (6, "run-2"), (6, "run-2")):
        topic = f"{cosmo_topic}-{len(seen)}"
        write(node.namesrv, BODY, [[b"x"]], in_stream(batch, run=run), stream=True, topic=topic)
        seen.append(marks(node, topic) != [None])
    assert seen == [True, False, True, False, False]


def test_a_batch_write_is_marked_only_when_named(node: Node, cosmo_topic: str) -> None:
    write(node.namesrv, BODY, [[b"x"]], topic=f"{cosmo_topic}-a")
    assert marks(node, f"{cosmo_topic}-a") == [None]
    for _ in range(2):
        write(node.namesrv, BODY, [[b"x"]], topic=f"{cosmo_topic}-b", idempotenceId="nightly")
    assert None not in marks(node, f"{cosmo_topic}-b")
    assert len(set(keys(node, f"{cosmo_topic}-b"))) == 1


def test_a_stage_that_is_repeated_finds_its_first_row(node: Node, cosmo_topic: str) -> None:
    """Spark counts attempts from 0 again, so only the topic tells."""
    writer = make_writer(
        {"namesrv": node.namesrv, "topic": cosmo_topic, "batchRows": "10"},
        schema_of(BODY),
        False,
    )
    table = pa.table({"body": pa.array([row[0] for row in numbered(30)], pa.binary())})
    for task in (1, 2):
        writer._task.send(table.to_batches(), Context(task=task))
    found = marks(node, cosmo_topic)
    assert len(found) == 60
    assert found.count(None) == 30
    assert len({mark for mark in found if mark}) == 1


@pytest.mark.parametrize(
    "error",
    [TimedOut("late"), Unreachable("gone"), Refused(Code.SYSTEM_ERROR, "no index")],
    ids=repr,
)
def test_who_cannot_be_asked_for_the_first_row_may_have_it(
    node: Node, cosmo_topic: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write(node.namesrv, BODY, [[b"a"]], topic=cosmo_topic)
    real = Links.call

    async def call(links: Links, address: str, command: Any, timeout_ms: int | None = None) -> Any:
        if isinstance(command, QueryMessage):
            raise error
        return await real(links, address, command, timeout_ms)

    monkeypatch.setattr(Links, "call", call)
    write(node.namesrv, BODY, [[b"b"]], topic=cosmo_topic)
    before, after = marks(node, cosmo_topic)
    assert before is None
    assert after is not None


def test_a_delayed_first_row_is_not_looked_for(node: Node, cosmo_topic: str) -> None:
    """It may lie where it is not found yet, so what follows it is marked."""
    write(node.namesrv, BODY, [[b"a"]], topic=cosmo_topic)
    rows = [[b"c", 600_000], [b"b", None]]
    write(node.namesrv, "body binary, delay_ms bigint", rows, topic=cosmo_topic)
    before, after = marks(node, cosmo_topic)
    assert before is None
    assert after is not None


def test_nothing_leaves_before_the_first_row_is_acknowledged(
    node: Node, cosmo_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other queues fill up first, and yet the queue of row 0 leaves first and alone."""
    log: list[str] = []
    real = Outbox._request

    async def noted(self: Outbox, address: str, queue: Any, members: Any, tries: int) -> None:
        log.append(f"begin {members[0].body.decode()}")
        await real(self, address, queue, members, tries)
        log.append(f"end {members[0].body.decode()}")

    monkeypatch.setattr(Outbox, "_request", noted)
    rows = [["lonely", "a"]] + [[f"b{number}", "b"] for number in range(25)]
    schema = "body string, queue_key string"
    write(node.namesrv, schema, rows, topic=cosmo_topic, batchRows=10)
    assert log[:2] == ["begin lonely", "end lonely"]
    assert len(log) == 8


def test_commit_and_abort_say_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    batch = make_writer({"topic": "t"}, schema_of(BODY), False)
    stream = make_stream_writer({"topic": "t"}, schema_of(BODY), False)
    done = [Sent(0, 10, 2), Sent(1, 5, 0), None]
    with caplog.at_level(logging.INFO, "cosmodrome.spark"):
        batch.commit(done[:2])
        batch.abort(done)
        stream.commit(done[:2], 7)
        stream.abort(done, 8)
    commit, abort, stream_commit, stream_abort = caplog.messages
    assert "rows=15 resent=2 tasks=2 unfinished_tasks=0" in commit
    assert "stay: rows=15 resent=2 tasks=2 unfinished_tasks=1" in abort
    assert "batch=7 rows=15" in stream_commit
    assert "batch=8 rows=15" in stream_abort
