from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any

from cosmodrome.speed.pure import Entry, Growing, Header, Limits, Run

WALK_MORE: int
WALK_BLANK: int
WALK_EMPTY: int
WALK_CORRUPT: int

def decode_header(serialize: int, data: bytes) -> Header: ...
def encode_header(
    serialize: int,
    code: int,
    language: int,
    version: int,
    opaque: int,
    flag: int,
    remark: str | None,
    ext: dict[str, str] | None,
) -> bytes: ...
def java_hash(text: str) -> int: ...
def encode_record(
    out: bytearray,
    log_offset: int,
    queue_offset: int,
    store_ms: int,
    topic: bytes,
    queue_id: int,
    flag: int,
    sys_flag: int,
    born_ms: int,
    born_host: bytes,
    store_host: bytes,
    reconsume_times: int,
    prepared_offset: int,
    body: bytes,
    properties: bytes,
) -> int: ...
def walk(
    view: memoryview,
    base: int,
    start: int,
    end: int,
    check_crc: bool,
    limit: int,
    whole_ms: int = 0,
) -> tuple[list[Entry], int, int]: ...
def key_hash(topic: str, key: str) -> int: ...
def gather(
    view: memoryview,
    base: int,
    start: int,
    end: int,
    check_crc: bool,
    limit: int,
    whole_ms: int = 0,
) -> tuple[list[Run], bytes, list[Entry], int, int, int, int]: ...
def chain(
    slots: bytearray,
    keys: bytes,
    count: int,
    begin_ms: int,
    limit: int,
    out: bytearray,
    pages: bytearray | None = None,
) -> tuple[int, int]: ...

class Place:
    key: tuple[str, int]
    next: int
    def __init__(self, topic: str, queue_id: int, following: int) -> None: ...

class Tail:
    owner: Any
    data: bytearray
    at: int
    log_end: int
    dirty: bool
    def __init__(self, owner: Any) -> None: ...
    @property
    def end(self) -> int: ...

class Runs:
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Run]: ...
    def put_back(self) -> None: ...

def spread(
    runs: Runs | Collection[Run],
    queues: Mapping[tuple[str, int], Growing],
    dirty: set[Any],
    topics: Container[str],
    watched: Sequence[Container[tuple[str, int]]],
) -> tuple[int, int, list[tuple[Any, bytes]]]: ...
def select(
    entries: bytes,
    index: int,
    view: memoryview,
    base: int,
    low: int,
    high: int,
    queue_id: int,
    queue_offset: int,
    codes: frozenset[int] | None,
    count: int,
    taken_bytes: int,
    limits: Limits,
) -> tuple[int, bytes, int, int, int, bool]: ...
