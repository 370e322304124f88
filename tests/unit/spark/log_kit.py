"""Commit logs made by hand, for tests that read or damage them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from cosmodrome.layout import BLANK, BLANK_BYTES, MAGIC_BLANK
from cosmodrome.wire.record import Record, encode_record

HOST = bytes((127, 0, 0, 1, 0, 0, 42, 159))
FIRST_MS = 1_700_000_000_000


@dataclasses.dataclass(frozen=True)
class Sent:
    topic: str = "T"
    queue_id: int = 0
    body: bytes = b"body"
    tags: str | None = None
    sys_flag: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a record lies."""

    path: Path
    position: int
    size: int
    log_offset: int


def make_log(directory: Path, sent: Sequence[Sent], file_bytes: int = 4096) -> list[Place]:
    """Log files as a broker writes them; the last one is filled up with zeros."""
    directory.mkdir(parents=True)
    places: list[Place] = []
    offsets: dict[tuple[str, int], int] = {}
    base, data = 0, bytearray()
    for number, message in enumerate(sent):
        queue = message.topic, message.queue_id
        text = f"UNIQ_KEY\x01ID{number:04d}\x02" + (
            f"TAGS\x01{message.tags}\x02" if message.tags else ""
        )
        for _ in range(2):
            record = encode_record(
                Record(
                    *(0, 0, 0, message.queue_id, 7, offsets.get(queue, 0), base + len(data)),
                    *(message.sys_flag, FIRST_MS + number, HOST, FIRST_MS + 10 * number, HOST),
                    *(0, 0, message.body, message.topic, text),
                )
            )
            if len(data) + len(record) + BLANK_BYTES <= file_bytes:
                break
            left = file_bytes - len(data)
            data += BLANK.pack(left, MAGIC_BLANK) + bytes(left - BLANK_BYTES)
            (directory / f"{base:020d}").write_bytes(data)
            base, data = base + file_bytes, bytearray()
        path = directory / f"{base:020d}"
        places.append(Place(path, len(data), len(record), base + len(data)))
        offsets[queue] = offsets.get(queue, 0) + 1
        data += record
    (directory / f"{base:020d}").write_bytes(data + bytes(file_bytes - len(data)))
    return places


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: Path, position: int) -> None:
    old = path.read_bytes()[position]
    overwrite(path, position, bytes((old ^ 0x55,)))
