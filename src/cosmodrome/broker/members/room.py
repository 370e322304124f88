"""The room of tables and clients: topics, groups, offsets, and who is connected."""

from __future__ import annotations

import dataclasses

from cosmodrome.broker.foundation import Foundation, Service
from cosmodrome.broker.members.clients import Clients
from cosmodrome.broker.members.groups import GroupDeleted, Groups
from cosmodrome.broker.members.offsets import Offsets
from cosmodrome.broker.members.topics import Topics


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
    topics: Topics
    groups: Groups
    offsets: Offsets
    clients: Clients

    @property
    def handlers(self) -> tuple[object, ...]:
        return (self.topics, self.groups, self.offsets, self.clients)

    @property
    def services(self) -> tuple[Service, ...]:
        return (self.topics, self.groups, self.offsets, self.clients)


def build_members(base: Foundation) -> Members:
    options, env, role = base.options, base.env, base.role
    topics = Topics(options, base.config_file("topics.json"), env, role=role)
    groups = Groups(options, base.config_file("subscriptionGroup.json"), env, role=role)
    offsets = Offsets(options, base.config_file("consumerOffset.json"), base.store, env)
    clients = Clients(options, topics, groups, env.clock, base.gate.account_of)
    members = Members(topics, groups, offsets, clients)
    _follow_deletions(base, members)
    return members


def _follow_deletions(base: Foundation, members: Members) -> None:
    """What is kept about a topic or a group goes with it."""
    deleted, offsets, stats = members.topics.deleted, members.offsets, base.stats

    def forget_group(gone: GroupDeleted) -> None:
        stats.forget_group(gone.group)
        if gone.remove_offsets:
            offsets.remove(gone.group)

    deleted.subscribe(base.store.delete_topic)
    deleted.subscribe(offsets.remove_topic)
    members.topics.gone.subscribe(stats.forget_topic)
    members.groups.deleted.subscribe(forget_group)
