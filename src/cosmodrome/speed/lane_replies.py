"""Replies of the pure lane: frames with holes, filled many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cosmodrome.layout import FRAME_PREFIX, SERIALIZE_BINARY

_OPAQUE_AT = FRAME_PREFIX.size + 5  # in a frame with a binary header
_pack_prefix = FRAME_PREFIX.pack


class Template:
    """A reply with holes, cut from a frame that the ordinary encoder made.

    `parts` lie around the holes. In a JSON header the last hole is the opaque. In a binary one
    the opaque is a number at its place, and each hole is preceded by its length.
    """

    def __init__(self, parts: list[bytes], binary: bool, fields_at: int, fields_bytes: int) -> None:
        if not all(isinstance(part, bytes) for part in parts):
            raise TypeError("parts of a template are bytes")
        self.parts = parts
        self.binary = binary
        self.holes = len(parts) - 1 - (not binary)
        if self.holes < 0:
            raise ValueError("a template without parts")
        self._fields_at = FRAME_PREFIX.size + fields_at
        self._fields_bytes = fields_bytes - sum(map(len, parts))
        plain = [part.replace(b"%", b"%%") for part in parts]
        self._numbers = b"%d".join(plain)
        if self.holes == 3 and not binary:
            # For sends: the id of one message, and of several.
            rest = b"%d".join(plain[1:])
            self.one = plain[0] + b"%b%016X" + rest
            self.many = plain[0] + b"%b" + rest

    def head(self, opaque: int, body_bytes: int, *numbers: int) -> bytes:
        """Length words and header of a reply whose holes are these numbers."""
        if len(numbers) != self.holes:
            raise ValueError(f"{len(numbers)} numbers for {self.holes} holes")
        if self.binary:
            return self.fill(opaque, body_bytes, [b"%d" % number for number in numbers])
        header = self._numbers % (*numbers, opaque)
        return _pack_prefix(4 + len(header) + body_bytes, len(header)) + header

    def fill(self, opaque: int, body_bytes: int, texts: Sequence[bytes]) -> bytes:
        """The same for a binary header, its holes given as text."""
        out = bytearray(FRAME_PREFIX.size)
        for part, text in zip(self.parts, texts, strict=False):
            out += part
            out[-4:] = len(text).to_bytes(4, "big")
            out += text
        out += self.parts[-1]
        header_bytes = len(out) - FRAME_PREFIX.size
        out[_OPAQUE_AT : _OPAQUE_AT + 4] = opaque.to_bytes(4, "big", signed=True)
        # All that is not in the parts was put into the holes.
        fields_bytes = self._fields_bytes + header_bytes
        out[self._fields_at : self._fields_at + 4] = fields_bytes.to_bytes(4, "big")
        FRAME_PREFIX.pack_into(
            out, 0, 4 + header_bytes + body_bytes, SERIALIZE_BINARY << 24 | header_bytes
        )
        return bytes(out)


# topic, messages, bytes, code, opaque, serialize, one-way, queue id, queue offset and the log
# offset, or those of a batch
Sent = tuple[str, int, int, int, int, int, bool, int, int, int | tuple[int, ...]]


class Ticket:
    """Sends that were staged together and wait for the same promise."""

    __slots__ = ("_sent", "began", "connection")

    def __init__(self, sent: list[Sent]) -> None:
        self._sent = sent
        self.connection: Any = None
        self.began = 0.0

    def __len__(self) -> int:
        return len(self._sent)

    def requests(self) -> list[tuple[int, int, int, bool]]:
        """Code, opaque, serialize and one-way of each."""
        return [one[3:7] for one in self._sent]

    def sums(self) -> dict[str, list[int]]:
        """Topic, requests, messages and bytes, for each topic."""
        sums: dict[str, list[int]] = {}
        last = None
        requests = messages = total = 0
        for topic, count, size, *_ in self._sent:
            if topic is not last:
                if last is not None:
                    _add(sums, last, requests, messages, total)
                last = topic
                requests = messages = total = 0
            requests += 1
            messages += count
            total += size
        if last is not None:
            _add(sums, last, requests, messages, total)
        return sums

    def replies(self, json: Template, binary: Template, host: bytes) -> bytes:
        """All answers, one frame after the other; `host` is the front half of message ids."""
        if json.binary or not binary.binary or json.holes != 3 or binary.holes != 3:
            raise ValueError("these are not the templates of a send")
        one, many = json.one, json.many
        out: list[bytes] = []
        for _, _, _, _, opaque, serialize, oneway, queue_id, queue_offset, place in self._sent:
            if oneway:
                continue
            if serialize:
                ids = _ids(host, place)
                out.append(binary.fill(opaque, 0, (ids, b"%d" % queue_id, b"%d" % queue_offset)))
                continue
            if place.__class__ is int:
                header = one % (host, place, queue_id, queue_offset, opaque)
            else:
                header = many % (_ids(host, place), queue_id, queue_offset, opaque)
            size = len(header)
            out.append(_pack_prefix(4 + size, size))
            out.append(header)
        return b"".join(out)


def _add(sums: dict[str, list[int]], topic: str, requests: int, messages: int, size: int) -> None:
    one = sums.setdefault(topic, [0, 0, 0])
    one[0] += requests
    one[1] += messages
    one[2] += size


def _ids(host: bytes, place: int | tuple[int, ...]) -> bytes:
    if isinstance(place, int):
        return b"%b%016X" % (host, place)
    return b",".join([b"%b%016X" % (host, one) for one in place])
