"""TLS and plain connections on one port: who is let in, and what survives hostile peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from tests import tls_kit
from tests.unit.transport.raw_peer import HOST, Offsets, RawPeer, frame, max_offset, until
from tests.unit.wire.wrong_requests import header_of

from cosmodrome.env.options import SocketOptions
from cosmodrome.errors import ConfigError, Unreachable
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.http.health import HealthServer
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.transport.tls import Door, SecureTransport
from cosmodrome.wire.commands import GetMaxOffset, SendMessageV2, SendReply
from cosmodrome.wire.table import BODY_BYTES_MAX, BROKER, Call

Run = Callable[[Coroutine[Any, Any, None]], None]
ASK = GetMaxOffset(topic="T", queue_id=3)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario on each of the two event loops."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(scenario, 120))

    return run


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tls_kit.certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another authority."""
    return tls_kit.certificates(tmp_path_factory.mktemp("strangers"))


@contextlib.asynccontextmanager
async def serving(door: Door, service: object = None) -> AsyncIterator[tuple[Server, int]]:
    router = Router(BROKER, [service or Offsets()], partial=True)
    server = Server(router, SocketOptions(), "broker", door=door)
    port = await server.listen(HOST, 0)
    try:
        yield server, port
    finally:
        await server.stop(grace_ms=0)


async def connect(port: int, context: ssl.SSLContext) -> RawPeer:
    return RawPeer(*await asyncio.open_connection(HOST, port, ssl=context))


def door(certs: Path, **changes: Any) -> Door:
    return tls_kit.server(tls_kit.settings(certs, **changes)).door


async def refused(port: int, context: ssl.SSLContext) -> None:
    """With TLS 1.3 a client hears what became of its certificate with its first read."""
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        peer = await connect(port, context)
        try:
            await peer.ask(max_offset(1))
        finally:
            peer.writer.transport.abort()


# --- both kinds on one port ----------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_permissive_serves_both(run: Run, certs: Path, version: ssl.TLSVersion) -> None:
    async def scenario() -> None:
        context = tls_kit.client(certs)
        context.minimum_version = context.maximum_version = version
        async with serving(door(certs)) as (server, port):
            for peer in (await connect(port, context), await RawPeer.connect(port)):
                reply = await peer.ask(max_offset(5, queue_id=3))
                assert (reply["opaque"], reply["extFields"]) == (5, {"offset": "3"})
                await peer.close()
            await until(lambda: server.connections == 0)

    run(scenario())


def test_enforcing_refuses_plain(run: Run, certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving(door(certs, tls_server_mode="enforcing")) as (_, port):
            plain = await RawPeer.connect(port)
            plain.send(max_offset(1))
            assert await plain.ended() == b""
            await plain.close()
            peer = await connect(port, tls_kit.client(certs))
            assert (await peer.ask(max_offset(2)))["opaque"] == 2
            await peer.close()

    run(scenario())
    assert "tls.server.mode is enforcing" in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tls_server_mode": "disabled"}, "tls.server.mode=disabled"),
        ({"tls_server_cert_path": ""}, "set tls.server.certPath"),
    ],
)
def test_tls_is_refused_with_the_reason(
    run: Run, certs: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str], why: str
) -> None:
    async def scenario() -> None:
        async with serving(door(certs, **changes)) as (_, port):
            with pytest.raises(OSError):
                await connect(port, tls_kit.client(certs))
            peer = await RawPeer.connect(port)
            assert (await peer.ask(max_offset(2)))["opaque"] == 2
            await peer.close()

    run(scenario())
    assert why in caplog.text


