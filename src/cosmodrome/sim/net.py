"""A network in memory on a loop that jumps: servers and clients of one process, in virtual time.

`NetLoop` replaces `create_server` and `create_connection`; protocols, plain and buffered, see
ordinary transports. Every connection is two pipes that keep order; bytes take `latency_s` from end
to end. What the other end does not read stays with the writer and counts against its limits, as in
a socket whose buffers are full (`pipe_bytes` are on their way at most).

Faults are by port, or by pair of nodes (`sim.node`). `cut` breaks the connections to a port, as a
process that dies does. A port in `silent` takes bytes, and connections, and never lets one through
in either direction: a machine that is gone, or a firewall. A `Link` is one direction from node to
node: it can be silent, slow or spoil bytes, and what was held up arrives when it is healed.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import errno
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from cosmodrome.sim.loop import JumpLoop
from cosmodrome.sim.node import NODE, Gate, Node

T = TypeVar("T")

PIPE_BYTES = 256 * 1024
HIGH_BYTES = 64 * 1024
FIRST_FREE_PORT = 40_000
LATENCY_S = 0.0005
RETRY_S = 1.0  # a connection that nobody answers is asked for again


@dataclasses.dataclass(slots=True)
class Link:
    """One direction between two nodes."""

    silent: bool = False
    delay_s: float = 0.0
    spoil: Callable[[bytes], bytes] | None = None  # what becomes of bytes that are sent
    heard: Callable[[MemoryTransport, bytes], None] | None = None  # sees what arrives, and where


class NetLoop(JumpLoop):
    def __init__(self, *, latency_s: float = LATENCY_S, pipe_bytes: int = PIPE_BYTES) -> None:
        super().__init__()
        self.latency_s = latency_s
        self.pipe_bytes = pipe_bytes
        self.silent: set[int] = set()
        self._links: dict[tuple[str, str], Link] = {}
        self._servers: dict[int, MemoryServer] = {}
        self._pairs: list[tuple[int, MemoryTransport, MemoryTransport]] = []
        self._next_port = FIRST_FREE_PORT

    # The signatures of asyncio have dozens of parameters; these are the ones in use.
    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        backlog: int = 100,
        ssl: object = None,
    ) -> MemoryServer:
        if ssl is not None:
            raise ValueError("the memory network has no TLS; leave ssl out")
        number = port or self._free_port()
        if number in self._servers:
            raise OSError(errno.EADDRINUSE, "address already in use (memory network)")
        server = MemoryServer(self, protocol_factory, host or "127.0.0.1", number)
        self._servers[number] = server
        return server

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
    ) -> tuple[MemoryTransport, asyncio.BaseProtocol]:
        if ssl is not None:
            raise ValueError("the memory network has no TLS; leave ssl out")
        assert host is not None and port is not None
        await asyncio.sleep(self.latency_s)
        while self._is_silent(port):  # noqa: ASYNC110 - as TCP does
            await asyncio.sleep(RETRY_S)
        server = self._servers.get(port)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        here = (host, self._free_port())
        there = (host, port)
        protocol = protocol_factory()
        near = MemoryTransport(self, protocol, port, here, there, contextvars.copy_context())
        context = server.context.copy()
        far = MemoryTransport(self, context.run(server.factory), port, there, here, context)
        near.peer, far.peer = far, near
        self._pairs = [pair for pair in self._pairs if not (pair[1].ended and pair[2].ended)]
        self._pairs.append((port, near, far))
        far.accept()
        near.protocol.connection_made(near)
        return near, protocol

    def cut(self, port: int) -> None:
        """Break every connection to a port, from both ends at once."""
        for number, near, far in self._pairs:
            if number == port:
                near.abort()
                far.abort()

    def ends(self) -> list[tuple[MemoryTransport, MemoryTransport]]:
        """Connections that both ends still have: who connected, and who was connected to."""
        return [(near, far) for _, near, far in self._pairs if not (near.ended or far.ended)]

    # --- nodes -----------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        node = NODE.get() if context is None else context.get(NODE)
        if node is None:
            return super().call_soon(callback, *args, context=context)
        gate = Gate(node, callback, args, context)
        gate.handle = super().call_soon(gate, context=gate.context)
        return gate.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        node = NODE.get() if context is None else context.get(NODE)
        if node is None:
            return super().call_at(when, callback, *args, context=context)
        gate = Gate(node, callback, args, context)
        gate.handle = handle = super().call_at(when, gate, context=gate.context)
        return handle

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, name=name, context=context)
        node = NODE.get() if context is None else context.get(NODE)
        if node is not None:
            node.adopt(task)
        return task

    def link(self, source: str, target: str) -> Link:
        """The direction from one node to another, by name; it outlives their lives."""
        return self._links.setdefault((source, target), Link())

    def heal(self, source: str, target: str) -> None:
        """That direction works again: what was held up arrives, and who was left hears of it."""
        link = self.link(source, target)
        link.silent, link.delay_s, link.spoil = False, 0.0, None
        for near, _ in self._between(source, target):
            near.catch_up()

    def part(self, one: str, other: str) -> None:
        """Break every connection between two nodes."""
        for near, far in self._between(one, other):
            for end in (near, far):
                self.call_soon(end._other_end_gone, context=end._context)

    def drop(self, node: Node) -> None:
        """A node is gone: its ports are free, the other ends of its connections hear of it."""
        for server in [server for server in self._servers.values() if server.node is node]:
            server.close()
        for _, near, far in self._pairs:
            for end in (near, far):
                if end.node is node:
                    end.abort()

    def _between(self, source: str, target: str) -> list[tuple[MemoryTransport, MemoryTransport]]:
        """Connections, the end at `source` first."""
        both = [pair for _, near, far in self._pairs for pair in ((near, far), (far, near))]
        return [
            pair for pair in both if (_name(pair[0].node), _name(pair[1].node)) == (source, target)
        ]

    def _is_silent(self, port: int) -> bool:
        server = self._servers.get(port)
        here, there = _name(NODE.get()), _name(server.node if server else None)
        blocked = self.link(here, there).silent or self.link(there, here).silent
        return blocked or port in self.silent

    def forget_server(self, server: MemoryServer) -> None:
        if self._servers.get(server.port) is server:
            del self._servers[server.port]

    def _free_port(self) -> int:
        self._next_port += 1
        return self._next_port


def _name(node: Node | None) -> str:
    return "" if node is None else node.name


class _Address:
    def __init__(self, name: tuple[str, int]) -> None:
        self._name = name

    def getsockname(self) -> tuple[str, int]:
        return self._name


class MemoryServer(asyncio.AbstractServer):
    def __init__(
        self,
        loop: NetLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
    ) -> None:
        self.factory = factory
        self.port = port
        self.sockets = [_Address((host, port))]
        self.context = contextvars.copy_context()
        self.node = NODE.get()
        self._loop = loop

    def close(self) -> None:
        self._loop.forget_server(self)

    async def wait_closed(self) -> None:
        """Connections have a life of their own."""

    async def start_serving(self) -> None:
        """It serves from the beginning."""

    async def serve_forever(self) -> None:
        await self._loop.create_future()

    def is_serving(self) -> bool:
        return self._loop._servers.get(self.port) is self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop


class MemoryTransport(asyncio.Transport):
    """One end of a connection. It owns the pipe towards the other end."""

    peer: MemoryTransport

    def __init__(
        self,
        loop: NetLoop,
        protocol: asyncio.BaseProtocol,
        port: int,
        here: tuple[str, int],
        there: tuple[str, int],
        context: contextvars.Context,
    ) -> None:
        super().__init__({"sockname": here, "peername": there})
        self.node = context.get(NODE)
        self._context = context
        self.protocol = protocol
        self.ended = False  # connection_lost was called, or is about to be
        self.lost = False  # connection_lost was called
        self._loop = loop
        self._port = port
        self._queued: deque[bytes] = deque()  # with the writer: the pipe is full
        self._queued_bytes = 0
        self._pipe: deque[bytes] = deque()  # on its way, or arrived and not read
        self._pipe_bytes = 0
        self._arrived = 0  # chunks of the pipe that are at the other end
        self._held_up = 0  # chunks of the pipe that a silent link holds
        self._high = HIGH_BYTES
        self._writing_paused = False
        self._reading_paused = False
        self._closing = False

    def accept(self) -> None:
        """Tell the protocol of a server; one of a paused node hears of it later."""
        if self.node is None:
            self._context.run(self.protocol.connection_made, self)
        else:
            gate = Gate(self.node, self.protocol.connection_made, (self,), self._context)
            self._context.run(gate)

    # --- writing ---------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self.ended or not data:
            return
        if self.node is not None and self.node.dumb:
            return
        spoil = self._link.spoil
        self._queued.append(bytes(data) if spoil is None else spoil(bytes(data)))
        self._queued_bytes += len(data)
        self._fill_pipe()
        self._tell_writer()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self._queued_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_BYTES if high is None else high

    def _fill_pipe(self) -> None:
        while self._queued and self._pipe_bytes < self._loop.pipe_bytes:
            data = self._queued.popleft()
            self._queued_bytes -= len(data)
            self._pipe.append(data)
            self._pipe_bytes += len(data)
            self._loop.call_later(self._latency_s, self._travelled, context=self.peer._context)

    def _travelled(self) -> None:
        if self._port in self._loop.silent:
            return  # it never arrives, nor does what comes behind it
        if self._link.silent:
            self._held_up += 1
            return
        self._arrived += 1
        self.peer._read_on()

    def _tell_writer(self) -> None:
        protocol = cast(asyncio.Protocol, self.protocol)
        if not self._writing_paused and self._queued_bytes > self._high:
            self._writing_paused = True
            protocol.pause_writing()
        elif self._writing_paused and self._queued_bytes <= self._high // 4:
            self._writing_paused = False
            protocol.resume_writing()

    # --- reading ---------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._loop.call_soon(self._read_on, context=self._context)

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def _read_on(self) -> None:
        """Take what has arrived from the other end's pipe."""
        source = self.peer
        while source._arrived and not self._reading_paused and not self.ended:
            data = source._pipe.popleft()
            source._pipe_bytes -= len(data)
            source._arrived -= 1
            if not self._closing:
                if source._link.heard is not None:
                    source._link.heard(self, data)
                self._hand_over(data)
        if source.ended:
            return
        source._fill_pipe()
        source._tell_writer()
        source._finish_closing()

    def _hand_over(self, data: bytes) -> None:
        if not isinstance(self.protocol, asyncio.BufferedProtocol):
            cast(asyncio.Protocol, self.protocol).data_received(data)
            return
        at = 0
        while at < len(data) and not self.ended:
            buffer = memoryview(cast(Any, self.protocol.get_buffer(len(data) - at)))
            size = min(len(buffer), len(data) - at)
            buffer[:size] = data[at : at + size]
            at += size
            self.protocol.buffer_updated(size)

    # --- the end ---------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing or self.ended

    def close(self) -> None:
        """After what was written has been taken."""
        if not self.is_closing():
            self._closing = True
            self._loop.call_soon(self._finish_closing, context=self._context)

    def abort(self) -> None:
        if not self.ended:
            self._closing = True
            self._end(None)

    def _finish_closing(self) -> None:
        if self._closing and not self.ended and not self._pipe and not self._queued:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self.ended = True
        self._queued.clear()
        self._queued_bytes = 0
        self._loop.call_soon(self._lose, error, context=self._context)
        if self._port not in self._loop.silent and not self._link.silent:
            self._tell_other_end()

    def _lose(self, error: Exception | None) -> None:
        self.lost = True
        self.protocol.connection_lost(error)

    def _tell_other_end(self) -> None:
        self._loop.call_later(
            self._latency_s, self.peer._other_end_gone, context=self.peer._context
        )

    def _other_end_gone(self) -> None:
        if self.ended:
            return
        cast(asyncio.Protocol, self.protocol).eof_received()
        self._closing = True
        self._end(None)

    # --- the way to the other end ----------------------------------------------------------------

    @property
    def _link(self) -> Link:
        return self._loop.link(_name(self.node), _name(self.peer.node))

    @property
    def _latency_s(self) -> float:
        return self._loop.latency_s + self._link.delay_s

    def catch_up(self) -> None:
        """The way to the other end is open again."""
        held_up, self._held_up = self._held_up, 0
        for _ in range(held_up):
            self._loop.call_later(self._latency_s, self._travelled, context=self.peer._context)
        if self.ended and not self.peer.ended:
            self._tell_other_end()
