"""What one request may cost the loop, for every code of both servers, beside large tables.

A step is what runs between two turns of the loop. CPU time is counted, not time, beside that of a
fixed piece of work (`unit_ms`), and of several attempts the cheapest counts: so a slow or busy
machine changes little. Each case is the dearest request of its code that is known; a code without a
case fails.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.twins.test_twins_lanes import Wire
from tests.unit.wire.wrong_requests import header_of

from cosmodrome.broker.app import build_broker
from cosmodrome.env.config import resolve
from cosmodrome.env.options import BrokerOptions, NameServerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.server import Server
from cosmodrome.wire import bodies, table
from cosmodrome.wire.bodies import (
    QUEUES_MAX,
    ConsumerData,
    HeartbeatData,
    MessageQueue,
    ProducerData,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from cosmodrome.wire.frame import Frame, decode, encode
from cosmodrome.wire.signature import sign
from cosmodrome.wire.table import (
    BODY_BYTES_MAX,
    BROKER,
    LIST_BYTES_MAX,
    NAMESERVER,
    SETTINGS_BYTES_MAX,
    SUBSCRIPTION_BYTES_MAX,
    Role,
)

# In units, of which one takes about 1 ms on a quiet core of 2026. 1 is the aim; heartbeats with
# 1,200 subscriptions and bodies in the dialect of 36 KiB take up to 2.
STEP_UNITS_MAX = 4.0
UNIT_ROWS = 8_000
ROWS = 2000  # topics, groups
CLIENTS = 200
ATTEMPTS = 4

Headers = Mapping[str, object]
NOTHING: Headers = {}


class Case(NamedTuple):
    header: Headers = NOTHING
    body: bytes = b""


def registered(topics: int) -> bytes:
    rows = {f"Topic{n}": TopicConfig(topic_name=f"Topic{n}") for n in range(topics)}
    wrapper = bodies.TopicConfigSerializeWrapper(topic_config_table=rows)
    return bodies.encode(bodies.RegisterBrokerBody(topic_config_serialize_wrapper=wrapper))


def heartbeat(client: str, subscriptions: int = 1) -> bytes:
    subscribed = [
        SubscriptionData(topic=f"Topic{n}", sub_string="*", sub_version=1)
        for n in range(subscriptions)
    ]
    consumer = ConsumerData(
        group_name="G",
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
        consume_from_where="CONSUME_FROM_LAST_OFFSET",
        subscription_data_set=subscribed,
    )
    beat = HeartbeatData(
        client_id=client,
        consumer_data_set=[consumer],
        producer_data_set=[ProducerData(group_name="P")],
    )
    return bodies.encode(beat)


def locks() -> bytes:
    queues = [MessageQueue(topic="Big", broker_name="b", queue_id=n) for n in range(5000)]
    body = bodies.LockBatchRequestBody(consumer_group="G", client_id="c0", mq_set=queues)
    data = bodies.encode(body)
    assert len(data) > LIST_BYTES_MAX // 2
    return data


BIG = {"topic": "Big", "queueId": QUEUES_MAX - 1}
GROUP = {"consumerGroup": "G", "group": "G", "groupName": "G"}
SEND = {"topic": "Big", "queueId": 0, "sysFlag": 0, "properties": "KEYS\x01K\x02", "batch": "false"}
SEND_V2 = {"b": "Big", "e": 0, "f": 0, "i": "KEYS\x01K\x02", "m": "false"}
LARGE = bytes(BODY_BYTES_MAX)
PULL = {**GROUP, "topic": "Big", "queueId": 0, "queueOffset": 0, "maxMsgNums": 1024, "sysFlag": 0}
DIALECT = b'{1:2,"y":[' + b"1," * (SUBSCRIPTION_BYTES_MAX // 2 - 10) + b"1]}"
MANY_RIGHTS = ",".join(f"Topic{n}=PUB" for n in range(1000))
ONE_SETTING = b"traceOn=true\n" * (SETTINGS_BYTES_MAX // 13)
UNKNOWN_SETTINGS = b"".join(b"key%05d=value\n" % n for n in range(SETTINGS_BYTES_MAX // 15))

CASES: dict[Role, dict[int, Case]] = {
    BROKER: {
        10: Case(SEND, LARGE),
        11: Case(PULL),
        12: Case({"topic": "Big", "key": "K", "maxNum": 64, "endTimestamp": 2**62}),
        14: Case({**GROUP, **BIG}),
        15: Case({**GROUP, **BIG}),
        17: Case({"topic": "New", "perm": 6, "topicFilterType": "SINGLE_TAG"}),
        21: Case(),
        25: Case(body=ONE_SETTING),
        26: Case(),
        28: Case(),
        29: Case({**BIG, "queueId": 0}),
        30: Case(BIG),
        31: Case(BIG),
        32: Case(BIG),
        33: Case({"offset": 0}),
        34: Case(body=heartbeat("c0", 1200)),
        35: Case({"clientID": "c1", "producerGroup": "P", **GROUP}),
        36: Case({"offset": 0, **GROUP, "delayLevel": 0}),
        37: Case({"producerGroup": "P"}),
        38: Case(GROUP),
        41: Case(body=locks()),
        42: Case(body=locks()),
        43: Case(),
        45: Case(),
        46: Case(body=DIALECT),
        50: Case({"accessKey": "account-7", "topicPerms": MANY_RIGHTS}),
        51: Case({"accessKey": "account-8"}),
        52: Case(),
        53: Case({"globalWhiteAddrs": ",".join(f"10.0.{n}.*" for n in range(250))}),
        200: Case(body=bodies.encode(SubscriptionGroupConfig(group_name="New"))),
        201: Case(),
        202: Case({"topic": "Big"}),
        203: Case(GROUP),
        204: Case({"producerGroup": "P"}),
        207: Case({"groupName": "Group7", "cleanOffset": "true"}),
        208: Case({**GROUP, "topic": ""}),
        215: Case({"topic": "Topic7"}),
        222: Case({"topic": "Big", **GROUP, "timestamp": -1, "isForce": "true"}),
        223: Case({"topic": "Big", "group": "Group2", "clientAddr": ""}),
        300: Case({"topic": "Big"}),
        301: Case({"filterServerAddr": "127.0.0.1:1"}),
        303: Case({"topic": "Big", **GROUP}),
        305: Case(),
        306: Case(),
        307: Case({**GROUP, "clientId": "nobody"}),
        308: Case({"topic": "Big", "filterGroups": "G", "compareGroup": "G"}),
        309: Case({**GROUP, "clientId": "nobody", "msgId": "0" * 32}),
        310: Case(SEND_V2, LARGE),
        314: Case({"srcGroup": "G", "destGroup": "Group1", "topic": "Big", "offline": "false"}),
        315: Case({"statsName": "TOPIC_PUT_NUMS", "statsKey": "Big"}),
        316: Case(),
        317: Case({"isOrder": "false"}),
        320: Case({**SEND_V2, "i": ""}, LARGE),
        321: Case({"topic": "Big", "queueId": 0, "index": 0, "count": 1000, **GROUP}),
        323: Case({"msgId": "0" * 32}),
        324: Case({**SEND, "topic": "b_REPLY_TOPIC"}, LARGE),
        325: Case({**SEND_V2, "b": "b_REPLY_TOPIC"}, LARGE),
        328: Case(),
        329: Case(),
        351: Case({"topic": "Big"}),
        352: Case(GROUP),
        361: Case(PULL),
        370: Case({"topic": "Big", "recallHandle": "x" * 60_000}),
        907: Case(),
        31001: Case({"topic": "Big", "maxNum": 1000}),
        31010: Case(),
    },
    NAMESERVER: {
        100: Case({"namespace": "N", "key": "K", "value": "v" * 1000}),
        101: Case({"namespace": "N", "key": "K"}),
        102: Case({"namespace": "N", "key": "K"}),
        103: Case(
            {
                "brokerName": "b",
                "brokerAddr": "127.0.0.1:9",
                "clusterName": "c",
                "brokerId": 0,
                "bodyCrc32": 0,
            },
            registered(ROWS),
        ),
        104: Case({"brokerName": "b", "brokerAddr": "127.0.0.1:9"}),
        105: Case({"topic": "Topic1"}),
        106: Case(),
        205: Case({"brokerName": "b0"}),
        206: Case(),
        216: Case({"topic": "Topic3", "clusterName": ""}),
        219: Case({"namespace": "N"}),
        224: Case({"cluster": "c"}),
        304: Case(),
        311: Case(),
        312: Case(),
        313: Case(),
        318: Case(body=UNKNOWN_SETTINGS),
        319: Case(),
        322: Case({"brokerName": "b0", "brokerAddr": "127.0.0.1:10"}, b"{1:2}"),
        327: Case({"brokerName": "b0"}),
    },
}

# These are asked of a broker with access control, which has a table of accounts.
ABOUT_ACCOUNTS = {50, 51, 52, 53, 31010}
# Answers of several MiB, one row for each of 65,535 queues. They are written in slices; the step
# that copies the whole text into a frame and the frame into the socket takes longer.
LARGE_ANSWERS = {202, 208, 303}
LARGE_STEP_UNITS_MAX = 30.0


def unit_ms() -> float:
    """CPU time of a fixed piece of work, of the kind that requests are."""
    began = time.thread_time()
    assert len({str(number): number for number in range(UNIT_ROWS)}) == UNIT_ROWS
    return (time.thread_time() - began) * 1000


class Meter:
    """The dearest step of the loop since `start`, in ms of CPU."""

    def __init__(self) -> None:
        self.worst_ms = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run: Callable[[Any], None] = asyncio.events.Handle._run

        def timed(handle: Any) -> None:
            began = time.thread_time()
            run(handle)
            self.worst_ms = max(self.worst_ms, (time.thread_time() - began) * 1000)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    meter = Meter()
    meter.install(monkeypatch)
    gc.collect()
    gc.disable()
    yield meter
    gc.enable()


def connect(server: Server, number: int = 0) -> tuple[SocketConnection, Wire]:
    wire = Wire(("127.0.0.1", 40_000 + number))
    connection = server._connection()
    connection.connection_made(wire)
    return connection, wire


def feed(connection: SocketConnection, data: bytes) -> None:
    buffer = connection.get_buffer(-1)
    for at in range(0, len(data), len(buffer)):
        piece = data[at : at + len(buffer)]
        buffer[: len(piece)] = piece
        connection.buffer_updated(len(piece))


async def answered(connection: SocketConnection, wire: Wire, data: bytes) -> bytes:
    """Send a request and wait for its answer."""
    wire.out.clear()
    asyncio.get_running_loop().call_soon(feed, connection, data)
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
        while not wire.out or connection.busy:
            await asyncio.sleep(0.001)
    return bytes(wire.out)


async def dearest(
    role: Role, server: Server, meter: Meter, codes: set[int], account: tuple[str, bytes] | None
) -> dict[int, float]:
    """By code, what its dearest step takes at least, in units; signed if there is an account."""
    found: dict[int, float] = {}
    connection, wire = connect(server)
    for code in sorted(codes):
        case = CASES[role][code]
        row = table.rows()[code]
        plain = {} if account else header_of(row)
        ext = {**plain, **{name: str(value) for name, value in case.header.items()}}
        known = {field.encode_name for field in table.header_fields(row)}
        ext = {name: value for name, value in ext.items() if name in known}
        best = float("inf")
        for attempt in range(ATTEMPTS):
            frame = Frame(code, attempt + 1, ext=dict(ext), body=case.body)
            if account is not None:
                sign(frame, *account)
            data = encode(frame)
            unit = unit_ms()
            await asyncio.sleep(0)  # that was a step of its own
            meter.worst_ms = 0.0
            answer = await answered(connection, wire, data)
            if account is not None and not attempt:
                assert decode(answer[4:]).code == Code.SUCCESS, decode(answer[4:]).remark
            best = min(best, meter.worst_ms / max(unit, unit_ms()))
        found[code] = best
    return found


def served(role: Role) -> set[int]:
    rows = table.rows().items()
    return {code for code, row in rows if role in row.served_by and not row.planned}


def judge(found: dict[int, float]) -> None:
    dear = {
        f"{table.rows()[code].name} ({code})": round(units, 1)
        for code, units in found.items()
        if units > (LARGE_STEP_UNITS_MAX if code in LARGE_ANSWERS else STEP_UNITS_MAX)
    }
    print(sorted(((round(units, 2), code) for code, units in found.items()), reverse=True)[:12])
    assert not dear, "units of one step of the loop: cache it, slice it or do it off the loop"


async def test_no_code_of_the_broker_holds_the_loop(tmp_path: Path, meter: Meter) -> None:
    broker = build_broker(
        BrokerOptions(broker_name="b", listen_port=0),
        StoreOptions(
            store_path_root_dir=str(tmp_path),
            flush_disk_type="ASYNC_FLUSH",
            mapped_file_size_commit_log=32 * 1024 * 1024,
            max_hash_slot_num=5000,
            max_index_num=5000,
        ),
        SocketOptions(),
        real_env(),
    )
    await broker.start()
    try:
        members, server = broker._rooms.members, broker._server
        names = [f"Topic{n}" for n in range(ROWS)]
        topics = {name: TopicConfig(topic_name=name) for name in names}
        members.topics._table.rows.update(topics)
        members.groups._table.rows.update(
            {f"Group{n}": SubscriptionGroupConfig(group_name=f"Group{n}") for n in range(ROWS)}
        )
        members.groups.put(SubscriptionGroupConfig(group_name="G"))
        members.topics.put(
            TopicConfig(topic_name="Big", read_queue_nums=QUEUES_MAX, write_queue_nums=QUEUES_MAX)
        )
        for queue_id in range(0, QUEUES_MAX, 16):
            members.offsets.commit("G", "Big", queue_id, 0)
        for name in names:
            members.offsets.commit("G", name, 0, 0)
        for number in range(CLIENTS):
            connection, wire = connect(server, number)
            beat = encode(Frame(34, 1, body=heartbeat(f"c{number}", 20)))
            await answered(connection, wire, beat)
        connection, wire = connect(server)
        for number in range(300):
            feed(connection, encode(Frame(310, number + 1, ext=_send(), body=b"x" * 100)))
        await answered(
            connection, wire, encode(Frame(30, 999, ext={"topic": "Big", "queueId": "0"}))
        )
        codes = served(BROKER) - ABOUT_ACCOUNTS
        judge(await dearest(BROKER, server, meter, codes, None))
    finally:
        await broker.stop()


async def test_no_code_about_accounts_holds_the_loop(tmp_path: Path, meter: Meter) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text(json.dumps({"accounts": [ADMIN, *map(account, range(ACCOUNTS))]}))
    broker = build_broker(
        BrokerOptions(broker_name="b", listen_port=0, acl_enable=True, acl_file=str(file)),
        StoreOptions(store_path_root_dir=str(tmp_path / "store")),
        SocketOptions(),
        real_env(),
    )
    await broker.start()
    try:
        signer = (ADMIN["accessKey"], ADMIN["secretKey"].encode())
        judge(await dearest(BROKER, broker._server, meter, ABOUT_ACCOUNTS, signer))
    finally:
        await broker.stop()


ACCOUNTS = 200
ADMIN: dict[str, Any] = {"accessKey": "the-admin", "secretKey": "the-secret", "admin": True}


def account(number: int) -> dict[str, Any]:
    rights = [f"Topic{n}=PUB" for n in range(20)]
    return {
        "accessKey": f"account-{number}",
        "secretKey": f"secret-{number}",
        "topicPerms": rights,
    }


def _send() -> dict[str, str]:
    row = table.rows()[310]
    return {**header_of(row), **{name: str(value) for name, value in SEND_V2.items()}}


async def test_no_code_of_the_name_server_holds_the_loop(tmp_path: Path, meter: Meter) -> None:
    options = NameServerOptions(
        listen_port=0, kv_config_path=str(tmp_path / "kv.json"), config_store_path=""
    )
    nameserver = build_nameserver(options, SocketOptions(), real_env())
    await nameserver.start()
    try:
        server = nameserver._server
        assert server is not None
        for number in range(5):
            connection, wire = connect(server, number)
            ext = {
                "brokerName": f"b{number}",
                "brokerAddr": f"127.0.0.1:1{number}",
                "clusterName": "c",
                "brokerId": "0",
            }
            frame = Frame(103, 1, ext=ext, body=registered(ROWS))
            await answered(connection, wire, encode(frame))
        judge(await dearest(NAMESERVER, server, meter, served(NAMESERVER), None))
    finally:
        await nameserver.stop()


@pytest.mark.parametrize("code", [202, 303])
async def test_an_answer_that_is_too_large_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """65,535 queues whose names are as long as names may be do not fit into a frame."""
    broker = build_broker(
        BrokerOptions(broker_name="b" * 100, listen_port=0),
        StoreOptions(store_path_root_dir=str(tmp_path)),
        SocketOptions(),
        real_env(),
    )
    await broker.start()
    try:
        topic = "T" * 127
        broker._rooms.members.topics.put(
            TopicConfig(topic_name=topic, read_queue_nums=QUEUES_MAX, write_queue_nums=QUEUES_MAX)
        )
        broker._rooms.members.groups.put(SubscriptionGroupConfig(group_name="G"))
        connection, wire = connect(broker._server)
        ext = {"topic": topic, "group": "G"}
        answer = decode((await answered(connection, wire, encode(Frame(code, 1, ext=ext))))[4:])
    finally:
        await broker.stop()
    assert answer.code == Code.SYSTEM_ERROR and "larger than an answer" in (answer.remark or "")
    assert not [record for record in caplog.records if record.exc_info]


def test_all_settings_fit_into_one_request() -> None:
    values = [resolve([group], []) for group in (BrokerOptions, StoreOptions, SocketOptions)]
    pairs = [pair for group in values for pair in group.items()]
    assert len(pairs) > 50
    assert 2 * sum(len(f"{key}={value}\n") for key, value in pairs) < SETTINGS_BYTES_MAX


def test_every_case_fits_its_code() -> None:
    for role, cases in CASES.items():
        assert cases.keys() == served(role), "each code needs a case here"
        for code, case in cases.items():
            row = table.rows()[code]
            assert role in row.served_by
            assert len(case.body) <= row.body_bytes_max, row.name
