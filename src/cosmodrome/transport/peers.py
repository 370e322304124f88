"""What a connection needs from others: limits, an owner, a peer, and perhaps a lane."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from cosmodrome.transport.router import LogLimit
from cosmodrome.transport.turns import Turns

if TYPE_CHECKING:
    from cosmodrome.transport.connection import SocketConnection

MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    idle_s: float = 120.0
    in_flight_max: int = 16_384  # requests of the peer that are not answered yet
    calls_max: int = 1024  # our requests that the peer has not answered yet
    queued_bytes_high: int = MIB  # serving and reading pause above this
    queued_bytes_max: int = 64 * MIB  # the connection is cut above this
    reads_always: bool = False  # also while the peer does not take what was written


class Owner(Protocol):
    """Whoever made the connection."""

    log_limit: LogLimit
    turns: Turns

    def connection_opened(self, connection: SocketConnection) -> bool:
        """Whether to keep it; a connection that is not kept is cut without further calls."""

    def stray(self, kind: str) -> tuple[str, bytes]:
        """For a peer that speaks `kind` instead of frames, or frames without TLS where that is
        not taken ("plain"): why it is closed, last words."""

    def holds(self, more_bytes: int) -> bool:
        """Count bytes that wait for a peer (negative: no longer); false when they are too many."""

    def connection_quiet(self, connection: SocketConnection) -> None:
        """It refuses requests and has answered all that it took before."""

    def connection_lost(self, connection: SocketConnection) -> None: ...


class Lane(Protocol):
    """Serves plain requests straight from the bytes that were read."""

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Serve whole frames from `at` on; where the first one begins that is left over."""


def plain_peer(address: object) -> tuple[str, int]:
    """Host and port of a socket address; a mapped IPv4 address is shown as IPv4."""
    if not isinstance(address, tuple) or len(address) < 2:
        return "?", 0  # the peer was gone before it could be asked
    host, port = str(address[0]), int(address[1])
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")
    return host, port
