"""Is the cluster in order? Each question is answered by one `Finding`, also when all is well.

Name servers and brokers are asked each on its own: one that does not answer is a finding and no
error. `cosmo check` and `cosmo doctor` use this; it judges nothing that only one machine can know.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Mapping
from typing import NamedTuple, TypeVar

from cosmodrome.client.operate.diagnosis.facts import is_loopback
from cosmodrome.client.operate.diagnosis.pair_checks import Member, pair_checks
from cosmodrome.client.operate.fleet import Fleet, attempt
from cosmodrome.client.operate.pairs import ASK_ELSEWHERE, BrokerSeen, ha_status
from cosmodrome.client.operate.standing import GroupStanding, standing
from cosmodrome.env.base import Clock
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import CosmodromeError, Refused
from cosmodrome.findings import Finding, Severity
from cosmodrome.layout import SETTING_FIGURE
from cosmodrome.wire import bodies, properties_text
from cosmodrome.wire.bodies import MASTER_ID, BrokerData, ClusterInfo, KVTable
from cosmodrome.wire.commands.broker import GetBrokerConfig, GetBrokerRuntimeInfo
from cosmodrome.wire.commands.route import GetBrokerClusterInfo

T = TypeVar("T")

CLOCK_WARN_S = 5.0
CLOCK_FAIL_S = 60.0
CLOCK_STEP_S = 1.0  # brokers tell how long they run in whole seconds
SLOW_MS = 1_000
# Defaults, where a broker does not tell its own.
DISK_FULL_PERCENT = StoreOptions().disk_max_used_space_ratio
DISK_REFUSING_PERCENT = StoreOptions().disk_space_warning_level_ratio


@dataclasses.dataclass(frozen=True, slots=True)
class Thresholds:
    """For the lag of groups; None: any number is fine."""

    lag_warn: int | None = None
    lag_fail: int | None = None
    age_warn_s: float | None = None
    age_fail_s: float | None = None


async def cluster_checks(fleet: Fleet, clock: Clock) -> list[Finding]:
    """Name servers, then every broker that they know."""
    checks, info = await _name_servers(fleet)
    if info is None:
        return checks
    if not any(data.broker_addrs for data in info.broker_addr_table.values()):
        listed = ";".join(fleet.name_server_addresses)
        return [
            *checks,
            Finding(
                "brokers",
                "cluster",
                Severity.ERROR,
                "no broker is registered",
                f"start one: cosmo broker run -n '{listed}'",
                evidence={"brokers": 0},
            ),
        ]
    found = await asyncio.gather(
        *(
            _brokers_of(fleet, clock, name, data)
            for name, data in sorted(info.broker_addr_table.items())
        )
    )
    return checks + [check for part in found for check in part]


async def _name_servers(fleet: Fleet) -> tuple[list[Finding], ClusterInfo | None]:
    checks: list[Finding] = []
    known: dict[str, ClusterInfo] = {}
    for address in fleet.name_server_addresses:
        answer, took_ms = await _timed(fleet.call(address, GetBrokerClusterInfo()))
        if isinstance(answer, CosmodromeError):
            checks.append(
                Finding(
                    "name server",
                    address,
                    Severity.ERROR,
                    str(answer),
                    "start it (cosmo up, or cosmo namesrv run), or give its address with -n",
                )
            )
            continue
        known[address] = bodies.decode(ClusterInfo, answer.body)
        checks.append(_answered("name server", address, took_ms))
    tables = {address: set(info.broker_addr_table) for address, info in known.items()}
    every = set().union(*tables.values()) if tables else set()
    for address, names in tables.items():
        if every - names:
            missing = ", ".join(sorted(every - names))
            checks.append(
                Finding(
                    "name server",
                    address,
                    Severity.WARNING,
                    f"it does not know {missing}, others do",
                    "give every broker all name servers (namesrvAddr), and look at the network",
                )
            )
    best = max(known.values(), key=lambda info: len(info.broker_addr_table), default=None)
    return checks, best


async def _brokers_of(fleet: Fleet, clock: Clock, name: str, data: BrokerData) -> list[Finding]:
    """All brokers of one name, each for itself and then together."""
    checks: dict[int, list[Finding]] = {}
    members: dict[int, Member] = {}

    async def look(number: int) -> None:
        checks[number], members[number] = await _broker(
            fleet, clock, BrokerAt(data.cluster, name, number, data.broker_addrs[number])
        )

    numbers = sorted(data.broker_addrs)
    # Slaves first: one that then has more than its master is indeed ahead.
    await asyncio.gather(*(look(number) for number in numbers if number != MASTER_ID))
    if MASTER_ID in numbers:
        await look(MASTER_ID)
    alone = [check for number in numbers for check in checks[number]]
    return alone + pair_checks([members[number] for number in numbers])


class BrokerAt(NamedTuple):
    cluster: str
    name: str
    number: int
    address: str


async def _broker(fleet: Fleet, clock: Clock, at: BrokerAt) -> tuple[list[Finding], Member]:
    subject = at.name if at.number == MASTER_ID else f"{at.name}/{at.number}"
    checks = [_advertised(fleet, subject, at.address)]
    asked_ms = clock.now_ms()
    answer, took_ms = await _timed(fleet.call(at.address, GetBrokerRuntimeInfo()))
    if isinstance(answer, CosmodromeError):
        unseen = _without_figures(subject, at.address, answer)
        return [unseen, *checks], Member(BrokerSeen(*at, answer, None), {})
    runtime = bodies.decode(KVTable, answer.body).table
    config = await attempt(fleet.call(at.address, GetBrokerConfig()))
    if isinstance(config, CosmodromeError):
        settings = _settings_shown(runtime)
    else:
        settings = properties_text.loads(config.body)
    seen = BrokerSeen(*at, runtime, await ha_status(fleet, at.address))
    version = runtime.get("brokerVersionDesc", "unknown").removeprefix("V").replace("_", ".")
    up = _answered("broker", subject, took_ms, f"{at.address} answers, version {version}")
    checks = [up, *checks, _disk(subject, runtime, settings), _clock(subject, runtime, asked_ms)]
    # Its answer is about half of the way old.
    return checks, Member(seen, settings, _ahead_s(runtime, asked_ms + took_ms / 2))


def _without_figures(subject: str, address: str, error: CosmodromeError) -> Finding:
    if isinstance(error, Refused):
        says = f"{address} answers, but shows this machine nothing: {error}"
        return Finding("broker", subject, Severity.UNKNOWN, says, ASK_ELSEWHERE)
    return Finding(
        "broker",
        subject,
        Severity.ERROR,
        f"{address}: {error}",
        "start it, open its port, or set brokerIP1 to an address that clients reach",
    )


def _settings_shown(runtime: Mapping[str, str]) -> dict[str, str]:
    """What peers may know of the settings of a broker that shows them to administrators only."""
    return {
        name.removeprefix(SETTING_FIGURE): text
        for name, text in runtime.items()
        if name.startswith(SETTING_FIGURE)
    }


def _answered(check: str, subject: str, took_ms: float, says: str = "it answers") -> Finding:
    figures = {"answer_ms": round(took_ms, 1)}
    if took_ms < SLOW_MS:
        return Finding(check, subject, Severity.OK, f"{says} ({took_ms:.0f} ms)", evidence=figures)
    return Finding(
        check,
        subject,
        Severity.WARNING,
        f"{says}, but only after {took_ms:.0f} ms",
        "look at its load and at the network",
        evidence=figures,
    )


def _advertised(fleet: Fleet, subject: str, address: str) -> Finding:
    servers = [one.rpartition(":")[0] for one in fleet.name_server_addresses]
    distant = [host for host in servers if not is_loopback(host)]
    if is_loopback(address.rpartition(":")[0]) and distant:
        return Finding(
            "advertised address",
            subject,
            Severity.ERROR,
            f"{address} is loopback: every client takes it for its own machine",
            "set brokerIP1 to an address that clients reach and restart the broker",
        )
    return Finding("advertised address", subject, Severity.OK, address)


def _disk(subject: str, runtime: Mapping[str, str], settings: Mapping[str, str]) -> Finding:
    ratio = _float(runtime.get("commitLogDiskRatio"))
    if ratio is None or ratio < 0:
        return Finding("disk", subject, Severity.UNKNOWN, "it does not tell how full its disk is")
    full = _float(settings.get("diskMaxUsedSpaceRatio")) or DISK_FULL_PERCENT
    refusing = _float(settings.get("diskSpaceWarningLevelRatio")) or DISK_REFUSING_PERCENT
    used = ratio * 100
    figures = {"used_percent": round(used, 1)}
    text = (
        f"{used:.0f} % used; old messages go from {full:.0f} %,"
        f" sends are refused at {refusing:.0f} %"
    )
    if used >= refusing:
        step = "free space now: sends are refused; shorten fileReservedTime or add disk"
        return Finding("disk", subject, Severity.ERROR, text, step, evidence=figures)
    if used >= full:
        step = "free space: old messages go before their time; shorten fileReservedTime or add disk"
        return Finding("disk", subject, Severity.WARNING, text, step, evidence=figures)
    return Finding("disk", subject, Severity.OK, text, evidence=figures)


_RUNTIME = re.compile(r"(\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds")


def _ahead_s(runtime: Mapping[str, str], asked_ms: float) -> float | None:
    """A broker of ours tells its time. Others tell when they started and for how long they run,
    which together is their time."""
    now_ms = _float(runtime.get("nowTimestamp"))
    if now_ms is None:
        boot_ms = _float(runtime.get("bootTimestamp"))
        match = _RUNTIME.search(runtime.get("runtime", ""))
        if boot_ms is None or match is None:
            return None
        days, hours, minutes, seconds = map(int, match.groups())
        ran_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds + CLOCK_STEP_S / 2
        now_ms = boot_ms + 1000 * ran_s
    return (now_ms - asked_ms) / 1000


def _clock(subject: str, runtime: Mapping[str, str], asked_ms: int) -> Finding:
    apart_s = _ahead_s(runtime, asked_ms)
    if apart_s is None:
        return Finding("clock", subject, Severity.UNKNOWN, "it does not tell its time")
    figures = {"ahead_s": round(apart_s, 1)}
    word = "ahead of" if apart_s > 0 else "behind"
    if abs(apart_s) <= CLOCK_WARN_S:
        return Finding(
            "clock", subject, Severity.OK, "as this machine's, within seconds", evidence=figures
        )
    severity = Severity.ERROR if abs(apart_s) > CLOCK_FAIL_S else Severity.WARNING
    return Finding(
        "clock",
        subject,
        severity,
        f"{abs(apart_s):.0f} s {word} this machine",
        "let both use NTP: delays, retention and lag in seconds are wrong otherwise",
        evidence=figures,
    )


# --- groups ------------------------------------------------------------------------------------


async def group_check(fleet: Fleet, group: str, limits: Thresholds) -> Finding:
    """Lag of one group against thresholds; what is not known is no good news."""
    found = await attempt(standing(fleet, group))
    if isinstance(found, CosmodromeError):
        return Finding("group", group, Severity.UNKNOWN, str(found), f"cosmo group explain {group}")
    return judge_group(found, limits)


def judge_group(found: GroupStanding, limits: Thresholds) -> Finding:
    step = f"cosmo group explain {found.group}"
    age_s = None if found.age_ms is None else found.age_ms / 1000
    if found.lag is None or age_s is None or not found.queues:
        known = {"lag_at_least": float(found.lag_known)}
        reasons = sorted({row.why for row in found.queues if row.why})
        why = (
            "; ".join([*reasons, *found.silent.values()])
            or "nothing was ever consumed as this group"
        )
        return Finding(
            "group", found.group, Severity.UNKNOWN, f"lag unknown: {why}", step, evidence=known
        )
    figures = {"lag": float(found.lag), "age_s": round(age_s, 1)}
    if found.members is not None:
        figures["members"] = float(found.members)
    says = f"{found.lag} message(s) behind, the oldest waits for {age_s:.1f} s"
    severity = Severity.OK
    if _above(found.lag, limits.lag_warn) or _above(age_s, limits.age_warn_s):
        severity = Severity.WARNING
    if _above(found.lag, limits.lag_fail) or _above(age_s, limits.age_fail_s):
        severity = Severity.ERROR
    if found.members == 0 and found.lag and severity is Severity.OK:
        severity, says = Severity.WARNING, f"{says}, and no member is connected"
    remedy = "" if severity is Severity.OK else step
    return Finding("group", found.group, severity, says, remedy, evidence=figures)


def _above(value: float, limit: float | None) -> bool:
    return limit is not None and value >= limit


def worst(findings: list[Finding]) -> Severity:
    return max(
        (one.severity for one in findings), key=lambda one: one.rank, default=Severity.UNKNOWN
    )


async def _timed(call: Awaitable[T]) -> tuple[T | CosmodromeError, float]:
    time = asyncio.get_running_loop().time
    began = time()
    answer = await attempt(call)
    return answer, (time() - began) * 1000


def _float(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
