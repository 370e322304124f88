"""What operators see of replication: the answer to `haStatus`, runtime figures, metrics."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import foundation

from cosmodrome.broker.operate import metric_table
from cosmodrome.broker.operate.replication_metrics import replication_samples
from cosmodrome.broker.operate.replication_view import ReplicationView, link_names
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused
from cosmodrome.replication.values import FollowerFacts, FollowerState, LinkFacts, SourceFacts
from cosmodrome.transport.http.exposition import Sample
from cosmodrome.wire import bodies
from cosmodrome.wire.commands.broker import GetBrokerHaStatus
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.report_bodies import HARuntimeInfo
from cosmodrome.wire.table import Call

CALL = Call(Frame(code=0, opaque=0), None)  # type: ignore[arg-type]
NOW_MS = 1_700_000_000_000

LINK = LinkFacts(
    peer="10.0.0.2:41234",
    node="b:1",
    classic=False,
    sent_end=950,
    acked_end=900,
    lag_bytes=100,
    lag_seconds=0.25,
    silent_seconds=1.5,
    sent_bytes_per_second=2048.7,
)
MASTER = SourceFacts(links=(LINK,), end=1000, refused_links=0, refused_why="")
FOLLOWER = FollowerFacts(
    state=FollowerState.COPYING,
    master="10.0.0.1:10912",
    why="copies the log",
    classic=False,
    end=400,
    master_end=900,
    lag_bytes=500,
    lag_seconds=12.0,
    silent_seconds=0.5,
    taken_bytes_per_second=100.0,
    links_made=1,
)
NEVER_LINKED = dataclasses.replace(
    FOLLOWER,
    state=FollowerState.NO_MASTER,
    master="",
    why="no name server knows a master",
    master_end=-1,
    lag_bytes=0,
    lag_seconds=0.0,
    silent_seconds=0.0,
    links_made=0,
)


class World:
    """The clock and the store as the view sees them."""

    min_offset = 100

    def now_ms(self) -> int:
        return NOW_MS

    def facts(self) -> World:
        return self


def view(facts: SourceFacts | FollowerFacts | None, **store_settings: Any) -> ReplicationView:
    world: Any = World()
    real = real_env()
    env = Env(clock=world, disk=real.disk, random=real.random, offload=real.offload)
    base = foundation(BrokerOptions(broker_name="b"), env, world, **store_settings)
    seen = ReplicationView(base)
    seen.facts = lambda: facts
    return seen


def answer(facts: SourceFacts | FollowerFacts | None, **store_settings: Any) -> dict[str, Any]:
    reply = view(facts, **store_settings).get_ha_status(GetBrokerHaStatus(), CALL)
    found: dict[str, Any] = json.loads(reply.body)
    return found


def metrics(seen: ReplicationView) -> dict[str, float]:
    found = {}
    for sample in replication_samples(seen):
        assert isinstance(sample, Sample)
        key = f"{sample.metric.name.removeprefix('cosmodrome_replication_')}{list(sample.labels)}"
        assert key not in found
        assert isinstance(sample.value, float | int)
        found[key.removesuffix("[]")] = sample.value
    return found


# --- haStatus -----------------------------------------------------------------------------------


def test_a_master_answers_as_upstream_does() -> None:
    found = answer(MASTER)
    assert found["master"] is True and found["masterCommitLogMaxOffset"] == 1000
    assert found["inSyncSlaveNums"] == 1
    (link,) = found["haConnectionInfo"]
    upstream = {
        "addr": "10.0.0.2:41234",
        "slaveAckOffset": 900,
        "diff": 100,
        "inSync": True,
        "transferredByteInSecond": 2048,
        "transferFromWhere": 950,
    }
    assert upstream.items() <= link.items()
    ours = {"node": "b:1", "classic": False, "lagSeconds": 0.25, "silentSeconds": 1.5}
    assert link == upstream | ours


def test_a_slave_far_behind_is_not_in_sync() -> None:
    found = answer(MASTER, ha_slave_fallbehind_max=99)
    assert found["inSyncSlaveNums"] == 0 and found["haConnectionInfo"][0]["inSync"] is False


def test_a_slave_answers_as_upstream_does() -> None:
    found = answer(FOLLOWER, broker_role="SLAVE")
    assert found["master"] is False and found["brokerRole"] == "SLAVE"
    client = found["haClientRuntimeInfo"]
    upstream = {
        "masterAddr": "10.0.0.1:10912",
        "transferredByteInSecond": 100,
        "maxOffset": 400,
        "lastReadTimestamp": NOW_MS - 500,
        "lastWriteTimestamp": 0,
        "masterFlushOffset": -1,
    }
    assert upstream.items() <= client.items()
    assert (client["state"], client["lagBytes"], client["lagSeconds"]) == ("copying", 500, 12.0)
    assert client["copiedPercent"] == 37.5  # 300 of 800 bytes: the log begins at 100


def test_what_a_slave_does_not_know_is_left_out() -> None:
    client = answer(NEVER_LINKED, broker_role="SLAVE")["haClientRuntimeInfo"]
    assert client["state"] == "no master" and client["lastReadTimestamp"] == 0
    unknown = {"lagBytes", "lagSeconds", "silentSeconds", "copiedPercent", "masterMaxOffset"}
    assert not unknown & client.keys()


def test_a_slave_without_a_link_knows_no_lag() -> None:
    lost = dataclasses.replace(FOLLOWER, state=FollowerState.CONNECTING, lag_bytes=0)
    client = answer(lost, broker_role="SLAVE")["haClientRuntimeInfo"]
    assert "lagBytes" not in client and client["silentSeconds"] == 0.5
    assert "lag_bytes" not in metrics(view(lost)) and "silent_seconds" in metrics(view(lost))


def test_without_replication_it_is_refused() -> None:
    with pytest.raises(Refused) as refusal:
        answer(None)
    assert refusal.value.code == Code.SYSTEM_ERROR


def test_what_upstream_answers_can_be_read() -> None:
    text = (
        b'{"haClientRuntimeInfo":{"lastReadTimestamp":0,"lastWriteTimestamp":0,'
        b'"masterFlushOffset":0,"maxOffset":0,"transferredByteInSecond":0},"haConnectionInfo":[{'
        b'"addr":"10.0.0.2:1","diff":5,"inSync":true,"slaveAckOffset":95,"transferFromWhere":100,'
        b'"transferredByteInSecond":7}],"inSyncSlaveNums":1,"master":true,'
        b'"masterCommitLogMaxOffset":100}'
    )
    found = bodies.decode(HARuntimeInfo, text)
    assert found.ha_connection_info[0].slave_ack_offset == 95
    assert bodies.encode(found) == text


# --- runtime figures ----------------------------------------------------------------------------


def test_runtime_figures() -> None:
    master = view(MASTER, broker_role="SYNC_MASTER").figures()
    assert master["replicationRole"] == "SYNC_MASTER" and master["replicationSlaves"] == "1"
    assert master["replicationSlave_b:1"] == ("100 bytes and 0.2 s behind, last contact 1.5 s ago")
    refused = dataclasses.replace(MASTER, refused_links=2, refused_why="ahead")
    assert view(refused).figures()["replicationRefusedWhy"] == "ahead"
    slave = view(FOLLOWER, broker_role="SLAVE").figures()
    assert slave["replicationState"] == "copying" and slave["replicationCopiedPercent"] == "37.5"
    assert slave["replicationLagBytes"] == "500" and slave["replicationLagSeconds"] == "12.0"
    lost = view(NEVER_LINKED, broker_role="SLAVE").figures()
    assert "replicationLagBytes" not in lost and "name server" in lost["replicationWhy"]
    assert view(None).figures() == {"replicationRole": "ASYNC_MASTER"}


@pytest.mark.parametrize(
    ("state", "end", "master_end", "ratio"),
    [
        (FollowerState.IN_STEP, 900, 900, 1.0),
        (FollowerState.COPYING, 100, 900, 0.0),
        (FollowerState.COPYING, 0, 0, 1.0),
        (FollowerState.COPYING, 500, 900, 0.5),
        (FollowerState.COPYING, 1000, 900, 1.0),
        (FollowerState.REFUSED, 500, 900, None),
        (FollowerState.CONNECTING, 500, 900, None),
        (FollowerState.COPYING, 500, -1, None),
    ],
)
def test_how_much_was_copied(
    state: FollowerState, end: int, master_end: int, ratio: float | None
) -> None:
    facts = dataclasses.replace(FOLLOWER, state=state, end=end, master_end=master_end)
    assert view(facts).copied_ratio(facts) == ratio


def test_links_have_names_of_their_own() -> None:
    def link(peer: str, node: str = "") -> LinkFacts:
        return dataclasses.replace(LINK, peer=peer, node=node)

    assert link_names([link("h:1", "b:1"), link("h:2")]) == ["b:1", "h"]
    assert link_names([link("h:1"), link("h:2")]) == ["h:1", "h:2"]
    assert link_names([]) == []


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_of_a_master() -> None:
    assert metrics(view(MASTER, broker_role="SYNC_MASTER")) == {
        "role['SYNC_MASTER']": 1,
        "links": 1,
        "refused_links_total": 0,
        "slave_lag_bytes['b:1']": 100,
        "slave_lag_seconds['b:1']": 0.25,
        "slave_silent_seconds['b:1']": 1.5,
        "slave_sent_bytes_per_second['b:1']": 2048.7,
    }


def test_metrics_of_a_slave() -> None:
    found = metrics(view(FOLLOWER, broker_role="SLAVE"))
    states = {key: value for key, value in found.items() if key.startswith("state[")}
    assert len(states) == len(FollowerState) and sum(states.values()) == 1
    assert found["state['copying']"] == 1
    assert (found["lag_bytes"], found["lag_seconds"], found["silent_seconds"]) == (500, 12.0, 0.5)
    assert found["copied_ratio"] == 0.375


def test_what_is_unknown_is_no_zero() -> None:
    found = metrics(view(NEVER_LINKED, broker_role="SLAVE"))
    assert not {"lag_bytes", "lag_seconds", "silent_seconds", "copied_ratio"} & found.keys()
    assert metrics(view(None)) == {"role['ASYNC_MASTER']": 1}


def test_every_metric_of_replication_is_told_by_somebody() -> None:
    told = {
        sample.metric.name
        for facts in (MASTER, FOLLOWER)
        for sample in replication_samples(view(facts))
        if isinstance(sample, Sample)
    }
    listed = {row.name for row in metric_table.TABLE if "_replication_" in row.name}
    assert listed == told
