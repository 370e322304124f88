"""What the broker sends to clients unasked: never to an account without the right to it.

Each case makes the broker push one code while a stranger does what it can to get it too.
"""

from __future__ import annotations

import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.access.push_kit import (
    ADMIN,
    OWNER,
    PUSHED,
    STRANGER,
    TWIN,
    Client,
    World,
    until,
    world,
)

from cosmodrome.errors import Code, Refused
from cosmodrome.wire import bodies, commands

REPLY = "MSG_TYPE\x01reply\x02REPLY_TO_CLIENT\x01honest\x02CORRELATION_ID\x01x"
SOON: dict[str, Any] = {
    "transaction_check_interval": 10,
    "transaction_time_out": 0,
    "transaction_check_max": 1000,
}


class Three:
    """An owner that has to get the push, a stranger that must not, and an operator."""

    def __init__(self, here: World) -> None:
        self.owner, self.stranger = here.client(OWNER), here.client(STRANGER)
        self.admin = here.client(ADMIN)

    async def meet(self) -> commands.SendReply:
        """Owner and stranger in one group, and a message of the owner's topic; the stranger was
        there first."""
        sent = await self.owner.send("Secret", b"for the owner")
        await self.stranger.beat("nosy", consumer="shared")
        await self.owner.beat("honest", consumer="shared", topics="Secret")
        await self.owner.call(
            commands.UpdateConsumerOffset(
                consumer_group="shared", topic="Secret", queue_id=0, commit_offset=1
            )
        )
        return sent


async def check_transaction(three: Three) -> None:
    await three.stranger.beat("honest", producer="tx")
    await three.owner.beat("honest", producer="tx")
    await three.owner.send_half("Secret", b"for the owner")
    await until(lambda: len(three.owner.seen.asks[39]) >= 3)


async def members_changed(three: Three) -> None:
    with pytest.raises(Refused, match="no right SUB to group 'private'"):
        await three.stranger.beat("honest", consumer="private")
    await three.owner.beat("honest", consumer="private", topics="Secret")
    await three.owner.beat("another name", consumer="private", topics="Secret")


async def offsets_reset(three: Three) -> None:
    await three.meet()
    await three.admin.call(
        commands.InvokeBrokerToResetOffset(
            topic="Secret", group="shared", timestamp=-1, is_force=True
        )
    )


async def status_asked(three: Three) -> None:
    await three.meet()
    await three.admin.call(
        commands.InvokeBrokerToGetConsumerStatus(topic="Secret", group="shared", client_addr="")
    )


async def report_asked(three: Three) -> None:
    await three.meet()
    await three.stranger.beat("honest", consumer="shared")
    await three.admin.call(
        commands.GetConsumerRunningInfo(consumer_group="shared", client_id="honest")
    )


async def consumed_directly(three: Three) -> None:
    sent = await three.meet()
    for client_id in ("honest", "nosy"):
        ask = commands.ConsumeMessageDirectly(
            consumer_group="shared", client_id=client_id, msg_id=sent.msg_id
        )
        if client_id == "honest":
            await three.admin.call(ask)
        else:
            with pytest.raises(Refused, match="may not read this") as refused:
                await three.admin.call(ask)
            assert refused.value.code == Code.NO_PERMISSION


async def reply_came(three: Three) -> None:
    await three.owner.beat("honest", producer="asking")
    await three.stranger.beat("honest", producer="asking")
    await reply(three.owner)


async def reply(client: Client) -> None:
    await client.call(
        commands.SendReplyMessageV2(
            producer_group="answering",
            topic="DefaultCluster_REPLY_TOPIC",
            default_topic="TBW102",
            default_topic_queue_nums=1,
            queue_id=0,
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties=REPLY,
            body=b"for the owner",
        )
    )


CASES: dict[int, Callable[[Three], Awaitable[None]]] = {
    39: check_transaction,
    40: members_changed,
    220: offsets_reset,
    221: status_asked,
    307: report_asked,
    309: consumed_directly,
    326: reply_came,
}


@pytest.mark.parametrize("code", PUSHED)
async def test_a_push_reaches_its_client_and_no_stranger(code: int, tmp_path: pathlib.Path) -> None:
    assert code in CASES, "a broker can push this: add a case of who must not get it"
    async with world(tmp_path, **SOON) as here:
        three = Three(here)
        await CASES[code](three)
        assert await three.owner.got(code)
        assert await three.stranger.got(code) == []


async def test_a_client_id_is_free_when_its_client_gave_it_up(tmp_path: pathlib.Path) -> None:
    async with world(tmp_path) as here:
        three = Three(here)
        await reply_came(three)
        await three.owner.beat("another name", producer="asking")
        await three.stranger.beat("honest", producer="asking")
        await reply(three.owner)
        assert len(await three.stranger.got(326)) == 1


async def test_clients_of_one_account_take_their_id_along(tmp_path: pathlib.Path) -> None:
    async with world(tmp_path) as here:
        before, after = here.client(OWNER), here.client(OWNER)
        await before.beat("honest", producer="asking")
        await after.beat("honest", producer="asking")
        await reply(here.client(OWNER))
        assert await after.got(326) and not await before.got(326)


async def test_a_client_id_alone_gives_nobody_a_lock(tmp_path: pathlib.Path) -> None:
    async with world(tmp_path) as here:
        owner, twin = here.client(OWNER), here.client(TWIN)
        body = bodies.encode(
            bodies.LockBatchRequestBody(
                client_id="honest",
                consumer_group="shared",
                mq_set=[bodies.MessageQueue(broker_name="b", queue_id=0, topic="Secret")],
            )
        )

        async def locks(client: Client) -> int:
            answer = await client.call(commands.LockBatchMq(body=body))
            return len(bodies.decode(bodies.LockBatchResponseBody, answer.body).lock_ok_mq_set)

        assert await locks(owner) == 1
        assert await locks(twin) == 0
        await twin.call(commands.UnlockBatchMq(body=body))
        assert await locks(twin) == 0
        await owner.call(commands.UnlockBatchMq(body=body))
        assert await locks(twin) == 1
