"""Messages found again by key and by either of their ids."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest
from peers.clients import CPP, GO, JAVA, JAVA_BINARY, NODE, Client, Failed, Letter, run, send
from tests.oracle.oracle_checks import Cluster, body, names

Ready = Callable[[Client], Client]

SENDERS = (JAVA, JAVA_BINARY, GO, CPP, NODE)


@pytest.mark.parametrize("sender", SENDERS, ids=names(SENDERS))
def test_query_by_key(
    sender: Client, java: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(sender)
    sent = [Letter(b"letter %d" % n, keys=f"common{group} own{n}{group}") for n in range(6)]
    acknowledged = send(sender, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    found = run(java, ["query-key", cluster.namesrv, topic, f"common{group}"])
    assert sorted(body(line) for line in found) == [letter.body for letter in sent]
    (one,) = run(java, ["query-key", cluster.namesrv, topic, f"own3{group}"])
    assert body(one) == sent[3].body
    assert one["keys"] == sent[3].keys
    assert one["queue_offset"] == acknowledged[3]["queue_offset"]


def test_unknown_key_is_reported(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    send(java, cluster.namesrv, topic, f"p_{group}", "sync", [Letter(b"a letter", keys="known")])
    with pytest.raises(Failed, match="CODE: 208"):
        run(java, ["query-key", cluster.namesrv, topic, f"absent{group}"])


@pytest.mark.parametrize("client", [JAVA, JAVA_BINARY], ids=["java", "java-binary"])
def test_query_by_both_ids(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    sent = [Letter(f"letter {n} 🚀".encode(), tags="TagA", keys=f"k{n}") for n in range(3)]
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    for which in ("msg_id", "offset_msg_id"):
        (one,) = run(client, ["query-id", cluster.namesrv, topic, acknowledged[1][which]])
        assert body(one) == sent[1].body
        assert (one["tags"], one["keys"]) == ("TagA", "k1")
        assert one["queue_id"] == acknowledged[1]["queue_id"]
        assert one["queue_offset"] == acknowledged[1]["queue_offset"]
        assert one["properties"]["UNIQ_KEY"] == acknowledged[1]["msg_id"]


def test_form_of_ids(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    acknowledged = send(
        java, cluster.namesrv, topic, f"p_{group}", "sync", [Letter(b"x" * n) for n in (10, 20, 30)]
    )
    offsets = []
    for line in acknowledged:
        assert re.fullmatch(r"[0-9A-F]{32}|[0-9A-F]{56}", line["msg_id"])
        assert re.fullmatch(r"[0-9A-F]{32}", line["offset_msg_id"])
        raw = bytes.fromhex(line["offset_msg_id"])
        assert socket.inet_ntoa(raw[:4]) == "127.0.0.1"
        assert int.from_bytes(raw[4:8]) == cluster.broker_port
        offsets.append(int.from_bytes(raw[8:]))
    # Records follow each other in the log; these differ by their bodies alone.
    assert offsets[1] - offsets[0] == offsets[2] - offsets[1] - 10
