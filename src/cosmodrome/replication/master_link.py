"""One connection to a master, at its slave.

Bytes are read into one buffer, taken by the store as far as they are whole records, and reported
when they are durable. One wait stands in the store's line at a time: what arrives meanwhile is
covered by the next one, so acknowledgements follow syncs, not frames.

A link ends once, with the reason why (`Ended`). Nothing is applied afterwards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import re
from collections.abc import Callable
from typing import Any, cast

from cosmodrome.errors import CosmodromeError, ProtocolError, StoreUnwritable
from cosmodrome.replication import frames
from cosmodrome.replication.intake import Intake
from cosmodrome.replication.joining import told_apart
from cosmodrome.store.store import PutStatus, Store

READ_BYTES = 1 << 20
UNSYNCED_BYTES_MAX = 64 << 20  # above it nothing is read until the disk has caught up
EPOCH = 0

_ADDRESS = re.compile(r"[!-~]{1,255}:[1-9][0-9]{0,4}", re.ASCII)
_log = logging.getLogger(__name__)


class End(enum.Enum):
    CLOSED = "closed"
    NO_WELCOME = "no welcome"  # it does not speak our stream
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    kind: End
    why: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Greeting:
    """How a link begins: with HELLO and `who`, or with the report of a classic slave."""

    who: frames.Who | None = None
    report: int = 0
    begin: int | None = None  # where a classic master has to begin; None: wherever its file does
    master_end: int = -1  # what a classic master had when it was asked; -1 when it did not answer


@dataclasses.dataclass(slots=True)
class Progress:
    """What is known of the master through this link."""

    begun: bool = False  # its place in the log is agreed
    begin: int = 0
    target: int | None = None  # what the master had when the link was made; None: unknown
    in_step: bool = False  # the target was reached
    master_end: int = -1
    master_ms: int = -1  # store time of the master's last record
    taken_bytes: int = 0
    master_address: str = ""  # where clients reach it, if it said so


class MasterLink(asyncio.BufferedProtocol):
    def __init__(
        self,
        store: Store,
        greeting: Greeting,
        apply: Callable[[frames.State], None],
        began: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.progress = Progress()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self.made_at = self.wrote_at = loop.time()
        self.read_at = 0.0  # before anything was read
        self._loop = loop
        self._store = store
        self._greeting = greeting
        self._apply = apply
        self._began = began
        self._intake = Intake(store)
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._first = b""
        self._reader: frames.MasterFrames | frames.ClassicFrames | None = None
        self._reported = -1
        self._waits = False  # for the disk
        self.paused = False  # until the disk has caught up
        self.classic = greeting.who is None

    # --- the connection --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.ended.done():
            self._transport.abort()
        elif self.classic:
            self._reader = frames.ClassicFrames()
            self._write(frames.number(self._greeting.report))
        else:
            self._write(frames.number(frames.HELLO))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended.done():
            return
        self.read_at = self._loop.time()
        data = self._buffer[:nbytes]
        try:
            if self._reader is None:
                data = self._welcomed(data)
            if self._reader is not None and data:
                for frame in self._reader.feed(data):
                    self._hear(frame)
                    if self.ended.done():
                        return
            self._wait_for_disk()
        except CosmodromeError as error:
            self.end(End.CLOSED, str(error))
        except Exception as error:
            _log.exception("ha_receive_failed")
            self.end(End.CLOSED, f"receiving failed ({type(error).__name__}: {error})")

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        why = "the master closed the connection" if error is None else f"it broke: {error}"
        self.end(End.CLOSED, why)

    def end(self, kind: End, why: str, remedy: str = "") -> None:
        if not self.ended.done():
            self.ended.set_result(Ended(kind, why, remedy))
        if self._transport is not None:
            self._transport.abort()

    # --- what the master says --------------------------------------------------------------------

    def _welcomed(self, data: memoryview) -> memoryview:
        """What is left behind WELCOME."""
        missing = frames.NUMBER.size - len(self._first)
        self._first += data[:missing]
        if len(self._first) < frames.NUMBER.size:
            return data[:0]
        if frames.NUMBER.unpack(self._first)[0] != frames.WELCOME:
            self.end(End.NO_WELCOME, f"it answered HELLO with {self._first!r}")
            return data[:0]
        who = self._greeting.who
        assert who is not None
        self._reader = frames.MasterFrames()
        self._write(frames.who(who))
        return data[missing:]

    def _hear(self, frame: frames.FromMaster) -> None:
        progress = self.progress
        if progress.begun and isinstance(frame, frames.Run):  # as nearly always
            self._take(frame)
            return
        if isinstance(frame, frames.Refusal):
            refusal = told_apart(frame, self._store)
            self.end(End.REFUSED, refusal.why, refusal.remedy)
        elif isinstance(frame, frames.Begin):
            self._begin(frame)
        elif self.classic and not progress.begun:
            self._begin_classic(frame)
        elif not progress.begun:
            raise ProtocolError(f"the master sent {type(frame).__name__} before BEGIN")
        if isinstance(frame, frames.Run) and progress.begun:
            self._take(frame)
        elif isinstance(frame, frames.State) and progress.begun:
            self._apply(frame)
        elif isinstance(frame, frames.Beat) and progress.begun:
            self._beaten(frame)

    def _begin(self, begin: frames.Begin) -> None:
        who = self._greeting.who
        if self.progress.begun or who is None:
            raise ProtocolError("the master began twice")
        if begin.version != frames.VERSION:
            raise ProtocolError(
                f"the master speaks version {begin.version} of the stream, this slave"
                f" {frames.VERSION}; run the same version of Cosmodrome on both"
            )
        self._check_epoch(begin.epoch)
        if begin.begin != who.end and who.first != who.end:
            raise ProtocolError(
                f"the master wants to begin at {begin.begin}, this log ends at {who.end}"
            )
        if not 0 <= begin.first <= begin.begin <= begin.end:
            raise ProtocolError(
                f"the master begins at {begin.begin}, and its log goes from {begin.first} to"
                f" {begin.end}"
            )
        if begin.address and not _ADDRESS.fullmatch(begin.address):
            raise ProtocolError(
                f"the master says that clients reach it at {begin.address[:100]!r}, which is no"
                " address"
            )
        self._intake.begin_at(begin.begin)
        progress = self.progress
        progress.target = progress.master_end = begin.end
        progress.master_address = begin.address
        self._agreed(begin.begin)

    def _begin_classic(self, frame: frames.FromMaster) -> None:
        """The first frame says where a classic master goes on."""
        if isinstance(frame, frames.Run):
            offset = frame.offset
        elif isinstance(frame, frames.Beat):
            offset = frame.end
        else:
            raise ProtocolError(f"a classic master sent {type(frame).__name__}")
        wanted = self._greeting.begin
        if wanted is not None and offset != wanted:
            raise ProtocolError(
                f"the master goes on at {offset}, this log at {wanted}; it has no longer, or does"
                " not have yet, what comes there: look at both logs, or make a new copy"
            )
        self._intake.begin_at(offset)
        if self._greeting.master_end >= 0:
            self.progress.target = self.progress.master_end = self._greeting.master_end
        self._agreed(offset)

    def _agreed(self, begin: int) -> None:
        progress = self.progress
        progress.begun = True
        progress.begin = begin
        self._look_at_step()
        self._reported = self._store.durable_end
        self._began()

    def _take(self, run: frames.Run) -> None:
        if run.epoch != EPOCH:
            self._check_epoch(run.epoch)
        progress = self.progress
        progress.taken_bytes += self._intake.take(run)
        end = run.offset + run.size
        if end > progress.master_end:
            progress.master_end = end
        if not progress.in_step:
            self._look_at_step()

    def _beaten(self, beat: frames.Beat) -> None:
        self._check_epoch(beat.epoch)
        progress = self.progress
        if self.classic:
            if beat.end != self._intake.next_offset:
                raise ProtocolError(
                    f"the master goes on at {beat.end}, this log at {self._intake.next_offset}"
                )
            # Behind data it says that there is no more. Alone it says nothing: a classic master
            # also sends heartbeats to a slave whose place it does not have.
            if progress.target is None and progress.taken_bytes:
                progress.target = beat.end
        else:
            progress.master_ms = beat.last_store_ms
        progress.master_end = max(progress.master_end, beat.end)
        self._look_at_step()

    def _look_at_step(self) -> None:
        progress = self.progress
        if progress.target is not None and self._intake.end >= progress.target:
            progress.in_step = True

    def _check_epoch(self, epoch: int) -> None:
        if epoch != EPOCH:
            raise ProtocolError(f"the master is in epoch {epoch}, this slave in {EPOCH}")

    # --- what it hears ---------------------------------------------------------------------------

    def _wait_for_disk(self) -> None:
        """Report when all that was taken so far is durable."""
        store = self._store
        if self._waits or not self.progress.begun or self._intake.end <= store.durable_end:
            self._report()
            return
        self._waits = True
        store.when_durable(self._intake.end, self._on_durable, self)
        unsynced = store.log_end - store.durable_end
        if unsynced > UNSYNCED_BYTES_MAX and not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def _on_durable(self, _: list[Any], outcome: PutStatus | StoreUnwritable) -> None:
        self._waits = False
        if self.ended.done():
            return
        if isinstance(outcome, StoreUnwritable):
            self.end(End.CLOSED, str(outcome))
            return
        store = self._store
        if self.paused and store.log_end - store.durable_end <= UNSYNCED_BYTES_MAX // 2:
            self.paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        self._report()
        if self._intake.end > store.durable_end:
            self._wait_for_disk()

    def _report(self) -> None:
        end = self._store.durable_end
        if end > self._reported and self.progress.begun:
            self._reported = end
            self._write(frames.number(end) if self.classic else frames.ack(EPOCH, end))

    def tick(self, now: float, beat_s: float) -> None:
        """Say that this end is there."""
        if not self.progress.begun and not self.classic:
            return
        if now - self.wrote_at < beat_s:
            return
        store = self._store
        if not self.classic:
            self._write(frames.beat(EPOCH, store.durable_end, store.last_store_ms))
        elif self.progress.begun:
            self._write(frames.number(store.durable_end))
        else:
            self._write(frames.number(self._greeting.report))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            self.wrote_at = self._loop.time()
