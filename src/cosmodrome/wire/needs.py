"""What a request needs before it is served, as the rows of the table of commands say it.

A row needs a level: any account, a peer (a broker, slave or filter server of this cluster) or an
administrator. Rows about messages also name the topics and groups that they touch, each with the
right that it takes. Who has which right is not decided here (see `access/gate.py`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from cosmodrome.wire import bodies


class Right(enum.IntFlag):
    """What an account may do with a topic or a group."""

    NONE = 0
    PUB = 4
    SUB = 8


PUB, SUB = Right.PUB, Right.SUB


class Level(enum.Enum):
    KNOWN = "any account"
    PEER = "a peer or an administrator"
    ADMIN = "an administrator"


class Topic(NamedTuple):
    name: str
    right: Right


class Group(NamedTuple):
    name: str
    right: Right


class Stored(NamedTuple):
    """The topic of the message at a log offset, which only the store knows."""

    log_offset: int
    right: Right


Resource = Topic | Group | Stored
B = TypeVar("B", bound=bodies.Body)


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """`resources` finds in a decoded request what it touches; `text` says it to people.

    `fields` are the header fields that it looks at, empty when it looks at more than those.
    """

    level: Level
    text: str
    resources: Callable[[Any], Iterable[Resource]] | None = None
    fields: tuple[str, ...] = ()

    def __and__(self, other: Needs) -> Needs:
        first, second = self.resources, other.resources
        assert first is not None and second is not None, "only rights to resources add up"
        return Needs(
            Level.KNOWN,
            f"{self.text}, {other.text}",
            lambda ask: (*first(ask), *second(ask)),
            self.fields + other.fields if self.fields and other.fields else (),
        )


KNOWN = Needs(Level.KNOWN, Level.KNOWN.value)
PEER = Needs(Level.PEER, Level.PEER.value)
ADMIN = Needs(Level.ADMIN, Level.ADMIN.value)


def topic(field: str, right: Right) -> Needs:
    """A right to the topic that a header field names; none when the field is left out."""
    return Needs(
        Level.KNOWN,
        f"{right.name} of the topic",
        lambda ask: _named(Topic, ask, field, right),
        (field,),
    )


def group(field: str, right: Right) -> Needs:
    """A right to the group that a header field names; none when the field is left out."""
    return Needs(
        Level.KNOWN,
        f"{right.name} of the group",
        lambda ask: _named(Group, ask, field, right),
        (field,),
    )


def stored(field: str, right: Right) -> Needs:
    """A right to the topic of the message at the log offset in a header field."""
    return Needs(
        Level.KNOWN,
        f"{right.name} of the message's topic",
        lambda ask: (Stored(getattr(ask, field), right),),
    )


def in_body(kind: type[B], text: str, find: Callable[[B], Iterable[Resource]]) -> Needs:
    """Rights to what the body names."""
    return Needs(Level.KNOWN, text, lambda ask: find(bodies.decode(kind, ask.body)))


def _named(
    kind: type[Topic | Group], ask: object, field: str, right: Right
) -> tuple[Resource, ...]:
    name = getattr(ask, field)
    return () if name is None else (kind(name, right),)
