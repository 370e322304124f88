"""Who follows whom: what both ends say, put together."""

from __future__ import annotations

from typing import Any

import pytest

from cosmodrome.client.operate.pairs import BrokerSeen, Pair, Standing, pair_of
from cosmodrome.errors import AccessDenied, Unreachable
from cosmodrome.wire.report_bodies import (
    HAClientRuntimeInfo,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
)

SLAVE_HOST = "10.0.0.2"


def link(addr: str = f"{SLAVE_HOST}:40000", **more: Any) -> HAConnectionRuntimeInfo:
    """As a master of Apache RocketMQ 5 says it, or with what ours adds."""
    return HAConnectionRuntimeInfo(addr=addr, diff=7, in_sync=True, **more)


def ours(node: str) -> HAConnectionRuntimeInfo:
    return link(node=node, classic=False, lag_seconds=0.5, silent_seconds=0.1)


def master(
    *links: HAConnectionRuntimeInfo, end: int = 1000, tells: bool = True, **more: Any
) -> BrokerSeen:
    status = None
    if tells:
        status = HARuntimeInfo(
            master=True,
            ha_connection_info=list(links),
            master_commit_log_max_offset=end,
            **more,
        )
    runtime = {"commitLogMaxOffset": str(end if status is None else 0)}
    return BrokerSeen("c", "b", 0, "10.0.0.1:10911", runtime, status)


def slave(
    number: int = 1,
    *,
    end: int = 900,
    tells: bool = True,
    address: str = f"{SLAVE_HOST}:10911",
    **told: Any,
) -> BrokerSeen:
    status = HARuntimeInfo(ha_client_runtime_info=HAClientRuntimeInfo(**told)) if tells else None
    return BrokerSeen("c", "b", number, address, {"commitLogMaxOffset": str(end)}, status)


def standing(pair: Pair, number: int = 1) -> Standing:
    return next(found for seen, found in pair.members if seen.number == number)


IN_STEP: dict[str, Any] = {"state": "in step", "lag_bytes": 0, "lag_seconds": 0.0}


def test_a_slave_of_ours_that_is_linked() -> None:
    pair = pair_of("b", [master(ours("b:1")), slave(copied_percent=100.0, **IN_STEP)])
    assert standing(pair, 0) == Standing("up", slaves=1)
    # The lag is the master's: it knows what was written meanwhile.
    assert standing(pair) == Standing("in step", "", None, 7, 0.5, 0.1, 100.0)
    assert standing(pair).good and not pair.strangers


def test_a_slave_without_a_link_does_not_look_healthy() -> None:
    for words in (IN_STEP, {}):
        found = standing(pair_of("b", [master(), slave(**words)]))
        assert found.state == "not linked" and not found.good and found.why


def test_a_refused_slave_says_why() -> None:
    told: dict[str, Any] = {"state": "refused", "why": "it is ahead; cut it", "lag_bytes": 3}
    found = standing(pair_of("b", [master(), slave(**told)]))
    assert (found.state, found.why, found.good) == ("refused", "it is ahead; cut it", False)
    assert found.lag_bytes == 100  # its own figure is from the last link


def test_a_refused_slave_that_is_ahead_has_no_lag() -> None:
    found = standing(pair_of("b", [master(end=800), slave(state="refused", why="ahead")]))
    assert (found.state, found.lag_bytes, found.lag_s) == ("refused", None, None)


def test_brokers_that_say_nothing_about_links() -> None:
    found = standing(pair_of("b", [master(tells=False), slave(tells=False)]))
    assert found == Standing("unknown", lag_bytes=100)
    assert standing(pair_of("b", [master(tells=False)]), 0) == Standing("up")  # slaves: unknown
    ahead = standing(pair_of("b", [master(tells=False, end=899), slave(tells=False)]))
    assert (ahead.state, ahead.good, ahead.lag_bytes) == ("ahead", False, None)
    assert "900" in ahead.why and "899" in ahead.why and "--cut-at" in ahead.why


