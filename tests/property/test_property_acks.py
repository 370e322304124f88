"""Who waits for disk and slave, against a law that looks at each of them alone."""

from __future__ import annotations

import asyncio
import dataclasses

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from tests.unit.store.ack_kit import AckRig
from tests.virtual_time import virtual_time

from cosmodrome.store.values import PutStatus


@dataclasses.dataclass
class Waiter:
    name: int
    end: int
    came: float
    slave: bool  # there was one to wait for

    def outcome(
        self, durable_end: int, acked_end: int, now: float, disk: float, slave: float
    ) -> PutStatus | None:
        """What the law says now, None when it says nothing yet."""
        durable, acked = self.end <= durable_end, self.end <= acked_end
        if not durable and now < self.came + disk:
            return None
        if not self.slave:
            return PutStatus.SLAVE_NOT_AVAILABLE
        if not acked:
            return PutStatus.FLUSH_SLAVE_TIMEOUT if now >= self.came + slave else None
        return PutStatus.OK if durable else PutStatus.FLUSH_DISK_TIMEOUT


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 3)),
        st.tuples(st.just("again"), st.integers(0, 5)),
        st.tuples(st.just("sync"), st.just(0)),
        st.tuples(st.just("ack"), st.integers(0, 10)),
        st.tuples(st.just("slave"), st.integers(0, 1)),
        st.tuples(st.just("time"), st.sampled_from([1, 100, 900, 1900, 2100, 3100])),
    ),
    max_size=40,
)


class Model:
    def __init__(self, rig: AckRig, disk: float, slave: float) -> None:
        self.rig = rig
        self.times = disk, slave
        self.ends: list[int] = [0]
        self.acked = 0
        self.count = 0
        self.waiting: list[Waiter] = []
        self.told: dict[int, tuple[object, float]] = {}

    def join(self, end: int) -> None:
        """In its line, who asks for less gives up no later than those who ask for more."""
        rig, store = self.rig, self.rig.store
        self.count += 1
        behind = [w.came for w in self.waiting if w.end > end and w.slave == rig.slave]
        waiter = Waiter(self.count, end, min([rig.now, *behind]), rig.slave)
        if end <= store.durable_end and end <= self.acked:
            waiter.slave = True  # known already, and nobody was asked
        self.waiting.append(waiter)
        rig.wait(end, self.count)
        self.look(rig.now)

    def look(self, now: float) -> None:
        """Everybody about whom the law has something to say is told that."""
        for waiter in list(self.waiting):
            durable_end = self.rig.store.durable_end
            outcome = waiter.outcome(durable_end, self.acked, now, *self.times)
            if outcome is not None:
                self.told[waiter.name] = outcome, now
                self.waiting.remove(waiter)

    async def step(self, what: str, value: int) -> None:
        rig = self.rig
        if what == "send":
            for _ in range(value):
                self.ends.append(rig.stage())
                self.join(self.ends[-1])
            await asyncio.sleep(0)
        elif what == "again":
            self.join(self.ends[-1 - value % len(self.ends)])
        elif what == "sync":
            rig.syncer.end()
        elif what == "ack":
            self.acked = self.ends[value * (len(self.ends) - 1) // 10]
            rig.store.acknowledge(self.acked)
        elif what == "slave":
            rig.slave = bool(value)
        else:
            stop = round(rig.now + value / 1000, 6)
            moments = {w.came + seconds for w in self.waiting for seconds in self.times}
            for moment in sorted(at for at in moments if rig.now < at < stop):
                self.look(moment)
            await rig.until(stop)
        self.look(rig.now)

    def check(self) -> None:
        heard: dict[int, tuple[object, float]] = {}
        for group, outcome, at in self.rig.heard:
            for who in group:
                assert who not in heard, "told twice"
                heard[who] = outcome, at
        told = {name: (outcome, round(at, 3)) for name, (outcome, at) in self.told.items()}
        assert heard == told


def run(steps: list[tuple[str, int]], flush: str, disk: float, slave: float) -> None:
    @virtual_time
    async def play() -> None:
        times = {"sync_flush_timeout": int(disk * 1000), "slave_timeout": int(slave * 1000)}
        rig = AckRig(None, flush_disk_type=flush, **times)
        async with rig:
            model = Model(rig, float("inf") if flush == "ASYNC_FLUSH" else disk, slave)
            for what, value in steps:
                await model.step(what, value)
                model.check()
            rig.store.acknowledge(0)
            model.acked = 0
            await model.step("time", 20_000)
            model.check()
            assert not model.waiting, "everybody was told in the end"

    play()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    flush=st.sampled_from(["SYNC_FLUSH", "ASYNC_FLUSH"]),
    times=st.sampled_from([(5, 3), (3, 5), (4, 4), (1, 9)]),
)
def test_everybody_is_told_what_the_law_says(
    steps: list[tuple[str, int]], flush: str, times: tuple[int, int]
) -> None:
    run(steps, flush, *times)
