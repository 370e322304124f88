"""What a field of settings says about itself: meaning, range, and whether it changes on request."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Meta

MIB = 1024 * 1024
MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS
YEAR_9999_MS = 253_402_300_799_999
INT32_MAX = 2**31 - 1  # upstream reads most numbers into a Java int

# May remove messages or stop every client: it matters where a request comes from.
DANGEROUS: Literal["dangerous"] = "dangerous"


class Options(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """A group of settings; fields are documented by `Meta(description=...)`."""


def described(
    text: str,
    *,
    least: int | None = None,
    most: int | None = None,
    live: bool | Literal["dangerous"] = False,
    secret: bool = False,
) -> Meta:
    """A number that is `live` needs both bounds; what is `secret` is never shown."""
    marks = {"live": bool(live), "dangerous": live == DANGEROUS, "secret": secret}
    extra = {name: True for name, marked in marks.items() if marked}
    return Meta(description=text, ge=least, le=most, extra=extra or None)
