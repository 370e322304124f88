"""Passes questions and orders of operators on to consumers.

A question goes to the connection of the named client and its answer comes back unchanged. An
order to go on from other offsets goes to all members of a group, in the form that each of them
can read; the consumers move, the broker changes no offset.

With access control, members get only what touches groups and topics that their accounts may read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.members.clients import Member
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import existing_topic
from cosmodrome.errors import Code, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.commands.client import GetConsumerRunningInfo
from cosmodrome.wire.commands.consume import ConsumeMessageDirectly
from cosmodrome.wire.commands.offset import (
    GetConsumerStatusFromClient,
    InvokeBrokerToGetConsumerStatus,
    InvokeBrokerToResetOffset,
    ResetConsumerClientOffset,
)
from cosmodrome.wire.frame import LANGUAGES
from cosmodrome.wire.message import parse_offset_message_id
from cosmodrome.wire.names import check_group
from cosmodrome.wire.needs import SUB, Group, Resource, Stored, Topic
from cosmodrome.wire.report_bodies import (
    GetConsumerStatusBody,
    MessageQueueForC,
    ResetOffsetBody,
    ResetOffsetBodyForC,
)
from cosmodrome.wire.table import Call, Command, Reply

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Reply)

RELAY_TIMEOUT_MS = 10_000
STATUS_TIMEOUT_MS = 5000
MEMBERS_ASKED_AT_ONCE = 64
THE_END = -1  # as a time: the end of each queue
# Compat: versions of 3.0.7 and 3.1.8; older clients do not know these requests.
VERSION_WITH_OFFSETS = 28
VERSION_WITH_REPORTS = 62
CPP = LANGUAGES.index("CPP")


class Relays:
    def __init__(self, base: Foundation, members: Members) -> None:
        self._broker_name = base.options.broker_name
        self._store = base.store
        self._topics = members.topics
        self._offsets = members.offsets
        self._clients = members.clients
        self._gate = base.gate

    # --- to one client -----------------------------------------------------------------------

    @GetConsumerRunningInfo.handler
    async def running_info(self, ask: GetConsumerRunningInfo, call: Call) -> Reply:
        return await self._relay(ask.consumer_group, ask.client_id, ask)

    @ConsumeMessageDirectly.handler
    async def consume_directly(self, ask: ConsumeMessageDirectly, call: Call) -> Reply:
        _, log_offset = parse_offset_message_id(ask.msg_id or "")
        record = self._store.record(log_offset) if log_offset >= 0 else None
        if record is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"There is no message at log offset {log_offset}; it has been removed, or the"
                " id belongs to another broker.",
            )
        what = {"group": ask.consumer_group, "client": ask.client_id, "message": ask.msg_id}
        audited(call, "message_consumed_directly", **what)
        ask.broker_name = self._broker_name
        ask.body = record
        message = Stored(log_offset, SUB)
        return await self._relay(ask.consumer_group, ask.client_id or "", ask, message)

    async def _relay(self, group: str, client_id: str, ask: Command[R], *touched: Resource) -> R:
        member = self._clients.consumer(group, client_id)
        if member is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The consumer <{group[:255]}> <{client_id[:255]}> is not online at this broker;"
                " `mqadmin consumerConnection` shows which clients are.",
            )
        if not self._may_get(member, Group(group, SUB), *touched):
            raise Refused(
                Code.NO_PERMISSION,
                f"The account of consumer <{group[:255]}> <{client_id[:255]}> may not read this, so"
                " it is not sent there; `cosmo acl check` shows what an account lacks.",
            )
        _check_version((member,), VERSION_WITH_REPORTS, "3.1.8")
        try:
            return await member.connection.call(ask, timeout_ms=RELAY_TIMEOUT_MS)
        except TimedOut as error:
            raise Refused(Code.CONSUME_MSG_TIMEOUT, str(error)) from None
        except Unreachable as error:
            raise Refused(Code.SYSTEM_ERROR, str(error)) from None

    # --- to all members of a group -----------------------------------------------------------

    @InvokeBrokerToResetOffset.handler
    def reset_offset(self, ask: InvokeBrokerToResetOffset, call: Call) -> Reply:
        table = self._targets(ask)
        members = self._readers(ask.group, ask.topic)
        if not members:
            raise Refused(
                Code.CONSUMER_NOT_ONLINE,
                f"No consumer of group {ask.group} is online at this broker, so nobody can be told"
                " to move; set the offsets directly, for example with `mqadmin resetOffsetByTime`"
                " while the group is stopped.",
            )
        _check_version(members, VERSION_WITH_OFFSETS, "3.0.7")
        for member in members:
            member.connection.push(
                ResetConsumerClientOffset(
                    topic=ask.topic,
                    group=ask.group,
                    timestamp=ask.timestamp,
                    is_force=False,  # Compat: what upstream sends, whatever it was asked
                    body=_order(table, member),
                )
            )
        audited(
            call,
            "offset_reset",
            topic=ask.topic,
            group=ask.group,
            timestamp=ask.timestamp,
            clients=len(members),
            before=_by_queue(self._offsets.of(ask.group, ask.topic)),
            after=_by_queue({queue.queue_id: offset for queue, offset in table.items()}),
        )
        return Reply(body=bodies.encode(ResetOffsetBody(offset_table=table)))

    def _targets(self, ask: InvokeBrokerToResetOffset) -> dict[MessageQueue, int]:
        check_group(ask.group)
        config = existing_topic(self._topics, ask.topic)
        table = {}
        for queue_id in range(config.write_queue_nums):
            known = self._offsets.query(ask.group, ask.topic, queue_id)
            if known < 0:
                raise Refused(
                    Code.SYSTEM_ERROR,
                    f"Group {ask.group} has committed no offset for queue {queue_id} of"
                    f" {ask.topic}; let it consume first.",
                )
            if ask.timestamp == THE_END:
                offset = self._store.bounds(ask.topic, queue_id)[1]
            else:
                offset = self._store.offset_by_time(ask.topic, queue_id, ask.timestamp)
            if not ask.is_force:
                offset = min(offset, known)
            queue = MessageQueue(broker_name=self._broker_name, queue_id=queue_id, topic=ask.topic)
            table[queue] = max(offset, 0)
        return table

    @InvokeBrokerToGetConsumerStatus.handler
    async def consumer_status(self, ask: InvokeBrokerToGetConsumerStatus, call: Call) -> Reply:
        members = self._readers(ask.group, ask.topic)
        if not members:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"No consumer of group {ask.group[:255]} is online at this broker.",
            )
        _check_version(members, VERSION_WITH_OFFSETS, "3.0.7")
        client_id = (ask.client_addr or "").strip()
        chosen = [member for member in members if client_id in ("", member.client_id)]
        table = await self._statuses(ask, chosen)
        return Reply(body=bodies.encode(GetConsumerStatusBody(consumer_table=table)))

    async def _statuses(
        self, ask: InvokeBrokerToGetConsumerStatus, members: Sequence[Member]
    ) -> dict[str, dict[MessageQueue, int]]:
        table: dict[str, dict[MessageQueue, int]] = {}
        for first in range(0, len(members), MEMBERS_ASKED_AT_ONCE):
            some = members[first : first + MEMBERS_ASKED_AT_ONCE]
            answers = await asyncio.gather(*(self._status(ask, member) for member in some))
            for member, answer in zip(some, answers, strict=True):
                if answer is not None:
                    table.setdefault(member.client_id, answer)
        return table

    async def _status(
        self, ask: InvokeBrokerToGetConsumerStatus, member: Member
    ) -> dict[MessageQueue, int] | None:
        question = GetConsumerStatusFromClient(topic=ask.topic, group=ask.group)
        try:
            answer = await member.connection.call(question, timeout_ms=STATUS_TIMEOUT_MS)
            return bodies.decode(GetConsumerStatusBody, answer.body or b"{}").message_queue_table
        except CosmodromeError as error:
            log.warning("consumer_status_missing client=%s error=%s", member.client_id, error)
            return None

    # --- who may be told ---------------------------------------------------------------------

    def _readers(self, group: str, topic: str) -> list[Member]:
        """Members of a consumer group that may read the topic as that group."""
        known = self._clients.group(group)
        members = known.members.values() if known else ()
        touched = Group(group, SUB), Topic(topic, SUB)
        return [member for member in members if self._may_get(member, *touched)]

    def _may_get(self, member: Member, *touched: Resource) -> bool:
        return self._gate.may_get(member.host, member.access_key, *touched)


def _by_queue(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(queue_id): offset for queue_id, offset in sorted(offsets.items())}


def _order(table: dict[MessageQueue, int], member: Member) -> bytes:
    if member.language != CPP:
        return bodies.encode(ResetOffsetBody(offset_table=table))
    # Compat: the C++ client reads a list; the Go client crashes on anything but objects as keys.
    rows = [
        MessageQueueForC(
            broker_name=queue.broker_name,
            offset=offset,
            queue_id=queue.queue_id,
            topic=queue.topic,
        )
        for queue, offset in table.items()
    ]
    return bodies.encode(ResetOffsetBodyForC(offset_table=rows))


def _check_version(members: Collection[Member], least: int, release: str) -> None:
    for member in members:
        if member.version < least:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The consumer {member.client_id} has a client of version {member.version}, which"
                f" does not know this request; upgrade it to {release} or later.",
            )
