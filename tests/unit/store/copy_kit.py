"""A master's log with everything that a log can have, and what a copy of it has to equal."""

from __future__ import annotations

import random
from pathlib import Path

from tests.unit.store.store_kit import HOST, draft, faulty_env, small

from cosmodrome.layout import SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK
from cosmodrome.store.store import Draft, Store

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
HOST_V6 = bytes(range(16)) + b"\x00\x00\x2a\x9f"


def drafts(chance: random.Random, number: int) -> list[Draft]:
    """One message, or a batch."""
    kind = chance.randrange(8)
    body = chance.randbytes(chance.choice([0, 1, 40, 300, 900, 2500]))
    keys = f"k{number} all"
    if kind == 0:
        return [draft(body[:200], "batch", chance.randrange(2), keys=keys) for _ in range(5)]
    if kind == 1:
        level = chance.randint(1, 18)
        properties = f"DELAY\x01{level}\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02KEYS\x01{keys}"
        return [draft(body, SCHEDULE_TOPIC, level - 1, properties=properties)]
    if kind == 2:
        flag = chance.choice([SYS_PREPARED, SYS_COMMIT, SYS_ROLLBACK])
        return [draft(body, "T", 0, sys_flag=flag, prepared_offset=number, keys=keys)]
    if kind == 3:
        return [draft(body, HALF_TOPIC, 0, keys=keys)]
    if kind == 4:
        return [Draft("T", 1, body, "TAGS\x01t", HOST_V6, HOST, sys_flag=1 << 4)]
    return [draft(body, "T", chance.randrange(4), keys=keys, tags="t")]


async def filled(root: Path, seed: int, count: int) -> Store:
    """A running master."""
    store = Store(small(root, mapped_file_size_consume_queue=2000), faulty_env())
    await store.start()
    chance = random.Random(seed)
    for number in range(count):
        stored = store.append_batch(drafts(chance, number))
        if chance.random() < 0.3:
            await store.durable(stored[-1].end)
    await store.durable(store._log.end)
    return store


def slave_of(root: Path, **changes: str) -> Store:
    options = small(root, mapped_file_size_consume_queue=2000, broker_role="SLAVE", **changes)
    return Store(options, faulty_env())


def whole(store: Store, size_max: int = 1 << 20) -> bytes:
    """The whole log, as it would be sent."""
    data = bytearray()
    while (view := store.log_bytes(store.log_start + len(data), size_max)) is not None:
        assert len(view) <= size_max
        data += view
    assert store.log_start + len(data) == store.log_end
    return bytes(data)


def take_all(slave: Store, log: bytes, stop: int, start: int = 0) -> None:
    """Have the slave take what it can of a log from `start` on that was received to `stop`."""
    while taken := slave.take(slave.log_end, log[slave.log_end - start : stop - start]):
        assert taken > 0


def derived(store: Store, keys: int) -> dict[str, object]:
    """All that consumers can see."""
    found: dict[str, object] = {}
    for topic, ids in store.queues().items():
        for queue_id in ids:
            first, end = store.bounds(topic, queue_id)
            entries: list[tuple[int, int, int]] = []
            while first + len(entries) < end:
                entries += store.entries(topic, queue_id, first + len(entries), 100)
            found[f"{topic}/{queue_id}"] = (first, end, entries)
        for number in range(keys):
            found[f"{topic}#k{number}"] = store.find(topic, f"k{number}", 50, 0, 1 << 60).records
    return found


def files(root: Path) -> dict[str, bytes]:
    """Log and queue files as they are on disk."""
    paths = [*root.glob("commitlog/*"), *root.glob("consumequeue/**/*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}
