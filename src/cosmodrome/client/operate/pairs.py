"""Masters and their slaves: who follows whom, how far behind, and why not.

Everybody is asked and then the answers are put together, because neither end alone is to be
trusted: a slave that runs and is registered may have no link. Brokers of Apache RocketMQ before 5
say nothing about links; then only the ends of both logs are compared, and the rest is unknown.
What is not known is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import UnsetType

from cosmodrome.client.operate.fleet import Fleet, attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.errors import CosmodromeError, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MASTER_ID, ClusterInfo, KVTable
from cosmodrome.wire.commands.broker import GetBrokerHaStatus, GetBrokerRuntimeInfo
from cosmodrome.wire.message import whole_number
from cosmodrome.wire.report_bodies import HAConnectionRuntimeInfo, HARuntimeInfo

T = TypeVar("T", int, float)

UP = "up"
NO_SLAVE = "no slave"  # a SYNC_MASTER: sends are answered SLAVE_NOT_AVAILABLE
SILENT = "silent"
NOT_SHOWN = "not shown"  # it answers, but shows this machine nothing
IN_STEP = "in step"
COPYING = "copying"
LINKED = "linked"  # the master says so, the slave does not say more
FAR_BEHIND = "far behind"
AHEAD = "ahead"  # of its master, which is nothing that a slave can be
NOT_LINKED = "not linked"
UNKNOWN_STATE = "unknown"
UNREGISTERED = "not registered"  # its master has a link, no name server knows it
# The next step when a broker refuses to show something.
ASK_ELSEWHERE = (
    "ask from its own machine or from one of its peerAddresses, or with the account of an"
    " administrator"
)
# And when a master does not come back.
PROMOTION = 'promote a slave ("Promote a slave by hand" in docs/operating-pairs.md)'
FOLLOWING = frozenset({IN_STEP, COPYING})
GOOD = FOLLOWING | {UP, LINKED, UNKNOWN_STATE}


@dataclasses.dataclass(frozen=True, slots=True)
class BrokerSeen:
    """One broker that name servers know, and what it said."""

    cluster: str
    name: str
    number: int
    address: str
    runtime: dict[str, str] | CosmodromeError
    status: HARuntimeInfo | None  # None: it does not tell

    @property
    def is_master(self) -> bool:
        return self.number == MASTER_ID

    @property
    def log_end(self) -> int | None:
        """What it has written; runtime figures of ours may count only what is synced."""
        if isinstance(self.runtime, CosmodromeError):
            return None
        if self.is_master and self.status is not None:
            return self.status.master_commit_log_max_offset
        text = self.runtime.get("commitLogMaxOffset", "")
        return whole_number(text)


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """A master or slave as both ends show it."""

    state: str
    why: str = ""  # and what to do
    slaves: int | None = None  # master: how many are linked
    lag_bytes: int | None = None
    lag_s: float | None = None
    silent_s: float | None = None
    copied_percent: float | None = None

    @property
    def good(self) -> bool:
        return self.state in GOOD


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A broker name: its master, its slaves, and links of slaves that nobody registered."""

    name: str
    members: tuple[tuple[BrokerSeen, Standing], ...]
    strangers: tuple[tuple[str, Standing], ...]  # by the address of their end of the link

    @property
    def has_slaves(self) -> bool:
        return bool(self.strangers) or any(not seen.is_master for seen, _ in self.members)


async def look(fleet: Fleet, info: ClusterInfo, cluster: str | None = None) -> list[Pair]:
    """Ask every broker of a cluster, or of all, and put the answers together."""
    brokers = sorted(
        (data.cluster, name, number, address)
        for name, data in info.broker_addr_table.items()
        for number, address in data.broker_addrs.items()
        if cluster in (None, data.cluster)
    )
    # Slaves first: one that then has more than its master is indeed ahead.
    slaves = [one for one in brokers if one[2] != MASTER_ID]
    masters = [one for one in brokers if one[2] == MASTER_ID]
    seen = await at_once(lambda one: _asked(fleet, *one), slaves)
    seen += await at_once(lambda one: _asked(fleet, *one), masters)
    by_name: dict[tuple[str, str], list[BrokerSeen]] = {}
    for one in sorted(seen, key=lambda one: (one.cluster, one.name, one.number)):
        by_name.setdefault((one.cluster, one.name), []).append(one)
    return [pair_of(name, members) for (_, name), members in by_name.items()]


