from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cosmodrome.speed.lane.counts import GetCounts

class Options(Protocol):
    @property
    def max_transfer_count_on_message_in_memory(self) -> int: ...
    @property
    def max_transfer_bytes_on_message_in_memory(self) -> int: ...
    @property
    def max_transfer_count_on_message_in_disk(self) -> int: ...
    @property
    def max_transfer_bytes_on_message_in_disk(self) -> int: ...

class Log(Protocol):
    @property
    def min_offset(self) -> int: ...
    def view(self, base: int) -> memoryview: ...

class Flush(Protocol):
    @property
    def durable_end(self) -> int: ...

class Source(Protocol):
    """The store, as far as reading goes."""

    @property
    def queues(self) -> Mapping[tuple[str, int], Any]: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def scan_count_min(self) -> int: ...
    @property
    def warm_bytes(self) -> int:
        """How far before the end of the log records are taken to be in memory."""

    @property
    def options(self) -> Options: ...
    @property
    def log(self) -> Log: ...
    @property
    def flush(self) -> Flush: ...

class Connection(Protocol):
    """Whoever is answered."""

    def free_fd(self) -> int:
        """The socket to write to at once, -1 when that cannot be."""

    def wrote(self, size: int) -> None: ...

def takes(template: object) -> bool: ...
def sniff(view: memoryview, at: int) -> bool: ...

class PullPlan:
    group: str
    topic: str
    queue_id: int
    queue_key: tuple[str, int]
    text: str | None
    kind: str | None
    version: int
    flags: int
    codes: Any
    def __init__(
        self,
        group: str,
        topic: str,
        queue_id: int,
        flags: int,
        version: int,
        text: str | None,
        kind: str | None,
        group_row: object,
        topic_row: object,
        online: object,
        subscription: object,
        model: str | None,
        codes: frozenset[int] | None,
        near_id: int,
        far_id: int,
    ) -> None: ...

class Held:
    plan: PullPlan
    end: int
    serialize: int
    opaque: int
    flags: int
    count: int
    offset: int
    commit: int
    wait_ms: int

class Pulls:
    pulls: int
    commits: int
    saw_binary: bool
    held: Held | None
    def __init__(
        self,
        groups: Mapping[str, Any],
        topics: Mapping[str, Any],
        online: Callable[[str], Any],
        source: Source,
        commit: Callable[[str, str, int, int], None],
        found: tuple[object, object],
        done: tuple[object, object],
        master: bool,
        counts: GetCounts,
    ) -> None: ...
    @property
    def wants_plan(self) -> bool: ...
    @property
    def plan_count(self) -> int: ...
    def feed(
        self, view: memoryview, at: int, slave_read: bool, out: list[bytes], connection: Connection
    ) -> tuple[int, int]: ...
    def serve(self, held: Held, slave_read: bool) -> bytes | None: ...
    def learn(self, plan: PullPlan) -> None: ...
    def count(self, ms: float) -> None: ...
