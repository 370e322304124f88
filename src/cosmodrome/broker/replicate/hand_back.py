"""Offsets that consumers committed at a slave reach its master.

Consumers whose master is away commit at the slave. What they commit is kept here, and as long as it
is kept, an older offset of the master does not overwrite it (see `Offsets.follow`). So the order of
events does not matter: tables of the master may be applied at once, whether or not the offsets were
handed back already.

While there is a link, each kept offset is compared with the master's and committed there if it is
newer; never does a slave move its master back. Then it is kept no longer. A commit that comes to
the slave although the master is there goes the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from cosmodrome.broker.members.offsets import Kept, Offsets
from cosmodrome.env.background import Background
from cosmodrome.env.backoff import Backoff
from cosmodrome.errors import Code, CosmodromeError, Refused
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands.offset import QueryConsumerOffset, UpdateConsumerOffset

log = logging.getLogger(__name__)

TIMEOUT_MS = 3000
CALLS_AT_ONCE = 32
GATHER_SECONDS = 0.2
RETRY_SECONDS = (1.0, 30.0)


class HandBack:
    """`start` begins to keep commits; `linked` and `unlinked` say whether the master is there.

    `kept` is never larger than the table of offsets.
    """

    def __init__(self, offsets: Offsets, connect: Callable[[str, int], Channel] = Channel) -> None:
        self.kept: Kept = offsets.kept
        self._offsets = offsets
        self._connect = connect
        self._some = asyncio.Event()  # something is kept
        self._subscriptions: list[Callable[[], None]] = []
        self._giving = Background("hand offsets back")

    async def start(self) -> None:
        if not self._subscriptions:
            self._subscriptions = [
                self._offsets.keep(),
                self._offsets.committed.subscribe(lambda _: self._some.set()),
            ]
            self._some.set()  # what the last stop left

    async def stop(self) -> None:
        await self.unlinked()
        while self._subscriptions:
            self._subscriptions.pop()()

    async def linked(self, host: str, port: int) -> None:
        """The master is there, and this is where clients reach it."""
        await self._giving.stop()
        self._giving.start(lambda: self._run(host, port))

    async def unlinked(self) -> None:
        await self._giving.stop()

    # --- inside ------------------------------------------------------------------------------

    async def _run(self, host: str, port: int) -> None:
        channel = self._connect(host, port)
        back_off = Backoff(*RETRY_SECONDS)
        try:
            while True:
                await self._some.wait()
                try:
                    count = await self._give(channel)
                except CosmodromeError as error:
                    log.warning(
                        "offsets_not_handed_back master=%s keys=%d error=%s; they are kept, trying"
                        " again",
                        channel.name,
                        len(self.kept),
                        error,
                    )
                    await asyncio.sleep(back_off.next_s())
                    continue
                back_off.reset()
                if count:
                    log.info("offsets_handed_back master=%s count=%d", channel.name, count)
                await asyncio.sleep(GATHER_SECONDS)
        finally:
            await channel.close()

    async def _give(self, channel: Channel) -> int:
        """Hand back all that is kept; how many offsets the master took."""
        count = 0
        waiting = self._positions()
        while batch := [one for one, _ in zip(waiting, range(CALLS_AT_ONCE), strict=False)]:
            outcomes = await asyncio.gather(
                *(self._give_one(channel, *position) for position in batch),
                return_exceptions=True,
            )
            count += sum(outcome is True for outcome in outcomes)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        if not self.kept:
            self._some.clear()
        return count

    def _positions(self) -> Iterator[tuple[str, int]]:
        for key in list(self.kept):
            for queue_id in list(self.kept.get(key, ())):
                yield key, queue_id

    async def _give_one(self, channel: Channel, key: str, queue_id: int) -> bool:
        offset = self.kept.get(key, {}).get(queue_id)
        if offset is None:
            return False  # the master has said something newer meanwhile
        topic, _, group = key.partition("@")
        try:
            newer = offset > await self._known(channel, topic, group, queue_id)
            if newer:
                ask = UpdateConsumerOffset(
                    consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
                )
                await channel.call(ask, TIMEOUT_MS)
        except Refused as error:
            if error.code == Code.SYSTEM_BUSY:
                raise
            # Another attempt would go no better: the master does not want this one.
            log.warning("offset_refused_by_master key=%s queue=%d error=%s", key, queue_id, error)
            newer = False
        self._offsets.let_go(key, queue_id, offset)
        return newer

    async def _known(self, channel: Channel, topic: str, group: str, queue_id: int) -> int:
        """What the master has for a group and queue, −1 when it has nothing."""
        ask = QueryConsumerOffset(consumer_group=group, topic=topic, queue_id=queue_id)
        try:
            return (await channel.call(ask, TIMEOUT_MS)).offset
        except Refused as error:
            if error.code == Code.QUERY_NOT_FOUND:
                return -1
            raise
