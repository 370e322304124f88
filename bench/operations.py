"""Small pieces of work that are counted in instructions: the send path, reads, decoding.

Each name stands for one operation with the same input every time. `build` makes it ready (a store
is filled, a broker started), and what comes out does it so many times. Run as a program under a
counter of instructions, it is `bench.instructions` that calls it:

    python -m bench.operations --times 100 "select 32 records of 1 KiB"
    python -m bench.operations --marks NAME NAME ...

With `--marks` every operation is done TIMES times for ROUNDS rounds, with a call of the kernel that
nothing else makes before the first and behind each, which is where valgrind is told to write
down its counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from bench.columnar import records
from bench.pair_operations import FILE_BYTES, LinkedSlave, MasterRole, Wire, at_once, slave
from cosmodrome import speed
from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.layout import QUEUE_ENTRY, SERIALIZE_BINARY, SERIALIZE_JSON
from cosmodrome.sim.env import SimClock
from cosmodrome.sim.loop import JumpLoop
from cosmodrome.speed import arrow, due, lane
from cosmodrome.wire.bodies import TopicConfig
from cosmodrome.wire.message import pack_host
from cosmodrome.wire.signature import signature

Work = Callable[[int], object]  # does the operation so many times
NOW_MS = 1_700_000_000_123
HOST = pack_host("10.1.2.3", 40_123)
MARK = "getsid"  # the function of the C library behind `mark`
WARM = 10  # times, before anything is counted
TIMES = 16
ROUNDS = 6
TOPICS = 16
PAUSE_S = 0.0001
ACCESS_KEY, SECRET = "producer", b"a-secret-key-of-24-bytes"
ACCOUNTS = f"""
accounts:
- accessKey: {ACCESS_KEY}
  secretKey: {SECRET.decode()}
  topicPerms:
  - Plain=PUB
