"""Signed requests and encrypted connections."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import shlex
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.client.conftest import Node
from tests.unit.client.producer_kit import stored

from cosmodrome.client.options import ClientOptions, Credentials
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.signing import sign
from cosmodrome.client.values import Message, SendStatus
from cosmodrome.errors import Unreachable
from cosmodrome.wire.frame import Frame, FrameSplitter

KEYS = Credentials("RocketMQ", "12345678")


def test_signatures_are_those_of_the_java_client() -> None:
    fields = {
        "a": "PG",
        "b": "T",
        "c": "TBW102",
        "d": "4",
        "e": "1",
        "f": "0",
        "g": "1700000000000",
        "h": "0",
        "i": "TAGS\x01A",
        "j": "0",
        "k": "false",
        "m": "false",
    }
    send = Frame(310, 1, ext=fields, body=b"hello")
    sign(send, KEYS)
    assert send.ext["Signature"] == "iAhMu+kEey2gfJJd68eSmjblZQE="
    bare = Frame(34, 1, body=b"{}")
    sign(bare, KEYS)
    assert bare.ext == {"AccessKey": "RocketMQ", "Signature": "pq0tPL2lAz7bhIfEGHu4hhut1Yw="}


def test_keys_do_not_show_in_words() -> None:
    assert "12345678" not in repr(KEYS)


async def test_every_request_is_signed_on_its_way() -> None:
    seen: list[Frame] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = FrameSplitter()
        while data := await reader.read(4096):
            seen.extend(splitter.feed(data))
            writer.close()

    class Mark:
        def before_request(self, address: str, frame: Frame) -> None:
            frame.ext["marked"] = address

        def after_response(self, address: str, request: Frame, response: Frame) -> None:
            raise AssertionError("nothing was answered")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = ClientOptions(
        credentials=Credentials("ak", "sk", "token"), rpc_hooks=(Mark(),), instance_name="signed"
    )
    async with Producer(address, group="g", client=options) as producer:
        with pytest.raises(Unreachable):
            await producer.send(Message("t", b"x"))
    server.close()
    await server.wait_closed()
    ext = seen[0].ext
    assert ext["marked"] == address
    assert ext["AccessKey"] == "ak" and ext["SecurityToken"] == "token"
    content = "".join(ext[name] for name in sorted(ext) if name != "Signature").encode()
    digest = hmac.new(b"sk", content + seen[0].body, hashlib.sha1).digest()
    assert ext["Signature"] == base64.b64encode(digest).decode()


@contextlib.asynccontextmanager
async def tls_in_front(target: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """A port that speaks TLS and hands everything to a plain one."""
    host, _, port = target.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        if tasks:
            await asyncio.wait(tasks, timeout=60)


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server with a certificate of its own, and of a client that trusts it."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("openssl is needed to make a certificate")
    key, cert = folder / "key.pem", folder / "cert.pem"
    options = shlex.split(
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        " -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [tool, *options, "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=str(cert))


async def test_sends_over_tls(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving, trusting = certificate(tmp_path)
    async with (
        tls_in_front(node.namesrv, serving) as namesrv,
        tls_in_front(node.broker.address, serving) as broker,
    ):
        from cosmodrome.client.links import Links

        monkeypatch.setattr(Links, "broker_address", lambda self, advertised: broker)
        client = ClientOptions(tls=trusting, instance_name="tls")
        async with Producer(namesrv, group="tls", client=client) as producer:
            results = await asyncio.gather(
                *(producer.send(Message("tls", b"secret" * 100)) for _ in range(20))
            )
            assert {result.status for result in results} == {SendStatus.OK}
        distrusting = ClientOptions(tls=ssl.create_default_context(), instance_name="wary")
        async with Producer(namesrv, group="tls", client=distrusting) as producer:
            with pytest.raises(Unreachable, match="no TLS with"):
                await producer.send(Message("tls", b"x"))
    assert len(await stored(node.broker, "tls")) == 20
