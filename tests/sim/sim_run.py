"""One seed: a store on a simulated disk lives, dies and recovers a few times under load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

from tests.sim.sim_history import History, Message

from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import MessageTooLarge, StoreUnwritable
from cosmodrome.layout import SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK
from cosmodrome.sim.disk import PowerCut, SimDisk
from cosmodrome.sim.env import SimClock, sim_env
from cosmodrome.sim.loop import JumpLoop
from cosmodrome.store.store import Draft, PutStatus, Store
from cosmodrome.wire.record import iter_records

ROOT = "/store"
HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
TOPICS = ("A", "%RETRY%g", "C")
DELAY_MS_MAX = 20
FLUSH_INTERVAL_MS = 60
# ASYNC_FLUSH: a timer, then one sync (delays before and after) and a turn of the loop.
WINDOW_SECONDS = (FLUSH_INTERVAL_MS + 2 * DELAY_MS_MAX + 1) / 1000


class Run:
    def __init__(self, seed: int, lives: int | None = None, *, index_slots: int = 0) -> None:
        self.chance = chance = random.Random(seed)
        self.loop = JumpLoop()
        self.clock = SimClock(self.loop)
        self.disk = SimDisk(f"disk-{seed}", self.clock.now_ms)
        self.seed = seed
        self.synced = chance.random() < 0.65
        self.lives = lives or chance.randint(2, 4)
        self.history = History()
        self.errors: list[Any] = []
        self.cuts = self.kills = self.stops = 0
        self.number = 0
        self.faulty = False  # since the last start
        self.power = False  # it was cut since the last check
        self.cut_at = 0.0
        self.flushed_offset = 0
        self.store: Store | None = None
        self.options = StoreOptions(
            store_path_root_dir=ROOT,
            flush_disk_type="SYNC_FLUSH" if self.synced else "ASYNC_FLUSH",
            mapped_file_size_commit_log=chance.choice((4096, 8192, 20480)),
            mapped_file_size_consume_queue=chance.choice((60, 100, 400)),
            max_hash_slot_num=index_slots or chance.choice((3, 20)),
            max_index_num=chance.choice((5, 30, 200)),
            max_message_size=3000,
            flush_interval_commit_log=FLUSH_INTERVAL_MS,
            flush_interval_consume_queue=chance.choice((10, 50, 1000)),
            flush_consume_queue_thorough_interval=chance.choice((10, 60, 3000)),
            sync_flush_timeout=chance.choice((15, 5000)),
            disk_space_warning_level_ratio=100,
        )

    # --- lives -------------------------------------------------------------------------------
    def run(self) -> None:
        self.loop.set_exception_handler(self.on_error)
        try:
            for life in range(self.lives + 1):
                self.live(last=life == self.lives)
        finally:
            self.loop.close()

    def live(self, *, last: bool) -> None:
        """One life, from start to its end, which may come before it has recovered."""
        chance, disk = self.chance, self.disk
        must = self.must_survive(power=self.power)
        cut = self.loop.create_future()
        disk.on_cut = lambda: None if cut.done() else cut.set_result(None)
        ending = "stop" if last else chance.choice(("steps", "steps", "steps", "cut", "stop"))
        if ending == "steps":
            disk.cut_after(int(chance.expovariate(1 / chance.choice((8, 40, 150)))) + 1)
        main = self.loop.create_task(self.serve(must, ending, last=last))
        self.loop.run_until_complete(asyncio.wait([main, cut], return_when=asyncio.FIRST_COMPLETED))
        if not disk.dead:
            main.result()
        if self.store is not None:
            self.cut_at = self.loop.time()
            self.flushed_offset = self.store._flush.synced_end
        self.store = None
        disk.cut()  # an orderly stop, too, may be followed by a power cut
        self.bury()
        assert not self.errors, self.errors
        power = chance.random() < 0.7
        self.cuts += power and ending != "stop"
        self.kills += (not power) and ending != "stop"
        self.stops += ending == "stop"
        disk.restart(power=power)
        self.power = self.power or power

    def bury(self) -> None:
        """Whatever still runs belongs to a machine that is gone."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if not isinstance(error, PowerCut | StoreUnwritable | None):
                self.errors.append(error)

    def on_error(self, _: object, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), PowerCut):
            self.errors.append(context)

    def must_survive(self, *, power: bool) -> set[bytes]:
        return {m.body for m in self.history.messages.values() if self.is_promised(m, power=power)}

    def is_promised(self, message: Message, *, power: bool) -> bool:
        if not self.history.current(message) or message.lost:
            return False
        if message.durable or not power:
            return message.written or message.seen or message.durable
        if self.synced:
            return message.seen  # nothing is readable before it is durable
        if not message.written and not message.seen:
            return False
        old = 0 <= message.acknowledged_at < self.cut_at - WINDOW_SECONDS and not self.faulty
        return message.end <= self.flushed_offset or old

    async def serve(self, must: set[bytes], ending: str, *, last: bool) -> None:
        chance = self.chance
        env = sim_env(self.disk, self.clock, chance.random().hex(), delay_ms_max=DELAY_MS_MAX)
        store = Store(self.options, env)
        await store.start()
        self.history.check(store, self.disk, ROOT, must=must)
        # Only now: a life that ends before its check has taken nothing, and its end cannot make
        # more of what earlier lives promised.
        self.store = store
        self.faulty = False
        self.power = False
        if last:
            await store.stop()
            return
        work = [asyncio.ensure_future(self.send(store)) for _ in range(chance.randint(1, 3))]
        work += [
            asyncio.ensure_future(self.consume(store)),
            asyncio.ensure_future(self.chaos(store)),
        ]
        done, _ = await asyncio.wait(
            work, timeout=chance.choice((0.03, 0.08, 0.25)), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        if ending == "cut":
            self.disk.cut()
            return
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        if ending == "stop":
            await store.stop()
            if self.disk.faults.sync_error is None and not self.faulty:
                assert not self.disk.exists(f"{ROOT}/abort")

    # --- what happens in a life --------------------------------------------------------------
    def draft(self) -> tuple[Message, Draft]:
        chance = self.chance
        self.number += 1
        topic, queue_id = chance.choice(TOPICS), chance.choice((0, 0, 1, 5))
        size = chance.choice((0, 20, 100, 300, 300, 1500))
        body = b"%d.%d " % (self.seed, self.number) + chance.randbytes(chance.randint(0, size))
        pairs = []
        if chance.random() < 0.5:
            pairs.append(f"TAGS\x01{chance.choice('tuv')}")
        if chance.random() < 0.5:
            pairs.append(f"UNIQ_KEY\x01u{self.number}")
        if chance.random() < 0.3:
            pairs.append(f"KEYS\x01{chance.choice(('k', 'k l', 'm'))}")
        kind = chance.choice((0,) * 8 + (SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK))
        message = Message(
            topic, queue_id, body, "\x02".join(pairs), kind, self.history.epoch(topic)
        )
        return message, Draft(topic, queue_id, body, message.properties, HOST, HOST, sys_flag=kind)

    async def send(self, store: Store) -> None:
        chance = self.chance
        while True:
            drafts = [self.draft() for _ in range(chance.choice((1, 1, 2, 5)))]
            together = chance.random() < 0.4
            wait = chance.random() < 0.85
            try:
                if together:
                    stored = store.append_batch([draft for _, draft in drafts])
                else:
                    stored = []
                    for _, draft in drafts:
                        stored.append(store.append(draft))
            except (StoreUnwritable, MessageTooLarge) as error:
                if isinstance(error, StoreUnwritable):
                    assert self.faulty or self.disk.dead, error
                if together or not stored:
                    await asyncio.sleep(chance.choice((0.001, 0.005)))
                    continue
            messages = [message for message, _ in drafts[: len(stored)]]
            for message, place in zip(messages, stored, strict=True):
                message.queue_offset = place.queue_offset
                message.log_offset, message.end = place.log_offset, place.end
                self.history.add(message)
            try:
                status = await store.durable(stored[-1].end, wait=wait)
            except StoreUnwritable as error:
                assert self.faulty or self.disk.dead, error
                await asyncio.sleep(0.001)
                continue
            if self.disk.dead:
                return
            for message in messages:
                message.written = True
                message.durable = self.synced and wait and status is PutStatus.OK
                message.acknowledged_at = self.loop.time()
            if wait and status is PutStatus.OK:
                self.read_back(store, messages[-1])
            self.history.promised += len(messages)
            await asyncio.sleep(chance.choice((0.001, 0.006, 0.02)))

    def read_back(self, store: Store, message: Message) -> None:
        """Whoever was answered can read the message."""
        if message.hidden or not self.history.current(message):
            return
        batch = store.read(message.topic, message.queue_id, message.queue_offset, 1)
        assert next(iter_records(batch.data)).body == message.body
        message.seen = True

    async def consume(self, store: Store) -> None:
        chance = self.chance
        while True:
            await asyncio.sleep(chance.choice((0.005, 0.03)))
            topics = store.queues()
            if not topics:
                continue
            topic = chance.choice(list(topics))
            queue_id = chance.choice(list(topics[topic]))
            if self.disk.dead:
                return
            for record in self.history.read(store, topic, queue_id):
                self.history.saw(record, topic, queue_id).seen = True

    async def chaos(self, store: Store) -> None:
        chance, disk = self.chance, self.disk
        while True:
            await asyncio.sleep(chance.choice((0.004, 0.012, 0.04)))
            if disk.dead:
                return
            what = chance.randrange(20)
            if what < 4:
                disk.write_back()
            elif what < 6:
                self.clock.skew_ms += chance.choice((-60_000, -1000, 1000, 4000, 60_000))
            elif what < 7:
                topic = chance.choice(TOPICS)
                # First, because the power may go in the middle: then either outcome is right.
                self.history.delete(topic)
                store.delete_topic(topic)
            elif what < 9:
                self.faulty = True
                disk.faults.capacity_pages = disk.used_pages + chance.randrange(3)
                await asyncio.sleep(chance.choice((0.01, 0.2)))
                disk.faults.capacity_pages = None
            elif what < 10 and chance.random() < 0.3:
                self.faulty = True
                disk.faults.sync_error = chance.choice(("commitlog", "consumequeue", "checkpoint"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Simulated disasters would fill the log."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_seed(seed: int, *, index_slots: int = 0) -> Run:
    run = Run(seed, index_slots=index_slots)
    with quiet():
        run.run()
    return run
