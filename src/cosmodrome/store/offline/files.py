"""The files of a store as they lie there, read without a store around them.

Geometry comes from the files themselves, because whoever looks at a store from outside seldom
has the settings of the broker that wrote it: the size of a log file from lengths and names,
that of queue files from their own length. An index file does not say how many slots it has;
that is found by trying which number makes its last entry, its header and the slot of that
entry agree. Nothing here writes.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import os.path
import sys
from collections import Counter
from collections.abc import Iterator

from cosmodrome import speed
from cosmodrome.env.base import Disk
from cosmodrome.errors import StoreError
from cosmodrome.layout import (
    INDEX_ENTRY,
    INDEX_HEADER,
    INDEX_SLOT,
    MAGIC_RECORD,
    QUEUE_ENTRY,
    QUEUE_ENTRY_BYTES,
)
from cosmodrome.store.commit_log.segment import (
    OpenFiles,
    holds_nothing,
    segment_offsets,
    segment_path,
)
from cosmodrome.store.index import NAME_DIGITS as INDEX_NAME_DIGITS

RECORDS_PER_STEP = 1024
LOG_FILES_OPEN_MAX = 4
DERIVED_FILES_OPEN_MAX = 128
PIECE_BYTES = 1024 * 1024
ZERO_RUN_BYTES = 64 * PIECE_BYTES  # far longer than any message, so no data follows
LOG_FILE_MULTIPLE = 4096  # lengths that are no multiple of this were not chosen by anyone

SLOTS_DEFAULT = 5_000_000
ENTRIES_DEFAULT = 20_000_000
QUEUE_FILE_BYTES_DEFAULT = 6_000_000
_GUESSES_MAX = 1_000_000
_GUESSES_KEPT = 16

# Both forms of a record share these bytes; the fourth tells them apart.
_MAGIC_START = (MAGIC_RECORD & 0xFFFFFFFF).to_bytes(4, "big")[:3]


@dataclasses.dataclass(frozen=True, slots=True)
class Hints:
    """What the operator knows better than the files; 0 and "" mean: find out."""

    log_directory: str = ""
    log_file_bytes: int = 0
    queue_file_bytes: int = 0
    index_slots: int = 0
    index_entries: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class QueueFiles:
    """One queue's files. `good` of them follow each other and have the same length."""

    topic: str
    queue_id: int
    directory: str
    bases: tuple[int, ...]
    sizes: tuple[int, ...]
    good: int

    @property
    def file_bytes(self) -> int:
        return self.sizes[0] if self.sizes else 0

    @property
    def first(self) -> int:
        """Number of the first entry that has a place in a file."""
        return self.bases[0] // QUEUE_ENTRY_BYTES if self.good else 0

    @property
    def end(self) -> int:
        """Number behind the last entry that has a place in a file."""
        if not self.good:
            return 0
        return (self.bases[self.good - 1] + self.file_bytes) // QUEUE_ENTRY_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class IndexFileFacts:
    """Header and geometry of one index file; `slots` is 0 when they could not be found."""

    path: str
    size: int
    slots: int
    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    used_slots: int
    count: int  # number behind the last entry; entry 0 is never used

    @property
    def entries_max(self) -> int:
        return (self.size - INDEX_HEADER.size - self.slots * INDEX_SLOT.size) // INDEX_ENTRY.size

    @property
    def full(self) -> bool:
        return self.count >= self.entries_max


