"""No command of upstream's admin tool is forgotten: not here, and not by `cosmo mqadmin`.

Also a handful of changes, made once by the tool and once by `cosmo mqadmin` with the same words:
what the brokers then have must be the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from peers.mqadmin import AdminTool
from peers.raw import call, create_topic
from tests.oracle.mqadmin_kit import commands_of, commands_run, flags_of
from tests.oracle.oracle_checks import Cluster

from cosmodrome.cli.main import cosmo as program
from cosmodrome.cli.mqadmin.table import BY_NAME, ROWS

Run = Callable[..., str]


def test_every_command_is_run(tool: AdminTool) -> None:
    listed = commands_of(tool())
    assert len(listed) == len(set(listed)) > 50
    run = commands_run(Path(__file__).parent)
    assert set(listed) == run


def test_cosmo_knows_the_same_commands_and_flags(tool: AdminTool) -> None:
    listed = commands_of(tool())
    assert sorted(listed) == sorted(row.name for row in ROWS)
    for name in listed:
        flags, required = flags_of(tool("help", name))
        row = BY_NAME[name.lower()]
        assert {flag.letter: (flag.name, flag.takes_value) for flag in row.flags} == flags, name
        assert {flag.letter for flag in row.flags if flag.required} == required, name


@pytest.mark.skipif(os.environ.get("ORACLE_TARGET") == "java", reason="upstream has access control")
def test_a_broker_without_access_control_says_so(tool: AdminTool, cluster: Cluster) -> None:
    words = {
        "updateAclConfig": ["-a", "account1", "-s", "secret123"],
        "deleteAclConfig": ["-a", "account1"],
        "clusterAclConfigVersion": [],
        "updateGlobalWhiteAddr": ["-g", "10.0.0.*"],
    }
    for command, flags in words.items():
        printed = tool(command, "-b", cluster.broker, *flags, fails=True)
        assert re.search(r"CODE: (1|209|210|211)  DESC: .*no access control", printed), printed


# --- the same words, the same effect ----------------------------------------------------------


@pytest.fixture
def cosmo(cluster: Cluster) -> Run:
    def run(*words: str) -> str:
        done = CliRunner().invoke(program, ["mqadmin", *words, "-n", cluster.namesrv])
        assert done.exit_code == 0, (words, done.output, done.exception)
        return done.stdout

    return run


def _both(tool: AdminTool, cosmo: Run) -> dict[str, Run]:
    return {"java": tool, "cosmo": cosmo}


def _topic(cluster: Cluster, name: str) -> dict[str, Any]:
    _, _, _, body = call(cluster.broker_port, 21, {})
    found: dict[str, Any] = json.loads(body)["topicConfigTable"][name]
    return {**found, "topicName": ""}


def _group(cluster: Cluster, name: str) -> dict[str, Any] | None:
    _, _, _, body = call(cluster.broker_port, 201, {})
    found: dict[str, Any] | None = json.loads(body)["subscriptionGroupTable"].get(name)
    return None if found is None else {**found, "groupName": ""}


@pytest.mark.parametrize(
    "flags",
    ["", "-r 3 -w 2", "-p 4", "-o true -w 5", "-u true -s true"],
)
def test_topics_are_the_same(
    flags: str, tool: AdminTool, cosmo: Run, cluster: Cluster, name: str
) -> None:
    for where in (["-c", cluster.cluster_name], ["-b", cluster.broker]):
        found = []
        for who, run in _both(tool, cosmo).items():
            topic = f"{who}_{where[0][1]}_{name}"
            order = {"namespace": "ORDER_TOPIC_CONFIG", "key": topic}
            call(cluster.namesrv_port, 100, {**order, "value": "another:7"})
            run("updateTopic", "-t", topic, *where, *flags.split())
            (_, fixed, _, _) = call(cluster.namesrv_port, 101, order)
            found.append((_topic(cluster, topic), sorted(fixed["value"].split(";"))))
        assert found[0] == found[1]


@pytest.mark.parametrize(
    "flags", ["", "-s false -d true -m true", "-q 3 -r 5", "-i 1 -w 2 -a false"]
)
def test_groups_are_the_same(
    flags: str, tool: AdminTool, cosmo: Run, cluster: Cluster, name: str
) -> None:
    found = []
    for who, run in _both(tool, cosmo).items():
        run("updateSubGroup", "-c", cluster.cluster_name, "-g", f"{who}_{name}", *flags.split())
        found.append(_group(cluster, f"{who}_{name}"))
    assert found[0] is not None and found[1] == found[0]
    for who, run in _both(tool, cosmo).items():
        run("deleteSubGroup", "-b", cluster.broker, "-g", f"{who}_{name}")
        assert _group(cluster, f"{who}_{name}") is None


def test_offsets_are_the_same(tool: AdminTool, cosmo: Run, cluster: Cluster, name: str) -> None:
    topic = f"T_{name}"
    create_topic(cluster.namesrv_port, cluster.broker_port, topic, 1)
    for run in (tool, cosmo, tool, cosmo):
        run("sendMessage", "-t", topic, "-p", "body", "-b", cluster.broker_name, "-i", "0")

    def offset(group: str) -> str:
        ask = {"consumerGroup": group, "topic": topic, "queueId": "0"}
        code, fields, _, _ = call(cluster.broker_port, 14, ask)
        assert code == 0
        return fields["offset"]

    for who, run in _both(tool, cosmo).items():
        group = f"{who}_{name}"
        start = {"consumerGroup": group, "topic": topic, "queueId": "0", "commitOffset": "2"}
        assert call(cluster.broker_port, 15, start)[0] == 0
        run("updateSubGroup", "-c", cluster.cluster_name, "-g", group)
        run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "2020-01-01#00:00:00:000")
        assert offset(group) == "0"
        run("skipAccumulatedMessage", "-g", group, "-t", topic)
        assert offset(group) == "4"


def test_writing_and_deleting_are_the_same(
    tool: AdminTool, cosmo: Run, cluster: Cluster, name: str
) -> None:
    for who, run in _both(tool, cosmo).items():
        topic = f"{who}_{name}"
        create_topic(cluster.namesrv_port, cluster.broker_port, topic, 2)
        run("updateTopicPerm", "-b", cluster.broker, "-t", topic, "-p", "4")
        assert _topic(cluster, topic)["perm"] == 4
        run("wipeWritePerm", "-b", cluster.broker_name)
        run("addWritePerm", "-b", cluster.broker_name)
        run("updateKvConfig", "-s", name, "-k", who, "-v", "value")
        entry = {"namespace": name, "key": who}
        assert call(cluster.namesrv_port, 101, entry)[1] == {"value": "value"}
        run("deleteKvConfig", "-s", name, "-k", who)
        assert call(cluster.namesrv_port, 101, entry)[0] == 22
        run("deleteTopic", "-c", cluster.cluster_name, "-t", topic)
        assert call(cluster.namesrv_port, 105, {"topic": topic})[0] == 17
