"""Connections to brokers and name servers by address, each made when it is first needed."""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from cosmodrome.client.options import ClientOptions, split_address
from cosmodrome.client.signing import sign
from cosmodrome.errors import Unreachable
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.ports import VIP_OFFSET
from cosmodrome.transport.router import Router
from cosmodrome.wire.commands.consume import PullRequest
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import join_address
from cosmodrome.wire.session import Prepare
from cosmodrome.wire.table import Command, R

log = logging.getLogger(__name__)


class Links:
    """Calls peers; requests are signed and shown to the hooks on their way out."""

    def __init__(self, options: ClientOptions, router: Router) -> None:
        self._options = options
        self._router = router
        self._channels: dict[str, Channel] = {}
        self._calls: collections.Counter[str] = collections.Counter()  # under way
        self._advertised: dict[str, str] = {}  # by the address that is called instead
        self._closed = False

    async def call(self, address: str, command: Command[R], timeout_ms: int | None = None) -> R:
        """Ask one peer. Unreachable, TimedOut or Refused when there is no good answer."""
        if self._advertised and isinstance(command, PullRequest):
            # Compat: upstream's brokers serve everything but pulls on their VIP port.
            address = self._advertised.get(address, address)
        channel = self.channel(address)
        self._calls[address] += 1
        try:
            return await channel.call(
                command, self._options.call_timeout_ms if timeout_ms is None else timeout_ms
            )
        finally:
            self._calls[address] -= 1

    async def notify(self, address: str, command: Command[Any]) -> None:
        """Send a one-way request, connecting first if need be; Unreachable when that fails."""
        await self.channel(address).notify(command, self._options.connect_timeout_ms)

    def channel(self, address: str) -> Channel:
        channel = self._channels.get(address)
        if channel is None:
            if self._closed:
                raise Unreachable(f"the client is closed; nothing is sent to {address} any more")
            host, port = split_address(address)
            channel = Channel(
                host,
                port,
                connect_timeout_ms=self._options.connect_timeout_ms,
                in_flight_max=self._options.in_flight_max,
                router=self._router,
                tls=lambda: self._options.tls,
                prepare=self._preparation(address),
            )
            self._channels[address] = channel
        return channel

    def broker_address(self, advertised: str) -> str:
        """Where to call a broker that advertises this address."""
        if not self._options.vip_channel:
            return advertised
        host, port = split_address(advertised)
        address = join_address(host, port + VIP_OFFSET)
        self._advertised[address] = advertised
        return address

    async def drop_others(self, keep: Collection[str]) -> None:
        """Close the connections to peers that are not needed any more.

        One that has a call under way stays: no route names the peers of administrative calls.
        """
        self._calls = +self._calls
        self._advertised = {
            address: advertised
            for address, advertised in self._advertised.items()
            if address in keep or address in self._calls
        }
        pulled_from = set(self._advertised.values())
        await self._drop(set(self._channels) - set(keep) - set(self._calls) - pulled_from)

    async def close(self) -> None:
        self._closed = True
        await self._drop(set(self._channels))

    async def _drop(self, addresses: set[str]) -> None:
        gone = [self._channels.pop(address) for address in addresses]
        await asyncio.gather(*(channel.close() for channel in gone))

    def _preparation(self, address: str) -> Prepare | None:
        if not self._options.rpc_hooks and self._options.credentials is None:
            return None
        return functools.partial(self._prepare, address)

    def _prepare(self, address: str, frame: Frame) -> Callable[[Frame], None] | None:
        for hook in self._options.rpc_hooks:
            hook.before_request(address, frame)
        if self._options.credentials is not None:
            sign(frame, self._options.credentials)
        if not self._options.rpc_hooks:
            return None
        return functools.partial(self._answered, address, frame)

    def _answered(self, address: str, request: Frame, response: Frame) -> None:
        for hook in self._options.rpc_hooks:
            try:
                hook.after_response(address, request, response)
            except Exception:  # whoever waits for the answer gets it all the same
                log.exception("hook failed: hook=%r", hook)
