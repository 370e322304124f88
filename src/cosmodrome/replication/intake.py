"""From bytes of a master to whole records in the store of its slave.

Frames are cut anywhere, records are not: what is torn waits in memory for its rest, one record at
most. The offset of every byte is checked, so the copy has no holes and no repetitions.
"""

from __future__ import annotations

from cosmodrome.errors import ProtocolError
from cosmodrome.replication.frames import Run
from cosmodrome.store.store import Store

RECORD_BYTES_MAX = 64 << 20
_SIZE_BYTES = 4  # of a record, or of the blank at a file's end; it stands first


class Intake:
    def __init__(self, store: Store) -> None:
        self.end = store.log_end  # of what the store has taken
        self._store = store
        self._held: list[bytes] = []  # the beginning of a record
        self._held_bytes = 0
        self._wanted = 0  # bytes that the record has, as far as is known

    @property
    def next_offset(self) -> int:
        """Where the next byte of the master has to stand."""
        return self.end + self._held_bytes

    def begin_at(self, offset: int) -> None:
        """The master goes on at another place than this log ends, which has nothing yet."""
        if offset != self.end:
            self._store.begin_at(offset)
            self.end = offset

    def take(self, run: Run) -> int:
        """Give the store what is whole by now; how many bytes that were.

        ProtocolError: it does not stand where it has to. StoreCorrupt: it is no record.
        StoreUnwritable: the store cannot take it.
        """
        if run.offset != self.end + self._held_bytes:
            raise ProtocolError(
                f"the master sends what stands at {run.offset}, this log goes on at"
                f" {self.next_offset}"
            )
        if self._held_bytes + run.size < self._wanted:
            self._hold([bytes(part) for part in run.parts], run.size)
            return 0
        data: bytes | memoryview
        if not self._held and len(run.parts) == 1:
            data = run.parts[0]
        else:
            data = b"".join((*self._held, *run.parts))
        taken = self._take_all(data)
        if self._held:
            self._held, self._held_bytes, self._wanted = [], 0, 0
        if taken < len(data):
            rest = bytes(memoryview(data)[taken:])
            self._hold([rest], len(rest))
            self._wanted = self._size(rest)
        return taken

    def _take_all(self, data: bytes | memoryview) -> int:
        """Everything that is whole; the store takes no more than the rest of a file at a time."""
        taken = size = self._store.take(self.end, data)
        self.end += size
        while size and taken < len(data):
            size = self._store.take(self.end, memoryview(data)[taken:])
            self.end += size
            taken += size
        return taken

    def _hold(self, parts: list[bytes], size: int) -> None:
        self._held += parts
        self._held_bytes += size

    def _size(self, rest: bytes) -> int:
        """Of the record that begins with `rest`."""
        if len(rest) < _SIZE_BYTES:
            return _SIZE_BYTES
        size = int.from_bytes(rest[:_SIZE_BYTES], "big")
        if size > RECORD_BYTES_MAX:
            raise ProtocolError(
                f"what the master sent for offset {self.end} would be a record of {size} bytes;"
                f" the most are {RECORD_BYTES_MAX}"
            )
        return max(size, len(rest) + 1)
