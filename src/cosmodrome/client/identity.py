"""Who a client is: its id in the cluster, and the ids it gives to messages."""

from __future__ import annotations

import datetime
import itertools
import os
import socket

from cosmodrome.client.options import DEFAULT_INSTANCE, ClientOptions
from cosmodrome.env.base import Env
from cosmodrome.errors import ConfigError

LOOPBACK = "127.0.0.1"

# Client ids that are in use in this process. Two clients with one id in one group would be given
# the same queues, so an id is taken once; dictionaries are safe to use from several threads.
_taken: dict[str, object] = {}


def local_ip() -> str:
    """The address this machine would use towards others; nothing is sent to find out."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            ip: str = probe.getsockname()[0]
            return ip
    return LOOPBACK


class ClientId:
    """A client id that nobody else in this process has, until it is given back."""

    def __init__(self, options: ClientOptions) -> None:
        ip = options.client_ip or local_ip()
        tail = f"@{options.unit_name}" if options.unit_name else ""
        self._owner = object()
        if options.instance_name != DEFAULT_INSTANCE:
            self.text = f"{ip}@{options.instance_name}{tail}"
            if _taken.setdefault(self.text, self._owner) is not self._owner:
                raise ConfigError(
                    f"client id {self.text} is in use in this process by a client with other"
                    " options; give each its own instance_name"
                )
            return
        for number in itertools.count(1):
            name = f"{os.getpid()}" if number == 1 else f"{os.getpid()}#{number}"
            self.text = f"{ip}@{name}{tail}"
            if _taken.setdefault(self.text, self._owner) is self._owner:
                return

    def give_back(self) -> None:
        if _taken.get(self.text) is self._owner:
            del _taken[self.text]


class MessageIds:
    """Unique ids of messages, in upstream's layout: tools read the time out of them.

    ip (4 or 16 bytes), process id (2), a constant of this process (4), milliseconds since the
    local month began (4), a counter (2), in hexadecimal. At most 65,536 ids per millisecond.
    """

    def __init__(self, env: Env, ip: str) -> None:
        self._clock = env.clock
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        prefix = socket.inet_pton(family, ip.partition("%")[0])
        prefix += (os.getpid() & 0xFFFF).to_bytes(2, "big")
        prefix += env.random.getrandbits(32).to_bytes(4, "big")
        self._prefix = prefix.hex().upper()
        self._counter = env.random.getrandbits(16)
        self._month_ms = 0
        self._next_month_ms = 0
        self._stamp = (-1, "")

    def next(self) -> str:
        self._counter = (self._counter + 1) & 0xFFFF
        now_ms = self._clock.now_ms()
        if now_ms != self._stamp[0]:
            if not self._month_ms <= now_ms < self._next_month_ms:
                self._turn_month(now_ms)
            self._stamp = (now_ms, f"{self._prefix}{(now_ms - self._month_ms) & 0xFFFFFFFF:08X}")
        return f"{self._stamp[1]}{self._counter:04X}"

    def _turn_month(self, now_ms: int) -> None:
        now = datetime.datetime.fromtimestamp(now_ms / 1000)
        first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        after = (first + datetime.timedelta(days=32)).replace(day=1)
        self._month_ms = int(first.timestamp() * 1000)
        self._next_month_ms = int(after.timestamp() * 1000)
