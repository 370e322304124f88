"""Consume queues: per topic and queue id, where every message stands in the log.

Entry number = queue offset, always: holes are filled with filler entries that readers skip.
New entries live in a tail in memory, are read from there, and reach their files in batches
through `pending` and `written`; a crash loses only what recovery builds again from the log.
Only these batches create files, so a queue that was dropped and made again cannot meet the
files of its former life: they are removed after the batch under way, before the next one.
"""

from __future__ import annotations

import logging
import os.path
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from cosmodrome import speed
from cosmodrome.env.base import Disk
from cosmodrome.errors import StoreError
from cosmodrome.layout import (
    QUEUE_ENTRY,
    QUEUE_ENTRY_BYTES,
    QUEUE_FILLER_SIZE,
    QUEUE_OFFSET_LIMIT,
    TOPIC_BYTES_MAX,
)
from cosmodrome.store.arrivals import Arrivals
from cosmodrome.store.commit_log.segment import (
    FileWrite,
    OpenFiles,
    data_end,
    holds_nothing,
    segment_offsets,
    segment_path,
    zero_from,
)

FILLER = QUEUE_ENTRY.pack(0, QUEUE_FILLER_SIZE, 0)
GAP_ENTRIES_MAX = 1_000_000  # a larger jump of a queue offset is damage, not a gap

Entry = tuple[int, int, int]  # log offset, size, tags code

_log = logging.getLogger(__name__)


def check_path_names(topic: str, queue_id: int) -> None:
    """Refuse what cannot be a directory of its own below the queues."""
    if queue_id < 0:
        raise StoreError(f"queue id {queue_id} of topic {topic!r} is negative")
    if (
        not topic
        or topic in (".", "..")
        or "/" in topic
        or "\0" in topic
        or len(topic.encode()) > TOPIC_BYTES_MAX
    ):
        raise StoreError(f"{topic!r} cannot name a topic: use letters, digits, %, |, - and _")


