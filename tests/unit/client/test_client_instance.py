"""Instances against a real name server and broker in the same process."""

from __future__ import annotations

import pytest

from cosmodrome.client.instance import acquire, release
from cosmodrome.client.options import ClientOptions, name_servers
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError


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
