"""Brokers and slaves: their own accounts, the HA port, and what addresses are for."""

from __future__ import annotations

import asyncio
import pathlib
import struct

import pytest
from tests.unit.access.access_kit import FILE, LOCAL, PEER, SECRETS, STRANGER, make_gate
from tests.unit.broker.broker_pair_kit import pair, send

from cosmodrome.access.own_account import OwnAccount
from cosmodrome.env.options import BrokerOptions
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.ports import is_own_address
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.signature import sign, signature

TEXT = b"who I am"


async def test_a_slave_with_an_account_follows_and_a_classic_one_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "accounts.yml"
    path.write_text(FILE)
    async with pair(tmp_path, acl_enable=True, acl_file=str(path)) as two:
        channel = Channel(
            "127.0.0.1",
            two.master.broker.port,
            prepare=lambda frame: sign(frame, "the-admin", SECRETS["the-admin"]),
        )
        await channel.call(send(b"for both"))
        await channel.close()
        await two.slave.has(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", two.master.broker.ha_port)
        writer.write(struct.pack(">q", 0))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(12)
        writer.close()
        assert "is no account" in two.master.source.refused_why
        assert "peerAddresses" in two.master.source.refused_why


async def test_who_may_have_the_log(tmp_path: pathlib.Path) -> None:
    gate = await make_gate(tmp_path)

    def denial(host: str, account: str = "", secret: bytes = b"") -> str:
        return gate.denies_peer(host, account, TEXT, signature(secret, {}, TEXT))

    assert denial(STRANGER, "the-slave", SECRETS["the-slave"]) == ""
    assert denial(STRANGER, "the-admin", SECRETS["the-admin"]) == ""
    assert denial(PEER) == ""
    assert "no account" in denial(STRANGER)
    assert "no account" in denial(LOCAL)
    assert "signature" in denial(STRANGER, "the-slave", b"another secret")
    assert "no peer" in denial(STRANGER, "the-broad", SECRETS["the-broad"])
    assert gate.admits_peers_at(STRANGER)  # it may sign


async def test_who_may_have_the_log_in_protected_mode(tmp_path: pathlib.Path) -> None:
    gate = await make_gate(tmp_path, acl_enable=False, bind_address="0.0.0.0")
    assert "not listed" in gate.denies_peer(STRANGER, "", b"", "")
    assert not gate.admits_peers_at(STRANGER)
    for host in (LOCAL, PEER):
        assert gate.denies_peer(host, "", b"", "") == "" and gate.admits_peers_at(host)
    gate = await make_gate(tmp_path, acl_enable=False)
    assert gate.denies_peer(STRANGER, "", b"", "") == "" and gate.admits_peers_at(STRANGER)


@pytest.mark.parametrize(
    ("settings", "access_key", "secret"),
    [
        ({}, "the-slave", SECRETS["the-slave"]),
        ({"broker_access_key": "the-admin"}, "the-admin", SECRETS["the-admin"]),
        (
            {"broker_access_key": "elsewhere", "broker_secret_key": "its-secret"},
            "elsewhere",
            b"its-secret",
        ),
        ({"broker_access_key": "nobody-here"}, None, b""),
    ],
)
async def test_the_account_of_a_broker(
    settings: dict[str, str], access_key: str | None, secret: bytes, tmp_path: pathlib.Path
) -> None:
    gate = await make_gate(tmp_path)
    frame = Frame(code=103, opaque=1, ext={"a": "b"}, body=TEXT)
    OwnAccount(BrokerOptions(**settings), gate.accounts).sign(frame)  # type: ignore[arg-type]
    assert frame.ext.get("AccessKey") == access_key
    if access_key is not None:
        assert frame.ext["Signature"] == signature(secret, frame.ext, TEXT)


def test_which_addresses_are_of_this_machine() -> None:
    assert is_own_address("127.0.0.1") and is_own_address("127.0.0.2")
    for host in ("192.0.2.1", "198.51.100.7", "?", "", "no-such-host.invalid."):
        assert not is_own_address(host), host