def test_a_silent_slave_of_a_master_that_tells() -> None:
    pair = pair_of("b", [master(link()), slave(tells=False)])
    assert standing(pair) == Standing("linked", lag_bytes=7)
    behind = link()
    behind.in_sync = False
    assert standing(pair_of("b", [master(behind), slave(tells=False)])).state == "far behind"


def test_links_that_cannot_be_told_apart() -> None:
    two = [slave(1, tells=False), slave(2, tells=False, address=f"{SLAVE_HOST}:20911")]
    pair = pair_of("b", [master(link(), link(f"{SLAVE_HOST}:40001")), *two])
    assert [standing(pair, number).state for number in (1, 2)] == ["unknown", "unknown"]
    assert [found.state for _, found in pair.strangers] == ["not registered"] * 2
    named = pair_of("b", [master(ours("b:2"), link()), *two])
    assert standing(named, 2).lag_s == 0.5
    assert (standing(named, 1).state, named.strangers) == ("linked", ())


def test_a_slave_that_nobody_registered() -> None:
    pair = pair_of("b", [master(ours("b:3"))])
    ((address, found),) = pair.strangers
    assert address == f"{SLAVE_HOST}:40000" and pair.has_slaves
    assert (found.state, found.lag_bytes, found.good) == ("not registered", 7, False)
    assert not pair_of("b", [master()]).has_slaves


def test_a_synchronous_master_alone() -> None:
    found = standing(pair_of("b", [master(broker_role="SYNC_MASTER")]), 0)
    assert (found.state, found.slaves, found.good) == ("no slave", 0, False)
    refusing = master(broker_role="SYNC_MASTER", refused_why="b/1 is ahead")
    assert "b/1 is ahead" in standing(pair_of("b", [refusing]), 0).why
    assert standing(pair_of("b", [master(broker_role="ASYNC_MASTER")]), 0).good


def test_a_slave_without_a_master() -> None:
    found = standing(pair_of("b", [slave(**IN_STEP)]))
    assert found.state == "not linked" and "no master" in found.why
    assert standing(pair_of("b", [slave(state="connecting", why="x")])).state == "connecting"


@pytest.mark.parametrize("number", [0, 1])
def test_who_does_not_answer(number: int) -> None:
    gone = BrokerSeen("c", "b", number, "x:1", Unreachable("x:1 is away"), None)
    found = standing(pair_of("b", [gone]), number)
    assert (found.state, found.why, found.good) == ("silent", "x:1 is away", False)


def test_a_slave_that_does_not_answer_has_the_lag_that_its_master_sees() -> None:
    gone = BrokerSeen("c", "b", 1, f"{SLAVE_HOST}:1", Unreachable("away"), None)
    found = standing(pair_of("b", [master(ours("b:1")), gone]))
    assert (found.state, found.lag_bytes, found.silent_s) == ("silent", 7, 0.1)


@pytest.mark.parametrize("number", [0, 1])
def test_who_shows_nothing_is_not_called_silent(number: int) -> None:
    refusal = AccessDenied("add 10.0.0.5 to peerAddresses")
    hidden = BrokerSeen("c", "b", number, "x:1", refusal, None)
    found = standing(pair_of("b", [hidden]), number)
    assert (found.state, found.good) == ("not shown", False)
    assert "add 10.0.0.5 to peerAddresses" in found.why
    if number:  # its master knows the rest
        found = standing(pair_of("b", [master(ours("b:1")), hidden]))
        assert (found.state, found.lag_bytes, found.silent_s) == ("not shown", 7, 0.1)


def test_a_slave_of_a_slave_has_no_link_to_the_master() -> None:
    second = slave(2, address="10.0.0.3:10911", master_addr=f"{SLAVE_HOST}:10912", **IN_STEP)
    members = [master(ours("b:1")), slave(**IN_STEP), second]
    assert standing(pair_of("b", members), 2).state == "in step"
    lost = slave(2, address="10.0.0.3:10911", master_addr="10.0.0.1:10912", **IN_STEP)
    assert standing(pair_of("b", [*members[:2], lost]), 2).state == "not linked"
