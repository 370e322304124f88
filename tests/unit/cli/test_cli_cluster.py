"""`cosmo cluster`, `cosmo broker config|stats`, `cosmo namesrv kv|config`, `cosmo context list`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.cli.operating_kit import cosmo, ghost, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.cli.operate.cluster import complain, rows_of
from cosmodrome.cli.operate.server_settings import MASK, masked
from cosmodrome.cli.support.exits import PartlyDone
from cosmodrome.cli.support.output import UNKNOWN
from cosmodrome.client.operate.pairs import BrokerSeen, Pair, Standing, pair_of
from cosmodrome.client.values import Message
from cosmodrome.errors import AccessDenied


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded() as node:
        with blocking.Producer(node.namesrv, group="senders") as producer:
            for _ in range(3):
                producer.send(Message("Orders", b"x"))
        yield node


@pytest.fixture(scope="module")
def namesrv(node: blocking.Node) -> str:
    return node.namesrv


@pytest.fixture(autouse=True)
def own_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        "cluster status",
        "broker config get",
        "broker config get brokerName flushDiskType",
        "broker config set fileReservedTime=71 --all --dry-run",
        "broker stats",
        "broker stats putTps bootTimestamp",
        "broker stats TOPIC_PUT_NUMS --key Orders",
        "namesrv kv list NS",
        "namesrv kv get NS key",
        "namesrv kv set NS key other --dry-run",
        "namesrv kv delete NS key --dry-run",
        "namesrv config get",
        "namesrv config set brokerExpiredTime=1000 --dry-run",
        "context list",
    ],
)
def test_every_form_says_the_same(words: str, namesrv: str) -> None:
    cosmo(namesrv, "namesrv", "kv", "set", "NS", "key", "a value: with ü")
    cosmo(namesrv, "context", "add", "here", namesrv)
    in_all_forms(namesrv, *words.split())


# --- cluster ---------------------------------------------------------------------------------


def test_the_table_of_a_cluster(node: blocking.Node) -> None:
    head, row = table(node.namesrv, "cluster", "status")
    assert head == [
        "CLUSTER",
        "BROKER",
        "ID",
        "ROLE",
        "ADDRESS",
        "STATE",
        "VERSION",
        "IN/S",
        "OUT/S",
        "IN TODAY",
        "OUT TODAY",
        "DISK %",
    ]
    assert row[:7] == [
        "DefaultCluster",
        "embedded",
        "0",
        "master",
        node.broker_address,
        "up",
        "4.9.8",
    ]
    assert row[9:11] == ["3", "0"]
    assert re.fullmatch(r"\d+", row[11])
    found = rows(node.namesrv, "cluster", "status")[0]
    assert found["booted_ms"] > 1_700_000_000_000 and found["booted"].startswith("20")


def test_a_silent_broker_is_shown_and_ends_with_7(namesrv: str) -> None:
    with ghost(namesrv) as address:
        done = cosmo(namesrv, "cluster", "status", "-o", "json")
        assert done.code == 7
        assert address in done.err
        silent = {row["broker"]: row for row in json.loads(done.out)}["ghost"]
        assert (silent["state"], silent["version"], silent["in_per_s"]) == ("silent", None, None)
        text = cosmo(namesrv, "cluster", "status").out
        assert text.splitlines()[2].split()[5:] == ["silent", *["unknown"] * 6]

        partly = cosmo(namesrv, "broker", "config", "get", "brokerName", "-o", "json")
        assert partly.code == 7
        assert [row["broker"] for row in json.loads(partly.out)] == ["embedded"]
        refused = cosmo(namesrv, "broker", "config", "set", "fileReservedTime=70", "--all")
        assert refused.code == 7 and refused.out == ""
        assert cosmo(namesrv, "broker", "stats", "-b", "ghost").code == 3
        assert cosmo(namesrv, "broker", "config", "get", "-b", address).code == 3
    unchanged = rows(namesrv, "broker", "config", "get", "fileReservedTime")
    assert unchanged[0]["value"] != "70"


def test_a_stopped_broker_ends_with_3() -> None:
    with blocking.embedded() as node:
        namesrv = node.namesrv
        node.stop_broker()
        for words in (("cluster", "status"), ("broker", "stats"), ("broker", "config", "get")):
            done = cosmo(namesrv, *words)
            assert done.code == 3 and "no broker is registered" in done.err, words
            assert done.out == ""


def test_rows_of_a_pair() -> None:
    up = BrokerSeen("c", "b", 0, "x:1", {"brokerVersionDesc": "V4_9_8"}, None)
    behind = BrokerSeen("c", "b", 1, "y:1", {}, None)
    told = Standing("copying", "", None, 512, 3.0, 0.5, 41.0)
    pair = Pair(
        "b", ((up, Standing("up", slaves=1)), (behind, told)), (("z:9", Standing("linked")),)
    )
    master, slave, stranger = rows_of(pair)
    assert (master["role"], master["slaves"], master["version"]) == ("master", 1, "4.9.8")
    assert "lag_bytes" not in master  # a dash: a master has no lag
    assert (slave["state"], slave["lag_bytes"], slave["lag_s"]) == ("copying", 512, 3.0)
    assert (slave["last_contact_s"], slave["copied_percent"]) == (0.5, 41.0)
    assert (stranger["address"], stranger["lag_bytes"]) == ("z:9", UNKNOWN)
    assert "id" not in stranger


def test_one_that_shows_nothing_beside_one_that_does() -> None:
    up = BrokerSeen("c", "b", 0, "x:1", {}, None)
    hidden = BrokerSeen("c", "b", 1, "y:1", AccessDenied("list me"), None)
    with pytest.raises(PartlyDone, match=r"not shown to this machine: b/1: .*list me"):
        complain([pair_of("b", [up, hidden])])
    with pytest.raises(AccessDenied, match="list me"):
        complain([pair_of("b", [hidden])])


def test_an_unknown_cluster_is_not_found(namesrv: str) -> None:
    done = cosmo(namesrv, "cluster", "status", "-c", "nothing")
    assert done.code == 4 and "DefaultCluster" in done.err


# --- broker ----------------------------------------------------------------------------------


def test_settings_of_brokers_are_read_and_changed(namesrv: str) -> None:
    get = ("broker", "config", "get", "fileReservedTime")
    before = rows(namesrv, *get)
    assert before == [{"broker": "embedded", "key": "fileReservedTime", "value": "72"}]
    change = ("broker", "config", "set", "fileReservedTime=48", "-b", "embedded")
    would = rows(namesrv, *change, "--dry-run")
    assert would == [
        {
            "broker": "embedded",
            "key": "fileReservedTime",
            "before": "72",
            "after": "48",
            "outcome": "would be changed",
        }
    ]
    assert rows(namesrv, *get) == before
    assert rows(namesrv, *change)[0]["outcome"] == "changed"
    assert rows(namesrv, *get)[0]["value"] == "48"
    assert rows(namesrv, *change)[0]["outcome"] == "unchanged"
    back = ("broker", "config", "set", "fileReservedTime=72", "-c", "DefaultCluster")
    assert rows(namesrv, *back)[0]["after"] == "72"


def test_help_promises_no_default_target_for_changed_settings() -> None:
    target = "[default: every master]"
    assert target in cosmo("127.0.0.1:1", "broker", "config", "get", "--help").out
    assert target not in cosmo("127.0.0.1:1", "broker", "config", "set", "--help").out


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("config get fileReservedTme", 4, "did you mean fileReservedTime?"),
        ("config set fileReservedTme=1 --all", 4, "did you mean fileReservedTime?"),
        ("config set fileReservedTime=1", 2, "--all"),
        ("config set fileReservedTime=1 --all -b embedded", 2, "give the target"),
        ("config set fileReservedTime --all", 2, "KEY=VALUE"),
        ("config set fileReservedTime=soon --all", 5, "fileReservedTime"),
        ("config get -b nobody", 4, "known are: embedded"),
        ("stats putTp", 4, "did you mean putTps?"),
        ("stats --key x", 2, "one NAME"),
        ("stats NO_SUCH --key x", 5, "TOPIC_PUT_NUMS"),
        ("stats -b nobody", 4, "known are: embedded"),
    ],
)
def test_what_goes_wrong_with_brokers(words: str, code: int, text: str, namesrv: str) -> None:
    done = cosmo(namesrv, "broker", *words.split())
    assert done.code == code, done
    assert text in done.err
    assert done.out == ""


def test_a_statistic_over_its_spans(namesrv: str) -> None:
    found = rows(namesrv, "broker", "stats", "TOPIC_PUT_NUMS", "--key", "Orders")
    assert [row["span"] for row in found] == ["minute", "hour", "day"]
    assert {row["statistic"] for row in found} == {"TOPIC_PUT_NUMS"}


def test_secrets_are_not_shown() -> None:
    assert masked("aclSecretKey", "abc") == masked("tlsServerKeyPassword", "x") == MASK
    assert masked("aclSecretKey", "") == "" and masked("brokerName", "abc") == "abc"


# --- name server -------------------------------------------------------------------------------


def test_entries_of_name_servers(namesrv: str) -> None:
    kv = ("namesrv", "kv")
    assert cosmo(namesrv, *kv, "list", "EMPTY").out.splitlines() == ["NAMESPACE  KEY  VALUE"]
    made = rows(namesrv, *kv, "set", "SPACE", "colour", "red")[0]
    assert (made["before"], made["after"], made["outcome"]) == (None, "red", "set")
    again = rows(namesrv, *kv, "set", "SPACE", "colour", "red")[0]
    assert again["outcome"] == "unchanged"
    entry = {"namespace": "SPACE", "key": "colour", "value": "red"}
    assert rows(namesrv, *kv, "get", "SPACE", "colour") == [entry]
    assert rows(namesrv, *kv, "list", "SPACE") == [entry]
    missing = cosmo(namesrv, *kv, "get", "SPACE", "color")
    assert missing.code == 4
    assert "did you mean colour? `cosmo namesrv kv list SPACE`" in missing.err
    refused = cosmo(namesrv, *kv, "delete", "SPACE", "colour")
    assert refused.code == 2 and "'red'" in refused.err
    assert rows(namesrv, *kv, "get", "SPACE", "colour") == [entry]
    gone = rows(namesrv, *kv, "delete", "SPACE", "colour", "--yes")[0]
    assert (gone["before"], gone["after"], gone["outcome"]) == ("red", None, "deleted")
    assert cosmo(namesrv, *kv, "delete", "SPACE", "colour", "--yes").code == 4


def test_settings_of_name_servers(namesrv: str) -> None:
    assert rows(namesrv, "namesrv", "config", "get", "productEnvName") == [
        {"name_server": namesrv, "key": "productEnvName", "value": "center"}
    ]
    changed = rows(namesrv, "namesrv", "config", "set", "orderMessageEnable=true")[0]
    assert (changed["before"], changed["after"], changed["outcome"]) == ("false", "true", "changed")
    unknown = cosmo(namesrv, "namesrv", "config", "set", "orderMessageEnabled=true")
    assert unknown.code == 4 and "orderMessageEnable?" in unknown.err
    assert cosmo(namesrv, "namesrv", "config", "get", "nothing").code == 4


def test_without_name_servers_everything_ends_with_3() -> None:
    for words in ("kv list", "kv set a b c", "kv get a b", "config get", "config set a=b"):
        done = cosmo("127.0.0.1:1", "namesrv", *words.split())
        assert done.code == 3, words
        assert "127.0.0.1:1" in done.err and done.out == ""


# --- contexts ----------------------------------------------------------------------------------


def test_contexts_are_listed(namesrv: str) -> None:
    assert rows(namesrv, "context", "list") == []
    cosmo(namesrv, "context", "add", "here", "127.0.0.1:9876")
    cosmo(namesrv, "context", "add", "there", "10.0.0.1:9876;10.0.0.2:9876")
    assert cosmo(namesrv, "context", "list").out == (
        "   NAME   NAME SERVERS\n*  here   127.0.0.1:9876\n   there  10.0.0.1:9876;10.0.0.2:9876\n"
    )
    assert rows(namesrv, "context", "list")[0]["current"] is True
