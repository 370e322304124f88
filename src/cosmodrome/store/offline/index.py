"""Whether the key index finds every message by every key, and names nothing else.

Two proofs together, both in one pass and with the memory of one file's slots: the entries, in
their order, are the keys of the log's records in log order; and inside each file every entry
hangs in the chain of its slot, so a lookup reaches it. Looking each key up would prove the same
but takes quadratic time for a key that many messages share.
"""

from __future__ import annotations

import array
from collections.abc import Iterator
from typing import NamedTuple

from cosmodrome import speed
from cosmodrome.findings import Finding
from cosmodrome.layout import (
    INDEX_ENTRY,
    INDEX_HEADER,
    INDEX_SLOT,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.store.index import key_hash
from cosmodrome.store.offline.files import PIECE_BYTES, IndexFileFacts, StoreFiles, read_slots
from cosmodrome.store.offline.findings import RUN_REBUILD, UNFINISHED, Findings, note, problem

SECONDS_MAX = 0x7FFFFFFF


class IndexEntry(NamedTuple):
    file: IndexFileFacts
    number: int
    hashed: int
    log_offset: int
    seconds: int
    previous: int

    @property
    def position(self) -> int:
        return (
            INDEX_HEADER.size + self.file.slots * INDEX_SLOT.size + self.number * INDEX_ENTRY.size
        )


def index_entries(files: StoreFiles, file: IndexFileFacts) -> Iterator[IndexEntry]:
    """The entries of one file in the order they were made."""
    view = files.index_view(file)
    start = INDEX_HEADER.size + file.slots * INDEX_SLOT.size
    step = PIECE_BYTES // INDEX_ENTRY.size
    count = min(file.count, file.entries_max)
    for number in range(1, count, step):
        at = start + number * INDEX_ENTRY.size
        stop = start + min(number + step, count) * INDEX_ENTRY.size
        for further, fields in enumerate(INDEX_ENTRY.iter_unpack(bytes(view[at:stop]))):
            yield IndexEntry(file, number + further, *fields)


class IndexCheck:
    """`cured_ms`: the next start builds the index anew from this time on; None if it does not."""

    def __init__(self, files: StoreFiles, limit: int, *, cured_ms: int | None) -> None:
        self.entry_count = 0
        self.files = files.index_files()
        self.findings = Findings(limit)
        self._store = files
        self._cured_files: set[str] = set()  # slots and header of these are made anew
        self._kept_numbers: dict[str, int] = {}  # but entries up to this number stay
        self._cured_from: int | None = None
        sizes = {file.size for file in self.files}
        if len(sizes) > 1:
            self.findings.add(
                note(
                    "index",
                    "index",
                    f"index files have {len(sizes)} different lengths: {sorted(sizes)}",
                    "nothing for this broker; the Java broker wants one length: run `cosmo store"
                    " rebuild` with --max-hash-slot-num and --max-index-num",
                )
            )
        if cured_ms is not None:
            self._foresee(cured_ms)
        self._entries = self._all_entries()
        self._head = next(self._entries, None)
        self._following = next(self._entries, None)
        self._missing_from = -1
        self._missing_count = 0

    def take(self, entry: speed.Entry) -> None:
        log_offset, topic, store_ms, keys = entry[0], entry[2], entry[6], entry[9]
        if not keys or entry[5] & SYS_TRANSACTION_MASK == SYS_ROLLBACK:
            return
        while (head := self._head) is not None and (
            head.log_offset < log_offset or self._out_of_order(head)
        ):
            self._stray(head)
            self._step()
        hashes = {key_hash(topic, key) for key in keys}
        found: set[int] = set()
        while (head := self._head) is not None and head.log_offset == log_offset:
            if head.hashed in hashes:
                self._check_time(head, store_ms)
            else:
                self._add(head, "names a record that has no key with its hash")
            found.add(head.hashed)
            self._step()
        if hashes <= found:
            self._end_missing(log_offset)
        else:
            if not self._missing_count:
                self._missing_from = log_offset
            self._missing_count += 1

    def finish(self, log_end: int, *, damaged: bool) -> Findings:
        self._end_missing(log_end)
        while (head := self._head) is not None:
            if not damaged or head.log_offset < log_end:
                self._stray(head)
            self._step()
        return self.findings

    # --- inside ------------------------------------------------------------------------------
    def _foresee(self, cured_ms: int) -> None:
        """Which files an abnormal start drops, and from where it then indexes again."""
        kept = 0
        for file in self.files:
            if self._cured_files:
                self._kept_numbers[file.path] = 0
            elif file.end_ms > cured_ms or (file.end_ms == cured_ms and not file.full):
                # The first such file keeps the entries that were synced.
                number = 0
                for entry in index_entries(self._store, file) if file.slots else ():
                    if file.begin_ms + entry.seconds * 1000 + 999 >= cured_ms:
                        break
                    number, kept = entry.number, max(kept, entry.log_offset)
                self._kept_numbers[file.path] = number
            else:
                kept = max(kept, file.end_offset)
                continue
            self._cured_files.add(file.path)
        self._cured_from = kept

    def _step(self) -> None:
        self.entry_count += 1
        self._head, self._following = self._following, next(self._entries, None)

    def _out_of_order(self, head: IndexEntry) -> bool:
        """An entry that points ahead of its successor is the damaged one of the two."""
        following = self._following
        return (
            following is not None
            and following.file.path == head.file.path
            and following.log_offset < head.log_offset
        )

    def _stray(self, head: IndexEntry) -> None:
        if not 0 <= head.log_offset < self._store.log_min:  # else its record has expired
            self._add(head, "names a place in the log where no record with keys begins")

    def _check_time(self, head: IndexEntry, store_ms: int) -> None:
        file = head.file
        if head.number == 1 and file.begin_ms != store_ms:
            self._add_of_file(file, 0, f"the header begins at {file.begin_ms}, not at {store_ms}")
        # A file that recovery cut back ends with the second of its last entry.
        if head.number == file.count - 1 and not 0 <= file.end_ms - store_ms < 1000:
            self._add_of_file(file, 8, f"the header ends at {file.end_ms}, not at {store_ms}")
        seconds = min(max(0, (store_ms - head.file.begin_ms) // 1000), SECONDS_MAX)
        if head.number > 1 and head.seconds != seconds:
            self._add(head, f"says {head.seconds} seconds after the file's begin, not {seconds}")

    def _add(self, entry: IndexEntry, what: str) -> None:
        text = f"entry {entry.number} ({entry.log_offset}) {what}"
        self.findings.add(
            self._problem(entry.file, entry.position, text),
            cured=entry.number > self._kept_numbers.get(entry.file.path, entry.number),
        )

    def _add_of_file(self, file: IndexFileFacts, position: int | None, what: str) -> None:
        self.findings.add(self._problem(file, position, what), cured=file.path in self._cured_files)

    def _problem(self, file: IndexFileFacts, position: int | None, what: str) -> Finding:
        return problem("index", self._store.name(file.path), what, RUN_REBUILD, position)

    def _end_missing(self, log_offset: int) -> None:
        count, self._missing_count = self._missing_count, 0
        if not count:
            return
        cured = self._cured_from is not None and self._missing_from >= self._cured_from
        if not self.files:
            what = f"there are no index files: no key of {count} messages is found"
            remedy = f"{RUN_REBUILD}; or say --no-index if the broker has messageIndexEnable off"
        else:
            what = (
                f"keys of {count} messages from log offset {self._missing_from} on are not in the"
                " index"
            )
            remedy = RUN_REBUILD
        self.findings.add(problem("index", "index", what, remedy), cured=cured)

    # --- inside a file -----------------------------------------------------------------------
    def _all_entries(self) -> Iterator[IndexEntry]:
        for file in self.files:
            if file.count <= 1 and file.size >= INDEX_HEADER.size:
                continue
            if not file.slots and self._store.holds_nothing(file.path):
                unfinished = "was being made when the broker ended"
                name = self._store.name(file.path)
                self.findings.add(note("index", name, unfinished, UNFINISHED))
                continue
            if not file.slots:
                self._add_of_file(
                    file,
                    None,
                    f"{file.size} bytes, but no number of slots fits them and their content; name"
                    " it with --max-hash-slot-num and --max-index-num if you know it",
                )
                continue
            if file.count > file.entries_max:
                self._add_of_file(
                    file,
                    INDEX_HEADER.size - 4,
                    f"the header counts {file.count} entries, {file.entries_max} have a place",
                )
            yield from self._chained_entries(file)

    def _chained_entries(self, file: IndexFileFacts) -> Iterator[IndexEntry]:
        """The entries, while following which of them each slot must name last."""
        newest = array.array("i", bytes(file.slots * INDEX_SLOT.size))
        first = last = None
        for entry in index_entries(self._store, file):
            first, last = first or entry, entry
            if entry.hashed < 0:
                self._add(entry, f"has the negative hash {entry.hashed}")
            slot = entry.hashed % file.slots
            if entry.previous != newest[slot]:
                self._add(entry, f"is chained to {entry.previous}, not to {newest[slot]}")
            newest[slot] = entry.number
            yield entry
        self._check_slots(file, newest)
        if first is not None and last is not None:
            for name, at, has, wants in (
                ("first", 16, file.begin_offset, first.log_offset),
                ("last", 24, file.end_offset, last.log_offset),
            ):
                if has != wants:
                    text = f"the header says the {name} record is at {has}, not {wants}"
                    self._add_of_file(file, at, text)

    def _check_slots(self, file: IndexFileFacts, newest: array.array[int]) -> None:
        start = INDEX_HEADER.size
        slots = read_slots(self._store.index_view(file), file.slots)
        if slots != newest:
            wrong = [at for at, value in enumerate(slots) if value != newest[at]]
            at = wrong[0]
            self._add_of_file(
                file,
                start + at * INDEX_SLOT.size,
                f"{len(wrong)} slots name the wrong entry; slot {at} names {slots[at]}, not"
                f" {newest[at]}",
            )
        used = file.slots - newest.count(0)
        if used != file.used_slots:
            self._add_of_file(file, 32, f"the header says {file.used_slots} slots, not {used}")
