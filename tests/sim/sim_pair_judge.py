"""What a pair must never do, judged by what is on its disks and on the wire."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable

from tests.sim.sim_machine import LOG, Machine

from cosmodrome import speed
from cosmodrome.env.options import StoreOptions
from cosmodrome.layout import (
    QUEUE_ENTRY,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.sim.net import MemoryTransport
from cosmodrome.store.store import DelayLevels, PutStatus, Store
from cosmodrome.wire.record import iter_records

HELLO = b"\xc0SMO-HA>"
WHO, BEGIN, ACK = 1, 2, 6
ALWAYS_MS = 1 << 60
DELAYS = DelayLevels(StoreOptions().message_delay_level)
TURN_S = 1e-6  # timers that are due at one time


@dataclasses.dataclass(slots=True)
class Sent:
    """One message, from the moment at which the master gave it a place."""

    topic: str
    queue_id: int
    body: bytes
    log_offset: int
    end: int
    batch_end: int  # of those that were sent together with it, and are answered together
    came: float
    had_slave: bool  # when it came, some link may have counted ...
    must_wait: bool  # ... and some link did
    raw: bytes = b""
    ok: bool = False  # answered OK by a master that waits for slaves
    wiped: int = 0  # disks that the slave had had by then


class Heard:
    """What the slave at the other end of one connection has said."""

    def __init__(self, wiped: int) -> None:
        self.wiped = wiped
        self.end: int | None = None  # of its log, by its own words
        self.said_at = self.linked_at = 0.0
        self.verified = 0
        self._held = b""
        self._greeted = False

    def feed(self, data: bytes) -> list[tuple[int, int, int]]:
        """Kind, first and end of the log, as often as it says so."""
        self._held += data
        said = []
        if not self._greeted and len(self._held) >= len(HELLO):
            assert self._held.startswith(HELLO), "the slave speaks another stream"
            self._held = self._held[len(HELLO) :]
            self._greeted = True
        while self._greeted and len(self._held) >= 5:
            kind, size = struct.unpack_from(">BI", self._held)
            if len(self._held) < 5 + size:
                break
            payload, self._held = self._held[5 : 5 + size], self._held[5 + size :]
            if kind == WHO:
                who = json.loads(payload)
                said.append((WHO, who["first"], who["end"]))
            elif kind == ACK:
                said.append((ACK, -1, struct.unpack(">qq", payload)[1]))
        return said


class Judge:
    def __init__(self, master: Machine, slave: Machine, now: Callable[[], float]) -> None:
        self.master, self.slave = master, slave
        self.now = now
        self.heard: dict[MemoryTransport, Heard] = {}
        self.greeted: dict[MemoryTransport, bytes] = {}  # how masters began, at the slave
        self.sent: dict[int, Sent] = {}  # by place; what a power cut took is not here any more
        self.ok = 0
        self.statuses: dict[PutStatus, int] = dict.fromkeys(PutStatus, 0)
        self.checks = 0
        self.expired = False  # files of the master's log were removed
        self.promised = {master.name: 0, slave.name: 0}  # ends of the log that must stay

    # --- the wire ----------------------------------------------------------------------------
    def hear(self, transport: MemoryTransport, data: bytes) -> None:
        """The master is about to read this from the slave."""
        slave = self.slave
        link = self.heard.get(transport)
        if link is None:
            link = self.heard[transport] = Heard(slave.wiped)
        for kind, first, end in link.feed(data):
            link.end = 0 if kind == WHO and first == end else end
            link.said_at = self.now()
            if kind == WHO:
                link.verified = first
                link.linked_at = self.now()
            elif self.master.serves and self.can_look(transport, link):
                self.check_ack(link, end)

    def hear_master(self, transport: MemoryTransport, data: bytes) -> None:
        """The slave is about to read this from the master."""
        begun = self.greeted.get(transport, b"")
        if len(begun) <= len(HELLO):
            self.greeted[transport] = begun + data[: len(HELLO) + 1 - len(begun)]

    def check_begun(self) -> None:
        """A slave that calls itself linked has heard so from a master, and not lost it."""
        begun = [
            transport
            for transport, first in self.greeted.items()
            if first[len(HELLO) :] == bytes((BEGIN,))
            and transport.node is self.slave.node
            and not transport.lost
        ]
        assert begun, "the slave says that it is linked, and no master said so"

    def check_ack(self, link: Heard, end: int) -> None:
        """A report says that the slave has the master's bytes, durably where it says so."""
        slave, master = self.slave, self.master
        assert master.store is not None
        start = max(link.verified, master.store.log_start)  # the rest has expired there
        here = slave.log_bytes(start, end, stable=slave.synced)
        there = master.log_bytes(start, end)
        assert here == there, f"reported {end}, but the slave's disk has other bytes there"
        link.verified = max(link.verified, end)
        self.promised[slave.name] = max(self.promised[slave.name], end)

    def can_look(self, transport: MemoryTransport, link: Heard) -> bool:
        """Whether the slave's disk still is what it was when it spoke."""
        slave = self.slave
        return link.wiped == slave.wiped and (slave.synced or transport.peer.node is slave.node)

    def live(self, *, surely: bool) -> list[tuple[MemoryTransport, Heard]]:
        """Links that count for this life of the master; a link that ends may count for a turn."""
        return [
            (transport, link)
            for transport, link in self.heard.items()
            if link.end is not None
            and transport.node is self.master.node
            and not transport.lost
            and not (surely and transport.is_closing())
        ]

    # --- sends -------------------------------------------------------------------------------
    def came(self, message: Sent) -> None:
        """Somebody begins to wait for a message, and for those that came with it."""
        behind_max = self.master.options.ha_slave_fallbehind_max
        ends = [link.end or 0 for _, link in self.live(surely=True)]
        message.must_wait = any(message.batch_end - end < behind_max for end in ends)
        message.had_slave = bool(self.live(surely=False))
        self.sent[message.log_offset] = message

    def answered(
        self, message: Sent, status: PutStatus, *, wait: bool, waits: bool, failed: bool
    ) -> None:
        """In the turn of the answer. `waits`: for slaves too; `failed`: the master's disk has."""
        master = self.master
        assert master.store is not None
        self.statuses[status] += 1
        if message.log_offset < master.store.log_start:
            return  # it has expired meanwhile
        durable = master.store.durable_end >= message.end
        raw = master.log_bytes(message.log_offset, message.end)
        message.raw = raw
        assert next(iter_records(raw)).body == message.body, "another message is at its place"
        took = self.now() - message.came + TURN_S
        if durable or (wait and status is PutStatus.OK):
            kept = master.log_bytes(message.log_offset, message.end, stable=master.synced)
            assert kept == raw, f"{status} up to {message.end}, but it is not on the master's disk"
            self.promised[master.name] = max(self.promised[master.name], message.end)
        options = master.options
        if status is PutStatus.FLUSH_DISK_TIMEOUT:
            assert took >= options.sync_flush_timeout / 1000 and not durable
        elif not waits:
            assert status is PutStatus.OK
        elif status is PutStatus.OK:
            self.judge_ok(message)
        elif status is PutStatus.SLAVE_NOT_AVAILABLE:
            assert not message.must_wait, "a slave was there, and the master says there was none"
        elif status is PutStatus.FLUSH_SLAVE_TIMEOUT:
            assert took >= options.slave_timeout / 1000 or failed, f"late after {took} s"
            assert message.had_slave, "there was no slave to wait for"
            reports = [link.end or 0 for _, link in self.live(surely=True)]
            assert failed or max(reports, default=0) < message.batch_end, "a slave reported it"

    def judge_ok(self, message: Sent) -> None:
        """OK of a master that waits for slaves: one that is linked now has said that it has it."""
        assert message.had_slave, "OK without any slave"
        end = message.batch_end
        links = [(t, link) for t, link in self.live(surely=False) if (link.end or 0) >= end]
        assert links, f"OK for {end}, which no live link has reported"
        slave = self.slave
        for transport, link in links:
            if self.can_look(transport, link):
                kept = slave.log_bytes(message.log_offset, message.end, stable=slave.synced)
                assert kept == message.raw, f"OK for {message.end}, which the slave has not"
                message.ok, message.wiped = True, slave.wiped
                self.ok += 1

    # --- lives -------------------------------------------------------------------------------
    def ended(self, machine: Machine, *, wiped: bool) -> None:
        """A life is over; its machine knows how, and what of its log is safe."""
        if machine.power and not machine.synced:
            self.promised[machine.name] = min(self.promised[machine.name], machine.synced_end)
        if wiped:
            self.promised[machine.name] = 0

    def recovered(self, machine: Machine, store: Store) -> None:
        """A store has just started: what was promised is there, and queues follow from the log."""
        self.checks += 1
        end = store.log_end
        promised = self.promised[machine.name]
        assert end >= promised, f"{machine.name}: recovered up to {end}, promised was {promised}"
        if machine is self.master:
            for at in [at for at, sent in self.sent.items() if self.is_lost(sent, end)]:
                del self.sent[at]
        for message in self.sent.values():
            if not message.raw or not store.log_start <= message.log_offset < promised:
                continue
            if machine is self.slave and not (message.ok and message.wiped == machine.wiped):
                continue
            kept = machine.log_bytes(message.log_offset, message.end)
            assert kept == message.raw, f"{machine.name}: lost what was promised, {message}"
        if machine is self.slave or not self.expired:
            # Removed files are back after a power cut, perhaps not all, nor all of each.
            check_derived(machine, store, anew=self.expired)

    def is_lost(self, message: Sent, end: int) -> bool:
        """Whether a recovery up to `end` gave a message up, which it may: nothing was promised.

        Others may be at its place: what a write left that had failed before it.
        """
        if message.end <= self.promised[self.master.name]:
            return False
        kept = self.master.log_bytes(message.log_offset, message.end)
        return message.end > end or kept != message.raw

    def linked(self) -> bool:
        """Whether the lives of now are joined, as far as the master knows."""
        slave = self.slave
        return any(t.peer.node is slave.node for t, _ in self.live(surely=True))

    def linked_at(self) -> float:
        return max((link.linked_at for _, link in self.live(surely=True)), default=self.now())

    def check_bounds(self, most: int) -> None:
        """What waits for a slave that does not read is bounded."""
        for transport, _ in self.live(surely=False):
            waiting = transport.get_write_buffer_size()
            assert waiting <= most, f"{waiting} bytes wait for the slave, at most {most} may"

    def check_kept(self) -> None:
        """What a linked slave still needs has not expired."""
        assert self.master.store is not None
        first = self.master.store.log_start
        for _, link in self.live(surely=True):
            assert link.end is None or link.end == 0 or link.end >= first, (
                f"a linked slave is at {link.end}, the master begins at {first}"
            )

    def check_prefix(self) -> None:
        """A linked slave has nothing but what its master has."""
        master, slave = self.master.store, self.slave.store
        assert master is not None and slave is not None
        self.checks += 1
        end = slave.log_end
        assert end <= master.log_end, f"linked at {end}, the master ends at {master.log_end}"
        start = max(slave.log_start, master.log_start)
        assert self.slave.log_bytes(start, end) == self.master.log_bytes(start, end), (
            f"linked, but the logs differ between {start} and {end}"
        )

    def is_prefix(self) -> bool:
        master, slave = self.master.store, self.slave.store
        assert master is not None and slave is not None
        start, end = max(slave.log_start, master.log_start), slave.log_end
        if not master.log_start <= end <= master.log_end:
            return slave.log_start == end
        return self.slave.log_bytes(start, end) == self.master.log_bytes(start, end)