async def _asked(fleet: Fleet, cluster: str, name: str, number: int, address: str) -> BrokerSeen:
    answer = await attempt(fleet.call(address, GetBrokerRuntimeInfo()))
    if isinstance(answer, CosmodromeError):
        return BrokerSeen(cluster, name, number, address, answer, None)
    runtime = bodies.decode(KVTable, answer.body).table
    return BrokerSeen(cluster, name, number, address, runtime, await ha_status(fleet, address))


async def ha_status(fleet: Fleet, address: str) -> HARuntimeInfo | None:
    """None: it does not tell."""
    answer = await attempt(fleet.call(address, GetBrokerHaStatus()))
    return (
        None if isinstance(answer, CosmodromeError) else bodies.decode(HARuntimeInfo, answer.body)
    )


# --- putting the answers together ----------------------------------------------------------------


def pair_of(name: str, members: Sequence[BrokerSeen]) -> Pair:
    master = next((one for one in members if one.is_master), None)
    status = master.status if master is not None else None
    links = None if status is None else list(status.ha_connection_info)
    slaves = [one for one in members if not one.is_master]
    matched, strangers = _match(slaves, links or [])
    standings = []
    for one in members:
        if one.is_master:
            standings.append((one, _master(one)))
        else:
            link = matched.get(one.number)
            # While a link has no owner it may be this slave's: then it is not said to have none.
            unlinked = links is not None and link is None and not strangers
            unlinked = unlinked and not _follows_another(one, members)
            standings.append((one, _slave(one, link, master, unlinked=unlinked)))
    return Pair(name, tuple(standings), tuple((link.addr, _stranger(link)) for link in strangers))


def _match(
    slaves: Iterable[BrokerSeen], links: Sequence[HAConnectionRuntimeInfo]
) -> tuple[dict[int, HAConnectionRuntimeInfo], list[HAConnectionRuntimeInfo]]:
    """Whose links these are: by name, else by host when that leaves no doubt."""
    left = list(links)
    matched: dict[int, HAConnectionRuntimeInfo] = {}
    nameless = []
    for slave in slaves:
        named = next((link for link in left if _names(link, slave)), None)
        if named is None:
            nameless.append(slave)
        else:
            matched[slave.number] = named
            left.remove(named)
    for slave in nameless:
        host = _host(slave.address)
        here = [link for link in left if not link.node and _host(link.addr) == host]
        if len(here) == 1 and sum(_host(one.address) == host for one in nameless) == 1:
            matched[slave.number] = here[0]
            left.remove(here[0])
    return matched, left


def _names(link: HAConnectionRuntimeInfo, slave: BrokerSeen) -> bool:
    return bool(link.node) and link.node == f"{slave.name}:{slave.number}"


def _follows_another(slave: BrokerSeen, members: Sequence[BrokerSeen]) -> bool:
    """Whether a slave says that it follows another slave of its name, not the master."""
    following = slave.status.ha_client_runtime_info if slave.status is not None else None
    if following is None or not following.master_addr:
        return False
    others = (one for one in members if not one.is_master and one is not slave)
    return following.master_addr in {_ha_address(one) for one in others}


def _ha_address(seen: BrokerSeen) -> str:
    """Where its HA port is, unless a setting moved it."""
    host, _, port = seen.address.rpartition(":")
    number = whole_number(port)
    return f"{host}:{number + 1}" if number is not None else ""


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _without_figures(error: CosmodromeError) -> Standing:
    return Standing(NOT_SHOWN if isinstance(error, Refused) else SILENT, str(error))


