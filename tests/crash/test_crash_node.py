"""`cosmo up` killed while clients send: every answered send is served after the restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import struct
from pathlib import Path

import pytest
from peers.node import CosmoNode

from cosmodrome.wire.record import Record, iter_records

CYCLES = int(os.environ.get("CRASH_CYCLES", "3"))
TOPIC = "CrashTopic"
QUEUES = 4
CLIENTS = 4
SETTINGS = {
    "mappedFileSizeCommitLog": "262144",
    "mappedFileSizeConsumeQueue": "2000",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "flushIntervalConsumeQueue": "50",
    "flushConsumeQueueThoroughInterval": "200",
    "diskSpaceWarningLevelRatio": "100",
}


class Link:
    """One connection; one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._opaque = 0
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def call(
        self, code: int, fields: dict[str, object], body: bytes = b""
    ) -> tuple[int, dict[str, str], str | None, bytes]:
        assert self._writer is not None
        self._opaque += 1
        header = json.dumps(
            {
                "code": code,
                "flag": 0,
                "language": "OTHER",
                "version": 0,
                "opaque": self._opaque,
                "extFields": {k: str(v) for k, v in fields.items()},
            }
        ).encode()
        size = 4 + len(header) + len(body)
        self._writer.write(struct.pack(">II", size, len(header)) + header + body)
        size, mark = struct.unpack(">II", await self._reader.readexactly(8))
        data = await self._reader.readexactly(size - 4)
        answer = json.loads(data[: mark & 0xFFFFFF])
        assert answer["opaque"] == self._opaque
        return (
            *(answer["code"], answer.get("extFields") or {}, answer.get("remark")),
            data[mark & 0xFFFFFF :],
        )


async def send_until_cut(port: int, name: str, history: dict[tuple[int, int], bytes]) -> None:
    link = Link(port)
    try:
        await link.open()
        number = 0
        while True:
            number += 1
            seed = hashlib.sha256(f"{name}-{number}".encode()).digest()
            body = f"{name}-{number} ".encode() + seed * (1 + seed[0] % 30)
            code, fields, remark, _ = await link.call(
                10,
                {
                    "producerGroup": "g",
                    "topic": TOPIC,
                    "defaultTopic": "TBW102",
                    "defaultTopicQueueNums": QUEUES,
                    "queueId": number % QUEUES,
                    "sysFlag": 0,
                    "bornTimestamp": 1,
                    "flag": 0,
                    "reconsumeTimes": 0,
                    "properties": f"KEYS\x01{name}-{number}\x02TAGS\x01t",
                },
                body,
            )
            assert code == 0, (code, remark)
            place = (int(fields["queueId"]), int(fields["queueOffset"]))
            assert place not in history, f"two sends were told {place}"
            history[place] = body
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # killed
    finally:
        link.close()


async def pull_all(link: Link, queue_id: int) -> list[Record]:
    found: list[Record] = []
    offset = 0
    while True:
        code, fields, remark, body = await link.call(
            11,
            {
                "consumerGroup": "c",
                "topic": TOPIC,
                "queueId": queue_id,
                "queueOffset": offset,
                "maxMsgNums": 32,
                "sysFlag": 4,
                "commitOffset": 0,
                "suspendTimeoutMillis": 0,
                "subscription": "*",
                "subVersion": 0,
            },
        )
        if code == 19:
            return found
        assert code == 0, (code, remark)
        found += iter_records(body)
        offset = int(fields["nextBeginOffset"])


async def check(port: int, history: dict[tuple[int, int], bytes], sent: set[str]) -> int:
    link = Link(port)
    await link.open()
    count = 0
    try:
        for queue_id in range(QUEUES):
            records = await pull_all(link, queue_id)
            assert [record.queue_offset for record in records] == list(range(len(records)))
            count += len(records)
            for record in records:
                assert record.body_is_intact()
                assert record.pairs()["KEYS"] == record.body.split(b" ")[0].decode()
                assert record.pairs()["KEYS"].rpartition("-")[0] in sent
                place = (queue_id, record.queue_offset)
                assert history.setdefault(place, record.body) == record.body
            ends = max((offset for queue, offset in history if queue == queue_id), default=-1)
            assert ends < len(records), "acknowledged and lost"
    finally:
        link.close()
    return count


@pytest.mark.timeout(300 + 20 * CYCLES)
@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_a_killed_node_serves_what_it_acknowledged(tmp_path: Path, mode: str) -> None:
    chance = random.Random(f"node-{mode}")
    words = [
        word
        for key, value in (SETTINGS | {"flushDiskType": mode}).items()
        for word in ("--set", f"{key}={value}")
    ]
    node = CosmoNode(tmp_path / "data", options=[*words, "--log-level", "warning"])
    history: dict[tuple[int, int], bytes] = {}
    sent: set[str] = set()
    total = 0
    try:
        for cycle in range(CYCLES):
            await asyncio.to_thread(node.start)
            if cycle:
                total = await check(node.broker_port, history, sent)
            names = [f"{cycle}.{client}" for client in range(CLIENTS)]
            sent.update(names)
            senders = [
                asyncio.ensure_future(send_until_cut(node.broker_port, name, history))
                for name in names
            ]
            await asyncio.sleep(chance.uniform(0.1, 0.6))
            node.kill9()
            await asyncio.gather(*senders)
        await asyncio.to_thread(node.start)
        assert await check(node.broker_port, history, sent) > total
        assert len(history) > CYCLES * CLIENTS
    finally:
        node.stop()
