"""One connection of a slave, at its master.

The first 8 bytes decide which stream it speaks. After the handshake `pump` sends what the slave
lacks, whenever the log was written (`follow`) and whenever there is room. Invariants:

- a slave that does not read costs `BUFFER_BYTES` and one frame, never more;
- nothing that a slave says counts before it was checked, the first report included;
- a link that was dropped counts for nothing from that moment on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

from cosmodrome.errors import ProtocolError
from cosmodrome.replication import frames
from cosmodrome.replication.joining import join, join_classic
from cosmodrome.replication.measures import Rate
from cosmodrome.replication.tables import Rows, Table
from cosmodrome.replication.values import LinkFacts, Node
from cosmodrome.store.store import Store
from cosmodrome.transport.peers import plain_peer
from cosmodrome.transport.tls import Door
from cosmodrome.wire.frame import TLS_FIRST_BYTE
from cosmodrome.wire.message import join_address

BUFFER_BYTES = 2 << 20  # what waits in the transport before the link pauses
TURN_BYTES = 4 << 20  # sent in one turn of the loop
JOINED_BYTES = 64 << 10  # frames up to this size leave together
GATHER_S = 0.004  # what no sender waits for leaves together, so long after the first of it
GATHER_BYTES = 256 << 10  # or as soon as it is so much
ROWS_GATHER_S = 0.2
ROWS_MAX = 10_000  # changed rows of one table that are kept; above, the whole table is sent again
FIRST_BYTES = frames.NUMBER.size
EPOCH = 0
PLAIN_REFUSED = frames.Refusal(
    why="a slave without TLS is not served while tls.server.mode is enforcing",
    remedy=(
        "set tls.enable=true at the slave; a Java slave has no TLS for this stream: replace it, or"
        " use permissive on a trusted network"
    ),
)

_log = logging.getLogger(__name__)


class Hub(Protocol):
    """The master as its links see it."""

    store: Store
    node: Node
    tables: Sequence[Table]
    file_bytes: int
    batch_bytes: int
    address: Callable[[], str]  # where clients reach the master
    door: Door

    def opened(self, link: Link) -> bool:
        """Whether there is room for one more that has said nothing yet."""

    def denial(self, link: Link, who: frames.Who | None) -> frames.Refusal | None:
        """Why the slave may not have the log; a classic one does not say who it is."""

    def joins(self, link: Link) -> bool:
        """Whether there is room for one more slave; from now on it counts."""

    def acked(self, link: Link) -> None: ...
    def gone(self, link: Link, kind: str, why: str) -> None:
        """It counts no more. Without `kind` that is nothing to tell."""

    def refused(self, link: Link, kind: str, refusal: frames.Refusal) -> None: ...


class Link(asyncio.Protocol):
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.peer = "unknown"
        self.host = "?"
        self.stream: ClassicStream | OwnStream | None = None  # None until it has spoken
        self.joined = False
        self.begin = 0  # where the stream began
        self.sent_end = 0
        self.acked_end = 0
        loop = asyncio.get_running_loop()
        self.made_at = self.read_at = self.wrote_at = loop.time()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._entered = False  # by the door: over TLS, or without where that is taken
        self._paused = False
        self._pumps_soon = False
        self._log_sent_at = 0.0  # when bytes of the log left last
        self._gathering: asyncio.TimerHandle | None = None
        self._rate = Rate()

    # --- the connection --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple) and len(name) >= 2:
            self.peer = join_address(name[0], name[1])
            self.host, _ = plain_peer(name)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES, low=BUFFER_BYTES // 4)
        if not self.hub.opened(self):
            self._cut()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self.read_at = self._loop.time()
        if not self._entered and not self._enter(data):
            return
        try:
            if self.stream is None:
                self._first += data
                if len(self._first) < FIRST_BYTES:
                    return
                data, self._first = self._first, b""
                data = self._speak(data)
            if data and self.stream is not None:
                self.stream.heard(data)
        except ProtocolError as error:
            self.drop("protocol", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            why = "the slave closed it" if error is None else f"it broke: {error}"
            self.drop("lost" if self.joined else "", why)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.pump_soon()

    # --- life ------------------------------------------------------------------------------------

    def _enter(self, data: bytes) -> bool:
        """Whether this is for the stream; otherwise TLS begins, or the link is dropped."""
        door = self.hub.door
        assert self._transport is not None
        self._entered = True
        if not data.startswith(TLS_FIRST_BYTE):
            if not door.takes_plain:
                self.refuse("plain", PLAIN_REFUSED)
            return door.takes_plain
        if door.why_not_tls:
            self.drop("tls", door.why_not_tls)
        else:
            self._transport = door.secure(self._transport, self, data)
        return False

    def _speak(self, data: bytes) -> bytes:
        """The first number says which stream it is; what is left for the stream."""
        (first,) = frames.NUMBER.unpack_from(data)
        if first == frames.HELLO:
            self.stream = OwnStream(self)
            self.write(frames.number(frames.WELCOME))
            return data[FIRST_BYTES:]
        if first < 0:
            raise ProtocolError(
                f"it began with {data[:FIRST_BYTES]!r}, which is neither a report nor HELLO;"
                " check who connects to this port: it is for slaves of this broker"
            )
        self.stream = ClassicStream(self)
        return data

    def join(self, begin: int, acked: int) -> bool:
        """The slave has its place: from now on it is fed, and counts."""
        self.begin = self.sent_end = begin
        self.acked_end = acked
        self.joined = self.hub.joins(self)
        return self.joined

    def ack(self, end: int) -> None:
        """The slave says how far it is; checked here, whatever the stream."""
        log_end = self.hub.store.log_end
        if end > log_end:
            raise ProtocolError(
                f"the slave reports {end}, but this log ends at {log_end}; if it is a slave of"
                " this broker it is ahead: cut it with `cosmo store repair --cut-at` or make a new"
                " copy"
            )
        if end < 0 or end > self.sent_end:
            raise ProtocolError(
                f"the slave reports {end}, but only what is below {self.sent_end} was sent to it;"
                " check what connects to this port"
            )
        # Before the first byte arrived there, a slave that began here has nothing.
        if end != self.acked_end and end > self.begin:
            self.acked_end = end
            self.hub.acked(self)

    def refuse(self, kind: str, refusal: frames.Refusal) -> None:
        self.hub.refused(self, kind, refusal)
        self._end(flush=True)

    def drop(self, kind: str, why: str) -> None:
        self.hub.gone(self, kind, why)
        self._end(flush=False)

    def _end(self, *, flush: bool) -> None:
        self.joined = False
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self.stream is not None:
            self.stream.end()
        self._cut(flush=flush)

    def _cut(self, *, flush: bool = False) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if flush:
            transport.close()
            self._loop.call_later(1.0, transport.abort)  # it may never read what was said last
        else:
            transport.abort()

    # --- sending ---------------------------------------------------------------------------------

    def write(self, data: bytes | memoryview) -> None:
        if self._transport is not None:
            self._transport.write(data)
            self.wrote_at = self._loop.time()

    def follow(self) -> None:
        """The log has grown: send it at once when senders wait for slaves.

        Otherwise what is written within `GATHER_S` leaves together. To wake a slave, and its sync
        and report, cost the same for one message as for a hundred.
        """
        store = self.hub.store
        if store.waits_for_slaves:
            self.pump()
        elif self._gathering is not None:
            if store.log_end - self.sent_end >= GATHER_BYTES:
                self.pump()
        elif self._loop.time() - self._log_sent_at >= GATHER_S:
            self.pump()
        else:
            self._gathering = self._loop.call_later(GATHER_S, self._gathered)

    def _gathered(self) -> None:
        self._gathering = None
        self.pump()

    def pump(self) -> None:
        """Send what the slave lacks, as far as there is room."""
        stream = self.stream
        if self._paused or not self.joined or stream is None:
            return
        try:
            self._pump(stream)
        except Exception as error:  # the store, which calls this, must not suffer
            _log.exception("ha_send_failed peer=%s", self.peer)
            self.drop("failed", f"sending failed ({type(error).__name__}: {error}); see the log")

    def _pump(self, stream: ClassicStream | OwnStream) -> None:
        store, batch_bytes = self.hub.store, self.hub.batch_bytes
        small: list[bytes | memoryview] = []
        before = at = self.sent_end
        while not self._paused:
            if stream.rows_due:
                self._flush(small)
                stream.send_rows()
                continue
            if at - before >= TURN_BYTES:
                self.pump_soon()
                break
            data = store.log_bytes(at, batch_bytes) if at < store.log_end else None
            if data is None:
                if at < store.log_start:
                    self.drop(
                        "removed",
                        f"the log before {store.log_start} was removed while the slave needed it"
                        f" from {at} on; the disk was too full to keep it",
                    )
                break
            size = len(data)
            small.append(stream.head(at, size))
            at += size
            self.sent_end = at
            if size <= JOINED_BYTES:
                small.append(data)
            else:
                self._flush(small)
                self.write(data)
        self._flush(small)
        if at > before:
            self._log_sent_at = self.wrote_at
            self._rate.add(at - before, self.wrote_at)

    def _flush(self, small: list[bytes | memoryview]) -> None:
        if small:
            self.write(b"".join(small))
            small.clear()

    def pump_soon(self) -> None:
        """In this turn of the loop, or with the write that comes first."""
        if not self._pumps_soon:
            self._pumps_soon = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumps_soon = False
        self.pump()

    def tick(self, now: float, beat_s: float) -> None:
        """Say that this end is there. A peer that does not read hears enough later."""
        if self.stream is not None and self.joined and not self._paused:
            self.stream.tick(now, beat_s)
            self.pump()

    # --- what is known ---------------------------------------------------------------------------

    @property
    def needed_from(self) -> int:
        return max(self.acked_end, self.begin)

    def facts(self, now: float, log_end: int, lag_seconds: float) -> LinkFacts:
        stream = self.stream
        return LinkFacts(
            peer=self.peer,
            node=stream.node if stream is not None else "",
            classic=isinstance(stream, ClassicStream),
            sent_end=self.sent_end,
            acked_end=self.acked_end,
            lag_bytes=max(0, log_end - self.needed_from),
            lag_seconds=lag_seconds,
            silent_seconds=now - self.read_at,
            sent_bytes_per_second=self._rate.per_second(now),
        )


class ClassicStream:
    """Upstream's stream, which knows nothing but offsets."""

    node = ""
    rows_due = False

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reports = frames.Reports()

    def heard(self, data: bytes) -> None:
        for report in self._reports.feed(data):
            if self._link.joined:
                if report:
                    self._link.ack(report)
                continue
            hub = self._link.hub
            begin = hub.denial(self._link, None) or join_classic(report, hub.store, hub.file_bytes)
            if isinstance(begin, frames.Refusal):
                self._link.refuse("classic", begin)
                return
            if not self._link.join(begin, report):
                return
            self._link.pump()

    def head(self, offset: int, size: int) -> bytes:
        return frames.classic_head(offset, size)

    def tick(self, now: float, beat_s: float) -> None:
        if now - self._link.wrote_at >= beat_s:
            self._link.write(frames.classic_head(self._link.sent_end, 0))

    def send_rows(self) -> None:
        """Classic slaves ask for tables by themselves."""

    def end(self) -> None:
        """Nothing to let go of."""


