"""The filter servers beside this broker: who they are and whether they are alive.

A filter server says where it is every 10 seconds. One that is silent for 30 or whose connection
closes is dropped. `changed` fires with each change of the list, which the name servers are told,
so that consumers find it in their routes. Operators start filter servers, never the broker.
"""

from __future__ import annotations

import asyncio
import logging
import re

from cosmodrome.env.background import Background
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.commands.filter import RegisterFilterServer, RegisterFilterServerReply
from cosmodrome.wire.table import Call, Connection

log = logging.getLogger(__name__)

SILENCE_SECONDS_MAX = 30.0
SCAN_SECONDS = 5.0
FILTER_SERVERS_MAX = 256  # what a name server takes
ADDRESS_CHARACTERS_MAX = 255
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})\Z")


class _Known:
    __slots__ = ("address", "heard_at")

    def __init__(self, address: str, heard_at: float) -> None:
        self.address = address
        self.heard_at = heard_at  # on the loop's clock


class FilterServers:
    def __init__(
        self,
        options: BrokerOptions,
        *,
        silence_s: float = SILENCE_SECONDS_MAX,
        scan_s: float = SCAN_SECONDS,
    ) -> None:
        self.changed: Signal[None] = Signal()
        self._options = options
        self._silence_s = silence_s
        self._scan_s = scan_s
        self._known: dict[Connection, _Known] = {}
        self._scanner = Background("drop silent filter servers")

    async def start(self) -> None:
        self._scanner.repeat(self._scan_s, self._drop_silent)

    async def stop(self) -> None:
        await self._scanner.stop()

    def addresses(self) -> list[str]:
        """Each live filter server once, the one that was first known first."""
        return list(dict.fromkeys(known.address for known in self._known.values()))

    @RegisterFilterServer.handler
    def register(self, ask: RegisterFilterServer, call: Call) -> RegisterFilterServerReply:
        address = ask.filter_server_addr
        _check(address)
        now = asyncio.get_running_loop().time()
        known = self._known.get(call.connection)
        if known is None:
            self._add(call.connection, address, now)
        else:
            known.heard_at = now
            if known.address != address:
                known.address = address
                self._tell("filter_server_moved", address)
        return RegisterFilterServerReply(
            broker_name=self._options.broker_name, broker_id=self._options.broker_id
        )

    def _add(self, connection: Connection, address: str, now: float) -> None:
        if len(self._known) >= FILTER_SERVERS_MAX:
            raise Refused(
                Code.SYSTEM_BUSY,
                f"{FILTER_SERVERS_MAX} filter servers are registered; this broker takes no more,"
                " stop one of them.",
            )
        before = self.addresses()
        self._known[connection] = _Known(address, now)
        connection.on_close(lambda: self._drop(connection, "its connection closed"))
        if address not in before:
            self._tell("filter_server_new", address)

    def _drop(self, connection: Connection, why: str) -> None:
        known = self._known.pop(connection, None)
        # A restarted one may be known by its new connection before the old one is gone.
        if known is not None and known.address not in self.addresses():
            self._tell("filter_server_gone", f"{known.address} reason={why!r}")

    def _drop_silent(self) -> None:
        oldest = asyncio.get_running_loop().time() - self._silence_s
        for connection, known in tuple(self._known.items()):
            if known.heard_at < oldest:
                self._drop(connection, f"silent for {self._silence_s:g} s")
                connection.close("the filter server on it is silent")

    def _tell(self, event: str, address: str) -> None:
        log.info("%s address=%s count=%d", event, address, len(self._known))
        self.changed.fire(None)


def _check(address: str) -> None:
    match = _ADDRESS.match(address) if len(address) <= ADDRESS_CHARACTERS_MAX else None
    if match is None or not 1 <= int(match[1]) <= 65_535:
        raise Refused(
            Code.SYSTEM_ERROR,
            f"The filter server address {address[:64]!r} is not of the form host:port; check"
            " filterServerIP and listenPort of the filter server.",
        )
