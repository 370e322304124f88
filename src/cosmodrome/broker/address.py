"""Where clients reach a broker, as text for clients and as bytes for message ids."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket

from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import ConfigError
from cosmodrome.transport.ports import HA_OFFSET, VIP_OFFSET, advertised_host
from cosmodrome.wire.message import join_address, pack_host

_HOST = re.compile(r"[A-Za-z0-9._-]+\Z|\[[0-9A-Fa-f:.%]+\]\Z")


class AdvertisedAddress:
    """Complete only after `choose`, when the port is known."""

    def __init__(self, options: BrokerOptions, ha_listen_port: int = 0) -> None:
        self._options = options
        self._ha_listen_port = ha_listen_port
        self.host = ""
        self.port = options.listen_port
        self.packed = b""  # as message ids hold it

    async def choose(self, port: int) -> None:
        self.port = port
        self.host = self._options.broker_ip1 or advertised_host(self._options.bind_address)
        self.packed = await _pack(self.host, port)

    def store_host(self) -> bytes:
        """`packed` as it is now, for those who are built before it is known."""
        return self.packed

    @property
    def vip_port(self) -> int:
        return self.port + VIP_OFFSET

    @property
    def ha_port(self) -> int:
        return self._ha_listen_port or self.port + HA_OFFSET

    @property
    def text(self) -> str:
        """host:port as clients are told."""
        return join_address(self.host, self.port)

    @property
    def ha_text(self) -> str:
        """host:port as slaves are told."""
        return join_address(self._options.broker_ip2 or self.host, self.ha_port)


def parse_address(key: str, text: str, *, example_port: int, form: str) -> tuple[str, int]:
    """host:port of the setting `key`; ConfigError says what is wrong and shows the `form`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ConfigError(
            f"{key}: {text!r} has no port between 1 and 65535; write {form}, for example"
            f" {text.split(':')[0] or 'localhost'}:{example_port}"
        )
    if not _HOST.match(host):
        raise ConfigError(
            f"{key}: {host!r} is not a host name or address; write {form}, an IPv6 address in"
            " brackets"
        )
    return host.strip("[]"), int(port)


async def _pack(host: str, port: int) -> bytes:
    """A host name is looked up."""
    try:
        return pack_host(str(ipaddress.ip_address(host)), port)
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"brokerIP1: {host!r} has no address ({error}); set it to an address of this machine"
        ) from None
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return pack_host(str(found[0][4][0]), port)
