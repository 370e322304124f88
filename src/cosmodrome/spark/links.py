"""Blocking connections to name servers and brokers, kept between the tasks of one process.

A Python worker of Spark runs one task after another. Opening a connection per task, perhaps with a
TLS handshake, would cost more than reading a small range. A user takes a connection for itself and
gives it back; two users at once get two connections. A connection that broke, was idle for long, or
was inherited over a fork is not given out again.
"""

from __future__ import annotations

import atexit
import os
import re
import ssl
import time
from random import Random
from typing import overload

from cosmodrome.client.options import Credentials, split_address
from cosmodrome.client.signing import sign
from cosmodrome.env.backoff import Backoff
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ConfigError, CosmodromeError, Refused, Unreachable
from cosmodrome.spark.read.options import Connection
from cosmodrome.transport.plain import PlainConnection
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.session import Prepare

IDLE_S = 60.0  # brokers close after 120
KEPT_MAX = 64  # connections that wait for their next use
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 3.0

# Compat: the codes of 4.x and 5.x have other meanings too; only the remark tells them apart.
_DENIED_CODES = (Code.SYSTEM_ERROR, Code.NO_PERMISSION)
_DENIED = re.compile(r"AclException|signature failed|no permission to access")
_CLOSED = re.compile(r"closed the connection|the peer closed it")

_Key = tuple[str, Connection]


class _Pool:
    def __init__(self) -> None:
        self._kept: dict[_Key, list[tuple[float, PlainConnection]]] = {}
        self._process = os.getpid()

    def take(self, key: _Key) -> PlainConnection | None:
        self._drop_old()
        waiting = self._kept.get(key, [])
        while waiting:
            link = waiting.pop()[1]
            if link.looks_alive():
                return link
            link.close()
        return None

    def give(self, key: _Key, link: PlainConnection) -> None:
        self._drop_old()
        if not link.is_open or sum(map(len, self._kept.values())) >= KEPT_MAX:
            link.close()
            return
        self._kept.setdefault(key, []).append((time.monotonic(), link))

    def close(self) -> None:
        kept, self._kept = self._kept, {}
        for waiting in kept.values():
            for _, link in waiting:
                link.close()

    def _drop_old(self) -> None:
        if self._process != os.getpid():
            # These are the parent's: closing our copies leaves its connections open.
            self.close()
            self._process = os.getpid()
        oldest = time.monotonic() - IDLE_S
        for key, waiting in list(self._kept.items()):
            for item in [item for item in waiting if item[0] < oldest]:
                waiting.remove(item)
                item[1].close()
            if not waiting:
                del self._kept[key]


_pool = _Pool()
atexit.register(_pool.close)  # or Python complains of sockets that nobody closed


def take(address: str, connection: Connection) -> PlainConnection:
    """A connection to `host:port` that nobody else uses; it may not be open yet."""
    found = _pool.take((address, connection))
    if found is not None:
        return found
    host, port = split_address(address)
    return PlainConnection(
        host,
        port,
        connect_timeout_ms=min(connection.timeout_ms, 5_000),
        tls=tls_context(connection),
        prepare=_signer(connection),
    )


def give_back(address: str, connection: Connection, link: PlainConnection) -> None:
    """Keep it for its next user, unless it broke."""
    _pool.give((address, connection), link)


def close_all() -> None:
    """Close what waits for its next use. For tests: a process of Spark ends with its links."""
    _pool.close()


def credentials(connection: Connection) -> Credentials | None:
    if connection.access_key is None or connection.secret_key is None:
        return None
    return Credentials(connection.access_key, connection.secret_key, connection.security_token)


def tls_context(connection: Connection) -> ssl.SSLContext | None:
    """What the tls options say; ConfigError names the file that cannot be used."""
    if not connection.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=connection.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tlsCa={connection.tls_ca}: {error}") from error
    if connection.tls_cert is not None:
        try:
            context.load_cert_chain(connection.tls_cert, connection.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"tlsCert={connection.tls_cert}, tlsKey={connection.tls_key}: {error}"
            ) from error
    if not connection.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def is_denial(error: BaseException) -> bool:
    """Whether a broker's access control said no; it will say so again."""
    return (
        isinstance(error, Refused)
        and error.code in _DENIED_CODES
        and _DENIED.search(error.remark) is not None
    )


@overload
def explained(error: Refused, connection: Connection) -> Refused: ...


@overload
def explained(error: CosmodromeError, connection: Connection) -> CosmodromeError: ...


def explained(error: CosmodromeError, connection: Connection) -> CosmodromeError:
    """The same error; when a peer does not let us in, with the options that may change that."""
    hint = _hint(error, connection)
    if not hint:
        return error
    if isinstance(error, Refused):
        hinted: CosmodromeError = Refused(error.code, f"{error.remark}; {hint}")
    else:
        hinted = Unreachable(f"{error}; {hint}")
    hinted.__cause__ = error.__cause__
    return hinted


def _hint(error: CosmodromeError, connection: Connection) -> str:
    if is_denial(error):
        if connection.access_key is None:
            return "set the options accessKey and secretKey"
        if "permission" not in str(error):
            return "check the options accessKey and secretKey"
        other = " (or the option consumerGroup another group)" if "group:" in str(error) else ""
        return (
            f"the broker's access control must allow it to accessKey={connection.access_key}{other}"
        )
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError | ConnectionResetError):
        cause = cause.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"{cause.verify_message}: name who signed the certificate in the option tlsCa, or set"
            " tlsVerify=false to trust any"
        )
    closed = isinstance(cause, ConnectionResetError) or _CLOSED.search(str(error)) is not None
    alerted = isinstance(cause, ssl.SSLError) and "ALERT" in str(cause)
    # With TLS 1.3 a server complains of a missing certificate only after our handshake is done.
    if connection.tls and connection.tls_cert is None and (closed or alerted):
        return "if it wants to see a certificate, set the options tlsCert and tlsKey"
    if isinstance(cause, ssl.SSLError):
        return "if it has no TLS, leave the option tls out"
    if closed and not connection.tls:
        return "if it takes TLS only, set the option tls=true"
    return ""


class Attempts:
    """Counts the attempts at one thing, waits between them, and remembers why they failed."""

    def __init__(self, retries: int, random: Random | None = None) -> None:
        self._retries = retries
        self._random = random
        self._backoff: Backoff | None = None  # most attempts succeed
        self.failures: list[str] = []

    def failed(self, error: Exception) -> bool:
        """Note a failure; whether another attempt is allowed."""
        self.failures.append(str(error))
        return len(self.failures) <= self._retries

    def wait(self) -> None:
        if self._backoff is None:
            # Random numbers of this process: those of forked ones must differ.
            random = self._random or real_env().random
            self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S, random)
        time.sleep(self._backoff.next_s())

    def reset(self) -> None:
        self.failures.clear()
        self._backoff = None

    def describe(self) -> str:
        """The attempts in words; those that failed alike are named once."""
        count = len(self.failures)
        return f"{count} attempt{'s' * (count != 1)}: " + "; ".join(dict.fromkeys(self.failures))


def _signer(connection: Connection) -> Prepare | None:
    keys = credentials(connection)
    if keys is None:
        return None

    def prepare(frame: Frame) -> None:
        sign(frame, keys)

    return prepare
