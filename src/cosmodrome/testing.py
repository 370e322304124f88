"""Fixtures for pytest, found by pytest itself once this package is installed.

    async def test_orders(cosmo_node, cosmo_topic):
        async with Producer(cosmo_node.namesrv, group="p") as producer:
            await producer.send(Message(cosmo_topic, b"hello"))

The node is started by the first test that asks for it, in a background thread, so async tests,
each with a loop of its own, and plain tests use the same one. Nothing is imported before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cosmodrome.blocking import Node

_NAME_MAX = 100


@pytest.fixture(scope="session")
def cosmo_node() -> Iterator[Node]:
    """A name server and a broker for the whole test run, empty at first."""
    from cosmodrome.blocking import embedded

    with embedded() as node:
        yield node


@pytest.fixture
def cosmo_topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses; the first message creates it."""
    counter = request.config.stash.get(_COUNTER, 0) + 1
    request.config.stash[_COUNTER] = counter
    name = re.sub(r"[^a-zA-Z0-9_-]", "-", request.node.name)[:_NAME_MAX]
    return f"{name}-{counter}"


_COUNTER: pytest.StashKey[int] = pytest.StashKey()
