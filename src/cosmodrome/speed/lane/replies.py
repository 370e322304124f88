"""Replies of the pure lane: frames with holes, filled many at a time."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from cosmodrome.layout import FRAME_PREFIX, SERIALIZE_BINARY
from cosmodrome.speed.lane.counts import PutCounts
from cosmodrome.speed.lane.messages import Plan

_pack_prefix = FRAME_PREFIX.pack
_pack_int = struct.Struct(">i").pack


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
        if binary:
            # Without the numbers that are put in: opaque, length of the fields, of each hole.
            cut = [*(part[:-4] for part in parts[:-1]), parts[-1]]
            first, *self._rests = cut
            self._front = (first[:5], first[9:fields_at], first[fields_at + 4 :])
            self._fixed_bytes = sum(map(len, parts))
            self._fields_bytes = fields_bytes
            return
        plain = [part.replace(b"%", b"%%") for part in parts]
        self._numbers = b"%d".join(plain)
        if self.holes == 3:
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
        text_bytes = sum(map(len, texts))
        header_bytes = self._fixed_bytes + text_bytes
        word = SERIALIZE_BINARY << 24 | header_bytes
        before, between, behind = self._front
        fields_bytes = self._fields_bytes + text_bytes
        out = [_pack_prefix(4 + header_bytes + body_bytes, word), before, _pack_int(opaque)]
        out += (between, _pack_int(fields_bytes), behind)
        for text, part in zip(texts, self._rests, strict=True):
            out += (_pack_int(len(text)), text, part)
        return b"".join(out)


Request = tuple[int, int, int, bool]  # code, opaque, serialize, one-way
# request, plan, bytes, queue id, queue offset, and the log offset, or those of a batch
Sent = tuple[Request, Plan, int, int, int, int | list[int]]
Part = tuple[Any, list[Sent]]  # of one connection


class Ticket:
    """Sends that were staged together and wait for the same promise."""

    __slots__ = ("_parts", "_sent", "began")

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._sent = parts[0][1] if len(parts) == 1 else [one for _, part in parts for one in part]
        self.began = 0.0

    def __len__(self) -> int:
        return len(self._sent)

    def requests(self) -> list[tuple[Any, int, int, int, bool]]:
        """Connection, code, opaque, serialize and one-way of each."""
        return [(connection, *one[0]) for connection, sent in self._parts for one in sent]

    def count_in(self, counts: PutCounts) -> None:
        """Add what its requests brought."""
        plans: list[Plan] = []
        for _, plan, size, _, _, offsets in self._sent:
            if not plan.requests:
                plans.append(plan)
            plan.requests += 1
            plan.messages += 1 if offsets.__class__ is int else len(offsets)  # type: ignore[arg-type]
            plan.size += size
        for plan in plans:
            counts.add(plan.topic, plan.requests, plan.messages, plan.size)
            plan.requests = plan.messages = plan.size = 0

    def replies(
        self, json: Template, binary: Template, host: bytes
    ) -> list[tuple[Any, int, bytes]]:
        """Connection, number of requests and all their answers; `host` is the front of ids."""
        if json.binary or not binary.binary or json.holes != 3 or binary.holes != 3:
            raise ValueError("these are not the templates of a send")
        return [
            (connection, len(sent), _replies(sent, json, binary, host))
            for connection, sent in self._parts
        ]


def _replies(sent: list[Sent], json: Template, binary: Template, host: bytes) -> bytes:
    one, many = json.one, json.many
    out: list[bytes] = []
    for request, _, _, queue_id, queue_offset, log_offset in sent:
        _, opaque, serialize, oneway = request
        if oneway:
            continue
        if serialize:
            ids = _ids(host, log_offset)
            out.append(binary.fill(opaque, 0, (ids, b"%d" % queue_id, b"%d" % queue_offset)))
            continue
        if log_offset.__class__ is int:
            header = one % (host, log_offset, queue_id, queue_offset, opaque)
        else:
            header = many % (_ids(host, log_offset), queue_id, queue_offset, opaque)
        size = len(header)
        out.append(_pack_prefix(4 + size, size))
        out.append(header)
    return b"".join(out)


def answer(
    tickets: list[Ticket],
    json: Template,
    binary: Template,
    host: bytes,
    now: float,
    counts: PutCounts,
) -> tuple[dict[int, int], Exception | None]:
    """Give the replies of these tickets to their connections, and count what they brought.

    Returns how many requests took how many milliseconds, and the first error: a connection that
    fails does not keep the others from their replies.
    """
    times: dict[int, int] = {}
    error: Exception | None = None
    for ticket in tickets:
        ticket.count_in(counts)
        took_ms = int((now - ticket.began) * 1000)
        times[took_ms] = times.get(took_ms, 0) + len(ticket)
    for ticket in tickets:
        for connection, count, replies in ticket.replies(json, binary, host):
            try:
                connection.answer_many(count, replies)
            except Exception as caught:
                error = error or caught
    return times, error


def _ids(host: bytes, log_offset: int | list[int]) -> bytes:
    if isinstance(log_offset, int):
        return b"%b%016X" % (host, log_offset)
    return b",".join([b"%b%016X" % (host, one) for one in log_offset])
