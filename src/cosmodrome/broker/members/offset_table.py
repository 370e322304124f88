"""The rows of group offsets, what they take, and which of them belong to a group or a topic.

A client may commit for names that nobody ever created, so the table is bounded in bytes, as they
would be in the one answer that brings all rows to a slave or a tool: in all, and for one group. A
row that is there can always be changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cosmodrome.broker.members.table_file import TABLE_BYTES_MAX
from cosmodrome.errors import Code, Refused

QueueOffsets = dict[int, int]

GROUP_BYTES_MAX = TABLE_BYTES_MAX // 4
ROW_BYTES = len('"":{},')
PIECE_QUEUES = 500
QUEUE_BYTES = 24  # of a queue id and an offset as text, with what is around them


class OffsetTable:
    """Queue id -> offset, by `topic@group`. Look up in `rows`, and change there only what a row
    has already."""

    def __init__(self) -> None:
        self.rows: dict[str, QueueOffsets] = {}
        self.size_bytes = 0
        self._group_bytes: dict[str, int] = {}
        # Names as the keys of a dict, which unlike a set is nothing to the collector.
        self._topics: dict[str, dict[str, None]] = {}  # of a group
        self._groups: dict[str, dict[str, None]] = {}  # of a topic

    def topics_of(self, group: str) -> set[str]:
        return set(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> set[str]:
        return set(self._groups.get(topic, ()))

    def topics_by_group(self) -> dict[str, set[str]]:
        return {group: set(topics) for group, topics in self._topics.items()}

    def check_room(self, key: str) -> None:
        """Whether a queue more may be added to a row, which may be a new one."""
        topic, group = split(key)
        new = QUEUE_BYTES + (0 if key in self.rows else ROW_BYTES + len(key))
        if self.size_bytes + new > TABLE_BYTES_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The offsets of all groups on this broker take {self.size_bytes} bytes, and more"
                f" than {TABLE_BYTES_MAX} are not kept; delete unused groups with their offsets"
                " first. Offsets that are kept already still change.",
            )
        if self._group_bytes.get(group, 0) + new > GROUP_BYTES_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The offsets of group {group} take {self._group_bytes[group]} bytes on this"
                f" broker, and more than {GROUP_BYTES_MAX} are not kept for one group, so queues"
                f" of {topic} have no place; delete the offsets of topics that it no longer reads.",
            )

    def add(self, key: str, queue_id: int, offset: int) -> None:
        """The offset of a queue that has none yet."""
        queues = self.rows.get(key)
        if queues is None:
            self.put(key, {queue_id: offset})
        else:
            queues[queue_id] = offset
            self._count(key, QUEUE_BYTES)

    def put(self, key: str, queues: QueueOffsets) -> None:
        """Make this the row; an empty one is none."""
        self.drop(key)
        if not queues:
            return
        self.rows[key] = queues
        topic, group = split(key)
        self._topics.setdefault(group, {})[topic] = None
        self._groups.setdefault(topic, {})[group] = None
        self._count(key, _row_bytes(key, queues))

    def drop(self, key: str) -> None:
        queues = self.rows.pop(key, None)
        if queues is None:
            return
        topic, group = split(key)
        self._count(key, -_row_bytes(key, queues))
        for names, name, other in (
            (self._topics, group, topic),
            (self._groups, topic, group),
        ):
            del names[name][other]
            if not names[name]:
                del names[name]
        if group not in self._topics:
            del self._group_bytes[group]

    def clear(self) -> None:
        for key in list(self.rows):
            self.drop(key)

    def pieces(self) -> Iterator[bytes]:
        """All rows in upstream's dialect, each piece with about `PIECE_QUEUES` queues. A row that
        changes meanwhile is written as it is when its turn comes."""
        text: list[str] = []
        left = PIECE_QUEUES
        comma = "{"
        for key in list(self.rows):
            queues = self.rows.get(key)
            if queues is None:
                continue
            text.append(f"{comma}{msgspec.json.encode(key).decode()}:{{")
            comma = ","
            between = ""
            for queue_id in sorted(queues):
                text.append(f"{between}{queue_id}:{queues[queue_id]}")
                between = ","
                left -= 1
                if left <= 0:
                    yield "".join(text).encode()
                    text, left = [], PIECE_QUEUES
            text.append("}")
        yield "".join((*text, "{}" if comma == "{" else "}")).encode()

    def _count(self, key: str, size: int) -> None:
        _, group = split(key)
        self.size_bytes += size
        self._group_bytes[group] = self._group_bytes.get(group, 0) + size


def split(key: str) -> tuple[str, str]:
    topic, _, group = key.partition("@")
    return topic, group


def _row_bytes(key: str, queues: QueueOffsets) -> int:
    return ROW_BYTES + len(key) + len(queues) * QUEUE_BYTES
