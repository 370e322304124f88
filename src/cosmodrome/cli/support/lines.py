"""Lines of a file or of standard input without blocking the event loop.

A pipe or terminal is read when it has something, so that Ctrl-C works while nothing comes; a
plain file is read in pieces.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from typing import BinaryIO

from cosmodrome.errors import ConfigError

PIECE_BYTES = 64 * 1024
LINE_BYTES_MAX = 8 * 1024 * 1024  # no message is longer, base64 and JSON around it included


async def lines(source: BinaryIO) -> AsyncIterator[tuple[int, bytes]]:
    """Each line with its number, from 1, without its end."""
    rest = b""
    number = 0
    async for piece in _pieces(source):
        rest += piece
        *whole, rest = rest.split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise ConfigError(
                f"line {number + len(whole) + 1} is longer than {LINE_BYTES_MAX} bytes"
            )
        for line in whole:
            number += 1
            yield number, line.removesuffix(b"\r")
    if rest:
        yield number + 1, rest.removesuffix(b"\r")


async def _pieces(source: BinaryIO) -> AsyncIterator[bytes]:
    if stat.S_ISREG(os.fstat(source.fileno()).st_mode):
        while piece := source.read(PIECE_BYTES):
            yield piece
            await asyncio.sleep(0)
        return
    reader = asyncio.StreamReader(limit=PIECE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), source
    )
    try:
        while piece := await reader.read(PIECE_BYTES):
            yield piece
    finally:
        transport.close()
