"""Certificates and keys of a process, read from their files and read again when those change.

Files are replaced while a server runs: a pair that does not fit, or is half written, leaves the old
one in use and is looked at again. Connections that exist keep what they began with.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NoReturn

from cosmodrome.env.background import Background
from cosmodrome.env.base import Disk, Env
from cosmodrome.env.options import TlsOptions
from cosmodrome.errors import ConfigError
from cosmodrome.transport.tls import Door

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
EXPIRY_WARNING_DAYS = 30
DAY_MS = 86_400_000
_PEM_BEGIN, _PEM_END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_VERIFY = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "require": ssl.CERT_REQUIRED,
}


class Tls:
    """What a process has of TLS: the door of its ports, and how it calls others."""

    def __init__(self, options: TlsOptions, env: Env) -> None:
        _check(options)
        self.enforces = options.tls_server_mode == "enforcing"
        self._env = env
        self._server: _Watched | None = None
        self._client: _Watched | None = None
        if options.tls_server_mode != "disabled" and options.tls_server_cert_path:
            self._server = _Watched(
                "tls.server.certPath", _server_files(options), lambda: _server(options), env
            )
        if options.tls_enable or self.enforces:
            self._client = _Watched(
                "tls.client.certPath", _client_files(options), lambda: _client(options), env
            )
        self.door = Door(options.tls_server_mode, self._incoming)
        self._watch = Background("certificates")

    async def start(self) -> None:
        """Look for changed files from now on."""
        if self._watched:
            self._watch.start(self._look)

    async def stop(self) -> None:
        await self._watch.stop()

    @property
    def certificate_ends_ms(self) -> int | None:
        """Until when the certificate of the ports is valid; None without one."""
        return None if self._server is None else self._server.ends_ms

    def outgoing(self) -> ssl.SSLContext | None:
        """For a connection to another server; None for a plain one."""
        return None if self._client is None else self._client.context

    def _incoming(self) -> ssl.SSLContext | None:
        return None if self._server is None else self._server.context

    @property
    def _watched(self) -> list[_Watched]:
        return [each for each in (self._server, self._client) if each is not None]

    async def _look(self) -> NoReturn:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for each in self._watched:
                await self._env.offload(each.look)


class _Watched:
    """A context that follows its files. The first of them has the certificate, or is empty."""

    def __init__(
        self, name: str, files: Sequence[str], make: Callable[[], ssl.SSLContext], env: Env
    ) -> None:
        self._name = name
        self._files = files
        self._make = make
        self._env = env
        self._marks = self._marks_now()
        self._failed = False
        self._warn_at_ms = 0
        self.ends_ms: int | None = None
        self.context = make()
        self._check_expiry()

    def look(self) -> None:
        """Off the loop: reading files may take long."""
        marks = self._marks_now()
        if self._failed or marks != self._marks:
            self._renew(is_new=marks != self._marks)
            self._marks = marks
        self._check_expiry()

    def _renew(self, *, is_new: bool) -> None:
        try:
            self.context = self._make()
        except ConfigError as error:
            if is_new:
                log.error(
                    "certificates_not_renewed setting=%s error=%s; the old ones stay in use until"
                    " the files are mended",
                    self._name,
                    error,
                )
            self._failed = True
            return
        self._failed = False
        self._warn_at_ms = 0
        log.info("certificates_renewed setting=%s file=%s", self._name, self._files[0])

    def _marks_now(self) -> list[tuple[int, int]]:
        return [_mark(self._env.disk, path) for path in self._files if path]

    def _check_expiry(self) -> None:
        """Once a day, off the loop except at the start."""
        now_ms = self._env.clock.now_ms()
        if not self._files[0] or now_ms < self._warn_at_ms:
            return
        self._warn_at_ms = now_ms + DAY_MS
        try:
            self.ends_ms = ends_ms = expires_ms(self._env.disk.read(self._files[0]))
        except (OSError, ValueError) as error:
            log.warning("certificate_expiry_unknown file=%s error=%s", self._files[0], error)
            return
        days = (ends_ms - now_ms) // DAY_MS
        if days < EXPIRY_WARNING_DAYS:
            log.log(
                logging.ERROR if days < 0 else logging.WARNING,
                "certificate_expires setting=%s file=%s days=%d next=replace the file; it is read"
                " again without a restart",
                self._name,
                self._files[0],
                days,
            )


def _check(options: TlsOptions) -> None:
    if options.tls_server_mode == "enforcing" and not options.tls_server_cert_path:
        raise ConfigError(
            "tls.server.mode is enforcing, but there is no certificate: set tls.server.certPath"
            " and tls.server.keyPath (`cosmo tls make-test-certs` makes some to try)"
        )
    if options.tls_server_need_client_auth != "none" and not options.tls_server_trust_cert_path:
        raise ConfigError(
            f"tls.server.need.client.auth is {options.tls_server_need_client_auth}, but nobody is"
            " named who signs certificates of clients: set tls.server.trustCertPath"
        )


def _server_files(options: TlsOptions) -> tuple[str, str, str]:
    return (
        options.tls_server_cert_path,
        options.tls_server_key_path,
        options.tls_server_trust_cert_path,
    )


def _client_files(options: TlsOptions) -> tuple[str, str, str]:
    return (
        options.tls_client_cert_path,
        options.tls_client_key_path,
        options.tls_client_trust_cert_path or options.tls_server_trust_cert_path,
    )


def _server(options: TlsOptions) -> ssl.SSLContext:
    cert, key, trust = _server_files(options)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_pair(context, "tls.server", cert, key, options.tls_server_key_password)
    if trust:
        _load_trust(context, "tls.server.trustCertPath", trust)
    context.verify_mode = _VERIFY[options.tls_server_need_client_auth]
    return context


def _client(options: TlsOptions) -> ssl.SSLContext:
    cert, key, trust = _client_files(options)
    context = client_context(verify=options.tls_client_auth_server)
    if trust and options.tls_client_auth_server:
        _load_trust(context, "tls.client.trustCertPath", trust)
    elif options.tls_client_auth_server:
        context.load_default_certs()
    if cert:
        _load_pair(context, "tls.client", cert, key, options.tls_client_key_password)
    return context


def client_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _load_pair(context: ssl.SSLContext, prefix: str, cert: str, key: str, password: str) -> None:
    try:
        # With no password at all OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert, key or None, password=password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{prefix}.certPath={cert}, {prefix}.keyPath={key}: {_why(error)}; both have to be PEM"
            f" files that belong together, and {prefix}.keyPassword opens the key if it is locked"
        ) from None


def _load_trust(context: ssl.SSLContext, key: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={path}: {_why(error)}; it has to be a PEM file with certificates"
        ) from None


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error)
    return str(getattr(error, "strerror", None) or error)


def _mark(disk: Disk, path: str) -> tuple[int, int]:
    """What changes when a file does."""
    try:
        return disk.mtime_ms(path), disk.size(path)
    except OSError:
        return -1, -1


# --- the one date that is needed of a certificate ------------------------------------------------


def expires_ms(pem: bytes) -> int:
    """Until when the first certificate of a PEM file is valid; ValueError when it has none.

    The standard library tells it of a peer's certificate only. In DER each value is a tag, a length
    and content; the certificate's first part has its validity behind version, number, algorithm
    and issuer, where the version may be missing.
    """
    begin, end = pem.find(_PEM_BEGIN), pem.find(_PEM_END)
    if begin < 0 or end < begin:
        raise ValueError("it has no certificate in PEM form")
    try:
        der = base64.b64decode(pem[begin + len(_PEM_BEGIN) : end])
        _, certificate, _ = _der_value(der)
        _, rest, _ = _der_value(certificate)
        tag, _, after = _der_value(rest)
        for _ in range(3 if tag == 0xA0 else 2):
            _, _, after = _der_value(after)
        _, validity, _ = _der_value(after)
        _, _, after = _der_value(validity)
        tag, text, _ = _der_value(after)
    except (IndexError, binascii.Error) as error:
        raise ValueError(f"its certificate is damaged: {error}") from None
    # Years have two digits in one of the two forms, and that form ends with 2049.
    form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
    moment = datetime.strptime(text.decode("latin-1"), form).replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _der_value(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag and content of the first value, and what follows it."""
    length, at = data[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(data[2:at], "big")
    if at + length > len(data):
        raise IndexError("it ends early")
    return data[0], data[at : at + length], data[at + length :]
