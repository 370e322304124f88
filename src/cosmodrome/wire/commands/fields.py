"""Field types and texts that rows share.

Java reads numbers into 32 and 64 bits; a number that does not fit is refused when the header
is decoded, so no handler meets one that it could not store.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from cosmodrome.wire.table import Reply

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


# Why rows of unused codes are not served.
DROPPED = "dropped upstream, and no client sends it"


class OffsetReply(Reply):
    """One queue offset."""

    offset: Int64


class TimestampReply(Reply):
    """One store time in milliseconds, -1 when there is none."""

    timestamp: Int64
