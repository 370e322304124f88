"""A slave's side: finds its master, follows its log, and says where it stands.

One task makes one link after the other, with pauses that grow. Which stream a master speaks is
asked at its remoting port, because upstream's SYNC_MASTER takes every connection for a slave that
it has to wait for. Where nobody answers there, our stream is tried first. A master that answers
HELLO with anything else is Apache RocketMQ's, which is remembered for as long as it does not go
away: one that was replaced by ours in the meantime is greeted with HELLO again. One that answers
nothing, or closes, may be ours and busy: the classic stream compares no bytes, so it must not be
spoken by mistake. Upstream's answers with a heartbeat after 5 s.

A slave that is empty wants the whole log unless `syncFromLastFile` is set. A classic master sends
only its last file to a slave that reports 0, so its first offset, or its first record, is asked
for elsewhere (`ClassicMaster`). Its bounds are asked for at every link, because a classic master
sends heartbeats for ever to a slave whose place in the log it does not have.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Protocol

from cosmodrome.env.background import Background
from cosmodrome.env.backoff import Backoff
from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import ConfigError, CosmodromeError, StoreUnwritable, Unreachable
from cosmodrome.replication import frames
from cosmodrome.replication.joining import misfit
from cosmodrome.replication.master_link import End, Ended, Greeting, MasterLink, Progress
from cosmodrome.replication.measures import Rate
from cosmodrome.replication.tables import AppliedTables
from cosmodrome.replication.values import FollowerFacts, FollowerState, Node
from cosmodrome.store.store import PutStatus, Store
from cosmodrome.transport.router import LogLimit
from cosmodrome.transport.tls import Context, described_of_server, no_tls

CONNECT_S = 5.0
CLASSIC_S = 600.0  # that a master is Apache RocketMQ's is believed for so long
CLASSIC_MAX = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
REFUSED_PAUSE_S = 30.0
BEAT_S_MAX = 0.5
PROGRESS_S = 10.0
LOG_INTERVAL_S = 5.0
NO_TLS = (
    "the master is Apache RocketMQ's, whose HA stream has no TLS, and this slave uses TLS",
    "replace the master, or set tls.enable=false on a trusted network",
)

_log = logging.getLogger(__name__)


class ClassicMaster(Protocol):
    """What only the remoting port of a master can say about its stream and its log.

    Errors are those of a call: Unreachable, TimedOut, Refused.
    """

    async def speaks_ours(self) -> bool | None:
        """Whether it knows our stream; None when it cannot be asked. It raises nothing."""

    async def bounds(self) -> tuple[int, int]:
        """Its first offset and its end (code 28: commitLogMinOffset, commitLogMaxOffset)."""

    async def first_record(self) -> bytes:
        """The record at offset 0 (code 33); empty when there is none yet."""


def _unsigned(who: frames.Who) -> frames.Who:
    return who


class Follower:
    """Copies the log of a master into `store` while it is started and knows where the master is.

    `linked` fires with True when a link has begun and with False when it has ended.
    """

    def __init__(
        self,
        store: Store,
        options: StoreOptions,
        tables: AppliedTables,
        node: Node,
        env: Env,
        classic_master: ClassicMaster,
        *,
        sign: Callable[[frames.Who], frames.Who] = _unsigned,
        tls: Context = no_tls,
    ) -> None:
        self._sign = sign
        self._tls = tls
        self.linked: Signal[bool] = Signal()
        self._store = store
        self._options = options
        self._tables = tables
        self._node = node
        self._env = env
        self._classic_master = classic_master
        self._work = Background("replication follower")
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, env.random)
        self._log_limit = LogLimit(LOG_INTERVAL_S)
        self._address = ""
        self._moved = asyncio.Event()
        self._classic: dict[str, float] = {}  # address -> until when it is believed
        self._link: MasterLink | None = None
        self._state = FollowerState.NO_MASTER
        self._why = ""
        self._was_classic = False
        self._last = Progress()  # of the last link
        self._links_made = 0
        self._read_at = 0.0  # from a master, on links that are over
        self._rate = Rate()
        self._counted = 0  # bytes of the present link that the rate has
        self._told_at = 0.0

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._read_at = asyncio.get_running_loop().time()
        self._work.start(self._run)

    async def stop(self) -> None:
        """Safe to call twice."""
        await self._work.stop()

    def follow(self, address: str | None) -> None:
        """Where the master's HA port is, `host:port`; None while nobody knows."""
        new = address or ""
        if new == self._address:
            return
        self._address = new
        self._moved.set()
        if self._link is not None:
            self._link.end(End.CLOSED, f"the master is at {new}" if new else "the master is away")

    # --- what is known ---------------------------------------------------------------------------

    @property
    def master_address(self) -> str:
        """Where clients reach the master, as it said on the last link; empty when it did not."""
        return self._last.master_address

    def facts(self) -> FollowerFacts:
        now = asyncio.get_running_loop().time()
        link = self._link
        progress = self._last
        state, why = self._state, self._why
        if link is not None and link.progress.begun:
            self._count(now)
            state = FollowerState.IN_STEP if progress.in_step else FollowerState.COPYING
            why = "" if progress.in_step else self._copying(now)
        end = self._store.log_end
        return FollowerFacts(
            state=state,
            master=self._address,
            why=why,
            classic=self._was_classic,
            end=end,
            master_end=progress.master_end,
            lag_bytes=max(0, progress.master_end - end),
            lag_seconds=self._lag_seconds(progress, end, state),
            silent_seconds=now - max(self._read_at, link.read_at if link is not None else 0.0),
            taken_bytes_per_second=self._rate.per_second(now),
            links_made=self._links_made,
        )

    def _lag_seconds(self, progress: Progress, end: int, state: FollowerState) -> float:
        """Both times are the master's, so clocks that differ do not matter to our stream."""
        master_ms = progress.master_ms
        if state is FollowerState.IN_STEP and end >= progress.master_end:
            return 0.0
        if master_ms < 0:
            if end >= progress.master_end and state is not FollowerState.COPYING:
                return 0.0
            master_ms = self._env.clock.now_ms()
        own_ms = self._store.last_store_ms
        return max(0.0, (master_ms - own_ms) / 1000) if own_ms > 0 else 0.0

    def _copying(self, now: float) -> str:
        progress, end = self._last, self._store.log_end
        done = end - progress.begin
        text = f"copying: {done} bytes since the link was made"
        if progress.target is None:
            return text
        todo = max(0, progress.target - end)
        rate = self._rate.per_second(now)
        percent = 100 * done / max(1, progress.target - progress.begin)
        text = f"{text} ({percent:.1f} %), {todo} to go, {rate / 1e6:.1f} MB/s"
        return f"{text}, about {todo / rate:.0f} s" if rate > 0 else text

    def _count(self, now: float) -> None:
        taken = self._last.taken_bytes
        if taken > self._counted:
            self._rate.add(taken - self._counted, now)
            self._counted = taken

    # --- one link after the other ----------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._moved.clear()
            address = self._address
            if not address:
                self._state = FollowerState.NO_MASTER
                self._why = "nobody has said where the master is; check haMasterAddress, or the"
                self._why += " name servers and that the master runs"
                await self._moved.wait()
                self._backoff.reset()
                continue
            try:
                pause_s = await self._follow_once(address)
            except CosmodromeError as error:
                pause_s = self._not_linked(address, str(error))
            except OSError as error:
                self._classic.pop(address, None)  # it may come back as another one
                pause_s = self._not_linked(address, _why_unreachable(error))
            except Exception as error:
                _log.exception("ha_follow_failed master=%s", address)
                pause_s = self._not_linked(address, f"{type(error).__name__}: {error}")
            await self._pause(pause_s)

    async def _pause(self, seconds: float) -> None:
        """Shorter when the master has moved."""
        try:
            async with asyncio.timeout(seconds):
                await self._moved.wait()
        except TimeoutError:
            return
        self._backoff.reset()

    async def _follow_once(self, address: str) -> float:
        """Connect, follow for as long as it lasts; how long to pause then."""
        loop = asyncio.get_running_loop()
        host, port = split_address(address)
        if self._state is not FollowerState.REFUSED:
            self._state = FollowerState.CONNECTING
        await self._make_durable()
        ours = await self._classic_master.speaks_ours()
        if ours is None:
            ours = self._classic.get(address, -1.0) <= loop.time()
        tls = self._tls()
        if tls is not None and not ours:
            return self._refused(address, *NO_TLS)
        greeting = self._greet() if ours else await self._greet_classic()
        if isinstance(greeting, frames.Refusal):
            return self._refused(address, greeting.why, greeting.remedy)
        link = self._link = MasterLink(self._store, greeting, self._apply, self._link_began)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: link, host, port, ssl=tls)
            ended = await self._attend(link, address)
        finally:
            self._let_go(link)
        return self._conclude(address, link, ended)

    def _conclude(self, address: str, link: MasterLink, ended: Ended) -> float:
        if ended.kind is End.NO_WELCOME:
            if len(self._classic) >= CLASSIC_MAX:
                self._classic.clear()
            self._classic[address] = asyncio.get_running_loop().time() + CLASSIC_S
            self._why = f"{ended.why}; the classic stream is tried"
            _log.info("ha_master_classic master=%s why=%s", address, ended.why)
            return 0.0
        if ended.kind is End.REFUSED:
            return self._refused(address, ended.why, ended.remedy)
        if link.progress.taken_bytes:
            self._backoff.reset()
        if not link.progress.begun:
            self._classic.pop(address, None)
        return self._not_linked(address, ended.why)

    def _refused(self, address: str, why: str, remedy: str) -> float:
        self._state = FollowerState.REFUSED
        self._why = f"{why}; {remedy}"
        self._backoff.reset()
        _log.error(
            "ha_refused master=%s why=%s next=%s; it is tried again in %g s",
            address,
            why,
            remedy,
            REFUSED_PAUSE_S,
        )
        return REFUSED_PAUSE_S

    def _not_linked(self, address: str, why: str) -> float:
        self._state = FollowerState.CONNECTING
        self._why = why
        pause_s = self._backoff.next_s()
        held = self._log_limit.admit(why[:40])
        if held is not None:
            _log.warning(
                "ha_not_linked master=%s end=%d why=%s next=asked again from this end in %.1f s"
                " held_back=%d",
                address,
                self._store.log_end,
                why,
                pause_s,
                held,
            )
        return pause_s

    # --- beginning -------------------------------------------------------------------------------

    async def _make_durable(self) -> None:
        """What this slave says that it has is durable."""
        outcome = await self._store.durable(self._store.log_end)
        if outcome is not PutStatus.OK:
            raise StoreUnwritable("this disk does not sync in time what was taken; check it")

    def _greet(self) -> Greeting:
        store = self._store
        first, end = store.log_start, store.log_end
        return Greeting(
            who=self._sign(
                frames.Who(
                    version=frames.VERSION,
                    broker=self._node.broker,
                    cluster=self._node.cluster,
                    id=self._node.id,
                    incarnation=self._node.incarnation,
                    epoch=0,
                    first=first,
                    end=end,
                    file_bytes=self._options.mapped_file_size_commit_log,
                    fingerprint=store.fingerprint(end) if end > first else None,
                    from_first=not self._options.sync_from_last_file,
                )
            ),
        )

    async def _greet_classic(self) -> Greeting | frames.Refusal:
        """What to report so that a classic master begins where it has to."""
        store = self._store
        empty = store.log_end == store.log_start
        try:
            first, master_end = await self._classic_master.bounds()
        except CosmodromeError as error:
            if empty and not self._options.sync_from_last_file:
                raise  # 0 would bring the last file only
            _log.warning("ha_master_bounds_unknown why=%s", error)
            first, master_end = 0, -1
        if empty:
            if self._options.sync_from_last_file:
                return Greeting(master_end=master_end)
            if not await self._take_first(first):
                return Greeting(begin=0, master_end=master_end)
        end = store.log_end
        refusal = misfit(end, first, master_end) if master_end >= 0 else None
        return refusal or Greeting(report=end, begin=end, master_end=master_end)

    async def _take_first(self, first: int) -> bool:
        """Have an offset that is not 0 to begin at; False when the master has nothing yet."""
        store = self._store
        store.begin_at(max(0, first))
        if first > 0:
            return True
        record = await self._classic_master.first_record()
        if not record:
            return False
        if store.take(0, record) != len(record):
            raise Unreachable(
                f"the master's first record came as {len(record)} bytes that are not one record;"
                " check that haMasterAddress and the name servers lead to the same master"
            )
        await self._make_durable()
        return True

    def _link_began(self) -> None:
        link = self._link
        assert link is not None
        self._last = link.progress
        self._was_classic = link.classic
        self._counted = 0
        self._links_made += 1
        self._tables.begin()
        self._why = ""
        self._told_at = asyncio.get_running_loop().time()
        _log.info(
            "ha_linked master=%s stream=%s begin=%d master_end=%d",
            self._address,
            "classic" if link.classic else "own",
            link.progress.begin,
            link.progress.master_end,
        )
        self.linked.fire(True)

    # --- while it lasts --------------------------------------------------------------------------

    async def _attend(self, link: MasterLink, address: str) -> Ended:
        loop = asyncio.get_running_loop()
        silence_s = self._options.ha_housekeeping_interval / 1000
        beat_s = self._options.ha_send_heartbeat_interval / 1000
        if not link.classic:
            beat_s = min(beat_s, BEAT_S_MAX)
        if address != self._address:
            link.end(End.CLOSED, "the master has moved")
        copied = False
        while not link.ended.done():
            await asyncio.wait((link.ended,), timeout=min(beat_s, BEAT_S_MAX))
            now = loop.time()
            silent_s = now - max(link.made_at, link.read_at)
            if silent_s > silence_s and not link.paused:
                link.end(
                    End.CLOSED,
                    f"nothing was read from the master for {silent_s:.1f} s"
                    " (haHousekeepingInterval); check it and the network",
                )
            else:
                link.tick(now, beat_s)
                copied = self._tell(link, now, copied=copied)
        return link.ended.result()

    def _tell(self, link: MasterLink, now: float, *, copied: bool) -> bool:
        """Progress of a copy, now and then, and its end."""
        if copied or not link.progress.begun:
            return copied
        self._count(now)
        if link.progress.in_step:
            _log.info("ha_in_step master=%s end=%d", self._address, self._store.log_end)
            return True
        if now - self._told_at >= PROGRESS_S:
            self._told_at = now
            _log.info(
                "ha_copying master=%s end=%d %s",
                self._address,
                self._store.log_end,
                self._copying(now),
            )
        return False

    def _let_go(self, link: MasterLink) -> None:
        link.end(End.CLOSED, "this slave let go of it")
        if self._link is link:
            self._link = None
            self._read_at = max(self._read_at, link.read_at)
            self._count(asyncio.get_running_loop().time())
            if link.progress.begun:
                self.linked.fire(False)

    def _apply(self, state: frames.State) -> None:
        self._tables.take(state.table, state.rows, whole=state.whole, log_offset=state.offset)


def _why_unreachable(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    if isinstance(error, ssl.SSLError):
        return f"no TLS with the HA port: {described_of_server(error)}"
    if isinstance(error, TimeoutError):
        what = f"no connection within {CONNECT_S:g} s"
    return f"{what}; check that the master runs, its haListenPort, and that no firewall is between"


def split_address(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is no address of a master; write host:port")
    return host.strip("[]"), int(port)
