"""Nodes of one process: pauses, ends, and faults of the way from one to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from tests.unit.sim.test_sim_net import End

from cosmodrome.sim.net import NetLoop
from cosmodrome.sim.node import NODE, Node

PORT = 700
Scenario = Callable[["Two"], Coroutine[None, None, None]]


class Two:
    """A server at node `b`, and a connection to it from node `a`."""

    def __init__(self, loop: NetLoop) -> None:
        self.loop = loop
        self.a, self.b = Node("a", loop), Node("b", loop)
        self.near, self.far = End(), End(echo=True)
        self.made: list[Node | None] = []

    async def serve(self) -> None:
        def factory() -> End:
            self.made.append(NODE.get())
            return self.far

        await self.loop.create_server(factory, None, PORT)

    async def connect(self) -> None:
        _, near = await self.loop.create_connection(lambda: self.near, "b", PORT)
        assert near is self.near

    async def link(self) -> None:
        await self.b.run(self.serve())
        await self.a.run(self.connect())

    def say(self, text: bytes) -> None:
        self.near.transport.write(text)


def run(scenario: Scenario) -> None:
    loop = NetLoop(latency_s=0.01)
    try:
        loop.run_until_complete(scenario(Two(loop)))
    finally:
        loop.close()


def test_what_a_node_starts_belongs_to_it() -> None:
    async def scenario(two: Two) -> None:
        seen: list[Node | None] = []

        async def inner() -> None:
            seen.append(NODE.get())
            asyncio.get_running_loop().call_later(1, lambda: seen.append(NODE.get()))

        async def outer() -> None:
            await asyncio.create_task(inner())

        await two.a.run(outer())
        await asyncio.sleep(2)
        assert seen == [two.a, two.a] and NODE.get() is None
        await two.link()
        assert two.made == [two.b]

    run(scenario)


def test_a_paused_node_holds_its_callbacks_and_has_them_all_later() -> None:
    async def scenario(two: Two) -> None:
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(two.loop.time())

        two.a.run(tick())
        await asyncio.sleep(3.5)
        two.a.pause()
        await asyncio.sleep(10)
        assert [int(at) for at in ticks] == [1, 2, 3]
        two.a.resume()
        await asyncio.sleep(1.5)
        assert [int(at) for at in ticks] == [1, 2, 3, 13, 14]

    run(scenario)


def test_a_timer_that_is_cancelled_after_a_pause_does_not_fire() -> None:
    async def scenario(two: Two) -> None:
        fired: list[str] = []

        async def start() -> None:
            loop = asyncio.get_running_loop()
            late = loop.call_later(2, fired.append, "late")
            loop.call_later(1, late.cancel)

        await two.a.run(start())
        two.a.pause()
        await asyncio.sleep(5)
        two.a.resume()
        await asyncio.sleep(5)
        assert fired == []

    run(scenario)


def test_a_paused_node_takes_connections_and_bytes_and_reads_them_later() -> None:
    async def scenario(two: Two) -> None:
        await two.b.run(two.serve())
        two.b.pause()
        await two.a.run(two.connect())
        two.say(b"hello")
        await asyncio.sleep(5)
        assert two.far.got == b"" and not hasattr(two.far, "transport")
        two.b.resume()
        await asyncio.sleep(1)
        assert two.far.got == two.near.got == b"hello"

    run(scenario)


def test_a_half_open_link_holds_one_direction_until_it_is_healed() -> None:
    async def scenario(two: Two) -> None:
        await two.link()
        two.loop.link("b", "a").silent = True
        two.say(b"one")
        two.say(b"two")
        await asyncio.sleep(5)
        assert two.far.got == b"onetwo" and two.near.got == b""
        two.loop.heal("b", "a")
        await asyncio.sleep(1)
        assert two.near.got == b"onetwo"
        two.say(b"three")
        await asyncio.sleep(1)
        assert two.near.got == b"onetwothree"

    run(scenario)


def test_an_end_behind_a_silent_link_is_heard_when_it_is_healed() -> None:
    async def scenario(two: Two) -> None:
        await two.link()
        two.loop.link("a", "b").silent = True
        two.near.transport.abort()
        await asyncio.sleep(5)
        assert two.near.lost and not two.far.lost
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await two.a.run(two.connect())
        two.loop.heal("a", "b")
        await asyncio.sleep(1)
        assert two.far.lost

    run(scenario)


def test_a_slow_link_keeps_the_order() -> None:
    async def scenario(two: Two) -> None:
        await two.link()
        two.loop.link("a", "b").delay_s = 3
        two.say(b"one")
        two.loop.link("a", "b").delay_s = 1
        two.say(b"two")
        await asyncio.sleep(0.5)
        assert two.far.got == b""
        await asyncio.sleep(3)
        assert two.far.got == b"onetwo"

    run(scenario)


def test_a_link_can_spoil_bytes_of_one_direction() -> None:
    async def scenario(two: Two) -> None:
        await two.link()
        two.loop.link("b", "a").spoil = bytes.upper
        two.say(b"abc")
        await asyncio.sleep(1)
        assert (two.far.got, two.near.got) == (b"abc", b"ABC")

    run(scenario)


def test_parting_two_nodes_breaks_their_connections() -> None:
    async def scenario(two: Two) -> None:
        await two.link()
        two.loop.part("b", "a")
        await asyncio.sleep(1)
        assert two.near.lost and two.far.lost

    run(scenario)


def test_a_node_that_is_gone_does_nothing_and_is_heard_to_be_gone() -> None:
    async def scenario(two: Two) -> None:
        done: list[str] = []

        async def work() -> None:
            asyncio.get_running_loop().call_later(1, done.append, "timer")
            try:
                await asyncio.sleep(1)
            finally:
                two.far.transport.write(b"from the dead")
                done.append("task")
                raise KeyError("nobody cares")

        await two.link()
        two.b.run(work())
        await asyncio.sleep(0.1)
        errors = await two.b.bury()
        two.loop.drop(two.b)
        await asyncio.sleep(5)
        assert done == ["task"] and isinstance(errors[0], KeyError)
        assert two.near.got == b"" and two.near.lost and not two.far.lost
        with pytest.raises(ConnectionRefusedError):
            await two.a.run(two.connect())
        again = Node("b", two.loop)
        await again.run(two.serve())
        assert two.made[-1] is two.b  # nobody has connected to the next life

    run(scenario)
