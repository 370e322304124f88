"""The room of replication: a master feeds its slaves, a slave follows its master.

A slave serves its own HA port too, as upstream does, so that slaves can follow a slave.
"""

from __future__ import annotations

import dataclasses
import functools

import msgspec

from cosmodrome.access.gate import Gate
from cosmodrome.access.own_account import OwnAccount
from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.later.room import Later
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.operate.room import Operate
from cosmodrome.broker.receive.room import Receive
from cosmodrome.broker.replicate.ask_master import AskMaster
from cosmodrome.broker.replicate.hand_back import HandBack
from cosmodrome.broker.replicate.java_tables import JavaTables
from cosmodrome.broker.replicate.slave import Slave
from cosmodrome.broker.replicate.tables import BEHIND_LOG, replicated_tables
from cosmodrome.broker.role import SYNC_MASTER_NAME
from cosmodrome.replication.follower import Follower
from cosmodrome.replication.frames import Who
from cosmodrome.replication.source import Source
from cosmodrome.replication.tables import AppliedTables
from cosmodrome.replication.values import FollowerFacts, Node, SourceFacts


@dataclasses.dataclass(frozen=True, slots=True)
class Replicate:
    source: Source  # of those who follow this broker
    slave: Slave | None  # this broker as one that follows

    def facts(self) -> SourceFacts | FollowerFacts:
        """How the copies stand, as this broker sees it."""
        return self.source.facts() if self.slave is None else self.slave.follower.facts()


def build_replicate(
    base: Foundation, members: Members, receive: Receive, later: Later, operate: Operate
) -> Replicate:
    store, options, env = base.store, base.store_options, base.env
    hand_back = HandBack(members.offsets, base.connect)
    tables = replicated_tables(
        store, members, later, receive.expressions, operate.settings, hand_back.kept
    )
    node = Node(
        cluster=base.options.broker_cluster_name,
        broker=base.options.broker_name,
        id=base.options.broker_id,
        incarnation=f"{env.random.getrandbits(64):016x}",
    )
    ask_master = AskMaster(base.connect)
    source = Source(
        store,
        options,
        tables,
        node,
        door=base.tls.door,
        address=lambda: base.address.text if base.role.takes_sends else ask_master.address,
        denies=functools.partial(_denies, base.gate),
        admits=base.gate.admits_peers_at,
    )
    store.hold_back = source.needed_from
    if options.broker_role == SYNC_MASTER_NAME:
        store.require_acks(source.available)
    if base.role.takes_sends:
        return Replicate(source, None)
    applied = AppliedTables(tables, BEHIND_LOG, lambda: store.durable_end)
    follower = Follower(
        store,
        options,
        applied,
        node,
        env,
        ask_master,
        sign=functools.partial(_signed, base.own_account),
        tls=base.tls.outgoing,
    )
    java_tables = JavaTables(applied, members.topics, members.groups, base.connect)
    slave = Slave(options, follower, applied, hand_back, java_tables, ask_master)
    return Replicate(source, slave)


def _signed(account: OwnAccount, who: Who) -> Who:
    """What a slave says of itself, with the signature of its account if it has one."""
    replace = msgspec.structs.replace
    pair = account.signature(lambda key: replace(who, access_key=key).signed_text())
    return who if pair is None else replace(who, access_key=pair[0], signature=pair[1])


def _denies(gate: Gate, host: str, who: Who | None) -> str:
    if who is None:
        return gate.denies_peer(host, "", b"", "")
    return gate.denies_peer(host, who.access_key, who.signed_text(), who.signature)
