"""Hot functions, each of them twice: compiled, and in plain Python. `choice` says which ones run.

Here are those of `core`, which everybody uses; `FLAVOUR` tells which twin runs.
"""

from __future__ import annotations

from cosmodrome.layout import WALK_BLANK, WALK_CORRUPT, WALK_EMPTY, WALK_MORE
from cosmodrome.speed.choice import FLAVOUR, prefer_compiled
from cosmodrome.speed.core.pure import (
    LANGUAGES,
    SCHEDULE_TOPIC,
    SLOT_PAGE_BYTES,
    Entry,
    Header,
    Limits,
    QueueEnd,
    Run,
    Tail,
    chain,
    decode_header,
    encode_header,
    encode_record,
    gather,
    gather_next,
    java_hash,
    key_hash,
    put_back,
    select,
    spread,
    walk,
)

__all__ = [
    "FLAVOUR",
    "LANGUAGES",
    "SCHEDULE_TOPIC",
    "SLOT_PAGE_BYTES",
    "WALK_BLANK",
    "WALK_CORRUPT",
    "WALK_EMPTY",
    "WALK_MORE",
    "Entry",
    "Header",
    "Limits",
    "QueueEnd",
    "Run",
    "Tail",
    "chain",
    "decode_header",
    "encode_header",
    "encode_record",
    "gather",
    "gather_next",
    "java_hash",
    "key_hash",
    "put_back",
    "select",
    "spread",
    "walk",
]

prefer_compiled("cosmodrome.speed.core", globals())