"""
SETTLE = 120  # times, until a broker's buffers have found their sizes


def mark() -> None:
    os.getsid(0)


# --- requests --------------------------------------------------------------------------------


def _frame(code: int, opaque: int, ext: dict[str, str], body: bytes, *, binary: bool) -> bytes:
    if binary:
        pairs = b"".join(
            struct.pack(">h", len(name)) + name.encode() + struct.pack(">i", len(value)) + value
            for name, value in ((name, text.encode()) for name, text in ext.items())
        )
        header = struct.pack(">hbhiiii", code, 0, 399, opaque, 0, 0, len(pairs)) + pairs
    else:
        fields = {"code": code, "extFields": ext, "flag": 0, "language": "JAVA", "opaque": opaque}
        fields |= {"serializeTypeCurrentRPC": "JSON", "version": 399}
        header = json.dumps(fields, separators=(",", ":")).encode()
    word = len(header) | (1 << 24 if binary else 0)
    return struct.pack(">II", 4 + len(header) + len(body), word) + header + body


def _header(frame: bytes) -> bytes:
    return frame[8 : 8 + (int.from_bytes(frame[4:8], "big") & 0xFFFFFF)]


def send(
    opaque: int,
    *,
    size: int = 128,
    batch: int = 1,
    binary: bool = False,
    topics: int = 1,
    signed: bool = False,
) -> bytes:
    """A send as the Java client makes it; message ids differ, keys are not set."""
    topic = "Plain" if topics == 1 else f"Plain{opaque % topics}"
    code, body = 310, b"x" * size
    properties = f"UNIQ_KEY\x017F00000100002A9F{opaque:016X}\x02WAIT\x01true\x02TAGS\x01TagA"
    if batch > 1:
        code, own = 320, properties.encode()
        head = struct.pack(">iiiii", 22 + size + len(own), 0, 0, 0, size)
        body = (head + body + struct.pack(">h", len(own)) + own) * batch
        properties = ""
    words = ["producers", topic, "TBW102", "4", str(opaque % 4), "0", str(NOW_MS), "0"]
    words += [properties, "0", "false", str(batch > 1).lower()]
    ext = dict(zip("abcdefghijkm", words, strict=True))
    if signed:
        ext = {"AccessKey": ACCESS_KEY} | ext
        ext["Signature"] = signature(SECRET, ext, body)
    return _frame(code, opaque, ext, body, binary=binary)


def sends(count: int, **shape: Any) -> bytes:
    return b"".join(send(1_000_000_000 + number, **shape) for number in range(count))


def pull(offset: int = 0, *, hold: bool = False) -> bytes:
    ext = {
        "consumerGroup": "consumers",
        "topic": "Plain",
        "queueId": "0",
        "queueOffset": str(offset),
        "maxMsgNums": "32",
        "sysFlag": "6" if hold else "4",
        "commitOffset": "0",
        "suspendTimeoutMillis": "1000",
        "subscription": "*",
        "subVersion": "0",
    }
    return _frame(11, 2_000_000_000, ext, b"", binary=False)


# --- compiled loops alone --------------------------------------------------------------------


def _lane(data: bytes, requests: int) -> Iterator[Work]:
    plan = lane.Plan("Plain", 4, 0)
    intake = lane.Intake(lambda name: plan, "DefaultCluster", 4 << 20, 16 << 20)
    # As replies look: three numbers are filled in, and the opaque in JSON.
    text = (b'{"extFields":{"msgId":"', b'","queueId":"', b'","queueOffset":"', b'"},"opaque":')
    json_reply = lane.Template([*text, b',"code":0}'], False, 0, 0)
    binary_reply = lane.Template(
        [bytes(21) + bytes(4), b"queueId", b"queueOffset", b""], True, 21, 0
    )
    view, log, counts = memoryview(data), bytearray(), lane.PutCounts()
    places: dict[tuple[str, int], speed.QueueEnd] = {}

    def place(topic: str, queue_id: int) -> speed.QueueEnd:
        return places.setdefault((topic, queue_id), speed.QueueEnd(topic, queue_id, 0))

    def once() -> None:
        at, _, count = intake.gather(None, view, 0, 1024, HOST, HOST)
        assert at == len(data) and count == requests
        log.clear()
        intake.encode(log, 1 << 40, 1 << 30, NOW_MS, place, [])
        for _, _, ticket in intake.tickets()[1]:
            assert len(ticket) == requests
            ticket.count_in(counts)
            ticket.replies(json_reply, binary_reply, b"0A010203000023F7")
        intake.clear()

    yield _repeat(once)


def _gather() -> Iterator[Work]:
    data = records(64, 128)
    yield _repeat(lambda: speed.gather(memoryview(data), 0, 0, len(data), False, 64))


def _select() -> Iterator[Work]:
    data = records(32 * 8, 1024)  # of eight queues
    found, _, _ = speed.walk(memoryview(data), 0, 0, len(data), False, 1000)
    entries = b"".join(QUEUE_ENTRY.pack(one[0], one[1], one[7]) for one in found if one[3] == 0)
    limits = (32, 262_144, 8, 65_536, 0)
    view = memoryview(data)
    words = (entries, 0, view, 0, 0, len(data), -1, 0, None, 0, 0, limits)
    assert speed.select(*words)[2] == 32
    yield _repeat(lambda: speed.select(*words))


def _deliver() -> Iterator[Work]:
    """Delayed messages of one topic with four queues, under their real names."""
    waiting, host = bytearray(), pack_host("10.1.2.3", 10_911)
    for number in range(64):
        properties = (
            f"DELAY\0012\2UNIQ_KEY\1{number:032X}\2REAL_TOPIC\1Plain\2REAL_QID\1{number % 4}"
        )
        speed.encode_record(
            waiting,
            0,
            number,
            0,
            speed.SCHEDULE_TOPIC.encode(),
            1,
            0,
            0,
            0,
            host,
            host,
            0,
            0,
            bytes(128),
            properties.encode(),
        )
    data, places = (
        bytes(waiting),
        {number: speed.QueueEnd("Plain", number, 0) for number in range(4)},
    )

    def once() -> None:
        many = due.DueMessages(data, 1 << 20, 1 << 20)
        many.encode(bytearray(), 0, 1 << 20, 0, lambda topic, queue: places[queue], [])
        assert many.staged == 64

    yield _repeat(once)


def _decode(binary: bool) -> Iterator[Work]:
    header = _header(send(1_000_000_000, binary=binary))
    serialize = SERIALIZE_BINARY if binary else SERIALIZE_JSON
    yield _repeat(lambda: speed.decode_header(serialize, header))


def _columns(body_bytes: int, columns: tuple[str, ...]) -> Iterator[Work]:
    data = records(256, body_bytes)

    def once() -> None:
        builder = arrow.ColumnBuilder(columns, broker="broker-a", check_crc=True)
        at, _ = builder.add(data, 0, len(data))
        assert at == len(data)
        builder.take()

    yield _repeat(once)


def _repeat(once: Callable[[], object]) -> Work:
    def work(times: int) -> None:
        for _ in range(times):
            once()

    return work


def _hmacs(count: int) -> Iterator[Work]:
    """What a signature takes and its checks do not."""
    from cosmodrome.speed.signed import native

    header = json.loads(_header(send(1_000_000_000, signed=True)))["extFields"]
    signed = "".join(header[name] for name in sorted(header) if name != "Signature").encode()
    body = b"x" * 128
    yield lambda times: native.hmac_sha1(SECRET, signed, body, plain=False, times=count * times)


# --- a whole broker without sockets ----------------------------------------------------------


def _built(
    folder: str, role: MasterRole, loop: asyncio.AbstractEventLoop, *, guarded: bool
) -> Broker:
    """The flush is asynchronous, everything else as it is set. Timers of a real clock would come
    more often the slower the counter is."""
    accounts = os.path.join(folder, "accounts.yml")
    with open(accounts, "w") as file:
        file.write(ACCOUNTS)
    return build_broker(
        BrokerOptions(broker_name="b", listen_port=0, acl_enable=guarded, acl_file=accounts),
        StoreOptions(
            store_path_root_dir=folder,
            broker_role=role,
            flush_disk_type="ASYNC_FLUSH",
            mapped_file_size_commit_log=FILE_BYTES,
            max_hash_slot_num=100_000,
            max_index_num=400_000,
        ),
        SocketOptions(),
        dataclasses.replace(
            real_env(),
            clock=SimClock(loop),
            random=random.Random(7),
            offload=at_once,
            syncer=None,
        ),
    )


def _broker(
    data: bytes,
    first: bytes = b"",
    *,
    held: bool = False,
    linked: MasterRole | None = None,
    guarded: bool = False,
) -> Iterator[Work]:
    """`data` arrives in one read every 0.1 ms of a time that passes only between the reads.

    With `held` a consumer waits for it, pulling anew each time. With `linked`, which is the role of
    this master, a slave follows and reports whatever it was sent. With `guarded` signatures are
    checked.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        runner = stack.enter_context(asyncio.Runner(loop_factory=JumpLoop))
        broker = _built(folder, linked or "ASYNC_MASTER", runner.get_loop(), guarded=guarded)
        wire, waiting_wire = Wire(), Wire()

        async def begin() -> tuple[Any, Any, LinkedSlave | None]:
            await broker.start()
            topics = broker._rooms.members.topics
            for name in ("Plain", *(f"Plain{number}" for number in range(TOPICS))):
                topics.put(TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4))
            connection = broker._server._connection()
            connection.connection_made(wire)
            waiting = broker._server._connection()
            waiting.connection_made(waiting_wire)
            follower = LinkedSlave(broker._rooms.replicate.source) if linked else None
            return connection, waiting, follower

        connection, waiting, follower = runner.run(begin())
        stack.callback(lambda: runner.run(broker.stop()))
        stack.callback(connection.connection_lost, None)
        stack.callback(waiting.connection_lost, None)
        offsets = itertools.count()

        def read(connection: Any, data: bytes) -> None:
            connection.get_buffer(-1)[: len(data)] = data
            connection.buffer_updated(len(data))

        async def feed(data: bytes, times: int) -> None:
            for _ in range(times):
                before, heard = wire.written_bytes, waiting_wire.written_bytes
                if held:
                    read(waiting, pull(next(offsets), hold=True))
                read(connection, data)
                await asyncio.sleep(PAUSE_S)
                if follower is not None:
                    follower.report()
                assert wire.written_bytes > before, "the broker did not answer"
                assert not held or waiting_wire.written_bytes > heard, "nobody was woken"

        if first:
            runner.run(feed(first, 40))
        runner.run(feed(data, SETTLE))
        yield lambda times: runner.run(feed(data, times))


