"""What a slave asks where clients reach its master, because the HA port does not say it."""

from __future__ import annotations

from collections.abc import Callable

from cosmodrome.errors import CosmodromeError, ProtocolError, Refused, Unreachable
from cosmodrome.layout import HA_STREAM, HA_STREAM_KEY
from cosmodrome.replication.follower import split_address
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import KVTable
from cosmodrome.wire.commands.broker import GetBrokerRuntimeInfo
from cosmodrome.wire.commands.consume import ViewMessageById
from cosmodrome.wire.table import Command, R

TIMEOUT_MS = 3000


class AskMaster:
    """`address` is host:port, empty while nobody said where clients reach the master."""

    def __init__(self, connect: Callable[[str, int], Channel] = Channel) -> None:
        self.address = ""
        self._connect = connect

    async def speaks_ours(self) -> bool | None:
        """Whether the master knows our stream; None when it cannot be asked."""
        try:
            return (await self._figures()).get(HA_STREAM_KEY) == HA_STREAM
        except CosmodromeError:
            return None

    async def bounds(self) -> tuple[int, int]:
        """Where the log of the master begins and ends."""
        figures = await self._figures()
        first, end = figures.get("commitLogMinOffset", ""), figures.get("commitLogMaxOffset", "")
        try:
            return max(int(first), 0), max(int(end), 0)
        except ValueError:
            raise ProtocolError(
                f"{self.address} says that its log begins at {first[:32]!r} and ends at"
                f" {end[:32]!r}; check that it is the master of this slave"
            ) from None

    async def first_record(self) -> bytes:
        """The record at offset 0; empty when there is none yet."""
        try:
            return (await self._call(ViewMessageById(offset=0))).body
        except Refused:
            return b""

    async def _figures(self) -> dict[str, str]:
        reply = await self._call(GetBrokerRuntimeInfo())
        return bodies.decode(KVTable, reply.body).table

    async def _call(self, command: Command[R]) -> R:
        if not self.address:
            raise Unreachable(
                "nobody said where clients reach the master, only its HA port is known; set"
                " namesrvAddr to the name servers of the master"
            )
        channel = self._connect(*split_address(self.address))
        try:
            return await channel.call(command, TIMEOUT_MS)
        finally:
            await channel.close()
