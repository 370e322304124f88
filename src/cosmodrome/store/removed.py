"""Topics that were deleted while the log still holds their messages.

The log is never rewritten, so recovery would bring a deleted topic back to life. This file
remembers up to which log offset each deleted topic is gone: records before it get no queue
entry. A line is dropped when the log has lost the last such record. Upstream does not know the
file and ignores it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from cosmodrome.env.base import Disk
from cosmodrome.env.signal import Signal

TOPICS_MAX = 10_000  # the oldest deletions are forgotten first

_log = logging.getLogger(__name__)


class _File(msgspec.Struct):
    topics: dict[str, int] = {}


class Removed:
    """`changes` fires with the name of a topic that was deleted just now."""

    def __init__(self, disk: Disk, path: str, *, read_only: bool) -> None:
        self._disk = disk
        self._path = path
        self._read_only = read_only
        self.before: dict[str, int] = {}  # topic -> its records before this offset are gone
        self.end = 0  # nothing from here on is gone
        self.changes: Signal[str] = Signal()

    def load(self) -> None:
        if not self._disk.exists(self._path):
            return
        try:
            self.before = msgspec.json.decode(self._disk.read(self._path), type=_File).topics
            self.end = max(self.before.values(), default=0)
        except (OSError, msgspec.DecodeError) as error:
            _log.error(
                "deleted_topics_unreadable path=%s error=%s next=%s",
                self._path,
                error,
                "messages of deleted topics may come back",
            )

    def note(self, topic: str, log_end: int, log_min: int) -> None:
        """A topic is deleted now. Blocking; on disk when this returns."""
        self.note_all({topic: log_end}, log_min)

    def note_all(self, ends: Mapping[str, int], log_min: int) -> None:
        """Like `note`, for several topics at once."""
        for topic, log_end in ends.items():
            self.before.pop(topic, None)  # to the end: the order is that of deletion
            self.before[topic] = log_end
        kept = [(name, before) for name, before in self.before.items() if before > log_min]
        self._save(dict(kept[-TOPICS_MAX:]))
        for topic in ends:
            self.changes.fire(topic)

    def clip(self, log_min: int, log_end: int) -> None:
        """The log was recovered: offsets behind its end will be given to new records."""
        ends = {topic: min(before, log_end) for topic, before in self.before.items()}
        fresh = {topic: before for topic, before in ends.items() if before > log_min}
        if fresh != self.before:
            self._save(fresh)

    def _save(self, fresh: dict[str, int]) -> None:
        self.before = fresh
        self.end = max(fresh.values(), default=0)
        if self._read_only:
            return
        try:
            self._disk.replace(self._path, msgspec.json.encode(_File(fresh)))
        except OSError as error:
            _log.error(
                "deleted_topics_not_saved path=%s error=%s next=%s",
                self._path,
                error,
                "a crash before the next deletion brings topics back",
            )
