"""The writing half of a connection: what waits for the peer, and how much of it.

Answers, pushes and calls append to a list, and one write at the end of the loop's turn carries all
of it. Within a read it leaves at the end of the read. What waits is bounded per connection and,
with the half frames that were read, for all connections of an owner.
"""

from __future__ import annotations

import abc
import asyncio
import logging

from cosmodrome.transport.peers import Limits, Owner
from cosmodrome.wire.message import join_address

log = logging.getLogger(__name__)


class Output(asyncio.BufferedProtocol, abc.ABC):
    """What `SocketConnection` is made of besides reading and serving."""

    def __init__(self, owner: Owner, limits: Limits) -> None:
        self._owner = owner
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.peer: tuple[str, int] = ("?", 0)
        self._close_reason = ""
        self._lost = False
        self._driving = False  # within a read: what is written leaves at its end
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_scheduled = False
        self.writing_paused = False  # the peer does not take what was written
        self._written_bytes = 0
        self._fd = -1  # of the socket, where what is written goes as it is
        self._write_mark = (0, 0.0)  # progress as of the last tick
        self._held = (0, 0)  # bytes that were read and wait, bytes that the peer does not take

    @property
    def name(self) -> str:
        """The peer as people write it."""
        return join_address(*self.peer)

    @property
    def closed(self) -> bool:
        return self._lost or bool(self._close_reason)

    def put(self, *parts: bytes) -> None:
        """Write frames; within a read they leave together at its end."""
        if self.closed:
            return
        self._out += parts
        for part in parts:
            self._out_bytes += len(part)
        if self.writing_paused:
            self._check_queued_bytes()
        elif not self._driving or self._out_bytes >= self._limits.queued_bytes_high:
            self._flush()

    def free_fd(self) -> int:
        """The socket, for a caller that writes at once and calls `wrote`; -1 while bytes are
        queued."""
        transport = self._transport
        if self._fd < 0 or self._out or self.writing_paused or self.closed or transport is None:
            return -1
        return -1 if transport.get_write_buffer_size() or transport.is_closing() else self._fd

    def wrote(self, size: int) -> None:
        self._written_bytes += size

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Cut the connection; what is queued is lost."""

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if self.writing_paused:
            self._check_queued_bytes()
        elif self._out_bytes >= self._limits.queued_bytes_high:
            self._flush()  # may pause writing, and with it serving
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_turn)

    def _flush_turn(self) -> None:
        self._flush_scheduled = False
        if not self.writing_paused:
            self._flush()

    def _flush(self) -> None:
        if not self._out or self._lost or self._transport is None:
            return
        if not self._transport.get_write_buffer_size():
            # Quiet time counts from when there was something to take.
            self._write_mark = (self._written_bytes, self._loop.time())
        out, self._out = self._out, []
        self._written_bytes += self._out_bytes
        self._out_bytes = 0
        if len(out) == 1:
            self._transport.write(out[0])
        else:
            self._transport.writelines(out)

    def _check_queued_bytes(self) -> None:
        assert self._transport is not None
        queued = self._out_bytes + self._transport.get_write_buffer_size()
        if queued > self._limits.queued_bytes_max:
            reason = f"the peer does not read: {queued} bytes wait for it"
            self._warn("unread replies", reason)
            self.abort(reason)
        else:
            self._hold(self._held[0], queued)

    def _hold(self, half_frame_bytes: int, unread_bytes: int) -> bool:
        """Count what this connection holds; false when it was cut for that."""
        held = (half_frame_bytes, unread_bytes)
        if held == self._held:
            return True
        more_bytes = sum(held) - sum(self._held)
        self._held = held
        if self._owner.holds(more_bytes) or more_bytes <= 0 or self.closed:
            return True
        reason = (
            "serverHeldBytesMax is reached: all connections together hold too many bytes of"
            f" unfinished requests and unread replies, this one {sum(held)}"
        )
        self._warn("held bytes", reason)
        self.abort(reason)
        return False

    def _warn(self, kind: str, reason: str) -> None:
        held = self._owner.log_limit.admit(kind)
        if held is not None:
            log.warning(
                "connection closed: peer=%s reason=%s held_back=%d", self.name, reason, held
            )
