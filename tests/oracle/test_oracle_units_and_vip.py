"""The second port of a broker, and the marks of units on topics."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from peers.clients import Client, Consumer, Letter, send
from peers.java import mqadmin
from peers.raw import call
from tests.oracle.oracle_checks import USER_PROPERTY, Cluster, check_arrived, letters

UNIT_TOPICS, UNIT_SUB_TOPICS, UNIT_SUB_PLAIN_TOPICS = 311, 312, 313


def _connections() -> Counter[int]:
    """Established outgoing connections of this machine by the port they lead to."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return Counter(int(row[2].rpartition(":")[2], 16) for row in rows if row[3] == "01")


def test_the_vip_port_serves_everything(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    vip_port = cluster.broker_port - 2
    before = _connections()[vip_port]
    sent = letters(20)
    with Consumer(
        java, cluster.namesrv, topic, group, mode="push+vip", properties=[USER_PROPERTY]
    ) as consumer:
        acknowledged = send(java, cluster.namesrv, topic, f"p_{group}", "sync+vip", sent)
        received = consumer.receive(len(sent))
        assert _connections()[vip_port] > before
    check_arrived(sent, acknowledged, received)


def _listed(cluster: Cluster, code: int) -> set[str]:
    answered, _, remark, body = call(cluster.namesrv_port, code)
    assert answered == 0, remark
    return set(json.loads(body)["topicList"])


def test_unit_marks(java: Client, cluster: Cluster, name: str, group: str) -> None:
    """A producer in unit mode marks the topic it creates, a consumer its retry topic."""
    made = {}
    for mark, words in (("unit", ["-u", "true"]), ("sub", ["-s", "true"]), ("none", [])):
        made[mark] = f"U_{mark}_{name}"
        printed = mqadmin(
            cluster.namesrv, "updateTopic", "-c", cluster.cluster_name, "-t", made[mark], *words
        )
        assert re.search("create topic to .* success", printed)
    unit, sub, none = made["unit"], made["sub"], made["none"]
    auto = f"U_auto_{name}"
    in_unit = "+unit=u1+unitmode"
    send(java, cluster.namesrv, auto, f"p_{group}", f"sync{in_unit}", [Letter(b"x")])
    with Consumer(java, cluster.namesrv, auto, group, mode=f"push{in_unit}") as consumer:
        consumer.receive(1)
        _, _, _, body = call(cluster.broker_port, 38, {"consumerGroup": group})
        (client_id,) = json.loads(body)["consumerIdList"]
        assert client_id.endswith("@u1")
    asked = {unit, sub, none, auto, f"%RETRY%{group}"}
    assert _listed(cluster, UNIT_TOPICS) & asked == {unit, auto}
    assert _listed(cluster, UNIT_SUB_TOPICS) & asked == {sub, f"%RETRY%{group}"}
    assert _listed(cluster, UNIT_SUB_PLAIN_TOPICS) & asked == {sub, f"%RETRY%{group}"}
