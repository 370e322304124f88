"""Hot functions, chosen once: the compiled twin when it can be imported, else the pure one.

`COSMODROME_PURE=1` forces the pure twin. `FLAVOUR` says which one is live. `lanes` chooses the
inner loops of the broker's fast lane so; `HAS_LANE` tells whether the compiled ones run.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from cosmodrome.speed.pure import (
    LANGUAGES,
    SCHEDULE_TOPIC,
    SLOT_PAGE_BYTES,
    WALK_BLANK,
    WALK_CORRUPT,
    WALK_EMPTY,
    WALK_MORE,
    Entry,
    Header,
    Limits,
    Run,
    put_back,
)

if TYPE_CHECKING:
    from cosmodrome.speed.pure import (
        Place,
        Tail,
        chain,
        decode_header,
        encode_header,
        encode_record,
        gather,
        java_hash,
        key_hash,
        select,
        spread,
        walk,
    )

    FLAVOUR: str
    HAS_LANE: bool
else:
    if os.environ.get("COSMODROME_PURE", "") not in ("", "0"):
        from cosmodrome.speed import pure as _chosen

        FLAVOUR = "pure"
    else:
        try:
            from cosmodrome.speed import native as _chosen

            FLAVOUR = "native"
        except ImportError:
            from cosmodrome.speed import pure as _chosen

            FLAVOUR = "pure"
    try:
        HAS_LANE = FLAVOUR == "native" and bool(import_module("cosmodrome.speed.lane"))
    except ImportError:
        HAS_LANE = False
    Place = _chosen.Place
    Tail = _chosen.Tail
    chain = _chosen.chain
    decode_header = _chosen.decode_header
    encode_header = _chosen.encode_header
    encode_record = _chosen.encode_record
    gather = _chosen.gather
    java_hash = _chosen.java_hash
    key_hash = _chosen.key_hash
    select = _chosen.select
    spread = _chosen.spread
    walk = _chosen.walk

__all__ = [
    "FLAVOUR",
    "HAS_LANE",
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
    "Place",
    "Run",
    "Tail",
    "chain",
    "decode_header",
    "encode_header",
    "encode_record",
    "gather",
    "java_hash",
    "key_hash",
    "put_back",
    "select",
    "spread",
    "walk",
]
