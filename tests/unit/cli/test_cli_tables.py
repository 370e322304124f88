"""What people see: the tables of all verbs that show something, kept in `tables.txt`.

Addresses, times, ids, ages and rates are masked, and columns are two spaces apart. Run with
COSMO_TABLES=write to write the file again, and read what changed.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.cli.operating_kit import cosmo, rows

from cosmodrome import blocking
from cosmodrome.cli.support.exits import EXIT_PROBLEMS
from cosmodrome.client.send.transactions import TransactionState
from cosmodrome.client.values import Message
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands import SendMessageV2
from cosmodrome.wire.message import format_properties

KEPT = Path(__file__).with_name("tables.txt")

COMMANDS = [
    "topic list",
    "topic describe Orders",
    "topic describe Orders --queues",
    "topic route Orders",
    "topic stats Orders",
    "topic alter Orders --queues 4 --dry-run",
    "group list",
    "group describe readers",
    "group lag readers",
    "group describe payments",
    "group lag payments",
    "group explain payments --sample 0.1",
    "group reset payments -t Orders --to earliest --dry-run",
    "group skip payments -t Orders --dry-run",
    "group clone payments others -t Orders --dry-run",
    "msg print Orders --count 2",
    "msg find Orders --key k1",
    "dlq list",
    "dlq peek payments",
    "timer list",
    "tx list",
    "client list",
    "cluster status",
    "broker config get flushDiskType maxMessageSize",
    "broker stats brokerVersionDesc startAcceptSendRequestTimeStamp",
    "namesrv kv list SOME_SPACE",
    "namesrv config get",
]
MASKS = [
    (r"\d+\.\d+\.\d+\.\d+@\S+", "CLIENT"),
    (r"/\S+/(?=config/)", "STORE/"),
    (r"127\.0\.0\.1(:\d+)?", "ADDRESS"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)?", "TIME"),
    (r"\b[0-9A-F]{32,}\b", "ID"),
    (r"\b(?=\S*[A-Z])(?=\S*[a-z])(?=\S*\d)[A-Za-z0-9_=-]{40,}", "HANDLE"),
    (r"\b\d+\.\d+\.\d+\b", "VERSION"),
    (r"-?\b\d+\.\d+\b", "N.N"),
    (r"(?<=  )\d{3,}(?= |$)", "NNN"),
]
COUNTING = ("topic stats", "cluster status")  # what they show depends on the moment


@pytest.fixture(scope="module")
def namesrv() -> Iterator[str]:
    """A topic with five messages, a group that has three of them and is gone, one that has all and
    runs, one dead letter, one message that is due later, one transaction without an end."""
    with blocking.embedded(transaction_check_interval=3_600_000) as node:
        for words in (
            "topic create Orders -q 1",
            "topic create %DLQ%payments -q 1",
            "group create payments",
            "namesrv kv set SOME_SPACE key value",
        ):
            done = cosmo(node.namesrv, *words.split())
            assert done.code == 0, done
        with blocking.Producer(node.namesrv, group="senders") as producer:
            for number in range(5):
                producer.send(Message("Orders", f"order {number}", tags="new", keys=[f"k{number}"]))
            producer.send(Message("Orders", "later", delay_ms=3_600_000))
        reset = ["group", "reset", "payments", "-t", "Orders", "--to", "3", "--yes"]
        assert cosmo(node.namesrv, *reset).code == 0

        def unknown(*_: object) -> TransactionState:
            return TransactionState.UNKNOWN

        with blocking.TransactionProducer(node.namesrv, group="tx", check=unknown) as bank:
            bank.send_in_transaction(Message("Orders", "half"), unknown)
        asyncio.run(_put_dead_letter(node.broker_address))
        deadline = time.monotonic() + 90
        while len(cosmo(node.namesrv, "tx", "list").out.splitlines()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with blocking.Consumer(node.namesrv, group="readers", consume_from="first") as consumer:
            got = threading.Semaphore(0)
            consumer.subscribe("Orders", handler=lambda _: got.release())
            worker = threading.Thread(target=consumer.run)
            worker.start()
            for _ in range(5):
                assert got.acquire(timeout=60)
            while rows(node.namesrv, "group", "list")[-1]["lag"] != 0:  # until it has committed
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield node.namesrv
            consumer.stop()
            worker.join(60)


async def _put_dead_letter(address: str) -> None:
    host, _, port = address.rpartition(":")
    channel = Channel(host, int(port))
    pairs = {"RETRY_TOPIC": "Orders", "ORIGIN_MESSAGE_ID": "O1", "UNIQ_KEY": "dead-1"}
    await channel.call(
        SendMessageV2(
            producer_group="p",
            topic="%DLQ%payments",
            default_topic="TBW102",
            default_topic_queue_nums=1,
            queue_id=0,
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties=format_properties(pairs),
            reconsume_times=16,
            body=b"dead",
        )
    )
    await channel.close()


def masked(command: str, text: str) -> str:
    lines = []
    for line in text.splitlines():
        for pattern, mask in MASKS:
            line = re.sub(pattern, mask, line)
        if command.startswith(COUNTING):
            line = re.sub(r"(?<=  )\d+\b", "N", line)
        lines.append(re.sub(r"(?<=\S) {2,}", "  ", line).rstrip())
    return "\n".join(lines).rstrip()


def kept() -> dict[str, str]:
    if not KEPT.exists():
        return {}
    parts = re.split(r"^\$ cosmo (.+)\n", KEPT.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_tables(namesrv: str) -> None:
    seen = {}
    for command in COMMANDS:
        for form in ("table", "wide"):
            done = cosmo(namesrv, *command.split(), "-o", form)
            assert done.code in (0, EXIT_PROBLEMS), (command, done)
            seen[f"{command} -o {form}"] = masked(command, done.out)
    if os.environ.get("COSMO_TABLES") == "write":
        KEPT.write_text(
            "\n\n".join(f"$ cosmo {name}\n{text}" for name, text in seen.items()) + "\n"
        )
    known = kept()
    assert list(known) == list(seen)
    for name, text in seen.items():
        assert text == known[name], f"cosmo {name}"
