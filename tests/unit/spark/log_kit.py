"""Commit logs made by hand, for tests that read or damage them."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
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
class StoredRecord:
    """Where a record lies."""

    path: Path
    position: int
    size: int
    log_offset: int


def make_log(directory: Path, sent: Sequence[Sent], file_bytes: int = 4096) -> list[StoredRecord]:
    """Log files as a broker writes them; the last one is filled up with zeros."""
    directory.mkdir(parents=True)
    stored: list[StoredRecord] = []
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
                    size=0,
                    magic=0,
                    body_crc=0,
                    queue_id=message.queue_id,
                    flag=7,
                    queue_offset=offsets.get(queue, 0),
                    log_offset=base + len(data),
                    sys_flag=message.sys_flag,
                    born_ms=FIRST_MS + number,
                    born_host=HOST,
                    store_ms=FIRST_MS + 10 * number,
                    store_host=HOST,
                    reconsume_times=0,
                    prepared_offset=0,
                    body=message.body,
                    topic=message.topic,
                    properties=text,
                )
            )
            if len(data) + len(record) + BLANK_BYTES <= file_bytes:
                break
            left = file_bytes - len(data)
            data += BLANK.pack(left, MAGIC_BLANK) + bytes(left - BLANK_BYTES)
            (directory / f"{base:020d}").write_bytes(data)
            base, data = base + file_bytes, bytearray()
        path = directory / f"{base:020d}"
        stored.append(StoredRecord(path, len(data), len(record), base + len(data)))
        offsets[queue] = offsets.get(queue, 0) + 1
        data += record
    (directory / f"{base:020d}").write_bytes(data + bytes(file_bytes - len(data)))
    return stored


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: Path, position: int) -> None:
    old = path.read_bytes()[position]
    overwrite(path, position, bytes((old ^ 0x55,)))


Harm = Callable[[list[StoredRecord]], tuple[int, int]]  # hurts records[first:behind]


def harm_body(records: list[StoredRecord]) -> tuple[int, int]:
    flip(records[5].path, records[5].position + 89)
    return 5, 6


def harm_size(records: list[StoredRecord]) -> tuple[int, int]:
    flip(records[5].path, records[5].position + 3)
    return 5, 6


def harm_huge_size(records: list[StoredRecord]) -> tuple[int, int]:
    overwrite(records[5].path, records[5].position, b"\x70")
    return 5, 6


def harm_magic(records: list[StoredRecord]) -> tuple[int, int]:
    flip(records[5].path, records[5].position + 5)
    return 5, 6


def harm_offset(records: list[StoredRecord]) -> tuple[int, int]:
    flip(records[5].path, records[5].position + 35)
    return 5, 6


def harm_topic_length(records: list[StoredRecord]) -> tuple[int, int]:
    record = records[5]
    data = record.path.read_bytes()[record.position : record.position + record.size]
    flip(record.path, record.position + data.index(b"\x02T2"))
    return 5, 6


def harm_zeroed(records: list[StoredRecord]) -> tuple[int, int]:
    overwrite(records[5].path, records[5].position, bytes(records[5].size))
    return 5, 6


def harm_garbage(records: list[StoredRecord]) -> tuple[int, int]:
    length = sum(record.size for record in records[4:7])
    overwrite(records[4].path, records[4].position, random.Random(1).randbytes(length))
    return 4, 7


def harm_file_start(records: list[StoredRecord]) -> tuple[int, int]:
    number = next(
        n for n, record in enumerate(records) if record.log_offset and not record.position
    )
    overwrite(records[number].path, 0, b"\xff" * 100)
    return number, number + 1


def harm_file_end(records: list[StoredRecord]) -> tuple[int, int]:
    """From the middle of a file that others follow to its end."""
    number = next(
        n for n, record in enumerate(records) if record.log_offset and not record.position
    )
    first = number - 2
    size = records[first].path.stat().st_size
    overwrite(records[first].path, records[first].position, bytes(size - records[first].position))
    return first, number


def harm_cut_short(records: list[StoredRecord]) -> tuple[int, int]:
    number = next(
        n for n, record in enumerate(records) if record.log_offset and not record.position
    )
    os.truncate(records[number - 2].path, records[number - 2].position)
    return number - 2, number


def harm_last(records: list[StoredRecord]) -> tuple[int, int]:
    flip(records[-1].path, records[-1].position + 35)
    return len(records) - 1, len(records)


HARMS = [
    harm_body,
    harm_size,
    harm_huge_size,
    harm_magic,
    harm_offset,
    harm_topic_length,
    harm_zeroed,
    harm_garbage,
    harm_file_start,
    harm_file_end,
    harm_cut_short,
    harm_last,
]
