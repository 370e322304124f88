"""One frame: a length word, a header in JSON or binary form, and a body.

`FrameSplitter` cuts a byte stream that arrives in any pieces into frames. It holds at most one
unfinished frame, and a frame is refused by its two length words before its content is buffered:
headers are read as a whole, so they are bounded more tightly than bodies.
`InPlaceSplitter` does the same for a reader that owns the buffer: it copies no body.
"""

from __future__ import annotations

import dataclasses
import json

from cosmodrome import speed
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    FRAME_LENGTH,
    FRAME_PREFIX,
    HEADER_BYTES_MAX,
    HEADER_LENGTH_MASK,
    SERIALIZE_JSON,
)

VERSION = 409  # what every frame of ours reports: the ordinal of 4.9.8
LANGUAGE = 3  # PYTHON
LONG_BYTES = 64 * 1024  # a frame that is longer is not copied more often than it has to be
LANGUAGES = speed.LANGUAGES  # names by code
Prepared = tuple[bytes, bytes]  # see `prepare_json`
_json_text = json.JSONEncoder(ensure_ascii=False).encode


@dataclasses.dataclass(slots=True)
class Frame:
    code: int
    opaque: int
    flag: int = 0
    ext: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    remark: str | None = None
    version: int = VERSION
    language: int = LANGUAGE
    serialize: int = SERIALIZE_JSON
    skipped_bytes: int = 0  # of a body that was not kept, because it is too long for its code

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)


def encode(frame: Frame) -> bytes:
    """The whole frame, length word included."""
    header = speed.encode_header(
        frame.serialize,
        frame.code,
        frame.language,
        frame.version,
        frame.opaque,
        frame.flag,
        frame.remark,
        frame.ext,
    )
    if len(header) > HEADER_BYTES_MAX and not frame.is_response:
        raise ProtocolError(_long_header(len(header)))  # the peer would end the connection
    length = 4 + len(header) + len(frame.body)
    if length + 4 > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a frame of {length + 4} bytes; at most {FRAME_BYTES_MAX} fit, send less at once"
        )
    prefix = FRAME_PREFIX.pack(length, frame.serialize << 24 | len(header))
    return b"".join((prefix, header, frame.body))


def prepare_json(code: int, ext: dict[str, str], last: str) -> Prepared:
    """A JSON request header in two parts, for `speed.client.send_frame`: up to the opaque
    number, and from there to the value of the field `last`; one field more follows it."""
    opening = f'{{"code":{code},"flag":0,"language":"{LANGUAGES[LANGUAGE]}","opaque":'
    fields = "".join(f"{_json_text(name)}:{_json_text(value)}," for name, value in ext.items())
    head = f',"serializeTypeCurrentRPC":"JSON","version":{VERSION},"extFields":{{'
    return opening.encode(), f'{head}{fields}{_json_text(last)}:"'.encode()


def decode(data: bytes | memoryview) -> Frame:
    """A frame without its length word."""
    if len(data) < 4:
        raise ProtocolError(f"a frame of {len(data)} bytes has no room for its header length")
    word = int.from_bytes(data[:4], "big")
    serialize = word >> 24
    header_end = 4 + (word & HEADER_LENGTH_MASK)
    if header_end - 4 > HEADER_BYTES_MAX:
        raise ProtocolError(_long_header(header_end - 4))
    if header_end > len(data):
        raise ProtocolError(
            f"a header of {header_end - 4} bytes in a frame that has {len(data) - 4} left for it"
        )
    code, language, version, opaque, flag, remark, ext = speed.decode_header(
        serialize, bytes(data[4:header_end])
    )
    body = bytes(data[header_end:])
    return Frame(code, opaque, flag, ext, body, remark, version, language, serialize)


def begun(data: bytearray) -> Frame | None:
    """The frame at the front of which only the header has arrived, as one whose body is skipped.

    None when the frame is whole, or its header has not arrived or is broken: whoever cuts the frame
    off says what is wrong with it.
    """
    with memoryview(data) as view:
        if len(view) < FRAME_LENGTH.size + 4:
            return None
        (length,) = FRAME_LENGTH.unpack_from(view)
        header_end = FRAME_LENGTH.size + 4 + _header_bytes(view, 0)
        frame_end = FRAME_LENGTH.size + length
        if not header_end <= len(view) < frame_end:
            return None
        try:
            frame = decode(bytes(view[FRAME_LENGTH.size : header_end]))
        except ProtocolError:
            return None
    frame.skipped_bytes = frame_end - header_end
    return frame


