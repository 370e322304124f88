"""Whole servers with TLS: clients, registration, the fast lane, a pair."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests import tls_kit
from tests.unit.broker.broker_pair_kit import Member, pair, send, until
from tests.unit.broker.test_broker_pair import pull

from cosmodrome.broker.operate import metric_table
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message
from cosmodrome.errors import CosmodromeError
from cosmodrome.node import Node, embedded
from cosmodrome.replication.values import FollowerState, SourceFacts
from cosmodrome.transport.http.exposition import Sample
from cosmodrome.wire.frame import Frame, FrameSplitter
from cosmodrome.wire.session import Session


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tls_kit.certificates(tmp_path_factory.mktemp("tls"))


async def read_all(namesrv: str, client: ClientOptions) -> list[bytes]:
    found: list[bytes] = []
    async with PullConsumer(namesrv, group="readers", client=client) as consumer:
        for queue in await consumer.queues("T"):
            result = await consumer.pull(queue, 0)
            found += [message.body for message in result.messages]
    return found


@pytest.mark.parametrize("kind", ["permissive", "enforcing", "mutual"])
async def test_a_node_with_our_client(certs: Path, kind: str) -> None:
    chosen = tls_kit.mutual(certs) if kind == "mutual" else tls_kit.settings(certs)
    chosen["tls_server_mode"] = "permissive" if kind == "permissive" else "enforcing"
    context = tls_kit.client(certs, shows=certs if kind == "mutual" else None)
    client = ClientOptions(tls=context, instance_name=kind)
    sent = [b"%d" % number * 5000 for number in range(20)]
    async with embedded(**chosen) as node:
        async with Producer(node.namesrv, group="g", client=client) as producer:
            for body in sent:
                await producer.send(Message("T", body))
        assert sorted(await read_all(node.namesrv, client)) == sorted(sent)
        plain = ClientOptions(instance_name=f"plain {kind}", call_timeout_ms=1_000)
        async with Admin(node.namesrv, client=plain) as admin:
            if kind == "permissive":
                assert await admin.brokers.addresses()
            else:
                with pytest.raises(CosmodromeError):
                    await admin.brokers.addresses()


async def test_the_end_of_the_certificate_is_a_metric(certs: Path) -> None:
    async with embedded(**tls_kit.settings(certs)) as node:
        assert node._broker is not None
        (source,) = node._broker.metrics()
        told = [
            item.value
            for item in source.walk()
            if isinstance(item, Sample) and item.metric is metric_table.CERTIFICATE
        ]
    assert told == [pytest.approx(100 * 86_400, abs=86_400)]


@contextlib.asynccontextmanager
async def two_nodes(certs: Path) -> AsyncIterator[tuple[Node, Node]]:
    settings: dict[str, Any] = {"default_topic_queue_nums": 1}
    async with (
        embedded(**settings) as plain,
        embedded(**settings, **tls_kit.settings(certs)) as secure,
    ):
        yield plain, secure


class Ignored:
    """A waiter for answers that are read by hand."""

    def done(self) -> bool:
        return False

    def set_result(self, result: Frame, /) -> None: ...
    def set_exception(self, exception: CosmodromeError, /) -> None: ...


async def replies(node: Node, context: ssl.SSLContext | None, requests: list[bytes]) -> list[Frame]:
    host, _, port = node.broker_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    splitter = FrameSplitter()
    found: list[Frame] = []
    for part in requests:
        writer.write(part)
        expected = len(found) + part.count(b'"code"')
        while len(found) < expected:
            found.extend(splitter.feed(await reader.read(65536)))
    writer.close()
    await writer.wait_closed()
    return sorted(found, key=lambda each: each.opaque)


async def test_replies_are_those_of_a_plain_connection(certs: Path) -> None:
    """Many sends in one write, then pulls: the fast lane cannot write to the socket by itself."""
    session = Session()
    sends = [session.request(send(b"%d" % n * 300), Ignored())[1] for n in range(40)]
    pulls = [session.request(pull(n), Ignored())[1] for n in (0, 8, 39)]
    parts = [sends[0], b"".join(sends[1:]), *pulls]
    async with two_nodes(certs) as (plain, secure):
        expected = await replies(plain, None, parts)
        got = await replies(secure, tls_kit.client(certs), parts)
    assert [each.code for each in got] == [0] * 43
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.opaque, ours.flag, ours.remark) == (theirs.opaque, theirs.flag, theirs.remark)
        assert ours.ext.keys() == theirs.ext.keys()
        assert ours.ext.get("queueOffset") == theirs.ext.get("queueOffset")
        assert len(ours.body) == len(theirs.body)
    assert len(got[-1].body) > 600


# --- the pair ------------------------------------------------------------------------------------


async def test_a_pair_over_tls(tmp_path: Path, certs: Path) -> None:
    chosen = tls_kit.mutual(certs, tls_server_mode="enforcing")
    async with pair(tmp_path, broker_role="SYNC_MASTER", **chosen) as it:
        for number in range(30):
            await it.master.send(b"%d" % number + b"x" * 4000)
        await it.slave.has(30)
        assert it.slave.store.log_end == it.master.store.log_end
        (link,) = it.master.broker._rooms.replicate.source._links
        assert link._transport is not None
        assert link._transport.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_a_slave_without_tls_is_refused_by_name(
    tmp_path: Path, certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = tls_kit.settings(certs, tls_server_mode="enforcing")
    async with pair(tmp_path, slaves=0, **chosen) as it:
        master = it.master.broker
        reader, writer = await asyncio.open_connection("127.0.0.1", master.ha_port)
        writer.write(struct.pack(">q", 0))  # the report of a Java slave
        assert await reader.read() == b""
        writer.close()
        facts = master._rooms.replicate.facts()
        assert isinstance(facts, SourceFacts) and facts.refused_links == 1
    assert "a slave without TLS is not served" in caplog.text
    assert "a Java slave has no TLS for this stream" in caplog.text


async def test_a_slave_with_tls_refuses_a_classic_master(tmp_path: Path, certs: Path) -> None:
    chosen = tls_kit.settings(certs, tls_enable=True)
    async with pair(tmp_path, slaves=0, **chosen) as it:
        slave = Member(tmp_path / "slave", it.namesrv, 1, chosen)

        async def classic() -> bool | None:
            return False

        try:
            await slave.start()
            follower = slave.broker._rooms.replicate.slave
            assert follower is not None
            await until(lambda: slave.in_step)
            follower.follower._classic_master.speaks_ours = classic
            link = follower.follower._link
            assert link is not None
            link._transport.abort()
            await until(lambda: slave.follower.state is FollowerState.REFUSED)
            assert "whose HA stream has no TLS" in slave.follower.why
        finally:
            await slave.stop()
