"""The store against a dict of lists: any mix of sends, rolls, restarts and crashes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.store.store_kit import (
    ALWAYS_MS,
    HandClock,
    bodies,
    draft,
    faulty_env,
    records,
    small,
)

from cosmodrome.layout import SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK
from cosmodrome.store.store import Draft, ReadStatus, Store

TOPICS = ("A", "%RETRY%g")
QUEUE_IDS = (0, 1)
Key = tuple[str, int]

messages = st.builds(
    draft,
    body=st.binary(max_size=900),
    topic=st.sampled_from(TOPICS),
    queue_id=st.sampled_from(QUEUE_IDS),
    keys=st.sampled_from([None, "k", "k l", "m"]),
    tags=st.sampled_from([None, "t", "u"]),
)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-property-"))
        self.runner = asyncio.Runner()
        self.clock = HandClock()
        self.model: dict[Key, list[Draft]] = {}
        self.deleted: set[str] = set()
        self.keyed: dict[tuple[str, str], list[bytes]] = {}
        self.store: Store | None = None
        self.mode = "SYNC_FLUSH"
        self.count = 0

    @initialize(mode=st.sampled_from(["SYNC_FLUSH", "ASYNC_FLUSH"]))
    def begin(self, mode: str) -> None:
        self.mode = mode
        self.open()

    def open(self) -> None:
        options = small(
            self.root, flush_disk_type=self.mode, max_index_num=500, max_hash_slot_num=50
        )
        self.store = Store(options, faulty_env(clock=self.clock))
        self.runner.run(self.store.start())

    def send(self, drafts: list[Draft], *, together: bool) -> None:
        store = self.store
        assert store is not None
        for item in drafts:
            self.count += 1  # no two bodies are alike, so no two messages are taken for each other
            item.body = b"%d " % self.count + item.body

        async def work() -> None:
            if together:
                stored = store.append_batch(drafts)
            else:
                stored = [store.append(item) for item in drafts]
            await store.durable(stored[-1].end)
            for item, place in zip(drafts, stored, strict=True):
                queue = self.model.setdefault((item.topic, item.queue_id), [])
                assert place.queue_offset == len(queue)
                queue.append(item)
                for word in item.properties.partition("KEYS\x01")[2].split():
                    self.keyed.setdefault((item.topic, word), []).append(item.body)

        self.runner.run(work())

    @rule(drafts=st.lists(messages, min_size=1, max_size=12))
    def send_singly(self, drafts: list[Draft]) -> None:
        self.send(drafts, together=False)

    @rule(drafts=st.lists(messages, min_size=1, max_size=3))
    def send_batch(self, drafts: list[Draft]) -> None:
        self.send(drafts, together=True)

    @rule(item=messages, kind=st.sampled_from([SYS_PREPARED, SYS_ROLLBACK]))
    def send_hidden(self, item: Draft, kind: int) -> None:
        store = self.store
        assert store is not None
        item.sys_flag = kind
        item.properties = ""

        async def work() -> None:
            stored = store.append(item)
            assert stored.queue_offset == 0
            await store.durable(stored.end)

        self.runner.run(work())

    @rule(item=messages)
    def send_committed(self, item: Draft) -> None:
        item.sys_flag = SYS_COMMIT
        self.send([item], together=False)

    @rule(step_ms=st.integers(-5000, 90_000))
    def time_passes(self, step_ms: int) -> None:
        self.clock.at_ms += step_ms

    @rule(thorough=st.booleans())
    def write_derived(self, thorough: bool) -> None:
        assert self.store is not None
        upkeep = self.store._upkeep
        assert self.runner.run(upkeep.write_checkpoint() if thorough else upkeep.write_derived())

    @rule(topic=st.sampled_from(TOPICS))
    def delete(self, topic: str) -> None:
        assert self.store is not None
        self.store.delete_topic(topic)
        for key in [key for key in self.model if key[0] == topic]:
            del self.model[key]
        self.deleted.add(topic)

    @rule()
    def restart(self) -> None:
        assert self.store is not None
        self.runner.run(self.store.stop())
        assert not (self.root / "abort").exists()
        self.open()
        self.forget_deleted()

    @rule(lose_derived=st.booleans())
    def crash(self, lose_derived: bool) -> None:
        assert self.store is not None
        self.runner.run(self.store.abandon())
        assert (self.root / "abort").exists()
        if lose_derived:
            shutil.rmtree(self.root / "consumequeue", ignore_errors=True)
            shutil.rmtree(self.root / "index", ignore_errors=True)
            (self.root / "checkpoint").unlink(missing_ok=True)
        self.open()
        self.forget_deleted()

    def forget_deleted(self) -> None:
        """Messages sent since a deletion are there; older ones may come back, and go again.

        The log keeps what a deleted topic held, so recovery cannot know better.
        """
        store = self.store
        assert store is not None
        for topic in self.deleted:
            stale = False
            for queue_id in QUEUE_IDS:
                wanted = [item.body for item in self.model.get((topic, queue_id), [])]
                got = bodies(store, topic, queue_id)
                assert not wanted or got == wanted
                stale = stale or got != wanted
            if stale:
                store.delete_topic(topic)
                for queue_id in QUEUE_IDS:
                    self.model.pop((topic, queue_id), None)

    @precondition(lambda self: self.store is not None)
    @invariant()
    def holds_what_was_acknowledged(self) -> None:
        store = self.store
        assert store is not None
        for topic in TOPICS:
            for queue_id in QUEUE_IDS:
                wanted = self.model.get((topic, queue_id), [])
                assert store.bounds(topic, queue_id) == (0, len(wanted))
                got = records(store, topic, queue_id)
                assert [item.body for item in got] == [item.body for item in wanted]
                assert [item.queue_offset for item in got] == list(range(len(wanted)))
                assert [item.sys_flag for item in got] == [item.sys_flag for item in wanted]
                times = [item.store_ms for item in got]
                assert times == sorted(times)
                if not wanted:
                    batch = store.read(topic, queue_id, 0, 1)
                    assert batch.status is ReadStatus.NO_MESSAGE_IN_QUEUE
        for (topic, word), wanted_bodies in self.keyed.items():
            found = store.find(topic, word, 64, 0, ALWAYS_MS)
            assert len(found.records) >= min(64, len(wanted_bodies))

    def teardown(self) -> None:
        if self.store is not None:
            self.runner.run(self.store.stop())
        self.runner.close()
        shutil.rmtree(self.root)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
