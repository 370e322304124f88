"""One outgoing connection, made when it is first needed and again after it broke.

Callers share one attempt to connect and get its outcome. After a failed attempt the next one
waits a little, longer each time up to a bound, so a dead peer is not hammered; a call spends
that wait from its own timeout.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any

from cosmodrome.env.backoff import Backoff
from cosmodrome.errors import TimedOut, Unreachable
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.peers import Limits
from cosmodrome.transport.router import LogLimit, Router
from cosmodrome.transport.tls import Context, described_of_server, no_tls
from cosmodrome.transport.turns import Turns
from cosmodrome.wire.session import WAITERS_MAX, Prepare
from cosmodrome.wire.table import CLIENT, Command, R

log = logging.getLogger(__name__)

READ_BUFFER_BYTES = 64 * 1024
BACK_OFF_FIRST_S = 0.05
BACK_OFF_MAX_S = 1.0
CLOSE_TIMEOUT_S = 1.0


class Channel:
    """Calls one peer. With a `router` it also serves the requests that the peer sends."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout_ms: int = 3000,
        in_flight_max: int = 1024,
        router: Router | None = None,
        tls: Context = no_tls,
        prepare: Prepare | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.name = f"{host}:{port}"
        self.log_limit = LogLimit()
        self.turns = Turns()
        self._tls = tls
        self._prepare = prepare
        self._connect_timeout_ms = connect_timeout_ms
        self._router = router or Router(CLIENT, (), partial=True)
        # `call` is bounded by its slots; users of `live` bring bounds of their own.
        self._limits = Limits(calls_max=WAITERS_MAX, reads_always=True)
        self._slots = asyncio.Semaphore(in_flight_max)
        self._connection: SocketConnection | None = None
        self._connecting: asyncio.Task[SocketConnection] | None = None
        self._back_off = Backoff(BACK_OFF_FIRST_S, BACK_OFF_MAX_S)
        self._not_before = 0.0  # on the loop's clock
        self._lost = asyncio.Event()
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    @property
    def live(self) -> SocketConnection | None:
        """The open connection, for callers that bound their requests themselves."""
        connection = self._connection
        return None if connection is None or connection.closed else connection

    async def connect(self) -> None:
        """Be connected when this returns, or raise Unreachable."""
        await self._ready()

    async def call(self, command: Command[R], timeout_ms: int = 3000) -> R:
        """Ask the peer. Unreachable: it got nothing or the connection broke; TimedOut: it may
        have acted; Refused: it answered with a code that is no success."""
        connection = self.live
        if connection is not None and not self._slots.locked():
            # Nothing to wait for but the answer, whose time the connection keeps.
            async with self._slots:
                return await connection.call(command, timeout_ms=timeout_ms)
        connection = None
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._slots:
                connection = await self._ready()
                return await connection.call(command, timeout_ms=timeout_ms)
        except TimeoutError:
            if connection is None:
                raise Unreachable(
                    f"{command.describe()} was not sent: no connection to {self.name} within"
                    f" {timeout_ms} ms"
                ) from None
            raise TimedOut(
                f"{self.name} did not answer {command.describe()} within {timeout_ms} ms"
            ) from None

    def push(self, command: Command[Any]) -> bool:
        """Send a one-way request over an open connection; False when there is none."""
        if self._connection is None or self._connection.closed:
            return False
        self._connection.push(command)
        return True

    async def notify(self, command: Command[Any], timeout_ms: int = 3000) -> None:
        """Send a one-way request, connecting first if need be."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                connection = await self._ready()
        except TimeoutError:
            raise Unreachable(f"no connection to {self.name} within {timeout_ms} ms") from None
        connection.push(command)

    async def close(self) -> None:
        """Close for good; calls that are out fail with Unreachable."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        connection = self._connection
        if connection is None:
            return
        connection.close("closed by us")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._connection is not None:
                    self._lost.clear()
                    await self._lost.wait()
        except TimeoutError:
            connection.abort("closed by us")

    # --- connecting --------------------------------------------------------------------------

    async def _ready(self) -> SocketConnection:
        if self._closed:
            raise Unreachable(f"the channel to {self.name} was closed")
        if self._connection is not None and not self._connection.closed:
            return self._connection
        attempt = self._connecting
        if attempt is None:
            attempt = asyncio.get_running_loop().create_task(self._connect())
            attempt.add_done_callback(self._attempted)
            self._connecting = attempt
        # Waiting leaves the attempt alone: a caller that gives up must not end it for others.
        await asyncio.wait((attempt,))
        if attempt.cancelled():
            raise Unreachable(f"the channel to {self.name} was closed")
        return attempt.result()

    async def _connect(self) -> SocketConnection:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._not_before - loop.time()))
        buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                _, connection = await loop.create_connection(
                    lambda: SocketConnection(
                        self._router, self, self._limits, buffer, prepare=self._prepare
                    ),
                    self.host,
                    self.port,
                    ssl=self._tls(),
                )
        except TimeoutError:
            self._postpone()
            raise Unreachable(
                f"{self.name} did not accept a connection within {self._connect_timeout_ms} ms;"
                " check that it runs and that no firewall is between"
            ) from None
        except ssl.SSLError as error:
            self._postpone()
            raise Unreachable(f"no TLS with {self.name}: {described_of_server(error)}") from error
        except OSError as error:
            self._postpone()
            raise Unreachable(
                f"cannot connect to {self.name}: {error.strerror or error};"
                " check the address and that it runs"
            ) from error
        self._back_off.reset()
        return connection

    def _attempted(self, task: asyncio.Task[SocketConnection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # every caller may have given up; then nobody else looks at it

    def _postpone(self) -> None:
        self._not_before = asyncio.get_running_loop().time() + self._back_off.next_s()

    # --- what the connection reports -----------------------------------------------------------

    def connection_opened(self, connection: SocketConnection) -> bool:
        if self._closed:
            return False
        self._connection = connection
        return True

    def stray(self, kind: str) -> tuple[str, bytes]:
        return f"{self.name} speaks {kind} instead of remoting; check the port", b""

    def holds(self, more_bytes: int) -> bool:
        return True  # the limits of the one connection are enough

    def connection_quiet(self, connection: SocketConnection) -> None:
        """Nothing waits for the peer's requests to end."""

    def connection_lost(self, connection: SocketConnection) -> None:
        if self._connection is connection:
            self._connection = None
        self._lost.set()
