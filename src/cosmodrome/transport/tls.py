"""TLS on a port that also takes plain connections: the first bytes decide.

Theory of operation. A connection is accepted, counted and limited as a plain one. When its first
bytes are those of TLS, whoever has it asks the `Door` for a `SecureTransport` and uses that instead
of the socket's own transport. It stands between the two: bytes of the socket go through OpenSSL to
the protocol above, and what that protocol writes goes the other way. The event loop's own TLS
cannot be used, because the first bytes have been read already. Invariants:

- nothing of the protocol above leaves before the handshake is done;
- a handshake that is not done in time ends the connection;
- while the protocol above does not read, nothing is read from the socket: at most one read waits;
- what is written is encrypted at once, so the socket's buffer, and its limits, are the only ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

from cosmodrome.transport.peers import plain_peer
from cosmodrome.transport.router import LogLimit
from cosmodrome.wire.frame import sniff
from cosmodrome.wire.message import join_address

log = logging.getLogger(__name__)

Mode = Literal["disabled", "permissive", "enforcing"]
Context = Callable[[], ssl.SSLContext | None]  # asked for each connection: it may be renewed

# How a connection begins; what `sniff` knows comes besides.
FRAMES, MORE, SECURE, PLAIN = "frames", "more", "secure", "plain"
SNIFF_BYTES = 4
READ_BYTES = 64 * 1024
WRITE_BYTES = 64 * 1024
UNREAD_BYTES_MAX = 1 << 20
HANDSHAKE_TIMEOUT_S = 10.0

PLAIN_REFUSED = (
    "it does not use TLS, and tls.server.mode is enforcing; switch TLS on in the client"
    " (Java: -Dtls.enable=true, cosmo: --tls)"
)


def no_tls() -> ssl.SSLContext | None:
    return None


def opening(first: bytes, door: Door | None) -> str:
    """What the first bytes of a connection begin: frames, TLS that `door` lets in, or something
    that is not served here. Without a door there is no TLS, or it has begun already."""
    kind = None
    if first[0] != 0:  # no frame: its first byte is the top byte of a small length
        if len(first) < SNIFF_BYTES:
            return MORE
        kind = sniff(first)
    if kind == "tls" and door is not None and not door.why_not_tls:
        return SECURE
    return kind or (FRAMES if door is None or door.takes_plain else PLAIN)


class Door:
    """Who comes in by which kind of connection; all ports of a process share it."""

    def __init__(
        self,
        mode: Mode = "permissive",
        context: Context = no_tls,
        *,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self.takes_plain = mode != "enforcing"
        self.handshake_timeout_s = handshake_timeout_s
        # Shared by all connections: a read is decrypted before the next one begins.
        self.ciphertext = memoryview(bytearray(READ_BYTES))
        self.plaintext = memoryview(bytearray(READ_BYTES))
        self._mode = mode
        self._context = context
        self._log_limit = LogLimit()

    @property
    def why_not_tls(self) -> str:
        """Why a peer that begins with TLS is not served; empty when it is."""
        if self._mode == "disabled":
            return "TLS is switched off on this port (tls.server.mode=disabled)"
        if self._context() is None:
            return (
                "this server has no certificate for TLS: set tls.server.certPath and"
                " tls.server.keyPath"
            )
        return ""

    def secure(
        self, lower: asyncio.Transport, upper: asyncio.BaseProtocol, first: bytes
    ) -> SecureTransport:
        """What `upper` has to use instead of `lower`, from which it has read `first`."""
        context = self._context()
        assert context is not None, "ask why_not_tls first"
        return SecureTransport(self, context, lower, upper, first)

    def failed(self, peer: str, why: str) -> None:
        held = self._log_limit.admit(why)
        if held is not None:
            log.warning("tls_failed peer=%s why=%s held_back=%d", peer, why, held)


class SecureTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """A transport to the protocol above, a protocol to the transport below."""

    def __init__(
        self,
        door: Door,
        context: ssl.SSLContext,
        lower: asyncio.Transport,
        upper: asyncio.BaseProtocol,
        first: bytes,
    ) -> None:
        super().__init__()
        self._door = door
        self._lower = lower
        self._upper: Any = upper
        self._buffered = isinstance(upper, asyncio.BufferedProtocol)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._context = context
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._shaken = False  # the handshake is done
        self._early: list[bytes] = []  # written before that
        self._reading = True
        self._resumes_soon = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(door.handshake_timeout_s, self._give_up)
        lower.set_protocol(self)
        self._incoming.write(first)
        self._go_on()

    # --- what the transport below calls ----------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._door.ciphertext

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._door.ciphertext[:nbytes])
        self._go_on()

    def eof_received(self) -> bool:
        return self._shaken and bool(self._upper.eof_received())

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._upper.connection_lost(error)

    def pause_writing(self) -> None:
        self._upper.pause_writing()

    def resume_writing(self) -> None:
        self._upper.resume_writing()

    # --- what the protocol above calls -----------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not len(data) or self._lower.is_closing():
            return
        if not self._shaken:
            self._early.append(bytes(data))
            return
        try:
            self._lower.write(b"".join(self._encrypted(memoryview(data).cast("B"))))
        except ssl.SSLError as error:
            self._fail(error)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Say that nothing follows; the peer may go on."""
        if self._shaken:
            # It sends our farewell, and complains that the peer's is not there yet.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._send()

    def close(self) -> None:
        if not self._lower.is_closing():
            self.write_eof()
            self._lower.close()

    def abort(self) -> None:
        self._lower.abort()

    def is_closing(self) -> bool:
        return self._lower.is_closing()

    def pause_reading(self) -> None:
        self._reading = False
        self._lower.pause_reading()

    def resume_reading(self) -> None:
        self._reading = True
        if not self._resumes_soon:
            # Not from here: what has arrived is handed to the protocol that is calling.
            self._resumes_soon = True
            self._loop.call_soon(self._resume)

    def is_reading(self) -> bool:
        return self._reading

    def get_write_buffer_size(self) -> int:
        return self._lower.get_write_buffer_size() + sum(map(len, self._early))

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._lower.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._lower.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        if name == "sslcontext":
            return self._context
        return self._lower.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._upper = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._upper
        return protocol

    # --- inside ----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Use what has arrived, for the handshake or for the protocol above."""
        if self._lower.is_closing():
            return
        if not self._shaken:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send()
                return
            except ssl.SSLError as error:
                self._fail(error)
                return
            self._shaken = True
            self._timer.cancel()
            early, self._early = self._early, []
            self._send()
            self.writelines(early)
        self._deliver()
        # What is left is answers to changes of keys; a peer that reads them needs very few.
        if self._outgoing.pending and self._lower.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self._door.failed(self._peer(), "it asks for new keys and does not read the answers")
            self._lower.abort()
        self._send()

    def _deliver(self) -> None:
        ended = False
        while self._reading and not ended and not self._lower.is_closing():
            view = self._upper.get_buffer(-1) if self._buffered else self._door.plaintext
            try:
                count, ended = self._decrypt(memoryview(view))
            except ssl.SSLError as error:
                self._fail(error)
                return
            if count and self._buffered:
                self._upper.buffer_updated(count)
            elif count:
                self._upper.data_received(bytes(view[:count]))
            elif not ended:
                return
        if ended and not self._upper.eof_received():
            self.close()

    def _decrypt(self, view: memoryview) -> tuple[int, bool]:
        """How many bytes are in `view` now, and whether the peer has said farewell.

        Several records at once: the protocol above serves what comes together, together.
        """
        count = 0
        while count < len(view):
            try:
                # With a buffer it returns a count, which its declaration does not know.
                more = cast(int, self._tls.read(len(view) - count, cast(bytearray, view[count:])))
            except ssl.SSLWantReadError:
                return count, False
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                more = 0
            if not more:
                return count, True
            count += more
        return count, False

    def _encrypted(self, view: memoryview) -> Iterator[bytes]:
        """In pieces: OpenSSL's buffer keeps the size that it once had."""
        while len(view):
            count = self._tls.write(view[:WRITE_BYTES])
            view = view[count:]
            yield self._outgoing.read()

    def _resume(self) -> None:
        self._resumes_soon = False
        if not self._lower.is_closing():
            self._go_on()
            if self._reading:
                self._lower.resume_reading()

    def _send(self) -> None:
        if self._outgoing.pending and not self._lower.is_closing():
            self._lower.write(self._outgoing.read())

    def _give_up(self) -> None:
        self._door.failed(
            self._peer(),
            f"the handshake was not done within {self._door.handshake_timeout_s:g} s",
        )
        self._lower.abort()

    def _fail(self, error: ssl.SSLError) -> None:
        self._door.failed(self._peer(), described(error))
        self._send()  # why, for the peer
        self._lower.close()

    def _peer(self) -> str:
        return join_address(*plain_peer(self._lower.get_extra_info("peername")))


