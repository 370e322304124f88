"""Accounts: who may sign requests, and what each of them may do with which topic and group.

An account's lists decide first, then what a name means, then its defaults:

- the retry topic of a group belongs to who may consume as that group, and its dead letters may be
  read by the same accounts;
- whoever has an account may publish traces;
- topics and groups of the system are for administrators;
- a peer (a slave, a broker, a filter server) may read everything: it copies the log anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cosmodrome.access.addresses import Addresses
from cosmodrome.wire.names import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    TRACE_TOPIC,
    is_system_group,
    is_system_topic,
)
from cosmodrome.wire.needs import PUB, SUB, Right

EVERYTHING = PUB | SUB


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    access_key: str
    secret: bytes = dataclasses.field(repr=False)
    white: Addresses = dataclasses.field(default_factory=Addresses)  # who need not sign
    admin: bool = False
    peer: bool = False
    default_topic: Right = Right.NONE
    default_group: Right = Right.NONE
    topics: Mapping[str, Right] = dataclasses.field(default_factory=dict)
    groups: Mapping[str, Right] = dataclasses.field(default_factory=dict)

    def topic_right(self, topic: str) -> Right:
        right = self.topics.get(topic)
        if right is None:
            right = self._unlisted_topic_right(topic)
        return right | PUB if topic == TRACE_TOPIC else right

    def group_right(self, group: str) -> Right:
        listed = self.groups.get(group)
        if listed is not None:
            return listed
        if self.unlimited or (self.admin and is_system_group(group)):
            return EVERYTHING
        right = Right.NONE if is_system_group(group) else self.default_group
        return right | SUB if self.peer else right

    def _unlisted_topic_right(self, topic: str) -> Right:
        if self.unlimited:
            return EVERYTHING
        if topic.startswith(RETRY_PREFIX):
            consumes = self.group_right(topic.removeprefix(RETRY_PREFIX)) & SUB
            return EVERYTHING if consumes else Right.NONE
        if topic.startswith(DLQ_PREFIX):
            return self.group_right(topic.removeprefix(DLQ_PREFIX)) & SUB
        if is_system_topic(topic):
            right = EVERYTHING if self.admin else Right.NONE
        else:
            right = self.default_topic
        return right | SUB if self.peer else right

    @property
    def unlimited(self) -> bool:
        # Compat: an administrator without lists may do everything, one with lists what they say.
        return self.admin and not self.topics and not self.groups