def _master(seen: BrokerSeen) -> Standing:
    if isinstance(seen.runtime, CosmodromeError):
        return _without_figures(seen.runtime)
    if seen.status is None:
        return Standing(UP)
    count = len(seen.status.ha_connection_info)
    if count == 0 and seen.status.broker_role == "SYNC_MASTER":
        why = "sends are answered SLAVE_NOT_AVAILABLE until a slave is linked"
        if seen.status.refused_why:
            why += f"; the last link was refused: {seen.status.refused_why}"
        return Standing(NO_SLAVE, why, slaves=0)
    return Standing(UP, slaves=count)


def _slave(
    seen: BrokerSeen,
    link: HAConnectionRuntimeInfo | None,
    master: BrokerSeen | None,
    *,
    unlinked: bool,
) -> Standing:
    if isinstance(seen.runtime, CosmodromeError):
        unseen = _without_figures(seen.runtime)
        return unseen if link is None else _as_linked(unseen, link)
    standing = _own_words(seen)
    if link is not None:
        state = _linked_state(link) if standing.state == UNKNOWN_STATE else standing.state
        standing = _as_linked(dataclasses.replace(standing, state=state), link)
    elif unlinked and standing.good:
        standing = dataclasses.replace(
            standing,
            state=NOT_LINKED,
            why=standing.why or "its master has no link from it; the logs of both say why",
        )
    if standing.lag_bytes is None and master is not None:
        standing = _compared(standing, seen, master)
    if master is None and standing.good:
        why = standing.why or "no master of its name is registered; consumers read here meanwhile"
        standing = dataclasses.replace(standing, state=NOT_LINKED, why=why)
    return standing


def _own_words(seen: BrokerSeen) -> Standing:
    if seen.status is None or not seen.status.ha_client_runtime_info.state:
        return Standing(UNKNOWN_STATE)
    following = seen.status.ha_client_runtime_info
    if following.state not in FOLLOWING:
        # What it knows of its master is old.
        silent_s = _known(following.silent_seconds)
        return Standing(following.state or UNKNOWN_STATE, following.why or "", silent_s=silent_s)
    return Standing(
        state=following.state or UNKNOWN_STATE,
        why=following.why or "",
        lag_bytes=_known(following.lag_bytes),
        lag_s=_known(following.lag_seconds),
        silent_s=_known(following.silent_seconds),
        copied_percent=_known(following.copied_percent),
    )


def _linked_state(link: HAConnectionRuntimeInfo) -> str:
    return LINKED if link.in_sync else FAR_BEHIND


def _as_linked(standing: Standing, link: HAConnectionRuntimeInfo) -> Standing:
    """With the lag as its master sees it."""
    return dataclasses.replace(
        standing,
        lag_bytes=link.diff,
        lag_s=_known(link.lag_seconds),
        silent_s=_known(link.silent_seconds),
    )


def _stranger(link: HAConnectionRuntimeInfo) -> Standing:
    why = "its master has a link from it, but no name server knows it: set its namesrvAddr"
    return _as_linked(Standing(UNREGISTERED, why), link)


def _compared(standing: Standing, slave: BrokerSeen, master: BrokerSeen) -> Standing:
    """With a lag from the ends of both logs, where nobody tells it."""
    own, other = slave.log_end, master.log_end
    if own is None or other is None:
        return standing
    if own <= other:
        return dataclasses.replace(standing, lag_bytes=other - own)
    if not standing.good:
        return standing
    why = (
        f"its log ends at {own}, that of its master at {other}: the master lost messages or is"
        " another one. Stop the slave and compare both, then cut it (`cosmo store repair"
        " --cut-at`) or have it make a new copy (`cosmo store set-aside`)"
    )
    return dataclasses.replace(standing, state=AHEAD, why=why)


def _known(value: T | UnsetType) -> T | None:
    return None if isinstance(value, UnsetType) else value
