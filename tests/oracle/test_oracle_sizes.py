"""The largest that goes through, what is refused, and how bodies are compressed."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from peers.clients import Client, Consumer, Letter, Line, run, send
from tests.oracle.oracle_checks import Cluster, body, check_arrived, letters

MIB = 1 << 20
LIMIT = 4 * MIB
MESSAGE_ILLEGAL = 13


def _try(
    java: Client, cluster: Cluster, topic: str, group: str, mode: str, sent: Sequence[Letter]
) -> list[Line]:
    """What became of each message, or of the one batch."""
    words = ["send", cluster.namesrv, topic, f"p_{group}", f"{mode}+report"]
    return run(java, words, "".join(f"{letter.line()}\n" for letter in sent))


def test_the_largest_message(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    exact, over = Letter(os.urandom(LIMIT)), Letter(os.urandom(LIMIT + 1))
    wide = Letter(b"wide", properties={"p": "x" * 32_768})
    # Written as bytes it is too long, counted in characters it is not.
    wide_bytes = Letter(b"wide", properties={"p": "é" * 20_000})
    fitting = Letter(b"fitting", properties={"p": "x" * 32_000})
    tried = [exact, over, wide, wide_bytes, fitting]
    lines = _try(java, cluster, topic, group, f"sync+plain+max={8 * MIB}", tried)
    assert [line["event"] for line in lines] == ["sent", "failed", "failed", "failed", "sent"]
    assert [line["code"] for line in lines[1:4]] == [MESSAGE_ILLEGAL] * 3
    # With its own limit the client does not even ask.
    (line,) = _try(java, cluster, topic, group, "sync+plain", [over])
    assert (line["code"], line["client_code"]) == (None, MESSAGE_ILLEGAL)
    # The limit is for what is stored; more may come out of it.
    flat = Letter(b"flat out " * MIB)
    (line,) = _try(java, cluster, topic, group, f"sync+max={16 * MIB}", [flat])
    assert line["event"] == "sent"
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        consumer.receive(3)
        received = consumer.listen(0.5)
    assert sorted(map(body, received)) == sorted([exact.body, fitting.body, flat.body])


def test_batches(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    many = letters(2_000)
    answers = send(java, cluster.namesrv, topic, f"p_{group}", "batch", many)
    assert [line["queue_offset"] for line in answers] == list(range(2_000))
    heavy = [Letter(os.urandom(MIB - 1024)) for _ in range(4)]
    (line,) = _try(java, cluster, topic, group, "batch", heavy)
    assert line["event"] == "sent"
    too_heavy = [Letter(os.urandom(MIB)) for _ in range(4)]
    (line,) = _try(java, cluster, topic, group, "batch", too_heavy)
    assert (line["code"], line["client_code"]) == (None, MESSAGE_ILLEGAL)
    (line,) = _try(java, cluster, topic, group, f"batch+max={8 * MIB}", too_heavy)
    assert line["code"] == MESSAGE_ILLEGAL
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        consumer.receive(2_004)
        received = consumer.listen(0.5)
    small = [line for line in received if len(line["body"]) < 1024]
    check_arrived(many, answers, small)
    large = [body(line) for line in received if len(line["body"]) >= 1024]
    assert sorted(large) == sorted(letter.body for letter in heavy)


@pytest.mark.parametrize(("kind", "bits"), [("LZ4", 0x101), ("ZSTD", 0x201), ("ZLIB", 0x301)])
def test_compression_of_the_java_client(
    kind: str, bits: int, java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    sent = [Letter(b"pressed flat " * 20_000), Letter(os.urandom(100_000)), Letter(b"short")]
    answers = send(java, cluster.namesrv, topic, f"p_{group}", f"sync+compress={kind}", sent)
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        received = consumer.receive(len(sent))
    check_arrived(sent, answers, received)
    flags = {body(line): line["sys_flag"] & 0x701 for line in received}
    assert [flags[letter.body] for letter in sent] == [bits, bits, 0]
