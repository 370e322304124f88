"""What is known about links between a master and its slaves: plain values, no behaviour."""

from __future__ import annotations

import dataclasses
import enum


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """Who is at this end of a link."""

    cluster: str
    broker: str  # the name that a master and its slaves share
    id: int  # 0 is the master
    incarnation: str  # another one after each start


@dataclasses.dataclass(frozen=True, slots=True)
class LinkFacts:
    """One slave, as its master sees it."""

    peer: str  # host:port of its end of the connection
    node: str  # broker name and id; empty for a classic slave, which does not say who it is
    classic: bool  # upstream's stream, which knows nothing but offsets
    sent_end: int  # of the log
    acked_end: int  # what the slave has: synced there when it is one of ours
    lag_bytes: int
    lag_seconds: float  # for how long the oldest byte that it lacks is written
    silent_seconds: float  # since something was read from it
    sent_bytes_per_second: float


class FollowerState(enum.Enum):
    """Where a slave stands with its master."""

    NO_MASTER = "no master"  # nobody said where it is
    CONNECTING = "connecting"
    COPYING = "copying"  # behind what the master had when the link was made
    IN_STEP = "in step"
    REFUSED = "refused"  # the logs do not fit; somebody has to decide


@dataclasses.dataclass(frozen=True, slots=True)
class FollowerFacts:
    """A slave, as it sees itself."""

    state: FollowerState
    master: str  # host:port of its HA port; empty when unknown
    why: str  # why it is not in step, and what to do; empty when it is
    classic: bool  # the master is Apache RocketMQ's
    end: int  # of its own log
    master_end: int  # as the master said last; -1 when it never did
    lag_bytes: int
    lag_seconds: float
    silent_seconds: float  # since something was read from the master
    taken_bytes_per_second: float
    links_made: int  # since the start


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFacts:
    """A master, as it sees its slaves."""

    links: tuple[LinkFacts, ...]
    end: int
    refused_links: int  # since the start, and why the last one was
    refused_why: str
