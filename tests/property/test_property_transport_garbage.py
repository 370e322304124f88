"""Whatever bytes arrive, the server lives, serves others and forgets the connection."""

from __future__ import annotations

import asyncio
import struct

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.transport.raw_peer import Offsets, RawPeer, frame, max_offset, serving, until

_words = st.integers(0, 2**32 - 1).map(lambda word: struct.pack(">I", word))
_small = st.integers(0, 64).map(lambda word: struct.pack(">I", word))
_values = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
_frames = st.builds(
    frame,
    st.sampled_from([14, 15, 30, 31, 9999, -1]),
    st.integers(-(2**31), 2**31 - 1),
    st.dictionaries(st.sampled_from(["topic", "queueId", "consumerGroup", "body"]), _values),
    st.binary(max_size=32),
    st.sampled_from([0, 1, 2, 3]),
)
_header_lies = st.builds(
    lambda length, word, rest: struct.pack(">II", length, word) + rest,
    st.integers(0, 200),
    st.integers(0, 200) | st.integers(2**24, 2**25 + 200),
    st.binary(max_size=200),
)
_pieces = st.lists(
    st.one_of(st.binary(max_size=64), _words, _small, _frames, _header_lies), max_size=6
)


@settings(max_examples=25, deadline=None)
@given(st.lists(_pieces, min_size=1, max_size=8))
def test_garbage_never_hurts_others(conversations: list[list[bytes]]) -> None:
    async def babble(port: int, pieces: list[bytes]) -> None:
        peer = await RawPeer.connect(port)
        try:
            for piece in pieces:
                peer.send(piece)
                await asyncio.sleep(0)
            await peer.writer.drain()
            await peer.ended(0.02)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            await peer.close()

    async def scenario() -> None:
        async with serving(Offsets()) as (server, port):
            good = await RawPeer.connect(port)
            await asyncio.gather(*(babble(port, pieces) for pieces in conversations))
            reply = await good.ask(max_offset(1, queue_id=6))
            assert reply["extFields"] == {"offset": "6"}
            await good.close()
            await until(lambda: server.connections == 0)

    asyncio.run(scenario())
