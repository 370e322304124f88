"""The listening side: accepts connections and keeps them within the limits of its options.

One server may listen on several ports; they share the router, the limits and the connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cosmodrome.env.base import Offload
from cosmodrome.env.options import SocketOptions
from cosmodrome.errors import ConfigError
from cosmodrome.transport.admission import Admission
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.http.health import http_response
from cosmodrome.transport.memory import HeldMemory
from cosmodrome.transport.peers import Lane, Limits
from cosmodrome.transport.router import LogLimit, Router
from cosmodrome.transport.tls import PLAIN, PLAIN_REFUSED, Door
from cosmodrome.transport.turns import Turns

log = logging.getLogger(__name__)

READ_BUFFER_BYTES = 256 * 1024
CLOSE_GRACE_S = 1.0  # for peers to take their last bytes after the grace is over


class Server:
    """Accepts connections for `router`; `name` and `hint` are for people who read them."""

    def __init__(
        self,
        router: Router,
        options: SocketOptions,
        name: str,
        hint: str = "",
        lane: Lane | None = None,
        door: Door | None = None,
        offload: Offload | None = None,
    ) -> None:
        """Without `offload`, memory that connections held stays with this process."""
        self.name = name
        self._door = door or Door()
        self.log_limit = LogLimit()
        self.turns = Turns()
        self._router = router
        self._lane = lane
        self._options = options
        self._hint = hint
        self._admission = Admission(options)
        self._limits = Limits(
            idle_s=options.server_channel_max_idle_time_seconds,
            in_flight_max=options.server_requests_in_flight_max,
        )
        # Shared by all connections: a read is consumed before the next one begins.
        self._buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self._listeners: list[asyncio.Server] = []
        self._connections: set[SocketConnection] = set()
        self._held_bytes = 0
        self._memory = None if offload is None else HeldMemory(offload)
        self._stopping = False
        self._changed = asyncio.Event()

    # --- life --------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def held_bytes(self) -> int:
        """Bytes of unfinished requests and of replies that peers do not take."""
        return self._held_bytes

    @property
    def in_flight(self) -> int:
        """Requests without an answer yet, on all connections."""
        return sum(connection.in_flight for connection in self._connections)

    async def listen(self, host: str, port: int) -> int:
        """Accept on one more address; returns the port, which matters when 0 was asked for."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(
                self._connection,
                host or None,
                port,
                backlog=self._options.server_socket_backlog,
            )
        except OSError as error:
            raise ConfigError(
                f"the {self.name} cannot listen on {host or '*'}:{port}: {error.strerror or error};"
                " stop whatever uses that port or choose another one"
            ) from error
        self._listeners.append(listener)
        bound: int = listener.sockets[0].getsockname()[1]
        self._admission.look_again()
        log.info(
            "listening: name=%s host=%s port=%d connections_max=%d",
            self.name,
            host or "*",
            bound,
            self._admission.connections_max,
        )
        return bound

    def _connection(self) -> SocketConnection:
        return SocketConnection(
            self._router, self, self._limits, self._buffer, lane=self._lane, door=self._door
        )

    async def stop(self, *, grace_ms: int = 3000) -> None:
        """Accept no more, let what is in flight finish within the grace, flush and close.

        Requests that arrive meanwhile are answered "service not available": clients take them
        elsewhere at once instead of waiting for a reply that will not come.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_ms / 1000
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.refuse_requests(f"This {self.name} is stopping; use another one.")
        await self._wait_until(lambda: not any(c.busy for c in self._connections), deadline)
        await self._router.stop(grace_s=max(0.0, deadline - loop.time()))
        for connection in tuple(self._connections):
            connection.close(f"the {self.name} stops")
        await self._wait_until(lambda: not self._connections, loop.time() + CLOSE_GRACE_S)
        for connection in tuple(self._connections):
            connection.abort(f"the {self.name} stops")
        await self._wait_until(lambda: not self._connections, loop.time() + CLOSE_GRACE_S)
        if self._memory is not None:
            self._memory.stop()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            await listener.wait_closed()

    async def _wait_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Until `done`, asked again after each change of a connection, or the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    # --- what connections report -------------------------------------------------------------

    def connection_opened(self, connection: SocketConnection) -> bool:
        if self._stopping:
            return False
        reason = self._admission.admit(connection.peer[0], connection.file_number)
        if reason:
            held = self.log_limit.admit("connections")
            if held is not None:
                log.warning(
                    "connection refused: name=%s peer=%s:%d reason=%s held_back=%d",
                    self.name,
                    *connection.peer,
                    reason,
                    held,
                )
            return False
        self._connections.add(connection)
        return True

    def stray(self, kind: str) -> tuple[str, bytes]:
        if kind == "tls":
            return self._door.why_not_tls or "TLS within TLS", b""
        if kind == PLAIN:
            return PLAIN_REFUSED, b""
        if kind == "http":
            hint = self._hint or (
                f"This is a {self.name} port: it speaks the RocketMQ remoting protocol, not HTTP;"
                " health probes are on the HTTP port of `cosmo up`."
            )
            return "an HTTP request on a port that speaks remoting", http_response(400, hint)
        return "a gRPC client on a port that speaks remoting; use a remoting client", b""

    def holds(self, more_bytes: int) -> bool:
        self._held_bytes += more_bytes
        if self._memory is not None:
            self._memory.now_holds(self._held_bytes)
        return self._held_bytes <= self._options.server_held_bytes_max

    def connection_quiet(self, connection: SocketConnection) -> None:
        self._changed.set()

    def connection_lost(self, connection: SocketConnection) -> None:
        self._connections.discard(connection)
        self._admission.leave(connection.peer[0])
        self._changed.set()