class StoreFiles:
    def __init__(self, root: str, disk: Disk, hints: Hints | None = None) -> None:
        self.root = root
        self.disk = disk
        self.hints = hints or Hints()
        self.log_directory = self.hints.log_directory or os.path.join(root, "commitlog")
        if not disk.is_dir(root):
            raise StoreError(f"{root} is not a directory; give the root of a store")
        if not disk.is_dir(self.log_directory):
            raise StoreError(
                f"{root} is not a store: there is no directory {self.log_directory}; give the"
                " directory that storePathRootDir names, and --store-path-commit-log if the log"
                " is elsewhere"
            )
        self._log_files = OpenFiles(disk, LOG_FILES_OPEN_MAX)
        self._derived_files = OpenFiles(disk, DERIVED_FILES_OPEN_MAX)
        self.log_bases = segment_offsets(disk, self.log_directory)
        self.log_sizes = {base: disk.size(self.log_path(base)) for base in self.log_bases}
        self.log_file_bytes = self.hints.log_file_bytes or self._log_geometry()

    def close(self) -> None:
        self._log_files.close()
        self._derived_files.close()

    def path(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def holds_nothing(self, path: str) -> bool:
        """Whether a file is all zeros, as one that was just made is."""
        return holds_nothing(self.disk, path, self.disk.size(path))

    def name(self, path: str) -> str:
        """A path as findings show it: below the root when it is there."""
        inside = os.path.join(self.root, "")
        return path[len(inside) :] if path.startswith(inside) else path

    @property
    def stopped_cleanly(self) -> bool:
        """No broker runs here and the last one stopped in order: it removed its marker."""
        return not self.disk.exists(self.path("abort"))

    # --- the log -----------------------------------------------------------------------------
    def log_path(self, base: int) -> str:
        return segment_path(self.log_directory, base)

    def log_base(self, offset: int) -> int:
        return offset - offset % self.log_file_bytes

    def log_view(self, base: int) -> memoryview:
        """A log file, at most as much of it as a log file has."""
        return self._log_files.view(self.log_path(base))[: self.log_file_bytes]

    @property
    def log_min(self) -> int:
        return self.log_bases[0] if self.log_bases else 0

    @property
    def log_run(self) -> list[int]:
        """First offsets of the files that follow each other without a gap."""
        run: list[int] = []
        for base in self.log_bases:
            if base % self.log_file_bytes or (run and base != run[-1] + self.log_file_bytes):
                break
            run.append(base)
        return run

    def first_record_ms(self, base: int) -> int:
        """Store time of the record a log file begins with, 0 when it begins with none."""
        view = self.log_view(base)
        entries, _, _ = speed.walk(view, base, 0, len(view), False, 1)
        return entries[0][6] if entries else 0

    def record_at(self, log_offset: int) -> memoryview | None:
        """The whole record that begins there, None when no good one does."""
        base = self.log_base(log_offset)
        if log_offset < 0 or base not in self.log_sizes:
            return None
        view, at = self.log_view(base), log_offset - base
        if at >= len(view):
            return None
        entries, end, _ = speed.walk(view, base, at, len(view), True, 1)
        return view[at:end] if entries else None

    def salvage(self, start: int) -> Iterator[list[speed.Entry]]:
        """Good records at or behind `start`, stepping over whatever is none.

        A record is known by its magic and by holding its own offset. The search of a file ends
        after a long run of zeros: nothing was ever written there.
        """
        for base in self.log_bases:
            if base + self.log_file_bytes <= start or base % self.log_file_bytes:
                continue
            view = self.log_view(base)
            at = _find_record(view, base, max(start - base, 0))
            while at >= 0:
                entries, at, _ = speed.walk(view, base, at, len(view), True, RECORDS_PER_STEP)
                good = [entry for entry in entries if "\0" not in entry[2]]
                if good:
                    yield good
                at = _find_record(view, base, at)

    def _log_geometry(self) -> int:
        """What most lengths and most steps between names say; lengths of short files lose."""
        if not self.log_bases:
            return LOG_FILE_MULTIPLE
        steps = [b - a for a, b in zip(self.log_bases, self.log_bases[1:], strict=False)]
        votes = Counter([*steps, *(size for size in self.log_sizes.values() if size)])
        if not votes:
            return LOG_FILE_MULTIPLE
        most = max(votes.values())
        return max(size for size, count in votes.items() if count == most)

    # --- queues ------------------------------------------------------------------------------
    def queues(self) -> Iterator[QueueFiles]:
        root = self.path("consumequeue")
        for topic in self.disk.list(root):
            for name in self.disk.list(os.path.join(root, topic)):
                if name.isascii() and name.isdigit() and str(int(name)) == name:
                    yield self._queue(topic, int(name), os.path.join(root, topic, name))

    def queue_entries(self, queue: QueueFiles, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Entries from number `start` to `end` as pieces (number of the first, bytes)."""
        number, end = max(start, queue.first), min(end, queue.end)
        while number < end:
            position = number * QUEUE_ENTRY_BYTES
            base = position - position % queue.file_bytes
            left = min(base + queue.file_bytes, end * QUEUE_ENTRY_BYTES) - position
            length = min(left, PIECE_BYTES // QUEUE_ENTRY_BYTES * QUEUE_ENTRY_BYTES)
            view = self._derived_files.view(segment_path(queue.directory, base))
            at = position - base
            yield number, bytes(view[at : at + length])
            number += length // QUEUE_ENTRY_BYTES

    def queue_entry(self, queue: QueueFiles, number: int) -> tuple[int, int, int] | None:
        """One entry as it lies in its file, None when no file has a place for it."""
        if not queue.first <= number < queue.end:
            return None
        position = number * QUEUE_ENTRY_BYTES
        at = position % queue.file_bytes
        view = self._derived_files.view(segment_path(queue.directory, position - at))
        log_offset, size, tags_code = QUEUE_ENTRY.unpack_from(view, at)
        return log_offset, size, tags_code

    def queue_file_bytes(self) -> int:
        """The length most queue files have."""
        if self.hints.queue_file_bytes:
            return -(-self.hints.queue_file_bytes // QUEUE_ENTRY_BYTES) * QUEUE_ENTRY_BYTES
        votes = Counter(queue.file_bytes for queue in self.queues() if queue.good)
        return votes.most_common(1)[0][0] if votes else QUEUE_FILE_BYTES_DEFAULT

    def _queue(self, topic: str, queue_id: int, directory: str) -> QueueFiles:
        bases = segment_offsets(self.disk, directory)
        sizes = [self.disk.size(segment_path(directory, base)) for base in bases]
        size, good = (sizes[0] if sizes else 0), 0
        while (
            good < len(bases)
            and size > 0
            and size % QUEUE_ENTRY_BYTES == 0
            and sizes[good] == size
            and bases[good] == bases[0] + good * size
            and bases[good] % size == 0
        ):
            good += 1
        return QueueFiles(topic, queue_id, directory, tuple(bases), tuple(sizes), good)

    # --- index -------------------------------------------------------------------------------
    def index_files(self) -> list[IndexFileFacts]:
        """All index files, oldest first, with the geometry that fits them."""
        found: list[IndexFileFacts] = []
        known: dict[int, int] = {}  # slots by file size: files of one size share them
        names = self.disk.list(self.path("index"))
        for name in names:
            if len(name) == INDEX_NAME_DIGITS and name.isascii() and name.isdigit():
                file = self._index_header(self.path("index", name))
                slots = known.get(file.size) or self._index_slots(file)
                if slots:
                    known[file.size] = slots
                found.append(dataclasses.replace(file, slots=slots))
        # A file without entries says nothing; its neighbours of the same size speak for it.
        return [
            file if file.slots else dataclasses.replace(file, slots=known.get(file.size, 0))
            for file in found
        ]

    def index_view(self, file: IndexFileFacts) -> memoryview:
        return self._derived_files.view(file.path)

    def index_geometry(self) -> tuple[int, int]:
        """Slots and entries for new index files: as the hints or the files have them."""
        slots, entries = self.hints.index_slots, self.hints.index_entries
        for file in reversed(self.index_files()):
            if file.slots:
                return slots or file.slots, entries or file.entries_max
        return slots or SLOTS_DEFAULT, entries or ENTRIES_DEFAULT

    def _index_header(self, path: str) -> IndexFileFacts:
        size = self.disk.size(path)
        if size < INDEX_HEADER.size:
            return IndexFileFacts(path, size, 0, 0, 0, 0, 0, 0, 0)
        header = INDEX_HEADER.unpack_from(self._derived_files.view(path))
        return IndexFileFacts(path, size, 0, *header)

    def _index_slots(self, file: IndexFileFacts) -> int:
        """Slots of a file: hinted, usual, or the only number that makes sense; 0 if unknown."""
        slots = self.hints.index_slots
        if not slots and self.hints.index_entries:
            entries_bytes = self.hints.index_entries * INDEX_ENTRY.size
            slots = (file.size - INDEX_HEADER.size - entries_bytes) // INDEX_SLOT.size
        if slots:
            return slots if _slots_fit(file.size, slots) else 0
        usual = _index_bytes(SLOTS_DEFAULT, ENTRIES_DEFAULT)
        if file.size == usual and (
            file.count <= 1 or _slots_agree(self.index_view(file), file, SLOTS_DEFAULT)
        ):
            return SLOTS_DEFAULT
        if file.count <= 1 or not _slots_fit(file.size, 1 + (_index_words(file.size) - 1) % 5):
            return 0
        return _guess_slots(self.index_view(file), file)


class LogWalk:
    """One walk through the log from `start`: lists of records, then `end` and `why` it ended.

    `why` is WALK_MORE when every file was walked to its end; `end` lies behind the last record.
    """

    def __init__(self, files: StoreFiles, start: int, *, check_crc: bool = True) -> None:
        self._files = files
        self._check_crc = check_crc
        self.end = start
        self.why = speed.WALK_MORE

    def __iter__(self) -> Iterator[list[speed.Entry]]:
        files = self._files
        run = set(files.log_run)
        while (base := files.log_base(self.end)) in run:
            view = files.log_view(base)
            at = self.end - base
            if at >= len(view):  # a file that is too short ends before its end
                self.why = speed.WALK_EMPTY
                return
            entries, position, self.why = speed.walk(
                view, base, at, len(view), self._check_crc, RECORDS_PER_STEP
            )
            self.end = base + position
            torn = _torn_topic(entries)
            if torn is not None:
                self.end, self.why = entries[torn][0], speed.WALK_CORRUPT
                del entries[torn:]
            if entries:
                yield entries
            if self.why == speed.WALK_BLANK:
                self.end = base + files.log_file_bytes
                self.why = speed.WALK_MORE
            elif self.why != speed.WALK_MORE:
                return


def _torn_topic(entries: list[speed.Entry]) -> int | None:
    """Checksums cover bodies only: a topic with a NUL was never written whole. As recovery does."""
    return next((at for at, entry in enumerate(entries) if "\0" in entry[2]), None)


def start_of_walk(files: StoreFiles, log_offset: int) -> int:
    """Where to begin so that records from `log_offset` on are met: files begin with a record."""
    run = files.log_run
    return max([base for base in run if base <= log_offset], default=run[0] if run else 0)


def _find_record(view: memoryview, base: int, start: int) -> int:
    """Position of the first good record at or behind `start`, -1 when there is none."""
    at, zeros = start, 0
    while at < len(view) and zeros < ZERO_RUN_BYTES:
        piece = bytes(view[at : at + PIECE_BYTES])
        hit = piece.find(_MAGIC_START)
        while hit >= 0:
            position = at + hit - 4
            if position >= start and speed.walk(view, base, position, len(view), True, 1)[0]:
                return position
            hit = piece.find(_MAGIC_START, hit + 1)
        zeros = 0 if any(piece) else zeros + len(piece)
        if at + len(piece) >= len(view):
            break
        at += len(piece) - len(_MAGIC_START) + 1
    return -1


def _index_bytes(slots: int, entries: int) -> int:
    return INDEX_HEADER.size + slots * INDEX_SLOT.size + entries * INDEX_ENTRY.size


def _index_words(size: int) -> int:
    return (size - INDEX_HEADER.size) // INDEX_SLOT.size


def _slots_fit(size: int, slots: int) -> bool:
    entries_bytes = size - _index_bytes(slots, 0)
    return (
        slots > 0
        and entries_bytes >= 2 * INDEX_ENTRY.size
        and not (entries_bytes % INDEX_ENTRY.size)
    )


def _slots_agree(view: memoryview, file: IndexFileFacts, slots: int) -> bool:
    """Whether first and last entry are what the header says and the last one's slot names it."""
    last = file.count - 1
    entries_at = _index_bytes(slots, 0)
    if not _slots_fit(file.size, slots) or _index_bytes(slots, last + 1) > file.size:
        return False
    first_hash, first_offset, seconds, previous = INDEX_ENTRY.unpack_from(
        view, entries_at + INDEX_ENTRY.size
    )
    if first_offset != file.begin_offset or seconds or previous or first_hash < 0:
        return False
    hashed, offset, _, previous = INDEX_ENTRY.unpack_from(view, entries_at + last * 20)
    if offset != file.end_offset or hashed < 0 or not 0 <= previous < max(last, 1):
        return False
    (newest,) = INDEX_SLOT.unpack_from(view, INDEX_HEADER.size + hashed % slots * INDEX_SLOT.size)
    return bool(newest == last)


def _chains_agree(view: memoryview, file: IndexFileFacts, slots: int) -> bool:
    """Whether all entries, chained one by one, give exactly the slots that the file has."""
    newest = array.array("i", bytes(slots * INDEX_SLOT.size))
    entries_at = _index_bytes(slots, 0)
    data = view[entries_at + INDEX_ENTRY.size : entries_at + file.count * INDEX_ENTRY.size]
    for number, (hashed, _, _, previous) in enumerate(INDEX_ENTRY.iter_unpack(data), 1):
        if hashed < 0 or newest[hashed % slots] != previous:
            return False
        newest[hashed % slots] = number
    return newest == read_slots(view, slots)


def read_slots(view: memoryview, slots: int) -> array.array[int]:
    """The slots of an index file as numbers."""
    found = array.array("i")
    found.frombytes(bytes(view[INDEX_HEADER.size : _index_bytes(slots, 0)]))
    if sys.byteorder == "little":
        found.byteswap()
    return found


def _guess_slots(view: memoryview, file: IndexFileFacts) -> int:
    """The one number of slots for which the file makes sense, 0 for none or several."""
    fitting = set(itertools.islice(_fitting_slots(view, file), _GUESSES_KEPT))
    if len(fitting) > 1:
        fitting = {slots for slots in fitting if _chains_agree(view, file, slots)}
    return fitting.pop() if len(fitting) == 1 else 0


def _fitting_slots(view: memoryview, file: IndexFileFacts) -> Iterator[int]:
    if file.end_offset > 0:
        # The last entry holds the header's end offset: only those places need a look.
        needle = file.end_offset.to_bytes(8, "big")
        for at in range(INDEX_HEADER.size, file.size, PIECE_BYTES):
            piece = bytes(view[at : at + PIECE_BYTES + len(needle) - 1])
            hit = piece.find(needle)
            while hit >= 0:
                entries_at = at + hit - 4 - (file.count - 1) * INDEX_ENTRY.size
                slots, odd = divmod(entries_at - INDEX_HEADER.size, INDEX_SLOT.size)
                if not odd and _slots_agree(view, file, slots):
                    yield slots
                hit = piece.find(needle, hit + 1)
        return
    words = _index_words(file.size)
    for slots in range(1 + (words - 1) % 5, min(words, _GUESSES_MAX), 5):
        if _slots_agree(view, file, slots):
            yield slots
