from collections.abc import Callable
from typing import Any

from cosmodrome.speed.native import Place, Runs

NOTHING: int
PULL: int
COMMIT: int
OTHER: int
FULL: int

# serialize, opaque, one-way, end of the frame; then the fields
Pull = tuple[
    int, int, bool, int, str, str, int, int, int, int, int, int, int, str | None, str | None
]
Commit = tuple[int, int, bool, int, str, str, int, int]

def read_pull(view: memoryview, at: int) -> Pull | None: ...
def read_commit(view: memoryview, at: int) -> Commit | None: ...

class Template:
    def __init__(
        self, parts: list[bytes], binary: bool, fields_at: int, fields_bytes: int
    ) -> None: ...
    def head(self, opaque: int, body_bytes: int, *numbers: int) -> bytes: ...

class Plan:
    topic: str
    def __init__(self, topic: str, queues: int, sys_flag: int) -> None: ...
    def take(self) -> tuple[str, int, int, int]: ...

class Ticket:
    began: float
    def __len__(self) -> int: ...
    def requests(self) -> list[tuple[Any, int, int, int, bool]]: ...
    def count_in(self, counted: list[Plan]) -> None: ...
    def replies(
        self, json: Template, binary: Template, host: bytes
    ) -> list[tuple[Any, int, bytes]]: ...

def answer(
    tickets: list[Ticket],
    json: Template,
    binary: Template,
    host: bytes,
    now: float,
    counted: list[Plan],
) -> tuple[dict[int, int], Exception | None]: ...

class Plans:
    def __len__(self) -> int: ...
    def clear(self) -> None: ...

class Intake:
    known: Plans
    shaped: int
    saw_binary: bool
    kept_bytes: int
    def __init__(
        self,
        find: Callable[[bytes], Plan | None],
        cluster: str,
        body_bytes_max: int,
        record_bytes_max: int,
    ) -> None: ...
    def gather(
        self,
        connection: Any,
        view: memoryview,
        at: int,
        limit: int,
        born_host: bytes,
        store_host: bytes,
    ) -> tuple[int, int, int]: ...
    def clear(self) -> None: ...
    def left_over(self) -> list[tuple[Any, int, bytes]]: ...
    @property
    def left(self) -> int: ...
    @property
    def next_bytes(self) -> int: ...
    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        place: Callable[[str, int], Place],
        undo: list[Callable[[], None]],
    ) -> tuple[int, int, Runs, bytes]: ...
    def tickets(self) -> tuple[list[tuple[int, int]], list[tuple[int, bool, Ticket]]]: ...
