"""Trace records of producers and consumers, as upstream's own admin tool reads them."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Callable

import pytest
from peers.clients import GO, JAVA, Client, Consumer, Letter, run, send
from peers.java import mqadmin
from tests.oracle.oracle_checks import Cluster, names

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.tracks import Traced, traces

Ready = Callable[[Client], Client]

CLIENTS = (JAVA, GO)
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"


@pytest.mark.parametrize("client", CLIENTS, ids=names(CLIENTS))
def test_trace_records(
    client: Client, ready: Ready, java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    sent = [Letter(b"traced", tags="T1", keys=f"key_{group}")]
    with Consumer(client, cluster.namesrv, topic, group, mode="push+trace") as consumer:
        (answer,) = send(client, cluster.namesrv, topic, f"p_{group}", "sync+trace", sent)
        consumer.receive(1)
        consumer.listen(1)
    deadline = time.monotonic() + 60
    while True:
        printed = mqadmin(cluster.namesrv, "queryMsgTraceById", "-i", answer["msg_id"])
        rows = [line.split() for line in printed.splitlines() if "success" in line]
        kinds = sorted({row[0] for row in rows})
        if kinds == ["Pub", "Sub"] or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert kinds == ["Pub", "Sub"], printed
    by_kind = {row[0]: row for row in rows}
    assert by_kind["Pub"][1] == f"p_{group}"
    assert by_kind["Sub"][1] == group
    assert re.search(r"\d+ms", " ".join(by_kind["Pub"]))

    lines = run(java, ["pull", cluster.namesrv, TRACE_TOPIC, f"{group}_pull", "*"])
    records = [
        record.split("\x01")
        for line in lines
        if line["event"] == "message"
        for record in base64.b64decode(line["body"]).decode().split("\x02")
        if answer["msg_id"] in record
    ]
    assert {record[0] for record in records} == {"Pub", "SubBefore", "SubAfter"}
    (published,) = [record for record in records if record[0] == "Pub"]
    assert published[3:8] == [f"p_{group}", topic, answer["msg_id"], "T1", f"key_{group}"]
    assert published[9] == str(len(sent[0].body))

    # And as `cosmo msg trace` tells it.
    for by in (answer["msg_id"], f"key_{group}"):
        life = asyncio.run(life_of(cluster.namesrv, by))
        assert [one.event for one in life] == ["sent", "consume", "consumed"]
        assert [one.group for one in life] == [f"p_{group}", group, group]
        assert [one.status for one in life] == ["stored", "begun", "success"]
        assert None not in [one.time_ms for one in life]
        assert (life[0].topic, life[0].keys) == (topic, f"key_{group}")


async def life_of(namesrv: str, msg_id: str) -> list[Traced]:
    async with Admin(namesrv) as admin:
        return await traces(admin, msg_id)