class FrameSplitter:
    """Bytes in any pieces → frames. After a ProtocolError the stream has no next frame."""

    __slots__ = ("_length_max", "_rest")
    _in_place = False  # whether bodies are views of what was fed

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._length_max = frame_bytes_max - FRAME_LENGTH.size
        self._rest = bytearray()  # the unfinished frame

    @property
    def pending_bytes(self) -> int:
        """Bytes of the unfinished frame."""
        return len(self._rest)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that are complete now; what is left waits for the next piece."""
        rest = self._rest
        if rest:
            rest += data
            frames, at = self._cut(rest)
            # Dropping the front of a bytearray moves its start, not its bytes.
            del rest[:at]
        else:
            frames, at = self._cut(data)
            if at < len(data):
                rest += data[at:]
        return frames

    def drop(self) -> None:
        """Give up the memory of an unfinished frame: nothing more is fed."""
        self._rest = bytearray()

    def _cut(self, source: bytes | bytearray | memoryview) -> tuple[list[Frame], int]:
        frames: list[Frame] = []
        at, in_place = 0, self._in_place
        with memoryview(source) as view:
            size = len(view)
            while size - at >= 4:
                (length,) = FRAME_LENGTH.unpack_from(view, at)
                if not 4 <= length <= self._length_max:
                    raise ProtocolError(_bad_length(length, self._length_max + FRAME_LENGTH.size))
                end = at + 4 + length
                if end > size:
                    _check_header(view, at)
                    break
                if in_place:
                    frames.append(_decode_in_place(view, at, end))
                else:
                    piece = view[at + 4 : end]
                    frames.append(decode(bytes(piece) if length < LONG_BYTES else piece))
                at = end
        return frames, at


class InPlaceSplitter(FrameSplitter):
    """Cuts frames out of a buffer that its owner keeps; their bodies are views of that buffer.

    Every `feed` gets what was received and not `used` before. The unfinished frame stays where it
    is; `needed` says how many bytes it will have, as far as that is known.
    """

    __slots__ = ("needed", "used")
    _in_place = True

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        super().__init__(frame_bytes_max)
        self.used = 0  # bytes of the last piece that became frames
        self.needed = FRAME_LENGTH.size

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        frames, used = self._cut(data)
        self.used, self.needed = used, FRAME_LENGTH.size
        if used + FRAME_LENGTH.size <= len(data):
            self.needed += FRAME_LENGTH.unpack_from(data, used)[0]
        return frames


def _decode_in_place(view: memoryview, at: int, end: int) -> Frame:
    """The frame between `at` and `end`; only its header is copied."""
    _, word = FRAME_PREFIX.unpack_from(view, at)
    header_end = at + 8 + (word & HEADER_LENGTH_MASK)
    if header_end > end or header_end - at - 8 > HEADER_BYTES_MAX:
        return decode(bytes(view[at + 4 : end]))  # which says what is wrong
    code, language, version, opaque, flag, remark, ext = speed.decode_header(
        word >> 24, bytes(view[at + 8 : header_end])
    )
    frame = Frame(code, opaque, flag, ext, b"", remark, version, language, word >> 24)
    # Whoever chose `InPlaceSplitter` knows that bodies are views; a cast would cost a call.
    frame.body = view[header_end:end]  # type: ignore[assignment]
    return frame


def frame_end(view: memoryview, at: int) -> int:
    """Where the frame at `at` ends, 0 when it is not whole.

    An impossible length counts as whole: whoever cuts the frame says what is wrong with it, before
    more of it is read.
    """
    if len(view) - at < FRAME_LENGTH.size:
        return 0
    (length,) = FRAME_LENGTH.unpack_from(view, at)
    if length > FRAME_BYTES_MAX - FRAME_LENGTH.size:
        return len(view)
    end: int = at + FRAME_LENGTH.size + length
    if end <= len(view):
        return end
    return len(view) if _header_bytes(view, at) > HEADER_BYTES_MAX else 0


def _header_bytes(view: memoryview, at: int) -> int:
    """How long the header of the frame at `at` is, 0 when that has not been read yet."""
    if len(view) - at < FRAME_PREFIX.size:
        return 0
    word: int = FRAME_PREFIX.unpack_from(view, at)[1]
    return word & HEADER_LENGTH_MASK


def _check_header(view: memoryview, at: int) -> None:
    size = _header_bytes(view, at)
    if size > HEADER_BYTES_MAX:
        raise ProtocolError(_long_header(size))


def sniff(first_bytes: bytes) -> str | None:
    """What a peer that does not speak frames seems to speak: "tls", "http", "grpc", or None.

    A frame's first byte is always zero, so three or four bytes decide.
    """
    if first_bytes[:2] == TLS_FIRST_BYTE + b"\x03":
        return "tls"
    if first_bytes[:4] == b"PRI ":
        return "grpc"
    if first_bytes[:4] in _HTTP_METHODS:
        return "http"
    return None


TLS_FIRST_BYTE = b"\x16"
_HTTP_METHODS = frozenset({b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC"})


def _long_header(size: int) -> str:
    return f"a header of {size} bytes; at most {HEADER_BYTES_MAX} fit, put less into its fields"


def _bad_length(length: int, frame_bytes_max: int) -> str:
    if length < 4:
        return f"frame length {length} is smaller than the header length word"
    return (
        f"frame length {length} (0x{length:08x}) is above the limit of {frame_bytes_max} bytes;"
        " either the peer does not speak this protocol or it sends too much at once"
    )
