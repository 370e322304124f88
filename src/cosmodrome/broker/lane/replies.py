"""Replies of the fast lane: frames that the ordinary encoder made, cut where they differ.

So they are the slow lane's replies, byte for byte, whatever becomes of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from cosmodrome.layout import BINARY_HEADER, FRAME_PREFIX, SERIALIZE_BINARY, SERIALIZE_JSON
from cosmodrome.speed import lane as core
from cosmodrome.transport.router import reply_frame
from cosmodrome.wire.frame import Frame, encode
from cosmodrome.wire.table import Reply

# Stand for what a template leaves open; no part of a reply looks like them.
_OPAQUE = 1_987_654_321
HOLES = (1_876_543_210, 1_765_432_109, 1_654_321_098, 1_543_210_987)


def templates(reply: Reply, holes: Sequence[int]) -> tuple[core.Template, core.Template]:
    """The reply with its holes, by serialize type."""
    return _template(SERIALIZE_JSON, reply, holes), _template(SERIALIZE_BINARY, reply, holes)


def _template(serialize: int, reply: Reply, holes: Sequence[int]) -> core.Template:
    """Encode a reply whose open fields are `holes`, and cut it at them."""
    request = Frame(0, _OPAQUE, serialize=serialize)
    header = encode(reply_frame(request, reply))[FRAME_PREFIX.size :]
    binary = serialize == SERIALIZE_BINARY
    marks = [str(hole).encode() for hole in (*holes, *(() if binary else (_OPAQUE,)))]
    parts: list[bytes] = []
    rest = header
    for mark in marks:
        part, found, rest = rest.partition(mark)
        assert found and mark not in rest, (mark, header)
        parts.append(part)
    parts.append(rest)
    if not binary:
        return core.Template(parts, False, 0, 0)
    remark_bytes = BINARY_HEADER.unpack_from(header)[-1]
    fields_at = BINARY_HEADER.size + remark_bytes
    fields_bytes = int.from_bytes(header[fields_at : fields_at + 4], "big")
    return core.Template(parts, True, fields_at, fields_bytes - sum(map(len, marks)))
