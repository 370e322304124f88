"""Reading ranges from brokers that cut, damage, shuffle, shorten or lose what they have."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from tests.plain_peer import Peer, Relay, answer
from tests.unit.spark.live_kit import connection, dead_address, queue_of, send

from cosmodrome.blocking import Node, embedded
from cosmodrome.errors import Code, Refused, Unreachable
from cosmodrome.spark import links
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.plan import DataLoss, Range
from cosmodrome.spark.read.reader import DamagedRecord, LookupFailed, read_range
from cosmodrome.spark.write.repeats import MARK
from cosmodrome.wire.commands import CheckClientConfig, SendMessage
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import format_properties, pack_host
from cosmodrome.wire.record import Record, encode_record

TOPIC = "shelf"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with embedded() as node:
        yield node


@pytest.fixture(autouse=True)
def no_kept_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(links, "BACKOFF_FIRST_S", 0.01)
    yield
    links.close_all()


def options(namesrv: str, *, retries: int = 0, **more: object) -> ReadOptions:
    base = ReadOptions(
        connection=connection(namesrv, retries=retries, timeout_ms=60_000),
        columns=("queue_offset", "body"),
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def read(span: Range, wanted: ReadOptions) -> list[tuple[object, ...]]:
    batches = list(read_range(span, wanted))
    if not batches:
        return []
    table = pa.Table.from_batches(batches)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def expected(start: int, end: int) -> list[tuple[object, ...]]:
    return [(number, b"m%d" % number) for number in range(start, end)]


# --- between us and a real broker ----------------------------------------------------------------


@pytest.mark.parametrize("cut_after", [1, 700, 5_000, 9_000, 20_000])
def test_a_connection_cut_in_the_middle(node: Node, cosmo_topic: str, cut_after: int) -> None:
    send(node, cosmo_topic, 150)
    passed = [0]

    def change(number: int, data: bytes) -> bytes | None:
        if number > 1:
            return data
        left = cut_after - passed[0]
        passed[0] += len(data)
        return data[:left] or None if left > 0 else None

    with Relay(node.broker_address, change) as relay:
        span = Range(queue_of(cosmo_topic), 0, 150, (relay.address,))
        assert read(span, options(node.namesrv, retries=2)) == expected(0, 150)
        assert relay.connections == 1  # the name server knows where the broker really is


def test_attempts_end_with_queue_and_offset(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 5)
    with Relay(node.broker_address, lambda number, data: None) as relay:
        span = Range(queue_of(cosmo_topic), 2, 5, (relay.address,))
        with pytest.raises(Unreachable, match=rf"{cosmo_topic}.*offset 2, 1 attempt: "):
            read(span, options(node.namesrv))


def test_a_broker_that_moved_is_found(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 40)
    span = Range(queue_of(cosmo_topic), 0, 40, (dead_address(),))
    assert read(span, options(node.namesrv, retries=1)) == expected(0, 40)
    nowhere = dataclasses.replace(span, addresses=())
    assert read(nowhere, options(node.namesrv)) == expected(0, 40)


def test_a_replica_is_read_when_its_master_is_down(cosmo_topic: str) -> None:
    with shelf(range(20)) as peer:
        span = Range(queue_of(TOPIC), 0, 20, (dead_address(), peer.address))
        assert read(span, options(dead_address(), retries=1)) == expected(0, 20)


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_what_a_replica_lacks_is_not_lost(fail_on_data_loss: bool) -> None:
    with shelf(range(15)) as peer:
        span = Range(queue_of(TOPIC), 0, 20, (dead_address(), peer.address))
        wanted = options(dead_address(), retries=3, fail_on_data_loss=fail_on_data_loss)
        with pytest.raises(Unreachable, match="ends at 15"):
            read(span, wanted)


def test_damage_on_the_way_is_pulled_again(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 60)
    harm = [True]

    def change(number: int, data: bytes) -> bytes:
        if harm and b"m17" in data:
            harm.clear()
            return data.replace(b"m17", b"m71")
        return data

    with Relay(node.broker_address, change) as relay:
        span = Range(queue_of(cosmo_topic), 0, 60, (relay.address,))
        assert read(span, options(node.namesrv)) == expected(0, 60)
        assert not harm


def test_damage_that_stays_is_named(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 60)
    change = lambda number, data: data.replace(b"m17", b"m71")  # noqa: E731
    with Relay(node.broker_address, change) as relay:
        span = Range(queue_of(cosmo_topic), 0, 60, (relay.address,))
        with pytest.raises(DamagedRecord, match=rf"{cosmo_topic}.*offset 17 .*checksum"):
            read(span, options(node.namesrv))
        before = dataclasses.replace(span, end=17)
        assert read(before, options(node.namesrv)) == expected(0, 17)
        unchecked = read(span, options(node.namesrv, check_crc=False))
        assert unchecked[17] == (17, b"m71") and len(unchecked) == 60


def test_a_range_longer_than_its_queue(
    node: Node, cosmo_topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(node, cosmo_topic, 30)
    span = Range(queue_of(cosmo_topic), 10, 45, (node.broker_address,))
    with pytest.raises(DataLoss, match=rf"{cosmo_topic}.*offset 30.*ends at 30.*failOnDataLoss"):
        read(span, options(node.namesrv))
    with caplog.at_level(logging.WARNING):
        assert read(span, options(node.namesrv, fail_on_data_loss=False)) == expected(10, 30)
    assert "skipped to offset 45" in caplog.text


def test_a_topic_that_is_gone(node: Node) -> None:
    span = Range(queue_of("never-was"), 0, 5, (node.broker_address,))
    with pytest.raises(DataLoss, match="the topic is gone"):
        read(span, options(node.namesrv))
    assert read(span, options(node.namesrv, fail_on_data_loss=False)) == []


def test_a_connection_is_left_usable_by_a_reader_that_stops_early(
    node: Node, cosmo_topic: str
) -> None:
    send(node, cosmo_topic, 150)
    span = Range(queue_of(cosmo_topic), 0, 150, (node.broker_address,))
    with Relay(node.broker_address, lambda number, data: data) as relay:
        span = dataclasses.replace(span, addresses=(relay.address,))
        reader = read_range(span, options(node.namesrv))
        assert next(reader).num_rows
        reader.close()  # type: ignore[attr-defined]
        assert read(span, options(node.namesrv)) == expected(0, 150)
        assert relay.connections == 1


# --- brokers with their own mind -----------------------------------------------------------------


def record(
    offset: int, body: bytes | None = None, sys_flag: int = 0, properties: str = ""
) -> bytes:
    host = pack_host("127.0.0.1", 1)
    return encode_record(
        Record(
            topic=TOPIC,
            queue_id=0,
            queue_offset=offset,
            log_offset=offset * 200,
            flag=0,
            sys_flag=sys_flag,
            born_ms=1,
            born_host=host,
            store_ms=2,
            store_host=host,
            reconsume_times=0,
            prepared_offset=0,
            body=b"m%d" % offset if body is None else body,
            properties=properties,
            **_derived(),
        )
    )


def _derived() -> dict[str, int]:
    """Fields that `encode_record` works out itself."""
    ours = {"size", "magic", "body_crc"}
    return {f.name: 0 for f in dataclasses.fields(Record) if f.name in ours}


def shelf(
    kept: range,
    *,
    count: Callable[[int, int], int] = lambda offset, asked: asked,
    order: Callable[[list[bytes]], list[bytes]] = lambda answers: answers,
    holes: frozenset[int] = frozenset(),
    asked: list[tuple[int, int]] | None = None,
) -> Peer:
    """A broker whose queue has the offsets of `kept` but the `holes`, and gives what it likes."""

    def one(frame: Frame) -> bytes:
        if frame.code == CheckClientConfig.request_code:
            return answer(frame)
        offset, ask = int(frame.ext["queueOffset"]), int(frame.ext["maxMsgNums"])
        if asked is not None:
            asked.append((offset, ask))
        code, upto, body = Code.SUCCESS, offset, b""
        if offset < kept.start or offset > kept.stop:
            code, upto = Code.PULL_OFFSET_MOVED, kept.start if offset < kept.start else kept.stop
        elif offset == kept.stop:
            code = Code.PULL_NOT_FOUND
        else:
            upto = min(kept.stop, offset + max(1, count(offset, ask)))
            body = b"".join(record(at) for at in range(offset, upto) if at not in holes)
            if not body:
                code = Code.PULL_RETRY_IMMEDIATELY
        ext = {"nextBeginOffset": str(upto), "minOffset": str(kept.start)}
        ext |= {"maxOffset": str(kept.stop), "suggestWhichBrokerId": "0"}
        return answer(frame, ext, code=code, body=body)

    return Peer(lambda frames: b"".join(order([one(frame) for frame in frames])))


@pytest.mark.parametrize("seed", range(6))
def test_answers_of_any_size_in_any_order(seed: int) -> None:
    chance = random.Random(seed)

    def shuffled(answers: list[bytes]) -> list[bytes]:
        chance.shuffle(answers)
        return answers

    limit = chance.choice((1, 7, 50))
    peer = shelf(
        range(3, 1_200), count=lambda _, asked: min(asked, chance.randint(1, limit)), order=shuffled
    )
    with peer:
        span = Range(queue_of(TOPIC), 3 + chance.randint(0, 40), 1_150, (peer.address,))
        wanted = options("h:1", pulls_ahead=chance.randint(1, 12))
        assert read(span, wanted) == expected(span.start, span.end)


@pytest.mark.parametrize("answered", [1, 8, 32, 500])
def test_a_broker_that_gives_more_than_asked(answered: int) -> None:
    with shelf(range(2_000), count=lambda _, asked: answered) as peer:
        span = Range(queue_of(TOPIC), 11, 1_500, (peer.address,))
        assert read(span, options("h:1")) == expected(11, 1_500)


def test_a_steady_broker_is_asked_for_every_offset_once() -> None:
    asked: list[tuple[int, int]] = []
    with shelf(range(5_000), count=lambda _, ask: min(ask, 32), asked=asked) as peer:
        span = Range(queue_of(TOPIC), 0, 3_200, (peer.address,))
        assert read(span, options("h:1")) == expected(0, 3_200)
    assert sorted(offset for offset, _ in asked) == list(range(0, 3_200, 32))


def test_the_stride_follows_the_broker() -> None:
    """From a cold part of the log (8 at once) to a warm one (200 at once)."""
    asked: list[tuple[int, int]] = []

    def count(offset: int, ask: int) -> int:
        return min(ask, 8 if offset < 2_000 else 200)

    with shelf(range(30_000), count=count, asked=asked) as peer:
        span = Range(queue_of(TOPIC), 0, 20_000, (peer.address,))
        assert read(span, options("h:1")) == expected(0, 20_000)
    late = [offset for offset, _ in asked if offset > 12_000]
    assert len(late) < 8_000 / 100


def test_expired_offsets(caplog: pytest.LogCaptureFixture) -> None:
    with shelf(range(40, 90)) as peer:
        span = Range(queue_of(TOPIC), 10, 80, (peer.address,))
        with pytest.raises(DataLoss) as raised:
            read(span, options("h:1"))
        text = str(raised.value)
        for part in (TOPIC, "embedded", "offset 10", "40 (expired)", "failOnDataLoss=false"):
            assert part in text
        with caplog.at_level(logging.WARNING):
            assert read(span, options("h:1", fail_on_data_loss=False)) == expected(40, 80)
        assert "skipped to offset 40" in caplog.text
        gone = dataclasses.replace(span, end=30)
        assert read(gone, options("h:1", fail_on_data_loss=False)) == []


def test_holes_inside_an_answer_are_losses(caplog: pytest.LogCaptureFixture) -> None:
    with shelf(range(100), holes=frozenset({33, 34})) as peer:
        span = Range(queue_of(TOPIC), 0, 100, (peer.address,))
        with pytest.raises(DataLoss, match="2 of the offsets"):
            read(span, options("h:1"))
        rows = read(span, options("h:1", fail_on_data_loss=False))
        assert rows == expected(0, 33) + expected(35, 100)
        # A filter leaves offsets out by its nature.
        assert read(span, options("h:1", sql="n > 0")) == rows


def test_a_hole_that_reaches_beyond_the_range_is_a_loss() -> None:
    """Brokers skip what was removed under them, as far as the next message that is there."""
    with shelf(range(100), holes=frozenset(range(40, 70)), count=lambda _, ask: 100) as peer:
        for end in (41, 50, 70):
            span = Range(queue_of(TOPIC), 0, end, (peer.address,))
            with pytest.raises(DataLoss, match=f"{end - 40} of the offsets 0 to {end - 1}"):
                read(span, options("h:1"))
            assert read(span, options("h:1", fail_on_data_loss=False)) == expected(0, 40)


def test_answers_that_hold_nothing(caplog: pytest.LogCaptureFixture) -> None:
    holes = frozenset(range(10, 60))
    with shelf(range(100), holes=holes, count=lambda _, ask: min(ask, 10)) as peer:
        span = Range(queue_of(TOPIC), 0, 100, (peer.address,))
        with pytest.raises(DataLoss, match="offset 10"):
            read(span, options("h:1"))
        rows = expected(0, 10) + expected(60, 100)
        assert read(span, options("h:1", fail_on_data_loss=False)) == rows
        assert read(span, options("h:1", sql="n > 0")) == rows


def test_a_broker_that_does_not_move_on() -> None:
    def respond(frames: list[Frame]) -> bytes:
        ext = {"nextBeginOffset": "5", "minOffset": "0", "maxOffset": "50"}
        return b"".join(answer(frame, ext, code=Code.PULL_RETRY_IMMEDIATELY) for frame in frames)

    with Peer(respond) as peer:
        span = Range(queue_of(TOPIC), 5, 9, (peer.address,))
        with pytest.raises(Unreachable, match="answers code 20 at 5"):
            read(span, options("h:1", retries=1))


@pytest.mark.parametrize(("code", "tries"), [(Code.SYSTEM_BUSY, 3), (Code.NO_PERMISSION, 1)])
def test_refusals(code: int, tries: int) -> None:
    with Peer(lambda frames: answer(frames[0], code=code, remark="No.")) as peer:
        span = Range(queue_of(TOPIC), 5, 9, (peer.address,))
        with pytest.raises((Refused, Unreachable), match=rf"{TOPIC}.*No\."):
            read(span, options(dead_address(), retries=2))
        assert len(peer.requests) == tries


def test_a_compressed_body_that_is_damaged() -> None:
    def respond(frames: list[Frame]) -> bytes:
        ext = {"nextBeginOffset": "6", "minOffset": "0", "maxOffset": "9"}
        body = record(5, b"no zlib at all", sys_flag=1)
        return b"".join(answer(frame, ext, body=body) for frame in frames)

    with Peer(respond) as peer:
        span = Range(queue_of(TOPIC), 5, 6, (peer.address,))
        with pytest.raises(DamagedRecord, match=r"offset 5 .*compressed body"):
            read(span, options("h:1"))
        assert len(peer.requests) == 2
        # Nobody looks at bodies that nobody asked for.
        assert read(span, options("h:1", columns=("queue_offset",))) == [(5,)]


# --- repetitions ---------------------------------------------------------------------------------


def test_repetitions_are_dropped_on_request(node: Node, cosmo_topic: str) -> None:
    def message(number: int, mark: str | None = None) -> SendMessage:
        properties = {"UNIQ_KEY": f"{number:032X}"} | ({MARK: mark} if mark else {})
        return SendMessage(
            producer_group="w",
            topic=cosmo_topic,
            default_topic="TBW102",
            default_topic_queue_nums=1,
            queue_id=0,
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties=format_properties(properties),
            body=b"m%d" % number,
        )

    first = [message(number) for number in range(10)]
    again = [message(number, "2") for number in range(5, 15)]
    link = links.take(node.broker_address, connection(node.namesrv))
    for command in first + again:
        link.call(command)
    link.close()
    span = Range(queue_of(cosmo_topic), 0, 20, (node.broker_address,))
    bodies = [b"m%d" % number for number in range(15)]
    assert len(read(span, options(node.namesrv))) == 20
    for columns in (("body",), ("queue_offset", "body", "msg_id")):
        rows = read(span, options(node.namesrv, dedupe=True, columns=columns))
        assert [row[columns.index("body")] for row in rows] == bodies
    # A range that begins behind the first copies asks the index.
    late = dataclasses.replace(span, start=10)
    rows = read(late, options(node.namesrv, dedupe=True, columns=("body",)))
    assert [row[0] for row in rows] == bodies[10:]


def test_repetitions_that_cannot_be_looked_up_end_the_read() -> None:
    """Rows of a batch that was begun must not be skipped by trying again."""
    marked = format_properties({"UNIQ_KEY": "K", MARK: "1"})

    def respond(frames: list[Frame]) -> bytes:
        ext = {"nextBeginOffset": "7", "minOffset": "0", "maxOffset": "9"}
        body = record(5, properties=marked) + record(6)
        return b"".join(answer(frame, ext, body=body) for frame in frames)

    with Peer(respond) as peer:
        span = Range(queue_of(TOPIC), 5, 7, (peer.address,))
        with pytest.raises(LookupFailed, match=rf"{TOPIC}.*dedupe=true.*no name server"):
            read(span, options(dead_address(), retries=1, dedupe=True))
