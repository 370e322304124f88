"""Findings about a master and its slaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.client.operate.diagnosis.pair_checks import (
    FATAL_SETTINGS,
    OTHER_SETTINGS,
    Member,
    pair_checks,
)
from cosmodrome.client.operate.pairs import PROMOTION, BrokerSeen
from cosmodrome.env.config import describe
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.errors import AccessDenied, CosmodromeError, Unreachable
from cosmodrome.findings import Finding, Severity
from cosmodrome.layout import PAIR_SETTINGS
from cosmodrome.wire.report_bodies import (
    HAClientRuntimeInfo,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
)

SETTINGS = dict.fromkeys([*FATAL_SETTINGS, *OTHER_SETTINGS], "same")
RUNTIME = {
    "brokerVersionDesc": "V4_9_8",
    "cosmodromeVersion": "1.0.0",
    "commitLogDirCapacity": "Total : 100.0 GiB, Free : 60.0 GiB.",
}


def status(**told: Any) -> HARuntimeInfo:
    return HARuntimeInfo(ha_client_runtime_info=HAClientRuntimeInfo(**told))


def master(links: int = 1, lag_seconds: float = 0.5, diff: int = 7, **more: Any) -> Member:
    link = HAConnectionRuntimeInfo(
        addr="y:9", node="b:1", diff=diff, in_sync=True, lag_seconds=lag_seconds
    )
    told = HARuntimeInfo(
        master=True,
        ha_connection_info=[link] * links,
        master_commit_log_max_offset=1000,
        broker_role="SYNC_MASTER",
    )
    return member(0, told, **more)


def member(
    number: int = 1,
    told: HARuntimeInfo | None = None,
    *,
    runtime: dict[str, str] | CosmodromeError | None = None,
    settings: dict[str, str] | None = None,
    ahead_s: float | None = 0.0,
) -> Member:
    if isinstance(runtime, CosmodromeError):
        return Member(BrokerSeen("c", "b", number, "x:1", runtime, None), {})
    told = told or status(state="in step", lag_bytes=0, lag_seconds=0.0)
    seen = BrokerSeen("c", "b", number, "x:1", RUNTIME | (runtime or {}), told)
    return Member(seen, SETTINGS | (settings or {}), ahead_s)


def found(*members: Member) -> dict[str, Finding]:
    checks = pair_checks(members)
    assert all(check.severity in (Severity.OK, *BAD) for check in checks)
    assert all(check.sentence for check in checks)
    return {check.code: check for check in checks}


BAD = (Severity.WARNING, Severity.UNKNOWN, Severity.ERROR)


def test_a_pair_in_order() -> None:
    checks = found(master(), member())
    assert {check.severity for check in checks.values()} == {Severity.OK}
    codes = ["replication", "pair clock", "pair version", "pair settings", "pair disk"]
    assert list(checks) == codes
    assert checks["replication"].evidence == {"lag_bytes": 7, "lag_s": 0.5}


def test_the_settings_that_must_agree_exist() -> None:
    known = {row[0] for group in (BrokerOptions, StoreOptions) for row in describe(group)}
    assert SETTINGS.keys() <= known
    assert SETTINGS.keys() == PAIR_SETTINGS  # so peers may compare all of them


@pytest.mark.parametrize(
    ("key", "severity"),
    [
        *((key, Severity.ERROR) for key in FATAL_SETTINGS),
        *((key, Severity.WARNING) for key in OTHER_SETTINGS),
    ],
)
def test_settings_that_differ(key: str, severity: Severity) -> None:
    check = found(master(), member(settings={key: "other"}))["pair settings"]
    assert check.severity is severity and check.subject == "b/1"
    assert f"{key} is other, its master has same" in check.sentence and key in check.remedy


def test_settings_that_nobody_tells() -> None:
    silent = Member(member().seen, {}, 0.0)
    check = found(master(), silent)["pair settings"]
    assert check.severity is Severity.UNKNOWN
    assert "by b/1" in check.sentence and "peerAddresses" in check.remedy


@pytest.mark.parametrize(
    ("ahead_s", "severity"),
    [
        (1.0, Severity.OK),
        (-10.0, Severity.WARNING),
        (100.0, Severity.ERROR),
        (None, Severity.UNKNOWN),
    ],
)
def test_clocks(ahead_s: float | None, severity: Severity) -> None:
    assert found(master(), member(ahead_s=ahead_s))["pair clock"].severity is severity
    # Both wrong by the same is no matter of the pair.
    both = found(master(ahead_s=500.0), member(ahead_s=500.0))
    assert both["pair clock"].severity is Severity.OK


def test_versions() -> None:
    older = found(master(), member(runtime={"cosmodromeVersion": "0.9.0"}))["pair version"]
    assert older.severity is Severity.WARNING and "Cosmodrome 0.9.0" in older.sentence
    java = {name: value for name, value in RUNTIME.items() if name != "cosmodromeVersion"}
    slave = Member(BrokerSeen("c", "b", 1, "x:1", java, None), SETTINGS, 0.0)
    assert "RocketMQ 4.9.8, its master is Cosmo" in found(master(), slave)["pair version"].sentence
    unknown = found(master(), member(runtime={"brokerVersionDesc": ""}))["pair version"]
    assert unknown.severity is Severity.UNKNOWN


def test_disks() -> None:
    capacity = "commitLogDirCapacity"
    small = member(runtime={capacity: "Total : 50.0 GiB, Free : 40.0 GiB."})
    assert found(master(), small)["pair disk"].severity is Severity.WARNING
    full = member(runtime={capacity: "Total : 100.0 GiB, Free : 512 B."})
    check = found(master(diff=4096), full)["pair disk"]
    assert check.severity is Severity.ERROR and "512.0 B free, and 4.0 KiB" in check.sentence
    assert "pair disk" not in found(master(), member(runtime={capacity: "?"}))


@pytest.mark.parametrize(
    ("told", "severity", "text"),
    [
        ({"state": "refused", "why": "ahead; cut it"}, Severity.ERROR, "refused: ahead; cut it"),
        ({"state": "connecting", "why": "no route"}, Severity.ERROR, "connecting: no route"),
        ({"state": "in step"}, Severity.ERROR, "not linked"),
    ],
)
def test_a_slave_without_a_link(told: dict[str, Any], severity: Severity, text: str) -> None:
    checks = pair_checks([master(links=0), member(told=status(**told))])
    assert (checks[0].subject, checks[0].severity) == ("b", Severity.ERROR)  # SYNC_MASTER
    assert (checks[1].severity, checks[1].subject) == (severity, "b/1")
    assert text in checks[1].sentence


def test_a_slave_that_copies_or_lags() -> None:
    copying = member(told=status(state="copying", copied_percent=41.2))
    check = found(master(), copying)["replication"]
    assert check.severity is Severity.WARNING and "41 % copied" in check.sentence
    late = found(master(lag_seconds=60.0), member())["replication"]
    assert late.severity is Severity.WARNING and "60.0 s" in late.sentence and late.remedy


def test_a_pair_of_brokers_that_say_nothing_about_links() -> None:
    def java(number: int, end: int) -> Member:
        runtime = {"brokerVersionDesc": "V4_9_7", "commitLogMaxOffset": str(end)}
        return Member(BrokerSeen("c", "b", number, "x:1", runtime, None), {}, None)

    check = found(java(0, 1000), java(1, 900))["replication"]
    assert check.severity is Severity.OK and "100 bytes behind; it does not tell" in check.sentence
    assert found(java(0, 1 << 40), java(1, 0))["replication"].severity is Severity.WARNING
    assert found(java(0, 900), java(1, 1000))["replication"].severity is Severity.ERROR


def test_who_is_silent_is_judged_elsewhere() -> None:
    gone = Unreachable("x:1 is away")
    (away,) = pair_checks([member(0, runtime=gone), member(1, runtime=gone)])
    assert away.code == "master" and "b/1 at x:1 does not tell" in away.sentence
    (away, check) = pair_checks([member(0, runtime=gone), member(1)])
    assert away.code == "master"
    assert check.severity is Severity.OK  # its own words are all there is
    assert pair_checks([member(0, runtime=gone)]) == []


@pytest.mark.parametrize("registered", [True, False])
def test_a_master_that_is_away(registered: bool) -> None:
    slaves = [member(at, runtime={"commitLogMaxOffset": str(at * 100)}) for at in (1, 2)]
    lost = [member(0, runtime=Unreachable("x:1 is away"))] if registered else []
    away = pair_checks([*lost, *slaves])[0]
    assert (away.code, away.subject, away.severity) == ("master", "b", Severity.ERROR)
    assert "b/1 at x:1 has the log up to 100" in away.sentence
    assert "b/2 at x:1 has the log up to 200" in away.sentence
    assert "docs/operating-pairs.md" in away.remedy


def test_a_master_that_shows_nothing_is_not_away() -> None:
    hidden = member(0, runtime=AccessDenied("not to you"))
    assert "master" not in {check.code for check in pair_checks([hidden, member(1)])}


def test_what_the_remedy_names_is_in_the_guide() -> None:
    section, document = re.fullmatch(r'.* \("(.+)" in (.+)\)', PROMOTION).groups()
    guide = Path(__file__).parents[3] / document
    assert f"## {section}\n" in guide.read_text()


def test_a_master_alone_is_no_pair() -> None:
    alone = HARuntimeInfo(master=True, broker_role="ASYNC_MASTER")
    assert pair_checks([member(0, alone)]) == []
