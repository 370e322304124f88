"""Addresses of this machine: ports nobody uses, the host that others are told, and a name.

A broker needs three related ports: the main one, the VIP port two below it and the HA port one
above it. The operating system gives away single ports only, so the three are tried out here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

from cosmodrome.errors import ConfigError
from cosmodrome.layout import TOPIC_BYTES_MAX

ANY_ADDRESS = ("", "0.0.0.0", "::")
LOOPBACK = "127.0.0.1"
# Documentation address (RFC 5737): connecting a datagram socket to it sends nothing.
ELSEWHERE = ("192.0.2.1", 9)
VIP_OFFSET = -2
HA_OFFSET = 1
BROKER_NAME_MAX = TOPIC_BYTES_MAX  # a broker has a topic of its own name
_ATTEMPTS_MAX = 100
_NOT_IN_NAMES = re.compile(r"[^%|a-zA-Z0-9_-]")


def free_base_port(host: str) -> int:
    """A port p such that p, p-2 and p+1 can all be bound on `host` right now.

    Nothing is reserved: between this call and the real bind another process may take one, and
    then the bind fails with the usual error.
    """
    for _ in range(_ATTEMPTS_MAX):
        with contextlib.ExitStack() as held:
            port = _bind(held, host, 0)
            if port is None or not 1024 <= port + VIP_OFFSET <= port + HA_OFFSET <= 65535:
                continue
            if all(_bind(held, host, port + offset) for offset in (VIP_OFFSET, HA_OFFSET)):
                return port
    raise ConfigError(
        f"found no three related free ports on {host!r} in {_ATTEMPTS_MAX} attempts;"
        " set listenPort to a port p with p, p-2 and p+1 free"
    )


def advertised_host(bind_address: str) -> str:
    """The address to tell clients when none is configured."""
    if bind_address not in ANY_ADDRESS:
        return bind_address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
            host = str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK  # no route to anywhere: only this machine can be meant
    return LOOPBACK if host in ANY_ADDRESS else host


def is_own_address(host: str) -> bool:
    """Whether `host` is an address of this machine, seen from this machine."""
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        return False  # a name, or nothing: nobody is asked what it means
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent. Only a packet to oneself has the same source and target.
            probe.connect((host, ELSEWHERE[1]))
            return str(probe.getsockname()[0]) == host
        except OSError:
            return False


def broker_name_of_machine() -> str:
    """The name of a broker for which none is configured."""
    return _NOT_IN_NAMES.sub("-", socket.gethostname())[:BROKER_NAME_MAX].strip("-") or "broker"


def _bind(held: contextlib.ExitStack, host: str, port: int) -> int | None:
    """Bind one port until `held` is closed; None when somebody else has it."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error}") from error
    family, kind, protocol, _, address = found[0]
    # A plain bind, without SO_REUSEADDR: a port that lingers in TIME_WAIT is not offered.
    probe = held.enter_context(socket.socket(family, kind, protocol))
    try:
        probe.bind(address)
    except PermissionError:
        return None
    except OSError as error:
        if port == 0:
            raise ConfigError(f"cannot listen on {host!r}: {error}") from error
        return None
    bound: int = probe.getsockname()[1]
    return bound
