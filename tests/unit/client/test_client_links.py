"""Connections by address: which ones stay and which ones go."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.unit.client.conftest import until

from cosmodrome.client.links import Links
from cosmodrome.client.options import ClientOptions
from cosmodrome.transport.router import Router
from cosmodrome.wire import commands
from cosmodrome.wire.table import CLIENT


async def test_a_connection_with_a_call_under_way_is_not_dropped(node: Any) -> None:
    await node.create_topic("T", 1)
    links = Links(ClientOptions(), Router(CLIENT, (), partial=True))
    address = f"127.0.0.1:{node.broker.port}"
    held = asyncio.create_task(
        links.call(
            address,
            commands.PullMessage(
                consumer_group="g",
                topic="T",
                queue_id=0,
                queue_offset=0,
                max_msg_nums=1,
                sys_flag=2 | 4,
                commit_offset=0,
                suspend_timeout_millis=600_000,  # until a message arrives
                subscription="*",
                sub_version=0,
            ),
            timeout_ms=600_000,
        )
    )
    await until(lambda: links.channel(address).live is not None)
    channel = links.channel(address)
    await links.drop_others(())
    assert links.channel(address) is channel
    await node.send("T", b"ends the hold")
    assert (await held).code == 0
    await links.drop_others(())
    assert links.channel(address) is not channel
    await links.close()


async def test_pulls_do_not_use_the_vip_port(node: Any) -> None:
    links = Links(ClientOptions(vip_channel=True), Router(CLIENT, (), partial=True))
    advertised = f"127.0.0.1:{node.broker.port}"
    address = links.broker_address(advertised)
    assert address == f"127.0.0.1:{node.broker.port - 2}"
    reply = await links.call(
        address,
        commands.PullMessage(
            consumer_group="g",
            topic="SELF_TEST_TOPIC",
            queue_id=0,
            queue_offset=0,
            max_msg_nums=1,
            sys_flag=4,
            commit_offset=0,
            suspend_timeout_millis=0,
            subscription="*",
            sub_version=0,
        ),
    )
    assert reply.code == 19
    channel = links.channel(advertised)
    await links.drop_others([address])
    assert links.channel(advertised) is channel
    await links.close()
