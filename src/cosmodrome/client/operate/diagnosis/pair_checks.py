"""Is a master with its slaves in order? Compares what they say; asks nobody.

Settings are compared because a slave may become the master: then it goes on with its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cosmodrome.client.operate.pairs import (
    ASK_ELSEWHERE,
    PROMOTION,
    BrokerSeen,
    Standing,
    pair_of,
)
from cosmodrome.errors import CosmodromeError, Refused
from cosmodrome.findings import Finding, Severity

CLOCK_WARN_S = 2.0
CLOCK_FAIL_S = 30.0
LAG_WARN_S = 10.0
LAG_WARN_BYTES = 256 << 20  # where seconds are not known

# What must be the same on both, and what happens otherwise.
FATAL_SETTINGS = {
    "mappedFileSizeCommitLog": "a slave cannot place the files of its master's log",
    "maxMessageSize": "a slave may refuse a record that its master took",
    "messageDelayLevel": "delayed messages are delivered at other times after a promotion",
    "brokerClusterName": "clients that look for the cluster do not find both",
}
OTHER_SETTINGS = {
    "flushDiskType": "what an acknowledgement promises depends on which of them gave it",
    "timerMaxDelaySec": "the one refuses delays that the other takes",
    "fileReservedTime": "one keeps messages that the other has removed",
    "deleteWhen": "one keeps messages that the other has removed",
    "transactionTimeOut": "transactions are checked at other times after a promotion",
    "transactionCheckMax": "transactions are given up at other times after a promotion",
    "autoCreateTopicEnable": "after a promotion topics are made that were refused, or refused",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    seen: BrokerSeen
    settings: Mapping[str, str]  # those that it tells
    ahead_s: float | None = None  # its clock, compared with ours

    @property
    def subject(self) -> str:
        seen = self.seen
        return seen.name if seen.is_master else f"{seen.name}/{seen.number}"


def pair_checks(members: Sequence[Member]) -> list[Finding]:
    """For the brokers of one name; nothing for a master that waits for no slave and has none."""
    name = members[0].seen.name
    pair = pair_of(name, [one.seen for one in members])
    by_number = {one.seen.number: one for one in members}
    master = next((one for one in members if one.seen.is_master), None)
    checks = [] if master is not None and _is_there(master) else _master_away(members)
    for seen, standing in pair.members:
        member = by_number[seen.number]
        if isinstance(seen.runtime, CosmodromeError):
            continue  # said already
        if seen.is_master:
            if not standing.good:
                step = "start its slave; `cosmo cluster status -o wide` shows all links"
                checks.append(
                    Finding("replication", member.subject, Severity.ERROR, standing.why, step)
                )
            continue
        checks.append(_link(member.subject, standing))
        if master is not None and not isinstance(master.seen.runtime, CosmodromeError):
            checks += _alike(master, member, standing)
    for address, standing in pair.strangers:
        who = f"{name} at {address}"
        checks.append(Finding("replication", who, Severity.WARNING, standing.why))
    return checks


def _is_there(member: Member) -> bool:
    """Whoever refuses to show something is there."""
    return not isinstance(member.seen.runtime, CosmodromeError) or isinstance(
        member.seen.runtime, Refused
    )


def _master_away(members: Sequence[Member]) -> list[Finding]:
    """Who could take its place, and how; nothing where there is no slave."""
    slaves = [one.seen for one in members if not one.seen.is_master]
    if not slaves:
        return []
    name = slaves[0].name
    ends = ", ".join(f"{name}/{seen.number} at {seen.address} {_has(seen)}" for seen in slaves)
    return [
        Finding(
            "master",
            name,
            Severity.ERROR,
            f"its master is away: sends fail, consumers read at a slave; {ends}",
            f"start the master. If its machine is lost, {PROMOTION}: the one with the longest log",
        )
    ]


def _has(seen: BrokerSeen) -> str:
    if seen.log_end is None:
        return "does not tell how long its log is"
    return f"has the log up to {seen.log_end}"


def _link(subject: str, standing: Standing) -> Finding:
    known = {"lag_bytes": standing.lag_bytes, "lag_s": standing.lag_s}
    figures = {name: value for name, value in known.items() if value is not None}
    state, step = standing.state, "look at the load and the disk of the slave, and at the network"
    if not standing.good:
        says = f"{state}: {standing.why}" if standing.why else state
        severity = Severity.WARNING if state == "far behind" else Severity.ERROR
        # `why` says what to do; it is the slave itself that knows.
        return Finding("replication", subject, severity, says, evidence=figures)
    if standing.lag_bytes is None:
        says = "it does not tell whether it follows its master"
        return Finding("replication", subject, Severity.UNKNOWN, says)
    says = f"{state}, {standing.lag_bytes} bytes behind"
    if state == "unknown":
        says = f"{standing.lag_bytes} bytes behind; it does not tell whether it is linked"
    if standing.lag_s is not None:
        says += f", {standing.lag_s:.1f} s"
    if state == "copying":
        if standing.copied_percent is not None:
            says += f", {standing.copied_percent:.0f} % copied"
        step = "wait: until it has all, a loss of the master loses what is missing"
        return Finding("replication", subject, Severity.WARNING, says, step, evidence=figures)
    late = (
        standing.lag_bytes > LAG_WARN_BYTES
        if standing.lag_s is None
        else standing.lag_s > LAG_WARN_S
    )
    if late:
        return Finding("replication", subject, Severity.WARNING, says, step, evidence=figures)
    return Finding("replication", subject, Severity.OK, says, evidence=figures)


def _alike(master: Member, slave: Member, standing: Standing) -> Iterator[Finding]:
    yield _clocks(master, slave)
    yield _versions(master, slave)
    yield from _settings(master, slave)
    room = _room(master, slave, standing)
    if room is not None:
        yield room


def _clocks(master: Member, slave: Member) -> Finding:
    if master.ahead_s is None or slave.ahead_s is None:
        return Finding("pair clock", slave.subject, Severity.UNKNOWN, "one does not tell its time")
    apart_s = slave.ahead_s - master.ahead_s
    figures = {"ahead_s": round(apart_s, 1)}
    if abs(apart_s) <= CLOCK_WARN_S:
        says = "as its master's"
        return Finding("pair clock", slave.subject, Severity.OK, says, evidence=figures)
    word = "ahead of" if apart_s > 0 else "behind"
    return Finding(
        "pair clock",
        slave.subject,
        Severity.ERROR if abs(apart_s) > CLOCK_FAIL_S else Severity.WARNING,
        f"{abs(apart_s):.0f} s {word} its master's",
        "let both use NTP: lag in seconds is wrong, and delays jump after a promotion",
        evidence=figures,
    )


def _versions(master: Member, slave: Member) -> Finding:
    own, other = _version(slave.seen), _version(master.seen)
    if own is None or other is None:
        return Finding("pair version", slave.subject, Severity.UNKNOWN, "one does not tell it")
    if own == other:
        return Finding("pair version", slave.subject, Severity.OK, f"{own}, as its master")
    return Finding(
        "pair version",
        slave.subject,
        Severity.WARNING,
        f"{own}, its master is {other}",
        "give both the same version, the slave first: an older slave may not know new records",
    )


def _version(seen: BrokerSeen) -> str | None:
    if isinstance(seen.runtime, CosmodromeError):
        return None
    protocol = seen.runtime.get("brokerVersionDesc", "").removeprefix("V").replace("_", ".")
    if not protocol:
        return None
    own = seen.runtime.get("cosmodromeVersion")
    return f"RocketMQ {protocol}" if own is None else f"Cosmodrome {own}"


def _settings(master: Member, slave: Member) -> Iterator[Finding]:
    hidden = [one.subject for one in (master, slave) if not one.settings]
    if hidden:
        says = f"no settings are shown to this machine by {' and '.join(hidden)}"
        step = f"{ASK_ELSEWHERE}, or compare both files"
        yield Finding("pair settings", slave.subject, Severity.UNKNOWN, says, step)
        return
    differences = [
        *_differences(master, slave, FATAL_SETTINGS, Severity.ERROR),
        *_differences(master, slave, OTHER_SETTINGS, Severity.WARNING),
    ]
    yield from differences
    if not differences:
        count = len(FATAL_SETTINGS) + len(OTHER_SETTINGS)
        says = f"the {count} settings that must agree do"
        yield Finding("pair settings", slave.subject, Severity.OK, says)


def _differences(
    master: Member, slave: Member, keys: Mapping[str, str], severity: Severity
) -> Iterable[Finding]:
    for key, otherwise in keys.items():
        own, other = slave.settings.get(key), master.settings.get(key)
        # A broker that does not know the setting cannot disagree about it.
        if own is not None and other is not None and own.strip() != other.strip():
            yield Finding(
                "pair settings",
                slave.subject,
                severity,
                f"{key} is {own}, its master has {other}: {otherwise}",
                f"set {key} to the same value in both files",
            )


def _room(master: Member, slave: Member, standing: Standing) -> Finding | None:
    own, other = _capacity(slave.seen), _capacity(master.seen)
    if own is None or other is None:
        return None
    total, free = own
    figures = {"free_bytes": free}
    if standing.lag_bytes is not None and standing.lag_bytes > free:
        return Finding(
            "pair disk",
            slave.subject,
            Severity.ERROR,
            f"{_size(free)} free, and {_size(standing.lag_bytes)} of its master's log are missing",
            "give the slave a larger disk, or shorten fileReservedTime on both",
            evidence=figures,
        )
    if total < 0.9 * other[0]:
        return Finding(
            "pair disk",
            slave.subject,
            Severity.WARNING,
            f"{_size(total)} in all, its master has {_size(other[0])}",
            "give both disks of the same size: the smaller one is full first",
            evidence=figures,
        )
    says = f"{_size(free)} free of {_size(total)}"
    return Finding("pair disk", slave.subject, Severity.OK, says, evidence=figures)


_CAPACITY = re.compile(r"Total : ([\d.]+) (\w+), Free : ([\d.]+) (\w+)")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def _capacity(seen: BrokerSeen) -> tuple[int, int] | None:
    """Bytes of its disk: all and free."""
    if isinstance(seen.runtime, CosmodromeError):
        return None
    found = _CAPACITY.search(seen.runtime.get("commitLogDirCapacity", ""))
    if found is None or found[2] not in _UNITS or found[4] not in _UNITS:
        return None
    return _bytes(found[1], found[2]), _bytes(found[3], found[4])


def _bytes(amount: str, unit: str) -> int:
    return int(float(amount) * 1024 ** _UNITS.index(unit))


def _size(count: int) -> str:
    power = 0
    while power < len(_UNITS) - 1 and count >= 1024 ** (power + 1):
        power += 1
    return f"{count / 1024**power:.1f} {_UNITS[power]}"
