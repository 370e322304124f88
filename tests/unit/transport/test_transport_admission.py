"""Which connections a server takes."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from tests.unit.transport.raw_peer import Offsets, RawPeer, max_offset, serving

from cosmodrome.env.options import SocketOptions
from cosmodrome.transport import admission
from cosmodrome.transport.admission import Admission, files_for_sockets, raise_file_limit


def test_an_address_has_its_share_and_loopback_all() -> None:
    door = Admission(SocketOptions(server_connections_per_address_max=2, server_connections_max=9))
    assert [door.admit("10.0.0.1", 5) for _ in range(2)] == ["", ""]
    assert "10.0.0.1" in door.admit("10.0.0.1", 5)
    assert "serverConnectionsPerAddressMax" in door.admit("10.0.0.1", 5)
    assert door.admit("10.0.0.2", 5) == ""
    door.leave("10.0.0.1")
    assert door.admit("10.0.0.1", 5) == ""
    assert [door.admit("127.0.0.1", 5) for _ in range(3)] == [""] * 3
    assert [door.admit("::1", 5) for _ in range(3)] == [""] * 3
    assert "serverConnectionsMax is 9" in door.admit("10.0.0.3", 5)


def test_a_host_of_ipv6_cannot_choose_another_address() -> None:
    door = Admission(SocketOptions(server_connections_per_address_max=1))
    assert door.admit("2001:db8::1", 5) == ""
    assert "2001:db8::/64" in door.admit("2001:db8::2", 5)
    assert door.admit("2001:db8:0:1::1", 5) == ""
    assert door.admit("fe80::1%eth0", 5) == ""
    assert door.admit("?", 0) == ""
    for host in ("2001:db8::7", "2001:db8:0:1::1", "fe80::1%eth0", "?"):
        door.leave(host)
    assert not door._by_network


@pytest.fixture
def few_files() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(1024, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_files_are_kept_for_the_store(few_files: int) -> None:
    door = Admission(SocketOptions())
    kept = few_files // 4
    assert files_for_sockets() == few_files - kept == door.connections_max
    assert door.admit("10.0.0.1", few_files - kept - 1) == ""
    assert "ulimit -n" in door.admit("10.0.0.1", few_files - kept)
    soft = raise_file_limit()
    assert few_files <= soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft == min(1 << 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    door.look_again()
    assert door.connections_max == min(20_000, files_for_sockets())


async def test_a_connection_that_would_take_the_stores_files_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Offsets()) as (server, port):
        peer = await RawPeer.connect(port)
        assert (await peer.ask(max_offset(1)))["code"] == 0
        monkeypatch.setattr(admission, "files_for_sockets", lambda: 3)
        server._admission.look_again()
        refused = await RawPeer.connect(port)
        assert await refused.ended() == b""
        assert (await peer.ask(max_offset(2)))["code"] == 0
        assert "too few files are left for the store" in caplog.text
        await peer.close()
        await refused.close()
