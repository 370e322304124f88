"""Bodies packed with zlib, lz4 or zstd, as the compression bits of a system flag say.

Here and not in `wire.message`, which offers both functions, because the columns of
`arrow` hold plain bodies.
"""

from __future__ import annotations

import zlib

import lz4.frame
import zstandard

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    SYS_COMPRESSED,
    SYS_COMPRESSION_MASK,
    SYS_LZ4,
    SYS_ZLIB,
    SYS_ZSTD,
)


class BodyTooBig(ProtocolError):
    """Decompressed, a body has more bytes than it may have."""


def compress(body: bytes, sys_flag: int) -> bytes:
    """The body packed as the compression bits of `sys_flag` say; unchanged if they say nothing."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    kind = sys_flag & SYS_COMPRESSION_MASK
    if kind in (0, SYS_ZLIB):
        return zlib.compress(body, 5)
    if kind == SYS_LZ4:
        packed: bytes = lz4.frame.compress(body)
        return packed
    if kind == SYS_ZSTD:
        return zstandard.ZstdCompressor(level=3).compress(body)
    raise ProtocolError(_unknown_compression(sys_flag))


def decompress(body: bytes, sys_flag: int, limit_bytes: int) -> bytes:
    """The plain body; never more than `limit_bytes` of memory for its content.

    Compat: writers before 4.9.4 set only the compressed bit and mean zlib.
    """
    if not sys_flag & SYS_COMPRESSED:
        return body
    kind = sys_flag & SYS_COMPRESSION_MASK
    try:
        if kind in (0, SYS_ZLIB):
            inflater = zlib.decompressobj()
            plain = inflater.decompress(body, limit_bytes + 1)
            ended = inflater.eof
        elif kind == SYS_LZ4:
            with lz4.frame.LZ4FrameDecompressor() as reader:
                plain = reader.decompress(body, max_length=limit_bytes + 1)
                ended = reader.eof
        elif kind == SYS_ZSTD:
            plain, ended = _decompress_zstd(body, limit_bytes), True
        else:
            raise ProtocolError(_unknown_compression(sys_flag))
    except (zlib.error, RuntimeError, zstandard.ZstdError, EOFError) as error:
        raise ProtocolError(f"the compressed body is damaged: {error}") from None
    if len(plain) > limit_bytes:
        raise BodyTooBig(_too_big(limit_bytes))
    if not ended:
        raise ProtocolError("the compressed body is cut short")
    return plain


def _decompress_zstd(body: bytes, limit_bytes: int) -> bytes:
    stated = zstandard.get_frame_parameters(body).content_size
    if stated != zstandard.CONTENTSIZE_UNKNOWN and stated > limit_bytes:
        raise BodyTooBig(_too_big(limit_bytes))
    engine = zstandard.ZstdDecompressor()
    try:
        return engine.decompress(body, max_output_size=limit_bytes + 1)
    except zstandard.ZstdError:
        # Too big and damaged look the same from there; a reader tells them apart.
        with engine.stream_reader(body) as reader:
            if len(reader.read(limit_bytes + 1)) > limit_bytes:
                raise BodyTooBig(_too_big(limit_bytes)) from None
        raise


def _too_big(limit_bytes: int) -> str:
    return f"the body grows beyond the cap of {limit_bytes} bytes when it is decompressed"


def _unknown_compression(sys_flag: int) -> str:
    return (
        f"unknown compression 0x{sys_flag & SYS_COMPRESSION_MASK:x} in sysFlag 0x{sys_flag:x};"
        " known are zlib, lz4 and zstd"
    )
