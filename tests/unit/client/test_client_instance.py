"""Instances against a real name server and broker in the same process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.client.conftest import Node, until

from cosmodrome.client.instance import acquire, release
from cosmodrome.client.options import ClientOptions, name_servers
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, ProtocolError


async def test_equal_options_share_an_instance_and_the_last_user_stops_it() -> None:
    env = real_env(1)
    one = await acquire("127.0.0.1:1", ClientOptions(), env)
    two = await acquire("127.0.0.1:1", ClientOptions(), env)
    other = await acquire("127.0.0.1:1", ClientOptions(instance_name="x"), env)
    assert one is two
    assert one is not other
    assert one.client_id != other.client_id
    await release(one)
    again = await acquire("127.0.0.1:1", ClientOptions(), env)
    assert again is one
    for instance in (one, two, other):
        await release(instance)


def test_name_servers_are_read_from_text_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_servers("a:1;b:2,a:1") == (("a", 1), ("b", 2))
    assert name_servers("[::1]:9876") == (("::1", 9876),)
    monkeypatch.setenv("COSMO_NAMESRV", "c:3")
    assert name_servers(None) == (("c", 3),)
    monkeypatch.delenv("COSMO_NAMESRV")
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    assert name_servers(None) == (("127.0.0.1", 9876),)
    with pytest.raises(ConfigError, match="host:port"):
        name_servers("nonsense")


@pytest.mark.parametrize("error", [ProtocolError("bad body"), ZeroDivisionError("a mistake")])
async def test_routes_are_refreshed_after_an_answer_that_made_no_sense(
    node: Node, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.create_topic("T", 1)
    options = ClientOptions(route_refresh_ms=100)
    async with Producer(node.namesrv, group="p", client=options) as producer:
        await producer.send(Message("T", b"x"))
        routes = producer._live().routes
        asked = 0
        ask = routes._ask_name_server

        async def failing(topic: str) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise error
            return await ask(topic)

        monkeypatch.setattr(routes, "_ask_name_server", failing)
        await until(lambda: asked >= 3)


async def test_heartbeats_go_on_after_an_unexpected_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Producer(node.namesrv, group="p") as producer:
        instance = producer._live()
        beats = 0

        async def failing() -> None:
            nonlocal beats
            beats += 1
            raise ZeroDivisionError("a mistake")

        monkeypatch.setattr(instance, "heartbeat", failing)
        await until(lambda: instance.heartbeat_soon() or beats >= 3)
