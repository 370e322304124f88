"""Wrong requests as raw frames: each gets upstream's code, a remark that helps, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.wire.wrong_requests import COMMIT, GARBAGE, NO_NUMBERS, header_of, numbers_of

from cosmodrome.broker.app import build_broker
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code
from cosmodrome.wire import table
from cosmodrome.wire.bodies import PERM_READ, PERM_WRITE
from cosmodrome.wire.table import BROKER, Command

HOST = "127.0.0.1"
BODY_BYTES_MAX = 64 * 1024


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._opaque = 0

    async def ask(self, code: int, ext: dict[str, str], body: bytes = b"") -> tuple[int, str]:
        """Code and remark of the answer; the connection stays."""
        self._opaque += 1
        header = json.dumps(
            {"code": code, "language": "JAVA", "opaque": self._opaque, "extFields": ext}
        ).encode()
        self.writer.write(
            struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
        )
        while True:
            async with asyncio.timeout(20):
                (length,) = struct.unpack(">I", await self._reader.readexactly(4))
                data = await self._reader.readexactly(length)
            (size,) = struct.unpack_from(">I", data)
            answer = json.loads(data[4 : 4 + (size & 0xFFFFFF)])
            if answer["flag"] & 1 and answer["opaque"] == self._opaque:
                return answer["code"], answer.get("remark") or ""


@contextlib.asynccontextmanager
async def broker_peer(folder: Path, **changes: Any) -> AsyncIterator[Peer]:
    broker = build_broker(
        BrokerOptions(**(dict[str, Any](broker_name="b", listen_port=0) | changes)),
        StoreOptions(
            store_path_root_dir=str(folder),
            mapped_file_size_commit_log=1 << 20,
            mapped_file_size_consume_queue=6000,
            max_hash_slot_num=100,
            max_index_num=400,
            max_message_size=BODY_BYTES_MAX,
        ),
        SocketOptions(),
        real_env(seed=1),
    )
    await broker.start()
    reader, writer = await asyncio.open_connection(HOST, broker.port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        await broker.stop()


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    async with broker_peer(tmp_path) as peer:
        for topic, perm in (
            ("T", 6),
            ("ReadOnly", PERM_READ),
            ("WriteOnly", PERM_WRITE),
            ("No", 0),
        ):
            created = {
                "topic": topic,
                "defaultTopic": "TBW102",
                "readQueueNums": "4",
                "writeQueueNums": "4",
                "perm": str(perm),
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": "0",
                "order": "false",
            }
            assert (await peer.ask(17, created))[0] == 0
        assert (await peer.ask(310, SEND, b"x"))[0] == 0
        yield peer


SEND = {"a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0"}
PULL = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "1",
}
SQL = {"expressionType": "SQL92"}
QUEUE = {"topic": "T", "queueId": "0"}
ILLEGAL, SYSTEM, NO_PERM = Code.MESSAGE_ILLEGAL, Code.SYSTEM_ERROR, Code.NO_PERMISSION

# What is wrong: request code, header, body, the code of the answer, what its remark says.
WRONG: dict[str, tuple[int, dict[str, str], bytes, int, str]] = {
    # sends
    "send: unknown topic, no template": (
        310,
        {**SEND, "b": "Nowhere", "c": "NoTemplate"},
        b"x",
        Code.TOPIC_NOT_EXIST,
        "Create it first",
    ),
    "send: queue beyond the topic's": (310, {**SEND, "e": "4"}, b"x", SYSTEM, "4"),
    "send: body too large": (
        310,
        SEND,
        bytes(BODY_BYTES_MAX + 1),
        ILLEGAL,
        str(BODY_BYTES_MAX),
    ),
    "send: properties too long": (
        310,
        {**SEND, "i": "k\x01" + "v" * 40_000},
        b"x",
        ILLEGAL,
        "32767",
    ),
    "send: topic too long": (310, {**SEND, "b": "T" * 128}, b"x", SYSTEM, "127"),
    "send: topic of a path": (310, {**SEND, "b": "../../etc"}, b"x", SYSTEM, "../../etc"),
    "send: no topic": (310, {**SEND, "b": ""}, b"x", SYSTEM, "topic"),
    "send: system topic": (310, {**SEND, "b": "SCHEDULE_TOPIC_XXXX"}, b"x", NO_PERM, "SCHEDULE"),
    "send: delay level is no number": (
        310,
        {**SEND, "i": "DELAY\x01soon"},
        b"x",
        ILLEGAL,
        "level",
    ),
    "send: delivery time is no number": (
        310,
        {**SEND, "i": "TIMER_DELIVER_MS\x01soon"},
        b"x",
        ILLEGAL,
        "TIMER_DELIVER_MS",
    ),
    "send: delivery too far away": (
        310,
        {**SEND, "i": "TIMER_DELAY_SEC\x01999999999"},
        b"x",
        ILLEGAL,
        "timerMaxDelaySec",
    ),
    "batch: not a batch": (320, {**SEND, "m": "true"}, b"garbage", ILLEGAL, "Batch item 0"),
    "batch: nothing in it": (320, {**SEND, "m": "true"}, b"", ILLEGAL, ""),
    # pulls
    "pull: unknown topic": (11, {**PULL, "topic": "Nowhere"}, b"", Code.TOPIC_NOT_EXIST, "Nowhere"),
    "pull: queue beyond the topic's": (11, {**PULL, "queueId": "4"}, b"", SYSTEM, "4"),
    "pull: queue below zero": (11, {**PULL, "queueId": "-1"}, b"", SYSTEM, "-1"),
    "pull: no permission to read": (
        11,
        {**PULL, "topic": "WriteOnly"},
        b"",
        NO_PERM,
        "WriteOnly",
    ),
    "pull: no permission at all": (11, {**PULL, "topic": "No"}, b"", NO_PERM, "No"),
    "pull: bad SQL": (
        11,
        {**PULL, **SQL, "subscription": "a > 5 AND AND b"},
        b"",
        Code.SUBSCRIPTION_PARSE_FAILED,
        "character 11",
    ),
    "pull: unknown kind of expression": (
        11,
        {**PULL, "expressionType": "XPATH"},
        b"",
        Code.SUBSCRIPTION_PARSE_FAILED,
        "XPATH",
    ),
    "pull: no subscription known": (
        11,
        {**PULL, "sysFlag": "0"},
        b"",
        Code.SUBSCRIPTION_NOT_EXIST,
        "g",
    ),
    "pull: group of a path": (11, {**PULL, "consumerGroup": "../x"}, b"", SYSTEM, "../x"),
    # topics, groups and the rest
    "topic: bad name": (
        17,
        {"topic": "a b", "defaultTopic": "T", "readQueueNums": "1", "writeQueueNums": "1"},
        b"",
        SYSTEM,
        "",
    ),
    "topic: unknown, statistics": (202, {"topic": "Nowhere"}, b"", Code.TOPIC_NOT_EXIST, "Nowhere"),
    "topic: path to delete": (215, {"topic": "../../x"}, b"", SYSTEM, "../../x"),
    "topic: system topic to delete": (215, {"topic": "TBW102"}, b"", SYSTEM, "TBW102"),
    "members: unknown group": (38, {"consumerGroup": "nobody"}, b"", SYSTEM, "nobody"),
    "connections: unknown group": (
        203,
        {"consumerGroup": "nobody"},
        b"",
        Code.CONSUMER_NOT_ONLINE,
        "nobody",
    ),
    "message: nothing there": (33, {"offset": "999999999"}, b"", SYSTEM, "999999999"),
    "statistic: unknown": (315, {"statsName": "X", "statsKey": "Y"}, b"", SYSTEM, "X"),
    "settings: a path": (25, {}, b"storePathRootDir=/tmp", NO_PERM, "storePathRootDir"),
    "unknown code": (9999, {}, b"", Code.REQUEST_CODE_NOT_SUPPORTED, "9999"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_requests(peer: Peer, wrong: str) -> None:
    code, ext, body, expected, said = WRONG[wrong]
    answer = await peer.ask(code, ext, body)
    assert answer[0] == expected, answer
    assert said in answer[1] and len(answer[1]) > 10
    assert (await peer.ask(30, QUEUE))[0] == 0


async def test_a_send_to_a_queue_below_zero_picks_one(peer: Peer) -> None:
    # Compat: upstream too lets the broker choose for any negative queue.
    assert (await peer.ask(310, {**SEND, "e": "-1"}, b"x"))[0] == 0


@pytest.mark.parametrize("topic", ["ReadOnly", "No"])
async def test_the_write_permission_of_a_topic_is_kept_by_its_route(peer: Peer, topic: str) -> None:
    # Compat: 4.9 does not look at it when a message comes; clients find no queue to send to.
    assert (await peer.ask(310, {**SEND, "b": topic}, b"x"))[0] == 0


async def test_an_unknown_group_is_refused_when_groups_are_not_made(tmp_path: Path) -> None:
    async with broker_peer(tmp_path, auto_create_subscription_group=False) as peer:
        assert (await peer.ask(310, SEND, b"x"))[0] == 0
        code, remark = await peer.ask(11, PULL)
        assert code == Code.SUBSCRIPTION_GROUP_NOT_EXIST and "g" in remark
        back = {"offset": "0", "group": "nobody", "delayLevel": "0"}
        code, remark = await peer.ask(36, back)
        assert code == Code.SUBSCRIPTION_GROUP_NOT_EXIST and "nobody" in remark


# --- every row ----------------------------------------------------------------------------------

ROWS = [
    row for code, row in sorted(table.rows().items()) if BROKER in row.served_by and not row.planned
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_every_row_survives_wrong_headers_and_bodies(
    tmp_path: Path, row: type[Command[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    good = header_of(row)
    code = row.request_code
    async with broker_peer(tmp_path, long_polling_enable=False, short_polling_time_mills=1) as peer:
        for body in GARBAGE:
            answered, remark = await peer.ask(code, good, body)
            assert answered in row.success_codes or remark, (body, answered)
        for field in table.header_fields(row):
            ext = {name: value for name, value in good.items() if name != field.encode_name}
            answered, remark = await peer.ask(code, ext)
            assert answered in row.success_codes or remark, field.encode_name
            if field.required:
                assert answered == SYSTEM and field.encode_name in remark, (answered, remark)
        for name in numbers_of(row):
            for value in NO_NUMBERS:
                answered, remark = await peer.ask(code, {**good, name: value})
                assert answered == SYSTEM and name in remark, (name, value, answered, remark)
            for value in ("-1", "-2147483648", "2147483647") if name != COMMIT else ():
                answered, remark = await peer.ask(code, {**good, name: value})
                assert answered in row.success_codes or remark, (name, value, answered)
        assert (await peer.ask(30, {"topic": "TBW102", "queueId": "0"}))[0] == 0
    assert "failed unexpectedly" not in caplog.text
