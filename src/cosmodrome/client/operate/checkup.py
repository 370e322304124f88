"""Is the cluster in order? Each answer is one `Check`: a status, a sentence, what to do next.

Asked are name servers and brokers, each on its own: one that does not answer is a finding and no
error. Used by `cosmo check` and `cosmo doctor`; it judges nothing that only one machine can know.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from cosmodrome.client.operate.facts import is_loopback
from cosmodrome.client.operate.fleet import Fleet, attempt
from cosmodrome.client.operate.standing import GroupStanding, standing
from cosmodrome.client.routes import MASTER
from cosmodrome.env.base import Clock
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire import bodies, properties_text
from cosmodrome.wire.bodies import ClusterInfo, KVTable
from cosmodrome.wire.commands.broker import GetBrokerConfig, GetBrokerRuntimeInfo
from cosmodrome.wire.commands.route import GetBrokerClusterInfo

T = TypeVar("T")

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
STATUSES = (OK, WARN, UNKNOWN, FAIL)  # from good to bad

CLOCK_WARN_S = 5.0
CLOCK_FAIL_S = 60.0
CLOCK_STEP_S = 1.0  # brokers tell how long they run in whole seconds
SLOW_MS = 1_000
# Upstream's defaults, where a broker does not tell its own.
DISK_FULL_PERCENT = 75
DISK_REFUSING_PERCENT = 90


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    check: str
    subject: str
    status: str
    says: str
    next_step: str = ""
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Thresholds:
    """For the lag of groups; None: any number is fine."""

    lag_warn: int | None = None
    lag_fail: int | None = None
    age_warn_s: float | None = None
    age_fail_s: float | None = None


async def cluster_checks(fleet: Fleet, clock: Clock) -> list[Check]:
    """Name servers, then every broker that they know."""
    checks, info = await _name_servers(fleet)
    if info is None:
        return checks
    if not any(MASTER in data.broker_addrs for data in info.broker_addr_table.values()):
        listed = ";".join(fleet.name_server_addresses)
        return [
            *checks,
            Check(
                *("brokers", "cluster", FAIL, "no master is registered"),
                f"start one: cosmo broker run -n '{listed}'",
                {"brokers": 0},
            ),
        ]
    places = [
        (name, data.cluster, number, address)
        for name, data in sorted(info.broker_addr_table.items())
        for number, address in sorted(data.broker_addrs.items())
    ]
    found = await asyncio.gather(*(_broker(fleet, clock, *place) for place in places))
    return checks + [check for part in found for check in part]


async def _name_servers(fleet: Fleet) -> tuple[list[Check], ClusterInfo | None]:
    checks: list[Check] = []
    known: dict[str, ClusterInfo] = {}
    for address in fleet.name_server_addresses:
        answer, took_ms = await _timed(fleet.call(address, GetBrokerClusterInfo()))
        if isinstance(answer, CosmodromeError):
            checks.append(
                Check(
                    *("name server", address, FAIL, str(answer)),
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
                Check(
                    *("name server", address, WARN, f"it does not know {missing}, others do"),
                    "give every broker all name servers (namesrvAddr), and look at the network",
                )
            )
    best = max(known.values(), key=lambda info: len(info.broker_addr_table), default=None)
    return checks, best


async def _broker(
    fleet: Fleet, clock: Clock, name: str, cluster: str, number: int, address: str
) -> list[Check]:
    subject = name if number == MASTER else f"{name}/{number}"
    checks = [_advertised(fleet, subject, address)]
    asked_ms = clock.now_ms()
    answer, took_ms = await _timed(fleet.call(address, GetBrokerRuntimeInfo()))
    if isinstance(answer, CosmodromeError):
        return [
            Check(
                *("broker", subject, FAIL, f"{address}: {answer}"),
                "start it, open its port, or set brokerIP1 to an address that clients reach",
            ),
            *checks,
        ]
    runtime = bodies.decode(KVTable, answer.body).table
    config = await attempt(fleet.call(address, GetBrokerConfig()))
    settings = {} if isinstance(config, CosmodromeError) else properties_text.loads(config.body)
    version = runtime.get("brokerVersionDesc", "unknown").removeprefix("V").replace("_", ".")
    up = _answered("broker", subject, took_ms, f"{address} answers, version {version}")
    return [up, *checks, _disk(subject, runtime, settings), _clock(subject, runtime, asked_ms)]


def _answered(check: str, subject: str, took_ms: float, says: str = "it answers") -> Check:
    figures = {"answer_ms": round(took_ms, 1)}
    if took_ms < SLOW_MS:
        return Check(check, subject, OK, f"{says} ({took_ms:.0f} ms)", "", figures)
    return Check(
        *(check, subject, WARN, f"{says}, but only after {took_ms:.0f} ms"),
        "look at its load and at the network",
        figures,
    )


def _advertised(fleet: Fleet, subject: str, address: str) -> Check:
    servers = [one.rpartition(":")[0] for one in fleet.name_server_addresses]
    distant = [host for host in servers if not is_loopback(host)]
    if is_loopback(address.rpartition(":")[0]) and distant:
        return Check(
            *("advertised address", subject, FAIL),
            f"{address} is loopback: every client takes it for its own machine",
            "set brokerIP1 to an address that clients reach and restart the broker",
        )
    return Check("advertised address", subject, OK, address)


def _disk(subject: str, runtime: Mapping[str, str], settings: Mapping[str, str]) -> Check:
    ratio = _float(runtime.get("commitLogDiskRatio"))
    if ratio is None or ratio < 0:
        return Check("disk", subject, UNKNOWN, "it does not tell how full its disk is")
    full = _float(settings.get("diskMaxUsedSpaceRatio")) or DISK_FULL_PERCENT
    refusing = _float(settings.get("diskSpaceWarningLevelRatio")) or DISK_REFUSING_PERCENT
    used = ratio * 100
    figures = {"used_percent": round(used, 1)}
    said = f"{used:.0f} % used; old messages go from {full:.0f} %, sends are refused at"
    said = f"{said} {refusing:.0f} %"
    if used >= refusing:
        step = "free space now: sends are refused; shorten fileReservedTime or add disk"
        return Check("disk", subject, FAIL, said, step, figures)
    if used >= full:
        step = "free space: old messages go before their time; shorten fileReservedTime or add disk"
        return Check("disk", subject, WARN, said, step, figures)
    return Check("disk", subject, OK, said, "", figures)


_RUNTIME = re.compile(r"(\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds")


def _clock(subject: str, runtime: Mapping[str, str], asked_ms: int) -> Check:
    """A broker tells when it started and for how long it runs: together its clock."""
    boot_ms = _float(runtime.get("bootTimestamp"))
    match = _RUNTIME.search(runtime.get("runtime", ""))
    if boot_ms is None or match is None:
        return Check("clock", subject, UNKNOWN, "it does not tell its time")
    days, hours, minutes, seconds = map(int, match.groups())
    ran_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds + CLOCK_STEP_S / 2
    apart_s = boot_ms / 1000 + ran_s - asked_ms / 1000
    figures = {"ahead_s": round(apart_s, 1)}
    word = "ahead of" if apart_s > 0 else "behind"
    if abs(apart_s) <= CLOCK_WARN_S:
        return Check("clock", subject, OK, "as this machine's, within seconds", "", figures)
    status = FAIL if abs(apart_s) > CLOCK_FAIL_S else WARN
    return Check(
        *("clock", subject, status, f"{abs(apart_s):.0f} s {word} this machine"),
        "let both use NTP: delays, retention and lag in seconds are wrong otherwise",
        figures,
    )


# --- groups ------------------------------------------------------------------------------------


async def group_check(fleet: Fleet, group: str, limits: Thresholds) -> Check:
    """Lag of one group against thresholds; what is not known is no good news."""
    found = await attempt(standing(fleet, group))
    if isinstance(found, CosmodromeError):
        return Check("group", group, UNKNOWN, str(found), f"cosmo group explain {group}")
    return judge_group(found, limits)


def judge_group(found: GroupStanding, limits: Thresholds) -> Check:
    step = f"cosmo group explain {found.group}"
    age_s = None if found.age_ms is None else found.age_ms / 1000
    if found.lag is None or age_s is None or not found.queues:
        known = {"lag_at_least": float(found.lag_known)}
        reasons = sorted({row.why for row in found.queues if row.why})
        why = (
            "; ".join([*reasons, *found.silent.values()])
            or "nothing was ever consumed as this group"
        )
        return Check("group", found.group, UNKNOWN, f"lag unknown: {why}", step, known)
    figures = {"lag": float(found.lag), "age_s": round(age_s, 1)}
    if found.members is not None:
        figures["members"] = float(found.members)
    says = f"{found.lag} message(s) behind, the oldest waits for {age_s:.1f} s"
    status = OK
    if _above(found.lag, limits.lag_warn) or _above(age_s, limits.age_warn_s):
        status = WARN
    if _above(found.lag, limits.lag_fail) or _above(age_s, limits.age_fail_s):
        status = FAIL
    if found.members == 0 and found.lag and status == OK:
        status, says = WARN, f"{says}, and no member is connected"
    return Check("group", found.group, status, says, "" if status == OK else step, figures)


def _above(value: float, limit: float | None) -> bool:
    return limit is not None and value >= limit


def worst(checks: list[Check]) -> str:
    return max((check.status for check in checks), key=STATUSES.index, default=UNKNOWN)


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
