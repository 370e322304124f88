"""Who reads which queue: pure functions from the members of a group and the queues of a topic.

No member is told its share; each computes it. So every strategy sorts what it is given, and two
members with the same lists and the same strategy never claim the same queue. Members with
different strategies do: a group uses one.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import ConfigError

VIRTUAL_NODES = 10
ROOM_SEPARATOR = "@"


class Strategy(Protocol):
    """A way to share queues. `name` is upstream's, for reports."""

    @property
    def name(self) -> str: ...

    def share(
        self, member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        """The queues of `member`; nothing when it is not among the members."""


class Averagely:
    """Each member gets a run of neighbouring queues; the first members get one more."""

    name = "AVG"

    def share(
        self, member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        order = sorted_members(members)
        if member not in order:
            return []
        index, everything = order.index(member), sorted_queues(queues)
        least, left_over = divmod(len(everything), len(order))
        start = index * least + min(index, left_over)
        return everything[start : start + least + (index < left_over)]


class AveragelyByCircle:
    """Queues are dealt out one by one, like cards."""

    name = "AVG_BY_CIRCLE"

    def share(
        self, member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        order = sorted_members(members)
        if member not in order:
            return []
        return sorted_queues(queues)[order.index(member) :: len(order)]


class ByConfig:
    """A fixed list, whatever the group looks like."""

    name = "CONFIG"

    def __init__(self, queues: Iterable[MessageQueue]) -> None:
        self._queues = sorted_queues(queues)

    def share(
        self, member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        there = set(queues)
        return [queue for queue in self._queues if queue in there]


class ByMachineRoom:
    """Only queues of brokers named `room@…` in some rooms, in runs; the rest is dealt out."""

    name = "MACHINE_ROOM"

    def __init__(self, rooms: Iterable[str]) -> None:
        self._rooms = frozenset(rooms)
        if not self._rooms:
            raise ConfigError("ByMachineRoom needs at least one room; brokers are named room@name")

    def share(
        self, member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        order = sorted_members(members)
        if member not in order:
            return []
        near = [queue for queue in sorted_queues(queues) if self._is_near(queue)]
        index, run = order.index(member), len(near) // len(order)
        rest = near[run * len(order) :]
        return near[index * run : (index + 1) * run] + rest[index : index + 1]

    def _is_near(self, queue: MessageQueue) -> bool:
        # Compat: upstream takes names with exactly one separator.
        parts = queue.broker_name.split(ROOM_SEPARATOR)
        return len(parts) == 2 and parts[0] in self._rooms


class ConsistentHash:
    """Members and queues lie on a ring; a queue belongs to the next member. When a member comes
    or goes, only queues that it gets or had change hands."""

    name = "CONSISTENT_HASH"

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES) -> None:
        if virtual_nodes < 1:
            raise ConfigError(f"virtual_nodes must be at least 1, not {virtual_nodes}")
        self._virtual_nodes = virtual_nodes

    def share(
        self, member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        order = sorted_members(members)
        if member not in order:
            return []
        owners: dict[int, str] = {}
        for name in order:
            for number in range(self._virtual_nodes):
                owners[_ring_position(f"{name}-{number}")] = name
        positions = sorted(owners)
        mine = []
        for queue in sorted_queues(queues):
            at = bisect.bisect_left(positions, _ring_position(_hashed_text(queue)))
            if owners[positions[at % len(positions)]] == member:
                mine.append(queue)
        return mine


class MachineRoomNearby:
    """Members share the queues of their own room; a room without members is shared by all.

    `room_of_queue` and `room_of_member` say where a queue and a client id are; a queue that is
    nowhere (an empty name) is shared by all. `inner` shares within a room.
    """

    def __init__(
        self,
        inner: Strategy,
        room_of_queue: Callable[[MessageQueue], str],
        room_of_member: Callable[[str], str],
    ) -> None:
        self._inner = inner
        self._room_of_queue = room_of_queue
        self._room_of_member = room_of_member

    @property
    def name(self) -> str:
        return f"MACHINE_ROOM_NEARBY-{self._inner.name}"

    def share(
        self, member: str, members: Sequence[str], queues: Sequence[MessageQueue]
    ) -> list[MessageQueue]:
        order = sorted_members(members)
        if member not in order:
            return []
        inhabited: dict[str, list[str]] = {}
        for name in order:
            inhabited.setdefault(self._room_of_member(name), []).append(name)
        rooms: dict[str, list[MessageQueue]] = {}
        for queue in sorted_queues(queues):
            rooms.setdefault(self._room_of_queue(queue), []).append(queue)
        mine: list[MessageQueue] = []
        home = self._room_of_member(member)
        for room, there in rooms.items():
            if room and room == home:
                mine += self._inner.share(member, inhabited[room], there)
            elif not room or room not in inhabited:
                mine += self._inner.share(member, order, there)
        return sorted_queues(mine)


def sorted_members(members: Iterable[str]) -> list[str]:
    """Each once, in the order of Java's strings: every client of a group has to agree."""
    return sorted(set(members), key=_units)


def sorted_queues(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Each once, by topic, broker and number."""
    return sorted(
        set(queues),
        key=lambda queue: (_units(queue.topic), _units(queue.broker_name), queue.queue_id),
    )


def _units(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


def _hashed_text(queue: MessageQueue) -> str:
    # Compat: the text that Java hashes.
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name},"
        f" queueId={queue.queue_id}]"
    )


def _ring_position(key: str) -> int:
    digest = hashlib.md5(key.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")