class OwnStream:
    """Our stream: who it is, the log, and the tables."""

    def __init__(self, link: Link) -> None:
        self.node = ""
        self.id = 0
        self.incarnation = ""
        self._link = link
        self._reader = frames.SlaveFrames()
        self._tables: dict[str, Table] = {}
        self._unsubscribe: list[Callable[[], None]] = []
        self._under_way: Iterator[bytes] = iter(())  # frames with rows, made one by one
        self._sending = False
        self._ready: dict[str, dict[str, object] | None] = {}  # rows by table; None: all of them
        self._ready_at = 0  # they leave when the log was sent up to here
        self._gathered: dict[str, dict[str, object] | None] = {}
        self._leading: dict[str, dict[str, object] | None] = {}  # go first, see `Table.leads`
        self._timer: asyncio.TimerHandle | None = None

    # --- what the slave says ---------------------------------------------------------------------

    def heard(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if isinstance(frame, frames.Who):
                self._judge(frame)
                if not self._link.joined:
                    return
            elif not self._link.joined:
                raise ProtocolError(f"{frame} before the slave said who it is")
            elif frame.epoch != EPOCH:
                raise ProtocolError(f"the slave is in epoch {frame.epoch}, the master in {EPOCH}")
            elif isinstance(frame, frames.Ack):
                self._link.ack(frame.end)

    def _judge(self, who: frames.Who) -> None:
        link, hub = self._link, self._link.hub
        if link.joined:
            raise ProtocolError("the slave said twice who it is")
        self.node = f"{who.broker}:{who.id}"[:256]
        self.id, self.incarnation = who.id, who.incarnation
        begin = hub.denial(link, who) or join(who, hub.node, hub.store, hub.file_bytes)
        if isinstance(begin, frames.Refusal):
            link.write(frames.refused(begin))
            link.refuse("own", begin)
            return
        if who.cluster != hub.node.cluster:
            _log.warning(
                "ha_cluster_differs peer=%s slave=%s slave_cluster=%.100s cluster=%s"
                " next=set brokerClusterName of both to the same name",
                link.peer,
                self.node,
                who.cluster,
                hub.node.cluster,
            )
        empty = who.first == who.end
        if not link.join(begin, 0 if empty else who.end):
            return
        store = hub.store
        link.write(
            frames.begin(
                frames.Begin(
                    version=frames.VERSION,
                    epoch=EPOCH,
                    first=store.log_start,
                    end=store.log_end,
                    begin=begin,
                    address=hub.address(),
                )
            )
        )
        for table in hub.tables:
            self._tables[table.name] = table
            self._ready[table.name] = None
            listener = self._leads(table.name) if table.leads else self._follows(table.name)
            self._unsubscribe.append(table.on_change(listener))
        link.pump()

    # --- what it hears ---------------------------------------------------------------------------

    def head(self, offset: int, size: int) -> bytes:
        return frames.data_head(EPOCH, offset, self._link.hub.store.durable_end, size)

    def tick(self, now: float, beat_s: float) -> None:
        store = self._link.hub.store
        self._link.write(frames.beat(EPOCH, store.log_end, store.last_store_ms))

    @property
    def rows_due(self) -> bool:
        if self._sending or self._leading:
            return True
        return bool(self._ready and self._link.sent_end >= self._ready_at)

    def send_rows(self) -> None:
        """The next frame with rows."""
        frame = next(self._under_way, None)
        self._sending = frame is not None
        if frame is not None:
            self._link.write(frame)
            return
        waiting = self._leading or self._ready
        if not waiting:
            return
        name = next(iter(waiting))
        rows = waiting.pop(name)
        whole = rows is None
        table_rows: Rows = self._tables[name].rows() if rows is None else rows
        store = self._link.hub.store
        self._under_way = frames.states(lambda: store.log_end, name, table_rows, whole=whole)
        self._sending = True

    def _leads(self, name: str) -> Callable[[Rows], None]:
        def changed(rows: Rows) -> None:
            _gather(self._leading, name, rows)
            self._link.pump_soon()

        return changed

    def _follows(self, name: str) -> Callable[[Rows], None]:
        def changed(rows: Rows) -> None:
            _gather(self._gathered, name, rows)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(
                    ROWS_GATHER_S, self._rows_gathered
                )

        return changed

    def _rows_gathered(self) -> None:
        self._timer = None
        if not self._link.joined:
            return
        if self._ready:  # the log that they follow was not sent yet
            self._timer = asyncio.get_running_loop().call_later(ROWS_GATHER_S, self._rows_gathered)
            return
        self._ready, self._gathered = self._gathered, {}
        self._ready_at = self._link.hub.store.log_end
        self._link.pump()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for unsubscribe in self._unsubscribe:
            with contextlib.suppress(ValueError):
                unsubscribe()
        self._unsubscribe.clear()


def _gather(gathered: dict[str, dict[str, object] | None], name: str, rows: Rows) -> None:
    known = gathered.setdefault(name, {})
    if known is not None:
        known.update(rows)
        if len(known) > ROWS_MAX:
            gathered[name] = None