# --- the table -------------------------------------------------------------------------------

ALL_COLUMNS = tuple(arrow.KINDS)
NO_BODY = tuple(name for name in ALL_COLUMNS if name != "body")

OPERATIONS: dict[str, Callable[[], Iterator[Work]]] = {
    "lane: 16 sends of 128 B": lambda: _lane(sends(16), 16),
    "lane: 16 sends of 128 B, binary headers": lambda: _lane(sends(16, binary=True), 16),
    "lane: a batch of 32 × 128 B": lambda: _lane(sends(1, batch=32), 1),
    "gather 64 records of 128 B": _gather,
    "select 32 records of 1 KiB": _select,
    "deliver 64 delayed records of 128 B": _deliver,
    "decode a send's header, JSON": lambda: _decode(False),
    "decode a send's header, binary": lambda: _decode(True),
    "columns of 256 records of 1 KiB": lambda: _columns(1024, ALL_COLUMNS),
    "columns of 256 records, no body": lambda: _columns(1024, NO_BODY),
    "broker: one send of 128 B": lambda: _broker(sends(1)),
    "broker: 16 sends of 128 B": lambda: _broker(sends(16)),
    "broker: 16 sends of 128 B to 16 topics": lambda: _broker(sends(16, topics=TOPICS)),
    "broker: 16 signed sends of 128 B, not checked": lambda: _broker(sends(16, signed=True)),
    "broker: 16 signed sends of 128 B": lambda: _broker(sends(16, signed=True), guarded=True),
    "the HMAC of 16 signed sends of 128 B": lambda: _hmacs(16),
    "broker: one send of 128 B, for which a pull waits": lambda: _broker(sends(1), held=True),
    "broker: a pull of 32 × 128 B": lambda: _broker(pull(), first=sends(16)),
    "master: 16 sends of 1 KiB, a slave follows": lambda: _broker(
        sends(16, size=1024), linked="ASYNC_MASTER"
    ),
    "master: 16 sends of 1 KiB, which wait for a slave": lambda: _broker(
        sends(16, size=1024), linked="SYNC_MASTER"
    ),
    "slave: 1 record of 1 KiB": lambda: slave(1, synced=False),
    "slave: 16 records of 1 KiB": lambda: slave(16, synced=False),
    "slave: 16 records of 1 KiB, synced": lambda: slave(16, synced=True),
}
build = {name: contextlib.contextmanager(make) for name, make in OPERATIONS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="+", choices=OPERATIONS, metavar="NAME")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--marks", action="store_true", help="rounds, with marks between them")
    options = parser.parse_args()
    gc.disable()
    for name in options.names:
        with build[name]() as work:
            work(WARM)
            if not options.marks:
                work(options.times)
                continue
            mark()
            for _ in range(ROUNDS):
                work(TIMES)
                mark()


if __name__ == "__main__":
    main()
