"""Long reports, written a few rows at a time.

A topic may have 65,535 queues. Everybody else has a turn of the loop between two steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from cosmodrome.errors import Code, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import Body

ROWS_PER_STEP = 64

Row = TypeVar("Row")


def encode_list(rows: Sequence[Body]) -> bytes:
    """Members of a list, without its brackets."""
    return b",".join(map(bodies.encode, rows))


async def written(
    rows: Iterable[Row], encode: Callable[[list[Row]], bytes], bytes_max: int
) -> bytes:
    """All rows as text, with commas between what `encode` makes of each step's."""
    left = iter(rows)
    parts: list[bytes] = []
    while some := list(itertools.islice(left, ROWS_PER_STEP)):
        parts.append(encode(some))
        bytes_max -= len(parts[-1])
        if bytes_max < 0:
            raise Refused(
                Code.SYSTEM_ERROR,
                "The report is larger than an answer may be; ask for one group and one topic at a"
                " time.",
            )
        await asyncio.sleep(0)
    return b",".join(parts)
