"""Every command in the guide about messages runs, and prints the headings that it shows."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

from tests.unit.cli.operating_kit import cosmo

from cosmodrome import blocking
from cosmodrome.client.send.transactions import TransactionState
from cosmodrome.client.values import Message
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands import SendMessageV2
from cosmodrome.wire.message import format_properties

GUIDE = Path(__file__).parents[3] / "docs" / "operating-messages.md"
BLOCKS = re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


async def put_dead_letters(address: str) -> None:
    host, _, port = address.rpartition(":")
    channel = Channel(host, int(port))
    for number, tag in enumerate(("paid", "open")):
        pairs = {
            "RETRY_TOPIC": "orders",
            "UNIQ_KEY": f"U{number}",
            "TAGS": tag,
            "KEYS": f"order-{number + 1}",
        }
        await channel.call(
            SendMessageV2(
                producer_group="p",
                topic="%DLQ%billing",
                default_topic="TBW102",
                default_topic_queue_nums=1,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                properties=format_properties(pairs),
                reconsume_times=16,
                body=b'{"order": %d}' % (number + 1),
            )
        )
    await channel.close()


def test_the_guide_as_it_stands() -> None:
    steps = re.findall(r"^\$ (cosmo .*)\n((?:(?!\$ ).*\n)*)", "".join(BLOCKS), re.MULTILINE)
    assert len(steps) >= 9
    with blocking.embedded() as node:
        for topic in ("orders", "%DLQ%billing"):
            assert cosmo(node.namesrv, "topic", "create", topic, "-q", "1").code == 0
        with blocking.Producer(node.namesrv, group="senders") as producer:
            producer.send(Message("orders", '{"order": 1}', tags="paid", keys=["order-1"]))
            producer.send(Message("orders", "later", delay_ms=600_000))
        with blocking.TransactionProducer(
            node.namesrv, group="payment", check=lambda _: TransactionState.UNKNOWN
        ) as producer:
            producer.send_in_transaction(
                Message("orders", "half"), lambda _: TransactionState.UNKNOWN
            )
        with blocking.Admin(node.namesrv) as admin:
            address = admin.brokers.addresses()["embedded"]
        asyncio.run(put_dead_letters(address))
        for line, shown in steps:
            _, *words = shlex.split(line)
            done = cosmo(node.namesrv, *words)
            assert done.code == 0, (line, done)
            expected = shown.splitlines()
            assert done.out.splitlines()[0].split() == expected[0].split(), line
            assert len(done.out.splitlines()) == len(expected), (line, done.out)


def test_the_guide_names_every_command_and_outcome() -> None:
    from cosmodrome.cli.messages import dlq, msg, redrive, timer, tx
    from cosmodrome.client.operate.redriving import audit as audit

    text = GUIDE.read_text()
    groups = {"msg": msg.msg, "dlq": dlq.dlq, "tx": tx.tx, "timer": timer.timer}
    for noun, group in groups.items():
        for verb in group.commands:
            assert f"{noun} {verb}" in text
    for verb in redrive.redrive.commands:
        assert verb == "start" or f"redrive {verb}" in text or f"`{verb}`" in text, verb
    for outcome in (
        audit.SENT,
        audit.FOUND,
        audit.UNCERTAIN,
        audit.REFUSED,
        audit.NO_TARGET,
        audit.NOT_SENT,
        audit.UNKNOWN,
        audit.AUDIT_TOPIC,
    ):
        assert outcome in text
