"""Tables of a master that is Apache RocketMQ's: it does not send them, so a slave asks.

Compat: the four codes, the period and the rules are those of upstream's slave. Topics and groups
are taken over as a whole when their version differs, offsets are merged, delay offsets replace.
Unlike upstream's, offsets of both kinds wait until this log has what the master's had when it said
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.table_file import VERSION_ROW
from cosmodrome.broker.members.topics import Topics
from cosmodrome.env.background import Background
from cosmodrome.errors import CosmodromeError, ProtocolError
from cosmodrome.replication.tables import AppliedTables
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.router import LogLimit
from cosmodrome.wire import bodies, fastjson
from cosmodrome.wire.bodies import (
    ConsumerOffsetSerializeWrapper,
    DataVersion,
    KVTable,
    SubscriptionGroupWrapper,
    TopicConfigSerializeWrapper,
)
from cosmodrome.wire.commands.broker import GetBrokerRuntimeInfo
from cosmodrome.wire.commands.group import GetAllSubscriptiongroupConfig
from cosmodrome.wire.commands.offset import GetAllConsumerOffset, GetAllDelayOffset
from cosmodrome.wire.commands.topic import GetAllTopicConfig
from cosmodrome.wire.table import Command, Reply

log = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0
TIMEOUT_MS = 3000
LOG_SECONDS = 60.0


class JavaTables:
    """Asks from `linked` to `unlinked`, at once and then every ten seconds."""

    def __init__(
        self,
        applied: AppliedTables,
        topics: Topics,
        groups: Groups,
        connect: Callable[[str, int], Channel] = Channel,
    ) -> None:
        self._applied = applied
        self._topics = topics
        self._groups = groups
        self._connect = connect
        self._limit = LogLimit(LOG_SECONDS)
        self._asking = Background("ask the master for its tables")

    async def linked(self, host: str, port: int) -> None:
        """A classic link has begun; this is where clients reach the master."""
        await self._asking.stop()
        self._asking.start(lambda: self._run(host, port))

    async def unlinked(self) -> None:
        await self._asking.stop()

    stop = unlinked

    async def _run(self, host: str, port: int) -> None:
        channel = self._connect(host, port)
        try:
            while True:
                for take in (
                    self._take_topics,
                    self._take_groups,
                    self._take_offsets,
                    self._take_delays,
                ):
                    await self._tried(take, channel)
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            await channel.close()

    async def _tried(self, take: Callable[[Channel], Awaitable[None]], channel: Channel) -> None:
        try:
            await take(channel)
        except CosmodromeError as error:
            held = self._limit.admit(take.__name__)
            if held is not None:
                log.warning(
                    "table_not_asked master=%s what=%s error=%s held_back=%d; trying again in"
                    " %.0f s",
                    channel.name,
                    take.__name__.removeprefix("_take_"),
                    error,
                    held,
                    PERIOD_SECONDS,
                )
        except Exception:
            # An answer that nobody foresaw must not end the asking.
            log.exception("table_not_asked master=%s", channel.name)

    async def _take_topics(self, channel: Channel) -> None:
        body = await _asked(channel, GetAllTopicConfig())
        wrapper = bodies.decode(TopicConfigSerializeWrapper, body)
        if _differs(wrapper.data_version, self._topics.version):
            rows = _named_rows(wrapper.topic_config_table, wrapper.data_version)
            self._applied.take("topics", rows, whole=True)

    async def _take_groups(self, channel: Channel) -> None:
        body = await _asked(channel, GetAllSubscriptiongroupConfig())
        wrapper = bodies.decode(SubscriptionGroupWrapper, body)
        if _differs(wrapper.data_version, self._groups.version):
            rows = _named_rows(wrapper.subscription_group_table, wrapper.data_version)
            self._applied.take("subscriptionGroup", rows, whole=True)

    async def _take_offsets(self, channel: Channel) -> None:
        body = await _asked(channel, GetAllConsumerOffset())
        wrapper = bodies.decode(ConsumerOffsetSerializeWrapper, body)
        end = await _log_end(channel)
        self._applied.take("consumerOffset", wrapper.offset_table, whole=False, log_offset=end)

    async def _take_delays(self, channel: Channel) -> None:
        document = fastjson.loads(await _asked(channel, GetAllDelayOffset()))
        rows = document.get("offsetTable") if isinstance(document, dict) else None
        if not isinstance(rows, dict):
            raise ProtocolError("GET_ALL_DELAY_OFFSET was answered without an offsetTable")
        rows = {str(level): offset for level, offset in rows.items()}
        end = await _log_end(channel)
        self._applied.take("delayOffset", rows, whole=True, log_offset=end)


async def _asked(channel: Channel, ask: Command[Reply]) -> bytes:
    body = (await channel.call(ask, TIMEOUT_MS)).body
    if not body:
        raise ProtocolError(f"{ask.describe()} was answered without a body")
    return body


async def _log_end(channel: Channel) -> int:
    """Where the master's log ends: asked after a table, so the log has what that speaks of."""
    info = bodies.decode(KVTable, await _asked(channel, GetBrokerRuntimeInfo()))
    end = info.table.get("commitLogMaxOffset", "")
    if not end.isascii() or not end.isdigit():
        raise ProtocolError("GET_BROKER_RUNTIME_INFO was answered without commitLogMaxOffset")
    return int(end)


def _differs(theirs: DataVersion, ours: DataVersion) -> bool:
    return (theirs.counter, theirs.timestamp) != (ours.counter, ours.timestamp)


def _named_rows(table: dict[str, Any], version: DataVersion) -> dict[str, Any]:
    rows = {name: msgspec.to_builtins(row) for name, row in table.items()}
    rows[VERSION_ROW] = msgspec.to_builtins(version)
    return rows
