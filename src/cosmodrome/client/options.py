"""How a client finds the cluster and presents itself; producers and consumers share it.

Frozen and hashable: clients with equal options share one set of connections.
"""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Mapping
from typing import Protocol

from cosmodrome.env.ports import NAMESRV_DEFAULT as NAMESRV_DEFAULT
from cosmodrome.errors import ConfigError
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import whole_number

NAMESRV_VARIABLES = ("COSMO_NAMESRV", "NAMESRV_ADDR")
DEFAULT_INSTANCE = "DEFAULT"


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """Keys of the broker's access control; every request is signed with them."""

    access_key: str
    secret_key: str = dataclasses.field(repr=False)
    security_token: str | None = dataclasses.field(default=None, repr=False)


def credentials_of(environ: Mapping[str, str]) -> Credentials | None:
    """The keys in COSMO_ACCESS_KEY, COSMO_SECRET_KEY and COSMO_SECURITY_TOKEN, if there are any."""
    access_key, secret_key = environ.get("COSMO_ACCESS_KEY"), environ.get("COSMO_SECRET_KEY")
    if not access_key or not secret_key:
        return None
    return Credentials(access_key, secret_key, environ.get("COSMO_SECURITY_TOKEN") or None)


class RpcHook(Protocol):
    """Sees every request just before it is encoded, and every answer."""

    def before_request(self, address: str, frame: Frame) -> None:
        """Header fields may be added to `frame.ext`; an exception ends the request."""

    def after_response(self, address: str, request: Frame, response: Frame) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """What all producers and consumers of a program usually have in common."""

    instance_name: str = DEFAULT_INSTANCE  # DEFAULT becomes the process id
    unit_name: str | None = None
    namespace: str = ""
    client_ip: str | None = None  # part of the client id; None: the address of this machine
    vip_channel: bool = False  # talk to brokers on the port two below their own
    # Those of the environment unless others are given.
    credentials: Credentials | None = dataclasses.field(
        default_factory=lambda: credentials_of(os.environ)
    )
    tls: ssl.SSLContext | None = None
    rpc_hooks: tuple[RpcHook, ...] = ()

    call_timeout_ms: int = 3_000
    connect_timeout_ms: int = 3_000
    in_flight_max: int = 4_096  # requests per connection that are not answered yet
    route_refresh_ms: int = 30_000
    heartbeat_ms: int = 30_000

    def __post_init__(self) -> None:
        for name in ("call_timeout_ms", "connect_timeout_ms", "in_flight_max"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("route_refresh_ms", "heartbeat_ms"):
            if getattr(self, name) < 100:
                raise ConfigError(f"{name} must be at least 100, not {getattr(self, name)}")
        if not self.instance_name or "@" in self.instance_name:
            raise ConfigError(f"instance_name {self.instance_name!r}: not empty and without @")


def name_servers(text: str | None) -> tuple[tuple[str, int], ...]:
    """Addresses `host:port;host:port`. None: those of the environment, or this machine."""
    if text is None:
        values = (os.environ.get(name, "").strip() for name in NAMESRV_VARIABLES)
        text = next((value for value in values if value), NAMESRV_DEFAULT)
    addresses = tuple(split_address(part) for part in text.replace(",", ";").split(";") if part)
    if not addresses:
        raise ConfigError("no name server address; give one as host:port")
    return tuple(dict.fromkeys(addresses))


def split_address(text: str) -> tuple[str, int]:
    """`host:port`, with brackets around an IPv6 address."""
    host, colon, port = text.strip().rpartition(":")
    number = whole_number(port) or 0
    if not colon or not 0 < number < 65536 or not host:
        raise ConfigError(
            f"{text!r} is not an address; write host:port, for example {NAMESRV_DEFAULT}"
        )
    return host.strip("[]"), number