class Queue:
    """One queue. Positions are bytes from entry 0; [first, tail_at) is in files."""

    __slots__ = (
        "directory",
        "file_bytes",
        "files",
        "first",
        "growth",
        "last_path",
        "min_offset",
        "queue_id",
        "tail",
        "topic",
    )

    def __init__(
        self, topic: str, queue_id: int, directory: str, file_bytes: int, files: OpenFiles
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.directory = directory
        self.file_bytes = file_bytes
        self.files = files
        self.first = 0
        self.growth = speed.Tail(self)
        self.tail = self.growth.data
        self.min_offset = 0
        self.last_path = (-1, "")  # of the file that was read last, by its first position

    @property
    def max_offset(self) -> int:
        return self.growth.end // QUEUE_ENTRY_BYTES

    @property
    def tail_at(self) -> int:
        """The position of the tail's first byte."""
        return self.growth.at

    @property
    def log_end(self) -> int:
        """End of the record that the last entry names."""
        return self.growth.log_end

    def begin_at(self, queue_offset: int) -> None:
        """Make the first entry of an empty queue number `queue_offset`."""
        position = queue_offset * QUEUE_ENTRY_BYTES
        self.first = self.growth.at = position - position % self.file_bytes
        self.tail[:] = FILLER * ((position - self.first) // QUEUE_ENTRY_BYTES)
        self.min_offset = queue_offset

    def entry(self, queue_offset: int) -> Entry | None:
        """One entry, None when there is none or it is a filler."""
        if not self.first // QUEUE_ENTRY_BYTES <= queue_offset < self.max_offset:
            return None
        data = self.entries(queue_offset, 1)
        if not data:
            return None
        log_offset, size, tags_code = QUEUE_ENTRY.unpack_from(data)
        if size <= 0 or size == QUEUE_FILLER_SIZE:
            return None
        return log_offset, size, tags_code

    def entries(self, queue_offset: int, count: int) -> bytes:
        """Up to `count` entries from `queue_offset` on, ending at a file's end at the latest."""
        position = queue_offset * QUEUE_ENTRY_BYTES
        wanted = count * QUEUE_ENTRY_BYTES
        if position >= self.tail_at:
            at = position - self.tail_at
            return bytes(self.tail[at : at + wanted])
        base = position - position % self.file_bytes
        stop = min(base + self.file_bytes, self.tail_at, position + wanted)
        try:
            view = self.file_view(base)
        except OSError as error:
            _log.error("queue_file_unreadable directory=%s base=%d %s", self.directory, base, error)
            return b""
        return bytes(view[position - base : stop - base])

    def file_view(self, base: int) -> memoryview:
        """The file that begins at this position; OSError when it cannot be read."""
        if self.last_path[0] != base:
            self.last_path = (base, segment_path(self.directory, base))
        return self.files.view(self.last_path[1])

    def find_min(self, log_min_offset: int) -> None:
        """Set the first entry that is no filler and whose record the log still has."""
        low, high = self.first // QUEUE_ENTRY_BYTES, self.max_offset
        while low < high:
            middle = (low + high) // 2
            data = self.entries(middle, 1)
            log_offset, size, _ = QUEUE_ENTRY.unpack(data) if data else (0, QUEUE_FILLER_SIZE, 0)
            # A negative offset is damage: it must not hide everything before it.
            if size == QUEUE_FILLER_SIZE or 0 <= log_offset < log_min_offset:
                low = middle + 1
            else:
                high = middle
        self.min_offset = low

    def forget_below(self, log_min_offset: int) -> None:
        """The log has lost its records before that offset."""
        entry = self.entry(self.min_offset)
        if entry is None or entry[0] < log_min_offset:
            self.find_min(log_min_offset)

    def expired_file(self, log_min_offset: int) -> int | None:
        """Position of the first file if nothing in it is in the log; never the last file."""
        end = self.first + self.file_bytes
        if end >= self.tail_at:
            return None
        data = self.entries(end // QUEUE_ENTRY_BYTES - 1, 1)
        if data and QUEUE_ENTRY.unpack(data)[0] >= log_min_offset:
            return None
        return self.first

    def pieces(self) -> Iterator[FileWrite]:
        """The tail, cut at file ends."""
        done = 0
        while done < len(self.tail):
            position = self.tail_at + done
            base = position - position % self.file_bytes
            stop = done + base + self.file_bytes - position
            whole = not done and stop >= len(self.tail)
            data = bytes(self.tail if whole else memoryview(self.tail)[done:stop])
            yield FileWrite(
                segment_path(self.directory, base), self.file_bytes, [(position - base, data)]
            )
            done += len(data)


class Queues:
    """All queues of the store."""

    def __init__(
        self, root: str, file_bytes: int, disk: Disk, files: OpenFiles, *, read_only: bool
    ) -> None:
        self._root = root
        self._file_bytes = -(-file_bytes // QUEUE_ENTRY_BYTES) * QUEUE_ENTRY_BYTES
        self._disk = disk
        self._files = files
        self._read_only = read_only
        self._queues: dict[tuple[str, int], Queue] = {}
        self._dirty: set[Queue] = set()
        self._writing: dict[Queue, int] = {}  # the batch under way: bytes of each tail
        self._dropped: list[Queue] = []
        self._emptied: set[Queue] = set()
        self.tail_bytes = 0
        self.unsynced: set[str] = set()
        self._disown: Callable[[], None] = lambda: None
        self.damaged = False  # files were unusable: entries of any age may be missing

    def __iter__(self) -> Iterator[Queue]:
        return iter(list(self._queues.values()))

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def table(self) -> Mapping[tuple[str, int], Queue]:
        """The live table; it stays the same object."""
        return self._queues

    @property
    def dirty_count(self) -> int:
        """Queues with entries that are in no file yet."""
        return len(self._dirty)

    def get(self, topic: str, queue_id: int) -> Queue | None:
        return self._queues.get((topic, queue_id))

    def max_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get((topic, queue_id))
        return 0 if queue is None else queue.max_offset

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The offset the next message gets; refuses names that could not become a queue."""
        check_path_names(topic, queue_id)
        return self.max_offset(topic, queue_id)

    def by_topic(self) -> Mapping[str, Sequence[int]]:
        table: dict[str, list[int]] = {}
        for topic, queue_id in sorted(self._queues):
            table.setdefault(topic, []).append(queue_id)
        return table

    def put(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        log_offset: int,
        size: int,
        tags_code: int,
    ) -> Queue:
        """Add the entry of one record; records come in log order."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self._make(topic, queue_id)
        if log_offset + size <= queue.log_end:
            return queue  # built before
        end = queue.max_offset
        if queue_offset != end:
            queue = self._meet(queue, queue_offset, end)
            if queue.max_offset != queue_offset:
                return queue
        self._grow(queue, QUEUE_ENTRY.pack(log_offset, size, tags_code))
        queue.growth.log_end = log_offset + size
        return queue

    def put_runs(
        self, runs: Collection[speed.Run], arrivals: Arrivals
    ) -> tuple[int, list[tuple[Queue, bytes]]]:
        """Add runs as long as they fit the ends of their queues; the rest is for `put_run`.

        Returns how many were added, and queue and entries of those somebody waits for.
        """
        done, size, seen = speed.spread(
            runs, self._queues, self._dirty, arrivals.topics, arrivals.queues
        )
        self.tail_bytes += size
        return done, seen

    def put_run(self, topic: str, queue_id: int, queue_offset: int, entries: bytes) -> Queue:
        """Add packed entries of consecutive offsets, at least one."""
        queue = self._queues.get((topic, queue_id)) or self._make(topic, queue_id)
        log_offset, size, _ = QUEUE_ENTRY.unpack_from(entries)
        if queue_offset == queue.max_offset and log_offset + size > queue.log_end:
            log_offset, size, _ = QUEUE_ENTRY.unpack_from(entries, len(entries) - QUEUE_ENTRY_BYTES)
            self._grow(queue, entries)
            queue.growth.log_end = log_offset + size
            return queue
        for at, entry in enumerate(QUEUE_ENTRY.iter_unpack(entries)):
            queue = self.put(topic, queue_id, queue_offset + at, *entry)
        return queue

    def drop(self, queue: Queue) -> None:
        """Forget a queue; its files go at once, or after the batch that is being written."""
        self._queues.pop((queue.topic, queue.queue_id), None)
        self._dirty.discard(queue)
        self.tail_bytes -= len(queue.tail)
        queue.tail.clear()
        queue.growth.owner = None
        self._dropped.append(queue)
        if not self._writing:
            self._remove_dropped()

    def let_go(self, path: str) -> None:
        """A file is about to be removed."""
        self._files.forget(path)
        self.unsynced.discard(path)

    # --- batches -----------------------------------------------------------------------------
    def pending(self) -> list[tuple[Queue, FileWrite]]:
        """Begin a batch: everything in memory. `written` must follow with the results."""
        assert not self._writing
        self._writing = {queue: len(queue.tail) for queue in self._dirty}
        return [(queue, write) for queue in self._writing for write in queue.pieces()]

    def written(
        self, batch: list[tuple[Queue, FileWrite]], results: list[OSError | None]
    ) -> OSError | None:
        """End the batch. A queue with any failed piece keeps its whole tail for the next one."""
        failed: dict[Queue, OSError] = {}
        for (queue, write), error in zip(batch, results, strict=True):
            if error is not None:
                failed[queue] = error
            else:
                self.unsynced.add(write.path)
        for queue, length in self._writing.items():
            if queue not in failed and queue not in self._dropped:
                queue.growth.at += length
                del queue.tail[:length]
                self.tail_bytes -= length
                if not queue.tail:
                    queue.growth.dirty = False
                    self._dirty.discard(queue)
        self._writing = {}
        self._remove_dropped()
        return next(iter(failed.values()), None)

    # --- recovery ----------------------------------------------------------------------------
    def load(self, disown: Callable[[], None] = lambda: None) -> None:
        """Find the queues on disk and, trusting zeros behind the last entry, their ends.

        `disown` is called before files that the checkpoint may vouch for are given up.
        """
        self._disown = disown
        for topic in self._disk.list(self._root):
            for name in self._disk.list(os.path.join(self._root, topic)):
                if name.isascii() and name.isdigit() and str(int(name)) == name:
                    self._load_queue(topic, int(name))

    def truncate(self, queue: Queue, limit: int) -> None:
        """Drop entries of records at or behind log offset `limit`, and anything invalid."""
        end = self._valid_end(queue, limit)
        entry: Entry | None = None
        while end > queue.first:
            entry = queue.entry(end // QUEUE_ENTRY_BYTES - 1)
            if entry is not None:
                break
            end -= QUEUE_ENTRY_BYTES  # fillers alone at the end stand for nothing
        if entry is None:
            self._emptied.add(queue)
            self.drop(queue)
            return
        last = queue.tail_at
        queue.growth.log_end = entry[0] + entry[1]
        queue.growth.at = end
        if self._read_only:
            return
        base = end - end % queue.file_bytes
        # The last file first: a power cut in between must not leave a gap.
        for later in reversed(range(base, last + queue.file_bytes, queue.file_bytes)):
            path = segment_path(queue.directory, later)
            if later >= end:
                self._files.forget(path)
                self._disk.remove(path)
            elif self._disk.exists(path):
                zero_from(self._disk, path, end - later)

    def sweep(self) -> None:
        """Recovery is done: directories that it emptied and nothing filled again go."""
        emptied, self._emptied = self._emptied, set()
        for queue in emptied:
            if (queue.topic, queue.queue_id) not in self._queues and not self._read_only:
                self._remove_directory(queue)

    # --- inside ------------------------------------------------------------------------------
    def _make(self, topic: str, queue_id: int) -> Queue:
        check_path_names(topic, queue_id)
        directory = os.path.join(self._root, topic, str(queue_id))
        queue = Queue(topic, queue_id, directory, self._file_bytes, self._files)
        self._queues[topic, queue_id] = queue
        return queue

    def _meet(self, queue: Queue, queue_offset: int, end: int) -> Queue:
        """Bring the queue's end to `queue_offset`, or leave it when that makes no sense."""
        if not 0 <= queue_offset <= QUEUE_OFFSET_LIMIT:
            raise StoreError(f"no queue reaches to the offset {queue_offset}")
        if queue.log_end == 0 and end == 0:
            queue.begin_at(queue_offset)
            self.tail_bytes += len(queue.tail)
            return queue
        if queue_offset < end:
            # The log is the truth, and in it the queue begins anew: its topic was deleted and
            # created again. The entries so far belong to the deleted one.
            _log.warning(
                "queue_restarted topic=%s queue=%d end=%d offset=%d",
                queue.topic,
                queue.queue_id,
                end,
                queue_offset,
            )
            self.drop(queue)
            queue = self._make(queue.topic, queue.queue_id)
            queue.begin_at(queue_offset)
            self.tail_bytes += len(queue.tail)
            return queue
        _log.error(
            "queue_gap topic=%s queue=%d end=%d offset=%d",
            queue.topic,
            queue.queue_id,
            end,
            queue_offset,
        )
        if queue_offset - end <= GAP_ENTRIES_MAX:
            self._grow(queue, FILLER * (queue_offset - end))
        return queue

    def _grow(self, queue: Queue, entries: bytes) -> None:
        queue.tail += entries
        self.tail_bytes += len(entries)
        if not queue.growth.dirty:
            queue.growth.dirty = True
            self._dirty.add(queue)

    def _remove_dropped(self) -> None:
        dropped, self._dropped = self._dropped, []
        if self._read_only:
            return
        for queue in dropped:
            for base in reversed(segment_offsets(self._disk, queue.directory)):
                path = segment_path(queue.directory, base)
                self._files.forget(path)
                self._disk.remove(path)
                self.unsynced.discard(path)
            # Most queues that recovery empties it fills again: thousands of directories would
            # be removed and made for nothing.
            if queue not in self._emptied:
                self._remove_directory(queue)

    def _remove_directory(self, queue: Queue) -> None:
        for directory in (queue.directory, os.path.dirname(queue.directory)):
            if self._disk.is_dir(directory) and not self._disk.list(directory):
                self._disk.remove(directory)

    def _load_queue(self, topic: str, queue_id: int) -> None:
        queue = self._make(topic, queue_id)
        bases = segment_offsets(self._disk, queue.directory)
        sizes = {base: self._disk.size(segment_path(queue.directory, base)) for base in bases}
        while bases and self._unfinished(queue, bases, sizes):
            self._discard_file(queue, bases.pop())
        size = sizes[bases[0]] if bases else self._file_bytes
        if size != self._file_bytes:
            _log.warning(
                "queue_file_size directory=%s configured=%d used=%d",
                queue.directory,
                self._file_bytes,
                size,
            )
        good = 0
        while (
            good < len(bases)
            and size > 0
            and size % QUEUE_ENTRY_BYTES == 0
            and sizes[bases[good]] == size
            and bases[good] == bases[0] + good * size
            and bases[good] % size == 0
        ):
            good += 1
        if bases[good:] and not self.damaged:
            self.damaged = True
            self._disown()
        for base in reversed(bases[good:]):
            _log.error("queue_file_unusable directory=%s base=%d", queue.directory, base)
            self._discard_file(queue, base)
        if not good:
            self.drop(queue)
            return
        queue.file_bytes = size
        queue.first = bases[0]
        queue.growth.at = bases[good - 1] + size
        queue.growth.at = self._written_end(queue)
        entry = queue.entry(queue.max_offset - 1)
        queue.growth.log_end = 0 if entry is None else entry[0] + entry[1]

    def _unfinished(self, queue: Queue, bases: list[int], sizes: dict[int, int]) -> bool:
        """Whether the last file was being made when the process ended, and so holds nothing."""
        usual = sizes[bases[0]] if len(bases) > 1 else self._file_bytes
        path = segment_path(queue.directory, bases[-1])
        return sizes[bases[-1]] < usual and holds_nothing(self._disk, path, usual)

    def _discard_file(self, queue: Queue, base: int) -> None:
        if not self._read_only:
            self._disk.remove(segment_path(queue.directory, base))

    def _written_end(self, queue: Queue) -> int:
        """First position in the last file that was never written, by bisection."""
        base = queue.tail_at - queue.file_bytes
        used_bytes = data_end(self._disk, segment_path(queue.directory, base))
        low = base // QUEUE_ENTRY_BYTES
        high = -(-(base + used_bytes) // QUEUE_ENTRY_BYTES)
        while low < high:
            middle = (low + high) // 2
            _, size, _ = QUEUE_ENTRY.unpack(queue.entries(middle, 1))
            if size > 0:
                low = middle + 1
            else:
                high = middle
        return low * QUEUE_ENTRY_BYTES

    def _valid_end(self, queue: Queue, limit: int) -> int:
        """Position behind the last entry, in order, of a record that ends at or below `limit`."""
        per_file = queue.file_bytes // QUEUE_ENTRY_BYTES
        base = queue.tail_at - queue.tail_at % queue.file_bytes
        while base >= queue.first:
            previous = -1
            position = base
            for log_offset, size, _ in QUEUE_ENTRY.iter_unpack(
                queue.entries(base // QUEUE_ENTRY_BYTES, per_file)
            ):
                if size != QUEUE_FILLER_SIZE or log_offset:
                    if size <= 0 or log_offset <= previous or log_offset + size > limit:
                        break
                    previous = log_offset
                position += QUEUE_ENTRY_BYTES
            if position > base:
                return position
            base -= queue.file_bytes
        return queue.first
