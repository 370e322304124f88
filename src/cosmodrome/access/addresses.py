"""Lists of addresses, as accounts and settings name them.

Compat: upstream's forms: `*` for everybody, one address, `*` or a range `3-7` in place of a part,
and `{1,2,3}` as the last part. Networks such as `10.1.0.0/16` are ours. Items are separated by
commas; an empty list has nobody.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable

from cosmodrome.errors import ConfigError

EVERYBODY = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})
ITEMS_MAX = 1000

_COMMA = re.compile(r",(?![^{]*\})")  # not one between braces
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Test = Callable[[_Address], bool]


class Addresses:
    """Hosts are addresses as sockets tell them; a name never matches."""

    def __init__(self, items: Iterable[str] = ()) -> None:
        self.texts = tuple(text for item in items for text in _split(item))
        if len(self.texts) > ITEMS_MAX:
            raise ConfigError(f"a list has {len(self.texts)} addresses; at most {ITEMS_MAX}")
        self._everybody = any(text in EVERYBODY for text in self.texts)
        self._tests = [_test(text) for text in self.texts if text not in EVERYBODY]
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.texts)

    def has(self, host: str) -> bool:
        if self._everybody:
            return True
        if not self._tests:
            return False
        known = self._known.get(host)
        if known is None:
            if len(self._known) >= ITEMS_MAX:
                self._known.clear()
            address = _parsed(host)
            known = address is not None and any(test(address) for test in self._tests)
            self._known[host] = known
        return known


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    address = _parsed(host)
    return address is not None and address.is_loopback


def _parsed(host: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _split(item: str) -> list[str]:
    return [text for part in _COMMA.split(item) if (text := part.strip())]


def _test(text: str) -> _Test:
    try:
        if "*" in text or "-" in text or "{" in text:
            return _by_parts(text)
        network = ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError(
            f"{text[:64]!r} is no address; use one such as 10.1.2.3, 10.1.2.*, 10.1.2.3-7,"
            " 10.1.2.{3,5}, 10.1.0.0/16 or *"
        ) from None
    return lambda address: address.version == network.version and address in network


def _by_parts(text: str) -> _Test:
    version, base = (6, 16) if ":" in text else (4, 10)
    separator, count, most = (":", 8, 0xFFFF) if version == 6 else (".", 4, 255)
    parts = [_part(part, base, most) for part in text.split(separator)]
    if len(parts) != count:
        raise ValueError(text)

    def matches(address: _Address) -> bool:
        if address.version != version:
            return False
        numbers = address.exploded.split(separator)
        return all(int(number, base) in part for number, part in zip(numbers, parts, strict=True))

    return matches


def _part(text: str, base: int, most: int) -> range | frozenset[int]:
    if text == "*":
        return range(most + 1)
    if text.startswith("{") and text.endswith("}"):
        return frozenset(_number(number, base, most) for number in text[1:-1].split(","))
    first, dash, last = text.partition("-")
    begin = _number(first, base, most)
    return range(begin, (_number(last, base, most) if dash else begin) + 1)


def _number(text: str, base: int, most: int) -> int:
    number = int(text.strip(), base)
    if not 0 <= number <= most:
        raise ValueError(text)
    return number
