"""Which connections a server takes: bounds per process, per server and per address.

A process that runs out of files cannot open the next file of its store, so a part of them is kept
back from sockets. The kernel gives out the lowest free number; so a new socket whose number is
high says how many files are open, whoever opened them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter

from cosmodrome.env.options import SocketOptions

FILES_WANTED = 1 << 20
FILES_RESERVED_MAX = 4096


def raise_file_limit() -> int:
    """Allow this process the open files that the machine lets it have; how many that are."""
    import resource  # here, because clients run on systems that do not have it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft
    return wanted


def files_for_sockets() -> int:
    """Numbers of files below this may be sockets; the others are the store's."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    return limit - min(limit // 4, FILES_RESERVED_MAX)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Admission:
    """Counts the connections of one server."""

    def __init__(self, options: SocketOptions) -> None:
        self._options = options
        self._files_max = files_for_sockets()
        self._total = 0
        self._by_network: Counter[str] = Counter()  # without loopback

    @property
    def connections_max(self) -> int:
        return min(self._options.server_connections_max, self._files_max)

    def look_again(self) -> None:
        """The limit of open files may have been raised since the start."""
        self._files_max = files_for_sockets()

    def admit(self, host: str, file_number: int) -> str:
        """Count a new connection; why it is not taken, empty when it is."""
        options, network = self._options, _network(host)
        if self._total >= options.server_connections_max:
            return (
                f"serverConnectionsMax is {options.server_connections_max};"
                " raise it if the machine has room"
            )
        if file_number >= self._files_max:
            return (
                f"too few files are left for the store, {self._files_max} are for connections;"
                " raise the limit of open files (ulimit -n, LimitNOFILE= of systemd)"
            )
        if network and self._by_network[network] >= options.server_connections_per_address_max:
            return (
                f"{network} has as many connections as one address may have;"
                " raise serverConnectionsPerAddressMax if many clients share it"
            )
        self._total += 1
        if network:
            self._by_network[network] += 1
        return ""

    def leave(self, host: str) -> None:
        """A connection that was admitted is gone."""
        self._total -= 1
        network = _network(host)
        if network:
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]


def _network(host: str) -> str:
    """What counts as one address: an IPv4 address, or the 64 bits that one IPv6 host may choose
    from; nothing for loopback, where proxies and tools of this machine are."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.is_loopback:
        return ""
    if address.version == 6:
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return host