def test_old_versions_are_refused(run: Run, certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A greeting of TLS 1.0, by hand: OpenSSL of today does not make one.
    body = b"\x03\x01" + bytes(32) + b"\x00" + b"\x00\x02\x00\x2f" + b"\x01\x00"
    hello = b"\x16\x03\x01" + (len(body) + 4).to_bytes(2, "big") + b"\x01"
    hello += len(body).to_bytes(3, "big") + body

    async def scenario() -> None:
        async with serving(door(certs)) as (_, port):
            peer = await RawPeer.connect(port)
            peer.send(hello)
            assert (await peer.ended())[:1] == b"\x15"  # an alert, nothing else
            await peer.close()

    run(scenario())
    assert "before TLS 1.2" in caplog.text


# --- certificates --------------------------------------------------------------------------------


def test_mutual_tls(
    run: Run, certs: Path, strangers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tls_kit.server(tls_kit.mutual(certs)).door) as (server, port):
            peer = await connect(port, tls_kit.client(certs, shows=certs))
            assert (await peer.ask(max_offset(1)))["opaque"] == 1
            await peer.close()
            await refused(port, tls_kit.client(certs))
            await refused(port, tls_kit.client(certs, shows=strangers))
            await until(lambda: server.connections == 0)

    run(scenario())
    assert "it shows no certificate" in caplog.text
    assert "its certificate is not accepted" in caplog.text


def test_an_expired_certificate_of_a_client(
    run: Run, certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).write_bytes((certs / name).read_bytes())
    expired = tls_kit.certificates(tmp_path, days=-1)

    async def scenario() -> None:
        async with serving(tls_kit.server(tls_kit.mutual(certs)).door) as (_, port):
            await refused(port, tls_kit.client(certs, shows=expired))

    run(scenario())
    assert "certificate has expired" in caplog.text


async def test_our_channel_says_what_is_wrong_with_a_server(certs: Path, strangers: Path) -> None:
    async def call(port: int, context: ssl.SSLContext, host: str = HOST) -> int:
        channel = Channel(host, port, tls=lambda: context)
        try:
            return (await channel.call(ASK)).offset
        finally:
            await channel.close()

    async with serving(door(certs)) as (_, port):
        assert await call(port, tls_kit.client(certs)) == 3
        with pytest.raises(Unreachable, match=r"not accepted: .*which authority is trusted"):
            await call(port, tls_kit.client(strangers))


# --- bytes ---------------------------------------------------------------------------------------


class Echo:
    @SendMessageV2.handler
    def send(self, ask: SendMessageV2, call: Call) -> SendReply:
        return SendReply(msg_id="", queue_id=0, queue_offset=0, body=ask.body)


def test_large_bodies_both_ways(run: Run, certs: Path) -> None:
    async def scenario() -> None:
        body = bytes(range(256)) * (4 * 4096)
        async with serving(door(certs), Echo()) as (_, port):
            peer = await connect(port, tls_kit.client(certs))
            for opaque in range(3):
                reply = await peer.ask(frame(310, opaque, header_of(SendMessageV2), body))
                assert reply["body"] == body
            await peer.close()

    run(scenario())


def test_many_frames_in_one_write(run: Run, certs: Path) -> None:
    async def scenario() -> None:
        async with serving(door(certs)) as (_, port):
            peer = await connect(port, tls_kit.client(certs))
            peer.send(b"".join(max_offset(i, queue_id=i) for i in range(3000)))
            for i in range(3000):
                reply = await peer.read()
                assert (reply["opaque"], reply["extFields"]["offset"]) == (i, str(i))
            await peer.close()

    run(scenario())


class Trickle:
    """A TLS client over a plain socket whose bytes leave one by one."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=HOST)
        self._port = port

    async def ask(self, data: bytes, answer_bytes: int) -> bytes:
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        await self._until_done(self._tls.do_handshake)
        self._tls.write(data)
        await self._drip()
        answer = b""
        while len(answer) < answer_bytes:
            answer += await self._until_done(lambda: self._tls.read(65536))
        self._writer.close()
        return answer

    async def _until_done(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._drip()
                self._incoming.write(await self._reader.read(7))
            else:
                await self._drip()
                return result

    async def _drip(self) -> None:
        for byte in self._outgoing.read():
            self._writer.write(bytes([byte]))
            await asyncio.sleep(0)


def test_byte_by_byte(run: Run, certs: Path) -> None:
    async def scenario() -> None:
        async with serving(door(certs)) as (server, port):
            plain = await RawPeer.connect(port)
            wanted = await plain.ask(max_offset(1, queue_id=2))
            plain.send(max_offset(1, queue_id=2))
            size = 4 + int.from_bytes(await plain.reader.readexactly(4), "big")
            await plain.close()
            answer = await Trickle(port, tls_kit.client(certs)).ask(max_offset(1, 2), size)
            assert len(answer) == size and wanted["extFields"]["offset"].encode() in answer
            await until(lambda: server.connections == 0)

    run(scenario())


def test_a_peer_that_does_not_read_stops_being_served(run: Run, certs: Path) -> None:
    async def scenario() -> None:
        body = bytes(BODY_BYTES_MAX)
        requests = 24 * (1 << 20) // BODY_BYTES_MAX
        async with serving(door(certs)) as (server, port):
            peer = await connect(port, tls_kit.client(certs))
            transport = cast(asyncio.Transport, peer.writer.transport)
            transport.pause_reading()
            for opaque in range(requests):
                peer.send(frame(30, opaque, {"topic": "T", "queueId": 1}, body))
            (one,) = server._connections
            await until(lambda: one.writing_paused)
            assert one._transport is not None
            held = one._transport.get_write_buffer_size()
            assert held < 8 << 20  # of 24 MiB
            transport.resume_reading()
            for opaque in range(requests):
                assert (await peer.read())["opaque"] == opaque
            await peer.close()

    run(scenario())


def test_a_peer_that_asks_for_keys_and_does_not_read(
    run: Run, certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(door(certs)) as (server, port):
            peer = await connect(port, tls_kit.client(certs))
            cast(asyncio.Transport, peer.writer.transport).pause_reading()
            for opaque in range(16 * (1 << 20) // BODY_BYTES_MAX):
                peer.send(frame(30, opaque, {"topic": "T", "queueId": 1}, bytes(BODY_BYTES_MAX)))
            (one,) = server._connections
            await until(lambda: one.writing_paused)
            # OpenSSL answers a change of keys so; the client's side cannot be made to ask.
            secure = cast(SecureTransport, one._transport)
            secure._outgoing.write(b"an answer")
            secure._go_on()
            await until(lambda: server.connections == 0)
            peer.writer.transport.abort()

    run(scenario())
    assert "it asks for new keys" in caplog.text


# --- hostile peers -------------------------------------------------------------------------------


def test_a_handshake_that_stalls_is_ended(
    run: Run, certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        slow = door(certs)
        slow.handshake_timeout_s = 0.05
        async with serving(slow) as (server, port):
            peer = await RawPeer.connect(port)
            peer.send(b"\x16\x03\x01\x02\x00\x01\x00")  # of 512 bytes that never come
            assert await peer.ended() == b""
            await peer.close()
            await until(lambda: server.connections == 0)

    run(scenario())
    assert "the handshake was not done within 0.05 s" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x00\x05hello", b"\x16\x03\xff\xff\xff" + b"x" * 70_000, b"\x16\x03\x01\0\0"],
)
def test_garbage_that_begins_like_tls(run: Run, certs: Path, garbage: bytes) -> None:
    async def scenario() -> None:
        fast = door(certs)
        fast.handshake_timeout_s = 0.2
        async with serving(fast) as (server, port):
            peer = await RawPeer.connect(port)
            peer.send(garbage)
            assert (await peer.ended())[:1] in (b"", b"\x15")
            await peer.close()
            await until(lambda: server.connections == 0)

    run(scenario())


def test_damaged_records_end_the_connection_only(
    run: Run, certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(door(certs)) as (server, port):
            raw = socket.create_connection((HOST, port))
            raw.setblocking(False)
            peer = RawPeer(
                *await asyncio.open_connection(
                    sock=raw, ssl=tls_kit.client(certs), server_hostname=HOST
                )
            )
            assert (await peer.ask(max_offset(1)))["opaque"] == 1
            damaged = socket.socket(fileno=socket.dup(raw.fileno()))
            damaged.send(b"\x17\x03\x03\x00\x20" + bytes(32))
            damaged.close()
            with contextlib.suppress(ssl.SSLError):
                await peer.ended()
            peer.writer.transport.abort()
            await until(lambda: server.connections == 0)

    run(scenario())
    assert "tls_failed" in caplog.text


def test_other_protocols_within_tls(
    run: Run, certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(door(certs)) as (_, port):
            peer = await connect(port, tls_kit.client(certs))
            peer.send(b"GET / HTTP/1.1\r\n\r\n")
            assert b"400 Bad Request" in await peer.ended()
            await peer.close()
            peer = await connect(port, tls_kit.client(certs))
            peer.send(b"\x16\x03\x01\x00\x05hello")
            assert await peer.ended() == b""
            await peer.close()

    run(scenario())
    assert "TLS within TLS" in caplog.text


# --- the HTTP port -------------------------------------------------------------------------------


def test_probes_over_tls(run: Run, certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask(port: int, context: ssl.SSLContext | None) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()

    async def scenario() -> None:
        for mode in ("permissive", "enforcing", "disabled"):
            probes = {"/livez": lambda: (True, "alive")}
            health = HealthServer(probes, door=door(certs, tls_server_mode=mode))
            port = await health.listen(HOST, 0)
            if mode == "disabled":
                with pytest.raises(OSError):
                    await ask(port, tls_kit.client(certs))
            else:
                assert (await ask(port, tls_kit.client(certs))).endswith(b"alive\n")
            plain = await ask(port, None)
            assert plain.endswith(b"use https://\n" if mode == "enforcing" else b"alive\n")
            await health.stop()

    run(scenario())
    assert "tls.server.mode=disabled" in caplog.text


# --- renewal -------------------------------------------------------------------------------------


async def test_new_certificates_are_used_by_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    certs = tls_kit.certificates(tmp_path)
    tls = tls_kit.server(tls_kit.settings(certs))
    watched = tls._watched[0]

    def shown(peer: RawPeer) -> bytes:
        return bytes(peer.writer.get_extra_info("ssl_object").getpeercert(binary_form=True))

    async with serving(tls.door) as (_, port):
        old = await connect(port, tls_kit.client(certs))
        watched.look()
        assert tls.outgoing() is None and "renewed" not in caplog.text
        key = (certs / "server.key").read_bytes()
        tls_kit.certificates(certs)
        mended = (certs / "server.key").read_bytes()
        (certs / "server.key").write_bytes(key)  # the pair does not fit
        watched.look()
        assert "certificates_not_renewed" in caplog.text
        second = await connect(port, tls_kit.client(certs))
        assert shown(second) == shown(old)
        (certs / "server.key").write_bytes(mended)
        watched.look()
        assert "certificates_renewed" in caplog.text
        third = await connect(port, tls_kit.client(certs))
        assert shown(third) != shown(old)
        for opaque, peer in enumerate((old, second, third)):
            assert (await peer.ask(max_offset(opaque)))["opaque"] == opaque
            await peer.close()


async def test_expiry_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certs = tls_kit.certificates(tmp_path, days=40)
    tls_kit.server(tls_kit.settings(certs))
    assert "certificate_expires" not in caplog.text
    tls_kit.certificates(certs, days=20)
    tls = tls_kit.server(tls_kit.settings(certs))
    assert "days=19" in caplog.text
    tls._watched[0].look()
    assert caplog.text.count("certificate_expires") == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tls_server_mode": "enforcing", "tls_server_cert_path": ""}, "there is no certificate"),
        ({"tls_server_need_client_auth": "require"}, "tls.server.trustCertPath"),
        ({"tls_server_cert_path": "/no/such.pem"}, "No such file"),
        ({"tls_server_key_path": "{}/client.key"}, "KEY_VALUES_MISMATCH"),
        ({"tls_server_cert_path": "{}/ca.key"}, "belong together"),
        ({"tls_enable": True, "tls_client_trust_cert_path": "{}/ca.key"}, "PEM file with"),
        ({"tls_enable": True, "tls_client_cert_path": "{}/ca.pem"}, "tls.client.keyPassword"),
    ],
)
def test_settings_that_cannot_work(certs: Path, changes: dict[str, Any], why: str) -> None:
    filled = {
        name: value.format(certs) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    with pytest.raises(ConfigError, match=why):
        tls_kit.server(tls_kit.settings(certs, **filled))
