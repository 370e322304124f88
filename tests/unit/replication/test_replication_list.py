"""Every file that a broker keeps is on the one list: it follows, or is local with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.broker.test_broker_app import channel_to, running, send

from cosmodrome.broker.operate.settings import MUST_AGREE
from cosmodrome.broker.replicate.tables import LOCAL, REPLICATED
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.env.reload import live_keys
from cosmodrome.wire import bodies, commands

ROOT = Path(__file__).resolve().parents[3]
LISTED = {*REPLICATED.values(), *LOCAL}
# Files below the store have a name with such an ending, or are named where paths are made.
NAMED = re.compile(r'"([A-Za-z]+\.(?:json|properties))"')
MADE = re.compile(r'(?:config_file|self\._path|_file)\("([A-Za-z.]+)"')
JOINED = re.compile(r'os\.path\.join\((?:self\._)?root, "([A-Za-z.]+)"')


def names_in_code() -> dict[str, str]:
    """Names of files below the store, and where each is said."""
    found: dict[str, str] = {}
    for room in ("broker", "store", "replication", "env", "nameserver"):
        for path in sorted((ROOT / "src" / "cosmodrome" / room).rglob("*.py")):
            if path.parts[-2:] == ("replicate", "tables.py"):
                continue  # the list itself
            text = path.read_text(encoding="utf-8")
            for pattern in (NAMED, MADE, JOINED):
                found.update((name, str(path)) for name in pattern.findall(text))
    return found


def unlisted(names: set[str]) -> set[str]:
    """Those that are neither listed nor the previous generation of a listed one."""
    return {name for name in names if name.removesuffix(".bak") not in LISTED}


def test_no_name_is_on_both_lists() -> None:
    assert not set(REPLICATED.values()) & set(LOCAL)
    assert all(LOCAL.values())


def test_every_file_that_the_code_names_is_listed() -> None:
    found = names_in_code()
    assert {"topics.json", "deletedTopics.json", "checkpoint", "abort", "lock"} <= set(found)
    missing = {name: found[name] for name in found if name not in LISTED and name != "config"}
    assert not missing, "add them to broker/replicate/tables.py, as a table or with a reason"


def test_every_file_of_the_state_table_is_listed() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split("## 5. State and its owner")[1].split("\n## ")[0]
    named = set(re.findall(r"\b([A-Za-z]+\.(?:json|properties))\b", section))
    assert len(named) >= 8
    assert not unlisted(named)


async def test_every_file_that_a_broker_writes_is_listed(tmp_path: Path) -> None:
    async with running(tmp_path, enable_property_filter=True) as broker:
        async with channel_to(broker.port) as channel:
            for properties in ("KEYS\x01k", "DELAY\x011", "TIMER_DELAY_MS\x01100"):
                ask = send()
                ask.properties = properties
                await channel.call(ask)
            await channel.call(
                commands.UpdateConsumerOffset(
                    consumer_group="g", topic="T", queue_id=0, commit_offset=1
                )
            )
            filtered = bodies.SubscriptionData(
                topic="T", sub_string="a > 1", expression_type="SQL92", sub_version=1
            )
            consumer = bodies.ConsumerData(group_name="g", subscription_data_set=[filtered])
            data = bodies.HeartbeatData(client_id="c", consumer_data_set=[consumer])
            await channel.call(commands.HeartBeat(body=bodies.encode(data)))
            await channel.call(commands.UpdateBrokerConfig(body=b"transactionCheckMax=3\n"))
            await channel.call(commands.DeleteTopicInBroker(topic="T"))
        running_names = {path.name for path in tmp_path.iterdir()}
    names = running_names | {path.name for path in tmp_path.iterdir()}
    config = {path.name for path in (tmp_path / "config").iterdir()}
    assert {"commitlog", "consumequeue", "checkpoint", "abort", "lock", "config"} <= names
    # The run reaches every table: one that it does not write would not be looked for.
    assert set(REPLICATED.values()) <= config
    assert not unlisted((names | config) - {"config"})


def test_settings_that_must_agree_can_change() -> None:
    assert live_keys(BrokerOptions) | live_keys(StoreOptions) >= MUST_AGREE


@pytest.mark.parametrize("name", sorted(REPLICATED))
def test_a_table_is_named_after_its_file(name: str) -> None:
    assert REPLICATED[name].rsplit(".", 1)[0] == name