def secure_streams(
    door: Door, writer: asyncio.StreamWriter, first: bytes, limit: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over TLS in place of those whose reader has given `first`; OSError if not served."""
    if door.why_not_tls:
        door.failed(join_address(*plain_peer(writer.get_extra_info("peername"))), door.why_not_tls)
        raise ConnectionRefusedError(door.why_not_tls)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport = door.secure(cast(asyncio.Transport, writer.transport), protocol, first)
    protocol.connection_made(transport)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def described_of_server(error: ssl.SSLError) -> str:
    """Why TLS failed with a server that was called, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not accepted: {error.verify_message}; check which authority is"
            " trusted, and that the certificate names the host that is called"
        )
    reason = str(error.reason or error)
    if "ALERT" in reason and "CERT" in reason:
        return f"{reason}; it wants to see a certificate that it accepts"
    return f"{reason}; check that it expects TLS on this port and who signed its certificate"


def described(error: ssl.SSLError) -> str:
    """Why TLS failed with a client, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not accepted: {error.verify_message}; it has to be signed by an"
            " authority in tls.server.trustCertPath"
        )
    reason = str(error.reason or error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return (
            "it shows no certificate, and tls.server.need.client.auth is require; give the client"
            " one"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW"):
        return "it offers only versions before TLS 1.2; renew the client"
    if "ALERT" in reason and ("CERT" in reason or "CA" in reason.split("_")):
        return (
            f"it does not accept our certificate ({reason}); give the client the authority that"
            " signed tls.server.certPath, and a certificate that names this host"
        )
    return f"{reason}; check that the client and this server agree on TLS versions and ciphers"
