"""What was sent and promised, and whether a recovered store agrees with it."""

from __future__ import annotations

import dataclasses

from cosmodrome import speed
from cosmodrome.layout import QUEUE_ENTRY, SYS_PREPARED, SYS_ROLLBACK, SYS_TRANSACTION_MASK
from cosmodrome.sim.disk import SimDisk
from cosmodrome.store.store import ReadStatus, Store
from cosmodrome.wire.record import Record, iter_records

ALWAYS_MS = 1 << 60

QueueKey = tuple[str, int]
Rebuilt = dict[QueueKey, dict[int, tuple[int, int, int]]]  # queue offset -> entry


@dataclasses.dataclass(slots=True)
class Message:
    topic: str
    queue_id: int
    body: bytes
    properties: str
    sys_flag: int
    epoch: int  # how often its topic had been deleted
    queue_offset: int = -1
    log_offset: int = -1
    end: int = -1
    written: bool = False  # promised against kills
    durable: bool = False  # promised against power cuts
    seen: bool = False  # a consumer read it
    acknowledged_at: float = -1.0
    lost: bool = False  # a recovery did not find it, so it may never come back

    @property
    def hidden(self) -> bool:
        return self.sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK)


class History:
    def __init__(self) -> None:
        self.messages: dict[bytes, Message] = {}
        self.epochs: dict[str, int] = {}
        self.promised = 0
        self.checks = 0

    def add(self, message: Message) -> None:
        assert message.body not in self.messages
        self.messages[message.body] = message

    def delete(self, topic: str) -> None:
        self.epochs[topic] = self.epoch(topic) + 1

    def epoch(self, topic: str) -> int:
        return self.epochs.get(topic, 0)

    def current(self, message: Message) -> bool:
        return message.epoch == self.epoch(message.topic)

    # --- judging -----------------------------------------------------------------------------
    def saw(self, record: Record, topic: str, queue_id: int) -> Message:
        """A consumer was given this record: it must be one that was sent, at its own place."""
        message = self.messages.get(record.body)
        assert message is not None, f"invented: {record}"
        place = (record.topic, record.queue_id, record.queue_offset, record.log_offset)
        sent = (message.topic, message.queue_id, message.queue_offset, message.log_offset)
        assert place == sent, f"sent to {sent}, found at {place}"
        assert (topic, queue_id) == (message.topic, message.queue_id)
        assert record.properties == message.properties
        assert not message.lost or not self.current(message), f"came back: {sent}"
        assert not message.hidden, f"a hidden message is readable: {sent}"
        return message

    def check(self, store: Store, disk: SimDisk, root: str, *, must: set[bytes]) -> None:
        """A store that has just recovered against everything that is known."""
        self.checks += 1
        logged, rebuilt = walk_log(disk, f"{root}/commitlog", store.facts().max_offset)
        present: set[bytes] = set()
        for topic, queue_ids in store.queues().items():
            for queue_id in queue_ids:
                for record in self.read(store, topic, queue_id):
                    present.add(self.saw(record, topic, queue_id).body)
        by_place = {entry[0]: entry for entry in logged}
        for message in self.messages.values():
            where = (message.topic, message.queue_id, message.queue_offset, message.log_offset)
            if message.body in must:
                assert message.log_offset in by_place, f"promised, not in the log: {where}"
                raw = store.record(message.log_offset, message.end - message.log_offset)
                assert raw is not None and next(iter_records(raw)).body == message.body
                assert message.hidden or message.body in present, f"promised and lost: {where}"
        self.check_queues(store, rebuilt)
        self.check_index(store, logged)
        for message in self.messages.values():
            found = message.body in present
            if message.hidden:
                raw = store.record(message.log_offset) if message.log_offset in by_place else None
                found = raw is not None and next(iter_records(raw)).body == message.body
            if found:
                # Recovery syncs what it keeps, so from here on it is promised.
                message.written = message.durable = True
                message.seen = message.seen or message.body in present
            elif self.current(message):
                message.lost = True
                message.written = message.durable = message.seen = False

    def read(self, store: Store, topic: str, queue_id: int) -> list[Record]:
        """Every message of a queue; without holes, unless its topic was deleted.

        Removed files are back after a power cut, perhaps not all of them or not all of each.
        """
        return read_queue(store, topic, queue_id, dense=self.epoch(topic) == 0)

    def check_queues(self, store: Store, rebuilt: Rebuilt) -> None:
        """Queues equal a rebuild; of a deleted topic the log may hold more."""
        live = {(topic, q) for topic, ids in store.queues().items() for q in ids}
        for key in rebuilt.keys() | live:
            deleted = self.epoch(key[0]) > 0
            queue = store._queues.get(*key)
            if queue is None:
                assert deleted, f"no queue {key}"
                continue
            least, most = store.bounds(*key)
            entries = rebuilt.get(key, {})
            for offset in range(least, most):
                got = QUEUE_ENTRY.unpack(queue.entries(offset, 1))
                if deleted and queue.entry(offset) is None:
                    continue
                assert got == entries[offset], f"{key} {offset}: {got} is not {entries[offset]}"
            if not deleted:
                assert list(entries) == list(range(least, most)), f"{key} has {least}..{most}"

    def check_index(self, store: Store, logged: list[speed.Entry]) -> None:
        for entry in logged:
            if entry[5] & SYS_TRANSACTION_MASK == SYS_ROLLBACK:
                continue
            for key in entry[9]:
                found = store._index.find(entry[2], key, 1 << 30, 0, ALWAYS_MS)
                assert entry[0] in found, f"key {key} of {entry[2]} at {entry[0]} is not indexed"


def read_queue(store: Store, topic: str, queue_id: int, *, dense: bool = True) -> list[Record]:
    """Every message, proving that offsets are dense and in log order."""
    offset, end = store.bounds(topic, queue_id)
    found: list[Record] = []
    expected, last = offset, -1
    while offset < end:
        batch = store.read(topic, queue_id, offset, 32)
        assert not dense or batch.status is ReadStatus.FOUND, (topic, queue_id, offset, batch)
        for record in iter_records(batch.data):
            assert not dense or record.queue_offset == expected, (topic, expected, record)
            assert record.log_offset > last and record.body_is_intact()
            expected, last = expected + 1, record.log_offset
            found.append(record)
        assert batch.next_offset > offset
        offset = batch.next_offset
    assert not dense or expected == end
    return found


def walk_log(disk: SimDisk, directory: str, end: int) -> tuple[list[speed.Entry], Rebuilt]:
    """All records of the log, and the queues that follow from them."""
    logged: list[speed.Entry] = []
    at = 0
    for name in disk.list(directory):
        view, base = disk.open_segment(f"{directory}/{name}").view, int(name)
        if base >= end:
            break
        assert at == base
        stop = min(len(view), end - base)
        entries, position, why = speed.walk(view, base, 0, stop, True, 1 << 30)
        logged += entries
        at = base + (len(view) if why == speed.WALK_BLANK else position)
    assert at == end, f"the log is good up to {at}, the store says {end}"
    rebuilt: Rebuilt = {}
    for log_offset, size, topic, queue_id, queue_offset, sys_flag, _, tags_code, *_ in logged:
        if sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
            continue
        queue = rebuilt.setdefault((topic, queue_id), {})
        if queue and queue_offset <= max(queue):
            queue.clear()  # the topic was deleted and began anew
        queue[queue_offset] = (log_offset, size, tags_code)
    return logged, rebuilt