def check_derived(machine: Machine, store: Store, *, anew: bool = False) -> None:
    """Queues and index are those that follow from the log on the disk.

    `anew`: a queue may have begun again, because its messages had expired at the master and a power
    cut took what was left of it there.
    """
    assert store.durable_end == store.log_end
    logged = walk(machine, store.log_start, store.log_end)
    queues: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    firsts: dict[tuple[str, int], int] = {}
    keys: dict[tuple[str, str], set[int]] = {}
    for entry in logged:
        log_offset, size, topic, queue_id, queue_offset = entry[:5]
        sys_flag, store_ms, tags_code, delay_level, words = entry[5:]
        if delay_level > 0:
            tags_code = store_ms + DELAYS.delay_ms(delay_level)
        kind = sys_flag & SYS_TRANSACTION_MASK
        if kind not in (SYS_PREPARED, SYS_ROLLBACK):
            key = topic, queue_id
            entries = queues.setdefault(key, [])
            if anew and entries and queue_offset < firsts[key] + len(entries):
                entries.clear()
                del firsts[key]
            assert firsts.setdefault(key, queue_offset) + len(entries) == queue_offset, key
            entries.append((log_offset, size, tags_code))
        if kind != SYS_ROLLBACK:
            for word in words:
                keys.setdefault((topic, word), set()).add(log_offset)
    for (topic, word), places in keys.items():
        assert store._index is not None
        found = store._index.find(topic, word, 1 << 30, 0, ALWAYS_MS)
        assert places <= set(found), f"{places - set(found)} not indexed for {word} of {topic}"
    known = {(topic, queue_id) for topic, ids in store.queues().items() for queue_id in ids}
    for key in known | queues.keys():
        least, most = store.bounds(*key)
        queue = store._queues.get(*key)
        assert queue is not None, f"no queue {key}"
        wanted = queues.get(key, [])
        assert (least, most) == (firsts.get(key, least), least + len(wanted)), (key, least, most)
        got = [QUEUE_ENTRY.unpack(queue.entries(offset, 1)) for offset in range(least, most)]
        assert got == wanted, f"queue {key} of {machine.name} is not that of its log"


def walk(machine: Machine, start: int, end: int) -> list[speed.Entry]:
    """All records of the log, which has nothing else."""
    size = machine.options.mapped_file_size_commit_log
    found: list[speed.Entry] = []
    while start < end:
        base = start - start % size
        stop = min(end, base + size) - base
        view = memoryview(machine.disk.visible(f"{LOG}/{base:020d}"))
        entries, position, why = speed.walk(view, base, start - base, stop, True, 1 << 30)
        found += entries
        start = base + size if why == speed.WALK_BLANK else base + position
        assert why == speed.WALK_BLANK or position == stop, f"no record at {start} of {end}"
    assert start == end
    return found
