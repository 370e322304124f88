"""A master's side: the port where slaves connect, and what they have of the log.

    store.written ─► every link: bytes leave in the turn in which they were written, or within
                     some milliseconds when no sender waits for slaves
    reports ─► the best of the live links ─► store.acknowledge

The best report counts for sends that wait (SYNC_MASTER), the lowest holds retention back. Both are
of live links only: what a slave said goes with its link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from cosmodrome.env.background import Background
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import ConfigError
from cosmodrome.replication.frames import Refusal, Who
from cosmodrome.replication.links import Link, OwnStream
from cosmodrome.replication.measures import WriteTimes
from cosmodrome.replication.tables import Table
from cosmodrome.replication.values import Node, SourceFacts
from cosmodrome.store.store import Store
from cosmodrome.transport.router import LogLimit
from cosmodrome.transport.tls import Door

LINKS_MAX = 32
SILENT_MAX = 64  # connections that have not said who they are
BEAT_S_MAX = 0.5

_log = logging.getLogger(__name__)


# Why a slave at this host may not have the log, "" when it may; a classic one is None.
Denies = Callable[[str, Who | None], str]


def _denies_nobody(host: str, who: Who | None) -> str:
    return ""


def _admits_all(host: str) -> bool:
    return True


class Source:
    """Feeds the slaves of one store. `node` is this broker, `tables` is what slaves get of it,
    and `address` says where clients reach the master, as far as that is known. `admits` says
    whether a slave at a host can be let in at all, whatever it says."""

    def __init__(
        self,
        store: Store,
        options: StoreOptions,
        tables: Sequence[Table],
        node: Node,
        *,
        door: Door | None = None,
        address: Callable[[], str] = str,
        denies: Denies = _denies_nobody,
        admits: Callable[[str], bool] = _admits_all,
    ) -> None:
        self.door = door or Door()
        self.store = store
        self.node = node
        self.address = address
        self.tables = tables
        self.file_bytes = options.mapped_file_size_commit_log
        self.batch_bytes = options.ha_transfer_batch_size
        self._options = options
        self._denies = denies
        self._admits = admits
        self._listener: asyncio.AbstractServer | None = None
        self._silent: dict[Link, bool] = {}  # the oldest first; whether it can be let in
        self._links: dict[Link, None] = {}  # in the order in which they came
        self._best: int | None = None  # report of a live link; None without any
        self._write_times = WriteTimes()
        self._ticker = Background("replication source")
        self._log_limit = LogLimit()
        self._refused_links = 0
        self._refused_why = ""
        self._stop_hearing: Callable[[], None] | None = None  # of writes; only with slaves

    # --- life ------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which matters when 0 was asked for."""
        if self._listener is not None:
            raise ConfigError("the HA port is open already")
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(lambda: Link(self), host or None, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for slaves on {host or '*'}:{port}: {error.strerror or error};"
                " stop whatever uses that port or choose another haListenPort"
            ) from error
        self._listener = listener
        beat_s = min(BEAT_S_MAX, self._options.ha_send_heartbeat_interval / 1000)
        self._ticker.repeat(beat_s, self._tick)
        bound: int = listener.sockets[0].getsockname()[1]
        _log.info("ha_listening host=%s port=%d", host or "*", bound)
        return bound

    async def stop(self) -> None:
        """Safe to call twice."""
        listener, self._listener = self._listener, None
        await self._ticker.stop()
        if listener is not None:
            listener.close()
        for link in (*self._silent, *self._links):
            link.drop("", "the master stops")
        if listener is not None:
            await listener.wait_closed()

    # --- what the broker and the store ask -------------------------------------------------------

    def available(self, end: int) -> bool:
        """Whether a slave can be waited for that is to report `end`."""
        best = self._best
        return best is not None and end - best < self._options.ha_slave_fallbehind_max

    def needed_from(self) -> int | None:
        """The lowest offset that a linked slave still needs."""
        return min((link.needed_from for link in self._links), default=None)

    def facts(self) -> SourceFacts:
        now, end = asyncio.get_running_loop().time(), self.store.log_end
        self._write_times.add(end, now)
        return SourceFacts(
            links=tuple(
                link.facts(now, end, self._write_times.age(link.needed_from, now))
                for link in self._links
            ),
            end=end,
            refused_links=self._refused_links,
            refused_why=self._refused_why,
        )

    # --- what links report (links.Hub) -----------------------------------------------------------

    def opened(self, link: Link) -> bool:
        if self._listener is None:
            return False
        hopeful = self._admits(link.host)
        if len(self._silent) >= SILENT_MAX:
            leaves = self._least_hopeful(link if not hopeful else None)
            self._warn(
                "silent",
                leaves.peer,
                f"{SILENT_MAX} connections to the HA port have not said anything yet, and the"
                " oldest makes room; check who connects there: it is for slaves of this broker",
            )
            if leaves is link:
                return False
            leaves.drop("", "it makes room")
        self._silent[link] = hopeful
        return True

    def denial(self, link: Link, who: Who | None) -> Refusal | None:
        why = self._denies(link.host, who)
        if not why:
            return None
        return Refusal(
            why=why,
            remedy="give the slave an account with peer: true (brokerAccessKey), or add its address"
            " to peerAddresses of the master; see docs/security.md",
        )

    def joins(self, link: Link) -> bool:
        self._replace(link)
        if len(self._links) >= LINKS_MAX:
            link.drop("many", f"{LINKS_MAX} slaves are linked, which is the most that there may be")
            return False
        self._silent.pop(link, None)
        self._links[link] = None
        if self._stop_hearing is None:
            self._stop_hearing = self.store.written.subscribe(self._on_written)
        _log.info(
            "ha_link peer=%s slave=%s begin=%d end=%d",
            link.peer,
            _named(link),
            link.begin,
            self.store.log_end,
        )
        self._find_best()
        return True

    def acked(self, link: Link) -> None:
        best = self._best
        if best is None or link.acked_end > best:
            self._best = link.acked_end
            self.store.acknowledge(link.acked_end)
        else:
            self._find_best()

    def gone(self, link: Link, kind: str, why: str) -> None:
        if kind:
            self._warn(kind, f"{link.peer} slave={_named(link)}", why)
        self._silent.pop(link, None)
        if self._links.pop(link, link) is None:
            self._find_best()
        if self._stop_hearing is not None and not self._links:
            self._stop_hearing()
            self._stop_hearing = None

    def refused(self, link: Link, kind: str, refusal: Refusal) -> None:
        self._silent.pop(link, None)
        self._refused_links += 1
        self._refused_why = f"{link.peer}: {refusal.why}; {refusal.remedy}"
        held = self._log_limit.admit(("refused", kind))
        if held is not None:
            _log.error(
                "ha_slave_refused peer=%s slave=%s why=%s next=%s held_back=%d",
                link.peer,
                _named(link),
                refusal.why,
                refusal.remedy,
                held,
            )

    # --- inside ----------------------------------------------------------------------------------

    def _on_written(self, _: None) -> None:
        for link in tuple(self._links):
            link.follow()

    def _find_best(self) -> None:
        best = max((link.acked_end for link in self._links), default=None)
        if best != self._best:
            self._best = best
            self.store.acknowledge(best or 0)

    def _least_hopeful(self, stranger: Link | None) -> Link:
        """Who makes room: the oldest that cannot be let in, or `stranger`, or the oldest of all.

        So strangers that say nothing keep no slave out, and one that says who it is hears why it is
        refused as long as there is room.
        """
        oldest = next((link for link, hopeful in self._silent.items() if not hopeful), stranger)
        return oldest or next(iter(self._silent))

    def _replace(self, link: Link) -> None:
        """The newer link of a slave wins; the older one is most likely half open."""
        mine = link.stream
        if not isinstance(mine, OwnStream):
            return
        for other in tuple(self._links):
            theirs = other.stream
            if not isinstance(theirs, OwnStream) or theirs.id != mine.id:
                continue
            why = "the slave has connected again"
            if theirs.incarnation != mine.incarnation:
                why = (
                    f"another process connected from {link.peer} as the same slave; if both are to"
                    " run, give each its own brokerId"
                )
            other.drop("replaced", why)

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        self._write_times.add(self.store.log_end, now)
        silence_s = self._options.ha_housekeeping_interval / 1000
        beat_s = self._options.ha_send_heartbeat_interval / 1000
        for link in tuple(self._silent):
            if now - link.made_at > silence_s:
                link.drop(
                    "handshake",
                    f"it has not said who it is within {silence_s:g} s (haHousekeepingInterval);"
                    " check who connects to this port: it is for slaves of this broker",
                )
        for link in tuple(self._links):
            if now - link.read_at > silence_s:
                link.drop(
                    "silence",
                    f"nothing was read from it for {now - link.read_at:.1f} s"
                    " (haHousekeepingInterval); check the slave and the network",
                )
            else:
                link.tick(now, beat_s)

    def _warn(self, kind: str, peer: str, why: str) -> None:
        held = self._log_limit.admit(kind)
        if held is not None:
            _log.warning("ha_link_closed peer=%s why=%s held_back=%d", peer, why, held)


def _named(link: Link) -> str:
    stream = link.stream
    if stream is None:
        return "unknown"
    return stream.node or "classic"
