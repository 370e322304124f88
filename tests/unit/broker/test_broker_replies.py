from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_clients_kit import RunningBroker, running_broker

from cosmodrome.broker.send import replies
from cosmodrome.errors import Code, Refused
from cosmodrome.wire import commands
from cosmodrome.wire.message import parse_properties
from cosmodrome.wire.table import Call, Reply

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
PROPERTIES = "MSG_TYPE\x01reply\x02REPLY_TO_CLIENT\x01asker\x02TTL\x013000\x02CORRELATION_ID\x01x"


class Asker:
    """Waits for replies; `code` is what it says to them."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.got: list[commands.PushReplyMessageToClient] = []
        self.hold = asyncio.Event()
        self.hold.set()

    @commands.PushReplyMessageToClient.handler
    async def take(self, ask: commands.PushReplyMessageToClient, call: Call) -> Reply:
        self.got.append(ask)
        await self.hold.wait()
        return Reply(code=self.code, remark=None if self.code == 0 else "no")


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with running_broker(tmp_path) as here:
        yield here


@pytest.mark.parametrize("row", [commands.SendReplyMessage, commands.SendReplyMessageV2])
async def test_a_reply_reaches_the_client_that_asked(here: RunningBroker, row: object) -> None:
    asker = Asker()
    await here.client("asker", asker).join()
    replier = await here.client("replier").join(producer="R")
    before_ms = int(time.time() * 1000)
    asker.hold.clear()
    sending = asyncio.create_task(
        replier.send(
            b"42",
            row,
            topic=REPLY_TOPIC,
            producer_group="R",
            properties=PROPERTIES,
            flag=3,
            unit_mode=False,
            reconsume_times=0,
        )
    )
    while not asker.got:
        await asyncio.sleep(0.005)
    assert not sending.done()  # answered only when the asker has it
    asker.hold.set()
    reply = await sending
    (got,) = asker.got
    assert (got.body, got.topic, got.producer_group, got.flag) == (b"42", REPLY_TOPIC, "R", 3)
    assert (got.default_topic, got.default_topic_queue_nums) == ("TBW102", 2)
    assert got.store_host == here.broker.address
    assert got.born_host.startswith("127.0.0.1:")
    pairs = parse_properties(got.properties or "")
    assert before_ms <= int(pairs.pop("PUSH_REPLY_TIME")) <= int(time.time() * 1000)
    assert pairs == parse_properties(PROPERTIES)
    # It is stored as well, as it came.
    assert (reply.code, reply.queue_offset) == (0, 0)
    (record,) = await replier.pull(REPLY_TOPIC)
    assert record.message_id == reply.msg_id
    assert (record.body, record.properties) == (b"42", PROPERTIES)


async def test_without_storing_the_id_is_zero(tmp_path: Path) -> None:
    async with running_broker(tmp_path, store_reply_message_enable=False) as here:
        await here.client("asker", Asker()).join()
        replier = here.client("replier")
        reply = await replier.send(
            topic=REPLY_TOPIC, row=commands.SendReplyMessageV2, properties=PROPERTIES
        )
        assert (reply.msg_id, reply.queue_id, reply.queue_offset) == ("0", 0, 0)
        assert (reply.region, reply.trace_on) == ("DefaultRegion", True)
        assert await replier.pull(REPLY_TOPIC) == []


@pytest.mark.parametrize(
    ("properties", "word"),
    [
        ("", "no property REPLY_TO_CLIENT"),
        ("REPLY_TO_CLIENT\x01nobody", "nobody that waits for this reply is not connected"),
        ("REPLY_TO_CLIENT\x01sulky", "did not take the reply"),
    ],
)
async def test_a_reply_that_does_not_arrive_is_refused_but_stored(
    here: RunningBroker, properties: str, word: str
) -> None:
    await here.client("sulky", Asker(code=1)).join()
    replier = here.client("replier")
    with pytest.raises(Refused, match=word) as caught:
        await replier.send(
            topic=REPLY_TOPIC, row=commands.SendReplyMessageV2, properties=properties
        )
    assert caught.value.code == Code.SYSTEM_ERROR
    assert len(await replier.pull(REPLY_TOPIC)) == 1


async def test_a_silent_asker_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "PUSH_TIMEOUT_MS", 30)
    async with running_broker(tmp_path) as here:
        asker = Asker()
        asker.hold.clear()
        await here.client("asker", asker).join()
        with pytest.raises(Refused, match="within 30 ms"):
            await here.client("replier").send(
                topic=REPLY_TOPIC, row=commands.SendReplyMessageV2, properties=PROPERTIES
            )
        asker.hold.set()


async def test_the_checks_of_a_send_hold_for_a_reply(here: RunningBroker) -> None:
    asker = Asker()
    await here.client("asker", asker).join()
    for changes, code in (
        ({"topic": "bad name"}, 1),
        ({"queue_id": 99}, 1),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, 16),
    ):
        with pytest.raises(Refused) as caught:
            await here.client("replier").send(
                row=commands.SendReplyMessageV2,
                **dict[str, Any](topic=REPLY_TOPIC, properties=PROPERTIES) | changes,
            )
        assert caught.value.code == code
    assert asker.got == []


async def test_the_newest_connection_of_a_client_is_used(here: RunningBroker) -> None:
    first, second = Asker(), Asker()
    old = await here.client("asker", first).join()
    await here.client("asker", second).join()
    await old.channel.close()
    await here.client("replier").send(
        topic=REPLY_TOPIC, row=commands.SendReplyMessageV2, properties=PROPERTIES
    )
    assert (len(first.got), len(second.got)) == (0, 1)
