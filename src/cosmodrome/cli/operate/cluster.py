"""`cosmo cluster status`: every broker that name servers know, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator

import click

from cosmodrome.cli.support.arguments import cluster_option
from cosmodrome.cli.support.exits import NotFound, PartlyDone
from cosmodrome.cli.support.operating import note, watch_option, with_admin
from cosmodrome.cli.support.output import UNKNOWN, Column, Time, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import NoBrokers
from cosmodrome.client.operate.pairs import BrokerSeen, Pair, Standing, look
from cosmodrome.errors import CosmodromeError, Refused, Unreachable

STATUS = (
    Column("cluster"),
    Column("broker"),
    Column("id", right=True),
    Column("role"),
    Column("address"),
    Column("state"),
    Column("version"),
    Column("in_per_s", "IN/S", right=True),
    Column("out_per_s", "OUT/S", right=True),
    Column("in_today", right=True),
    Column("out_today", right=True),
    Column("disk_used_percent", "DISK %", right=True),
    Column("slaves", right=True, wide=True),
    Column("lag_bytes", right=True, wide=True),
    Column("lag_s", right=True, wide=True),
    Column("last_contact_s", "CONTACT S", right=True, wide=True),
    Column("copied_percent", "COPIED %", right=True, wide=True),
    Column("broker_role", wide=True),
    Column("why", wide=True),
    Column("booted_ms", wide=True, time=True),
    Column("oldest_message_ms", wide=True, time=True),
    Column("put_p99_ms", wide=True, right=True),
    Column("dispatch_behind_bytes", wide=True, right=True),
)
# Only of interest where there are slaves.
OF_PAIRS = frozenset({"slaves", "lag_bytes", "lag_s", "last_contact_s", "copied_percent"})


@click.group()
def cluster() -> None:
    """The cluster as a whole."""


@cluster.command()
@cluster_option
@output_option
@watch_option
@with_admin
async def status(admin: Admin, cluster: str | None, output: str) -> None:
    """Show every broker: whether it answers and follows its master, version, rates and disk."""
    info = await admin.brokers.cluster()
    if cluster is not None and cluster not in info.cluster_addr_table:
        known = ", ".join(sorted(info.cluster_addr_table)) or "none"
        raise NotFound(f"there is no cluster {cluster}; known are: {known}")
    pairs = await look(admin.fleet, info, cluster)
    if not pairs:
        raise NoBrokers("no broker is registered; start one, or check the name servers")
    with_slaves = any(pair.has_slaves for pair in pairs)
    columns = [
        column._replace(wide=column.wide and not (with_slaves and column.name in OF_PAIRS))
        for column in STATUS
    ]
    show(output, columns, [row for pair in pairs for row in rows_of(pair)])
    complain(pairs)


def rows_of(pair: Pair) -> Iterator[dict[str, object]]:
    """A row for each broker of a name, and for each slave that only its master knows."""
    for seen, standing in pair.members:
        yield {
            "cluster": seen.cluster,
            "broker": seen.name,
            "id": seen.number,
            "role": "master" if seen.is_master else "slave",
            "address": seen.address,
            **(NO_FIGURES if isinstance(seen.runtime, CosmodromeError) else figures(seen.runtime)),
            **_replication(standing, is_master=seen.is_master),
            "broker_role": _role(seen),
        }
    for address, standing in pair.strangers:
        yield {
            "cluster": pair.members[0][0].cluster,
            "broker": pair.name,
            "role": "slave",
            "address": address,
            **NO_FIGURES,
            **_replication(standing, is_master=False),
            "broker_role": UNKNOWN,
        }


def _replication(standing: Standing, *, is_master: bool) -> dict[str, object]:
    state: dict[str, object] = {"state": standing.state, "why": standing.why or None}
    if is_master:
        return {**state, "slaves": UNKNOWN if standing.slaves is None else standing.slaves}
    lag = {
        "lag_bytes": standing.lag_bytes,
        "lag_s": standing.lag_s,
        "last_contact_s": standing.silent_s,
        "copied_percent": standing.copied_percent,
    }
    return {**state, **{name: UNKNOWN if one is None else one for name, one in lag.items()}}


def _role(seen: BrokerSeen) -> object:
    role = None if seen.status is None else seen.status.broker_role
    return role or UNKNOWN


def complain(pairs: list[Pair]) -> None:
    """Say on stderr what is wrong with slaves, and end with an error if somebody was not seen."""
    silent: list[str] = []
    refusals: dict[str, Refused] = {}
    count = 0
    for pair in pairs:
        count += len(pair.members)
        for seen, standing in pair.members:
            who = seen.name if seen.is_master else f"{seen.name}/{seen.number}"
            if isinstance(seen.runtime, Refused):
                refusals[who] = seen.runtime
            elif isinstance(seen.runtime, CosmodromeError):
                silent.append(standing.why)
            elif not standing.good:
                note(f"{who} is {_phrase(standing.state)}: {standing.why}")
        for address, standing in pair.strangers:
            note(f"a slave of {pair.name} at {address} is {standing.state}: {standing.why}")
    if len(silent) == count:
        raise Unreachable("no broker answers: " + "; ".join(silent))
    if refusals and count == len(refusals):
        raise next(iter(refusals.values()))
    missing = ["no answer: " + "; ".join(silent)] if silent else []
    if refusals:
        # Brokers with the same settings refuse in the same words.
        why = "; ".join(dict.fromkeys(map(str, refusals.values())))
        missing.append(f"not shown to this machine: {', '.join(refusals)}: {why}")
    if missing:
        raise PartlyDone("; ".join(missing))


def _phrase(state: str) -> str:
    return f"without a {state.removeprefix('no ')}" if state.startswith("no ") else state


def figures(runtime: dict[str, str]) -> dict[str, object]:
    """The few figures of a broker's runtime information that people look at first."""
    disk = number(runtime.get("commitLogDiskRatio"))
    return {
        "version": runtime.get("brokerVersionDesc", "").removeprefix("V").replace("_", ".")
        or UNKNOWN,
        "in_per_s": first_number(runtime.get("putTps")),
        "out_per_s": first_number(
            runtime.get("getTransferedTps", runtime.get("getTransferredTps"))
        ),
        "in_today": _today(runtime, "Put"),
        "out_today": _today(runtime, "Get"),
        "disk_used_percent": round(100 * disk)
        if isinstance(disk, float) and disk >= 0
        else UNKNOWN,
        "booted_ms": _moment(runtime.get("bootTimestamp")),
        "oldest_message_ms": _moment(runtime.get("earliestMessageTimeStamp")),
        "put_p99_ms": number(runtime.get("putLatency99")),
        "dispatch_behind_bytes": _whole(runtime.get("dispatchBehindBytes")),
    }


def number(text: str | None) -> object:
    try:
        return float(text or "")
    except ValueError:
        return UNKNOWN


def first_number(text: str | None) -> object:
    """The first of the rates over 10 s, 1 min and 10 min."""
    return number((text or "").partition(" ")[0])


def _whole(text: str | None) -> object:
    value = number(text)
    return int(value) if isinstance(value, float) else UNKNOWN


def _moment(text: str | None) -> object:
    value = _whole(text)
    return Time(value) if isinstance(value, int) and value > 0 else None


def _today(runtime: dict[str, str], direction: str) -> object:
    now = _whole(runtime.get(f"msg{direction}TotalTodayNow"))
    morning = _whole(runtime.get(f"msg{direction}TotalTodayMorning"))
    if isinstance(now, int) and isinstance(morning, int):
        return now - morning
    return UNKNOWN


NO_FIGURES: dict[str, object] = dict.fromkeys(figures({}), UNKNOWN)
