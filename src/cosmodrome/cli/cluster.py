"""`cosmo cluster status`: every broker that name servers know, and what it says of itself."""

from __future__ import annotations

import click

from cosmodrome.cli.arguments import cluster_option
from cosmodrome.cli.operating import NotFound, PartlyDone, watch_option, with_admin
from cosmodrome.cli.output import UNKNOWN, Column, Time, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import NoBrokers, attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.client.routes import MASTER
from cosmodrome.errors import CosmodromeError, Unreachable

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
    Column("booted_ms", wide=True, time=True),
    Column("oldest_message_ms", wide=True, time=True),
    Column("put_p99_ms", wide=True, right=True),
    Column("dispatch_behind_bytes", wide=True, right=True),
)
_FIGURES = [column.name for column in STATUS[6:]]


@click.group()
def cluster() -> None:
    """The cluster as a whole."""


@cluster.command()
@cluster_option
@output_option
@watch_option
@with_admin
async def status(admin: Admin, cluster: str | None, output: str) -> None:
    """Show every broker: whether it answers, its version, rates and disk."""
    info = await admin.brokers.cluster()
    if cluster is not None and cluster not in info.cluster_addr_table:
        known = ", ".join(sorted(info.cluster_addr_table)) or "none"
        raise NotFound(f"there is no cluster {cluster}; known are: {known}")
    places = [
        (data.cluster, name, number, address)
        for name, data in info.broker_addr_table.items()
        for number, address in data.broker_addrs.items()
        if cluster in (None, data.cluster)
    ]
    if not places:
        raise NoBrokers("no broker is registered; start one, or check the name servers")
    places.sort()
    said = await at_once(lambda place: attempt(admin.brokers.runtime(place[3])), places)
    rows, silent = [], {}
    for (its_cluster, name, number, address), answer in zip(places, said, strict=True):
        row: dict[str, object] = {
            "cluster": its_cluster,
            "broker": name,
            "id": number,
            "role": "master" if number == MASTER else "slave",
            "address": address,
        }
        if isinstance(answer, CosmodromeError):
            silent[f"{name} ({address})"] = answer
            row |= {"state": "silent", **dict.fromkeys(_FIGURES, UNKNOWN)}
        else:
            row |= {"state": "up", **figures(answer)}
        rows.append(row)
    show(output, STATUS, rows)
    if len(silent) == len(places):
        raise Unreachable("no broker answers: " + "; ".join(map(str, silent.values())))
    if silent:
        raise PartlyDone("no answer: " + "; ".join(map(str, silent.values())))


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
