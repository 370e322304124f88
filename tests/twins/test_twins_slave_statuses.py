"""Both lanes answer alike when a slave is missing or late, and when it comes back."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import pytest
from tests.twins.test_twins_lanes import Side, compare, frame, item, send_fields

from cosmodrome.errors import Code


def codes(side: Side) -> dict[int, int]:
    found = {}
    for opaque, reply in side.replies().items():
        word = struct.unpack_from(">I", reply, 4)[0]
        binary = word >> 24
        found[opaque] = (
            struct.unpack_from(">h", reply, 8)[0]
            if binary
            else json.loads(reply[8 : 8 + word])["code"]
        )
    return found


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_statuses_of_slaves(tmp_path: Path, flush: str) -> None:
    slave = False

    async def settle(side: Side) -> None:
        async with asyncio.timeout(60):
            while side.connection.in_flight:
                await asyncio.sleep(0.001)

    async def drive(side: Side) -> None:
        nonlocal slave
        side.store.require_acks(lambda end: slave)
        batch = item(b"one") + item(b"two")
        quick = send_fields(i="WAIT\x01false")
        for linked, first in ((False, 10), (True, 20)):
            slave = linked
            await side.feed(
                frame(310, first, send_fields(), b"plain")
                + frame(310, first + 1, send_fields(), b"binary", style=4)
                + frame(320, first + 2, send_fields(m="true"), batch)
                + frame(310, first + 3, quick, b"does not wait")
                + frame(310, first + 4, send_fields(b="unknown?"), b"refused")
            )
            await settle(side)
        side.store.acknowledge(1 << 40)
        await side.feed(frame(310, 30, send_fields(), b"in step"))

    sides = await compare(tmp_path, drive, flush_disk_type=flush, slave_timeout=50)
    none, late = Code.SLAVE_NOT_AVAILABLE, Code.FLUSH_SLAVE_TIMEOUT
    for side in sides:
        found = codes(side)
        assert [found[at] for at in (10, 11, 12, 13)] == [none, none, none, Code.SUCCESS]
        assert [found[at] for at in (20, 21, 22, 23)] == [late, late, late, Code.SUCCESS]
        assert found[14] == found[24] not in (none, late, Code.SUCCESS)
        assert found[30] == Code.SUCCESS
    assert sides[0].dispatched > sides[1].dispatched, "the lane took the plain ones"
