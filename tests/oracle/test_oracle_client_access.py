"""Requests signed by our client, judged by upstream's access control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from peers.clients import JAVA, Client
from peers.java import JavaCluster
from tests.oracle.access_kit import ADMIN, FORGED, UNKNOWN, USER, guarded_cluster
from tests.oracle.client_kit import Inbox, running

from cosmodrome import Admin, ClientOptions, Consumer, Message, Producer, SendFailed
from cosmodrome.client.operate.fleet import PartlyFailed
from cosmodrome.errors import Refused


@pytest.fixture(scope="module")
def guarded(
    ready: Callable[[Client], Client], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JavaCluster]:
    ready(JAVA)
    cluster = guarded_cluster(tmp_path_factory.mktemp("guarded"))
    cluster.start()
    yield cluster
    cluster.kill9()


async def test_signatures(guarded: JavaCluster) -> None:
    namesrv = guarded.namesrv_address
    async with Admin(namesrv, client=ADMIN) as admin:
        for topic in ("Open", "ReadOnly", "Closed"):
            await admin.topics.create(topic, queues=2)
        async with asyncio.timeout(20):
            while not {"Open", "ReadOnly", "Closed"} <= set(await admin.topics.names()):
                await asyncio.sleep(0.1)

    inbox = Inbox()
    bodies = ["plain", "ünï 🚀", "x" * 10_000]
    async with (
        running(
            Consumer(namesrv, group="readers", client=USER, consume_from="first"), "Open", inbox
        ),
        Producer(namesrv, group="senders", client=USER) as producer,
    ):
        for text in bodies:
            await producer.send(
                Message("Open", text, tags="标签", keys="k", properties={"a": "b c", "É": "ü"})
            )
        await producer.send_batch([Message("Open", "in a batch"), Message("Open", "of two")])
        await inbox.receive(5)
        for topic in ("ReadOnly", "Closed"):
            with pytest.raises(SendFailed) as failed:
                await producer.send(Message(topic, "not allowed"))
            assert failed.value.code == 1
            assert topic in (failed.value.remark or "")
    assert sorted(inbox.bodies) == sorted(
        text.encode() for text in (*bodies, "in a batch", "of two")
    )


@pytest.mark.parametrize("client", [FORGED, UNKNOWN, ClientOptions()], ids=["wrong", "new", "none"])
async def test_others_are_refused(guarded: JavaCluster, client: ClientOptions) -> None:
    namesrv = guarded.namesrv_address
    async with Admin(namesrv, client=ADMIN) as admin:
        await admin.topics.create("Open", queues=2)
        async with asyncio.timeout(20):
            while "Open" not in await admin.topics.names():
                await asyncio.sleep(0.1)
    async with Producer(namesrv, group="senders", client=client) as producer:
        with pytest.raises(SendFailed) as failed:
            await producer.send(Message("Open", "from a stranger"))
    assert failed.value.code == 1
    async with Admin(namesrv, client=client) as admin:
        with pytest.raises(PartlyFailed) as refused:
            await admin.topics.create("Another", queues=1)
    (reason,) = refused.value.failures.values()
    assert isinstance(reason, Refused)
