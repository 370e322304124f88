from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_clients_kit import BrokerClient, RunningBroker, running_broker

from cosmodrome.errors import Refused
from cosmodrome.wire import commands

MAX = (1 << 63) - 1


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with running_broker(tmp_path) as here:
        yield here


@pytest.fixture
async def admin(here: RunningBroker) -> BrokerClient:
    admin = here.client("admin")
    for _ in range(4):
        await admin.send(properties="TAGS\x01A")
    return admin


async def offset(admin: BrokerClient, group: str, topic: str = "T", queue_id: int = 0) -> int:
    ask = commands.QueryConsumerOffset(consumer_group=group, topic=topic, queue_id=queue_id)
    return int((await admin.call(ask)).offset)


# --- cloning ---------------------------------------------------------------------------------


async def test_clone_takes_over_exactly_the_offsets(admin: BrokerClient) -> None:
    await admin.commit(3)
    await admin.commit(1, 1, group="h")
    await admin.commit(4, 0, group="h")
    ask = commands.CloneGroupOffset(src_group="g", dest_group="h", topic="T", offline=True)
    await admin.call(ask)
    assert await offset(admin, "h") == 3
    table = json.loads(
        re.sub(rb"(\d+):", rb'"\1":', (await admin.call(commands.GetAllConsumerOffset())).body)
    )
    assert table["offsetTable"]["T@h"] == {"0": 3}


async def test_clone_of_all_topics_and_of_nothing(admin: BrokerClient) -> None:
    await admin.send(topic="U")
    await admin.commit(3)
    await admin.commit(1, topic="U")
    await admin.commit(2, topic="Gone")
    await admin.call(commands.CloneGroupOffset(src_group="g", dest_group="h", offline=True))
    assert [await offset(admin, "h", topic) for topic in ("T", "U", "Gone")] == [3, 1, 0]
    await admin.call(
        commands.CloneGroupOffset(src_group="none", dest_group="h", topic="T", offline=True)
    )
    await admin.call(commands.CloneGroupOffset(src_group="h", dest_group="h", topic="T"))
    assert await offset(admin, "h") == 3
    with pytest.raises(Refused, match="not allowed"):
        await admin.call(commands.CloneGroupOffset(src_group="g", dest_group="../h"))


async def test_clone_of_an_online_group_needs_its_subscription(
    here: RunningBroker, admin: BrokerClient
) -> None:
    await here.client("c").join("Other")
    await admin.commit(3)
    ask = commands.CloneGroupOffset(src_group="g", dest_group="h", topic="T", offline=False)
    await admin.call(ask)
    assert await offset(admin, "h") == 0
    ask.offline = True
    await admin.call(ask)
    assert await offset(admin, "h") == 3


# --- comparing -------------------------------------------------------------------------------


async def test_correction_offsets(admin: BrokerClient) -> None:
    await admin.commit(3, group="a")
    await admin.commit(2, group="b")
    await admin.commit(1, group="c")
    await admin.commit(1, 1, group="c")

    async def asked(**changes: Any) -> bytes:
        ask = commands.QueryCorrectionOffset(
            **{"filter_groups": "c", "compare_group": "a", "topic": "T", **changes}
        )
        return bytes((await admin.call(ask)).body)

    assert await asked() == b'{"correctionOffsets":{0:2}}'
    assert await asked(filter_groups=None) == b'{"correctionOffsets":{0:1,1:1}}'
    assert await asked(filter_groups="a,c") == b'{"correctionOffsets":{0:2}}'
    # A group that is behind all others is marked.
    assert await asked(compare_group="c") == b'{"correctionOffsets":{0:%d}}' % MAX
    # Asking changes nothing.
    assert await offset(admin, "c") == 1


async def test_time_spans(admin: BrokerClient) -> None:
    await admin.commit(2)
    ask = commands.QueryConsumeTimeSpan(topic="T", group="g")
    spans = json.loads((await admin.call(ask)).body)["consumeTimeSpanSet"]
    records = await admin.pull()
    assert [span["messageQueue"]["queueId"] for span in spans] == [0, 1]
    first, empty = spans
    assert first["messageQueue"] == {"brokerName": "b0", "queueId": 0, "topic": "T"}
    assert first["minTimeStamp"] == records[0].store_ms
    assert first["maxTimeStamp"] == records[3].store_ms
    assert first["consumeTimeStamp"] == records[1].store_ms
    assert 0 <= first["delayTime"] < 60_000
    assert re.fullmatch(r"20\d\d-\d\d-\d\d#\d\d:\d\d:\d\d:\d{3}", first["minTimeStampStr"])
    assert first["minTimeStampStr"].endswith(f":{records[0].store_ms % 1000:03d}")
    assert (empty["minTimeStamp"], empty["maxTimeStamp"], empty["delayTime"]) == (-1, -1, 0)
    await admin.commit(4)
    spans = json.loads((await admin.call(ask)).body)["consumeTimeSpanSet"]
    assert spans[0]["delayTime"] == 0
    with pytest.raises(Refused, match=r"\[17\]"):
        await admin.call(commands.QueryConsumeTimeSpan(topic="Nothing", group="g"))


# --- looking into a queue --------------------------------------------------------------------


async def test_entries_of_a_queue(here: RunningBroker, admin: BrokerClient) -> None:
    await here.client("c").join("T")
    ask = commands.QueryConsumeQueue(topic="T", queue_id=0, index=1, count=2, consumer_group="g")
    shown = json.loads((await admin.call(ask)).body)
    records = await admin.pull()
    assert (shown["minQueueIndex"], shown["maxQueueIndex"]) == (0, 4)
    assert shown["queueData"] == [
        {
            "eval": False,
            "physicOffset": record.log_offset,
            "physicSize": record.size,
            "tagsCode": 65,
        }
        for record in records[1:3]
    ]
    assert (shown["filterData"], shown["subscriptionData"]["topic"]) == ("null", "T")
    ask.consumer_group, ask.count = "nobody", 100
    shown = json.loads((await admin.call(ask)).body)
    assert len(shown["queueData"]) == 3
    assert shown["filterData"] == "nobody@T is not online!"
    assert "subscriptionData" not in shown
    ask.consumer_group, ask.index = None, 77
    reply = await admin.call(ask)
    assert json.loads(reply.body) == {"maxQueueIndex": 4, "minQueueIndex": 0, "queueData": []}
    assert "holds 0 to 3" in reply.remark
    ask.queue_id = 9
    with pytest.raises(Refused, match="Queue 9 of T does not exist"):
        await admin.call(ask)
