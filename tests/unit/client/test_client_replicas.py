"""Which replica a queue is pulled from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cosmodrome.client.receive.engine.replicas import ASIDE_S, Replicas
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import Unreachable

QUEUE = MessageQueue(topic="T", broker_name="b", queue_id=0)
OTHER = MessageQueue(topic="T", broker_name="b", queue_id=1)
GONE = Unreachable("gone")


class World:
    """Routes of one broker name, and a clock."""

    def __init__(self, **addresses: str) -> None:
        self.known = {int(name[1:]): address for name, address in addresses.items()}
        self.now = 100.0
        self.routes = cast(Any, SimpleNamespace)(
            version=1, address=self.address, replicas=lambda name: dict(self.known)
        )
        self.replicas = Replicas(self.routes, lambda: self.now)

    def address(self, name: str, number: int = 0) -> str | None:
        return self.known.get(number)


def test_the_master_is_asked_unless_a_broker_suggests_another() -> None:
    world = World(_0="m", _1="s")
    assert world.replicas.address(QUEUE) == "m"
    world.replicas.suggest(QUEUE, 1)
    assert (world.replicas.address(QUEUE), world.replicas.address(OTHER)) == ("s", "m")
    world.replicas.suggest(QUEUE, 0)
    assert world.replicas.address(QUEUE) == "m"


def test_without_a_master_in_the_route_a_slave_is_asked() -> None:
    assert World(_2="s").replicas.address(QUEUE) == "s"
    assert World().replicas.address(QUEUE) is None


def test_who_does_not_answer_is_left_aside_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    world = World(_0="m", _1="s")
    world.replicas.failed(QUEUE, "m", GONE)
    world.replicas.failed(OTHER, "m", GONE)
    assert caplog.text.count("away=m") == 1
    for queue in (QUEUE, OTHER):
        assert world.replicas.address(queue) == "s"
        world.replicas.suggest(queue, 0)  # the slave suggests the master, as it always does
    world.now += ASIDE_S
    # One pull tries, the others go on at the slave.
    assert world.replicas.address(QUEUE) == "m"
    assert world.replicas.address(OTHER) == "s"
    world.replicas.answered("m")
    assert world.replicas.address(OTHER) == "m"


def test_when_nobody_answers_the_preferred_one_is_asked() -> None:
    world = World(_0="m", _1="s")
    world.replicas.failed(QUEUE, "m", GONE)
    world.replicas.failed(QUEUE, "s", GONE)
    assert world.replicas.address(QUEUE) == "m"


def test_a_single_broker_is_never_left_aside() -> None:
    world = World(_0="m")
    world.replicas.failed(QUEUE, "m", GONE)
    world.known[1] = "s"
    assert world.replicas.address(QUEUE) == "m"


def test_a_new_route_begins_again() -> None:
    world = World(_0="m", _1="s")
    world.replicas.failed(QUEUE, "m", GONE)
    world.routes.version += 1
    assert world.replicas.address(QUEUE) == "m"
