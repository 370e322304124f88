"""The log of a master, piece by piece: which bytes are whole, and which are no log at all.

A piece may end anywhere. What is whole at its front is taken: records whose structure, log offset
and body checksum are right, then the blank of a full file with all that follows it in the file. A
record that only lacks its end waits for the next piece. Everything else is damage. Upstream's
checksum covers the body only. A changed byte in queue id, queue offset, flags, times, hosts, topic
or properties goes unnoticed as long as the lengths add up, no zero byte is in the topic and the
queue offset is possible.
"""

from __future__ import annotations

from collections.abc import Callable

from cosmodrome import speed
from cosmodrome.errors import StoreCorrupt
from cosmodrome.layout import (
    BLANK,
    BLANK_BYTES,
    MAGIC_BLANK,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    QUEUE_OFFSET_LIMIT,
    RECORD_BYTES_MIN,
    RECORD_LOG_OFFSET_AT,
)
from cosmodrome.store.commit_log.staging import Span

WHOLE_MS = 1 << 62  # no power cut is between the master's memory and here: no look for lost sectors


# The span of the plain records at the front of a piece, which begins at a log offset and has
# records up to a position; None when there is none.
PlainSpan = Callable[[memoryview, int, int], Span | None]


def whole_spans(
    piece: memoryview, offset: int, file_end: int, plain_span: PlainSpan | None = None
) -> list[Span]:
    """What of `piece`, which begins at the log offset `offset`, can be taken; maybe nothing.

    Nothing behind `file_end`, where the file ends, is looked at. StoreCorrupt when the first thing
    that is not taken is no beginning of a record.
    """
    piece = piece[: file_end - offset]
    records_end = max(0, min(len(piece), file_end - BLANK_BYTES - offset))
    spans: list[Span] = []
    plain = plain_span(piece, offset, records_end) if plain_span is not None else None
    if plain is not None:
        spans.append(plain)
        if plain.end == offset + len(piece):
            return spans  # as nearly always
    try:
        _add_others(spans, piece, offset, records_end, file_end)
    except StoreCorrupt:
        if not spans:
            raise
        # What comes first is good; the next piece begins with what is not.
    return spans


def _add_others(
    spans: list[Span], piece: memoryview, offset: int, records_end: int, file_end: int
) -> None:
    """Add what follows the spans in `piece`: records of any kind, then the blank of a file."""
    start, last_ms = (spans[-1].end - offset, spans[-1].last_ms) if spans else (0, 0)
    limit = len(piece) // RECORD_BYTES_MIN + 1
    runs, keys, delayed, count, found_ms, position, _ = speed.gather(
        piece, offset, start, max(start, records_end), True, limit, WHOLE_MS
    )
    for first in [run[2] for run in runs] + [entry[4] for entry in delayed]:
        if not 0 <= first <= QUEUE_OFFSET_LIMIT:
            raise _corrupt(
                offset + start, f"a record behind there says that its queue offset is {first}"
            )
    at = offset + position
    if count:
        last_ms = found_ms
        spans.append(Span(offset + start, at, last_ms, count, runs, keys, delayed))
    if _is_whole_blank(piece[position:], at, file_end):
        spans.append(Span(at, file_end, last_ms, 0, (), b""))


def _is_whole_blank(rest: memoryview, at: int, file_end: int) -> bool:
    """Whether a whole blank is at `at`, where no whole record is; False when more has to come."""
    if len(rest) < BLANK_BYTES:
        return False
    size, magic = BLANK.unpack_from(rest)
    left = file_end - at
    if magic == MAGIC_BLANK:
        if size != left:
            raise _corrupt(
                at,
                f"a file ends there with {size} bytes left, and ours has {left};"
                " mappedFileSizeCommitLog must be the same on both brokers",
            )
        return len(rest) == left
    if magic not in (MAGIC_RECORD, MAGIC_RECORD_V2):
        raise _corrupt(at, f"no record begins with the magic number {magic & 0xFFFFFFFF:#010x}")
    if not RECORD_BYTES_MIN <= size <= left - BLANK_BYTES:
        raise _corrupt(
            at,
            f"a record of {size} bytes, and the file has {left} left;"
            " mappedFileSizeCommitLog must be the same on both brokers",
        )
    if len(rest) >= RECORD_LOG_OFFSET_AT + 8:
        named = int.from_bytes(rest[RECORD_LOG_OFFSET_AT : RECORD_LOG_OFFSET_AT + 8], "big")
        if named != at:
            raise _corrupt(at, f"the record there says that it belongs to {named}")
    if len(rest) < size:
        return False
    _, position, _ = speed.walk(rest, at, 0, size, False, 1)
    why = "its lengths do not add up" if position == 0 else "its checksum or its topic is wrong"
    raise _corrupt(at, f"the record there is damaged: {why}")


def _corrupt(at: int, what: str) -> StoreCorrupt:
    return StoreCorrupt(f"what came for offset {at} of the commit log is no part of it: {what}")
