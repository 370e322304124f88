"""A peer that sends exactly the frames it is told to, for tests of the name server."""

from __future__ import annotations

import asyncio

from cosmodrome.layout import FLAG_ONEWAY
from cosmodrome.wire.frame import Frame, FrameSplitter, encode


class RawPeer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._splitter = FrameSplitter()
        self._frames: list[Frame] = []
        self._opaque = 1_000_000

    @classmethod
    async def connect(cls, port: int) -> RawPeer:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(
        self, code: int, ext: dict[str, str] | None = None, body: bytes = b"", version: int = 409
    ) -> Frame:
        self._opaque += 1
        frame = Frame(code, self._opaque, 0, ext or {}, body, version=version)
        self.send(encode(frame))
        return await self.answer(frame.opaque)

    def tell(self, code: int, ext: dict[str, str], body: bytes = b"") -> None:
        self.send(encode(Frame(code, 7, FLAG_ONEWAY, ext, body)))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self, opaque: int) -> Frame:
        async with asyncio.timeout(60):
            while True:
                for frame in self._frames:
                    if frame.opaque == opaque:
                        self._frames.remove(frame)
                        return frame
                data = await self._reader.read(65536)
                assert data, "the server closed the connection"
                self._frames.extend(self._splitter.feed(data))

    async def closed(self) -> bool:
        async with asyncio.timeout(60):
            return not await self._reader.read(65536)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass
