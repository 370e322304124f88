"""Frames and a log made by the Java system, read and written again."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from tests.goldens import GOLDENS, Golden, each_golden, frames

from cosmodrome import speed
from cosmodrome.speed.core import pure
from cosmodrome.wire.frame import Frame, FrameSplitter, decode, encode
from cosmodrome.wire.message import unpack_host
from cosmodrome.wire.record import Record, iter_records

LANGUAGE_CODES = {name: code for code, name in enumerate(speed.LANGUAGES)}


def ext_of(header: dict[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in (header.get("extFields") or {}).items()
        if value is not None
    }


@pytest.mark.parametrize(
    ("golden", "folder"),
    [
        pytest.param(golden, folder, id=f"{golden.name}-{folder}")
        for golden in GOLDENS
        for folder in sorted({path.parent.name for path in golden.captures()})
    ],
)
def test_captured_frames(golden: Golden, folder: str) -> None:
    count = 0
    for path in golden.captures(folder):
        for row in frames(path):
            data = base64.b64decode(row["frame_b64"])
            where = f"{path.name} seq {row['seq']}"
            (frame,) = FrameSplitter().feed(data)
            header = row["header"]
            assert frame.code == row["code"], where
            assert len(frame.body) == row["body_len"], where
            assert frame.is_response == (row["kind"] == "response"), where
            assert frame.is_oneway == (row["kind"] == "oneway"), where
            assert (frame.opaque, frame.version) == (header["opaque"], header["version"]), where
            if frame.serialize == 0:
                assert frame.ext == ext_of(header), where
                assert frame.language == LANGUAGE_CODES[header["language"]], where
                assert frame.remark == (header.get("remark") or None), where
            check_written_again(frame, data, where)
            count += 1
    assert count


def check_written_again(frame: Frame, data: bytes, where: str) -> None:
    header_bytes = int.from_bytes(data[5:8], "big")
    read_by_law = pure.decode_header(data[4], data[8 : 8 + header_bytes])
    assert speed.decode_header(data[4], data[8 : 8 + header_bytes]) == read_by_law, where
    for serialize in (0, 1):
        if serialize == 1 and frame.code > 0x7FFF:
            continue
        # Zero-length values cannot travel in the binary form; Java reads them as absent.
        ext = frame.ext if serialize == 0 else {k: v for k, v in frame.ext.items() if v}
        again = decode(encode_as(frame, serialize)[4:])
        assert again.ext == ext, where
        assert (again.code, again.opaque, again.flag) == (frame.code, frame.opaque, frame.flag)
        assert (again.remark, again.version, again.language, again.body) == (
            frame.remark,
            frame.version,
            frame.language,
            frame.body,
        ), where


def encode_as(frame: Frame, serialize: int) -> bytes:
    return encode(
        Frame(
            frame.code,
            frame.opaque,
            frame.flag,
            frame.ext,
            frame.body,
            frame.remark,
            frame.version,
            frame.language,
            serialize,
        )
    )


@each_golden
def test_java_json_headers_are_written_byte_for_byte(golden: Golden) -> None:
    """Java's own JSON responses have no order or white space of their own: ours are equal."""
    count = 0
    for path in golden.captures("json"):
        for row in frames(path):
            data = base64.b64decode(row["frame_b64"])
            if row["header"].get("language") != "JAVA" or data[4] != 0:
                continue
            frame = decode(data[4:])
            if not frame.ext and b'"extFields"' not in data:
                continue  # Java leaves out a map that was never made; ours is always there
            ours = speed.encode_header(0, *fields_of(frame))
            assert ours == data[8 : 8 + int.from_bytes(data[5:8], "big")]
            count += 1
    assert count > 100


def fields_of(frame: Frame) -> tuple[Any, ...]:
    return (
        frame.code,
        frame.language,
        frame.version,
        frame.opaque,
        frame.flag,
        frame.remark,
        frame.ext,
    )


@each_golden
@pytest.mark.parametrize("flavour", [speed, pure], ids=["chosen", "pure"])
def test_walk_over_a_java_log(golden: Golden, flavour: Any) -> None:
    manifest = golden.manifest("store")
    walked: list[speed.Entry] = []
    records: list[Record] = []
    ends = []
    for file in manifest["commitlog_files"]:
        data = (golden.path / "store" / file["file"]).read_bytes()
        base = int(file["file"][-20:])
        entries, at, why = flavour.walk(memoryview(data), base, 0, len(data), True, 1 << 30)
        walked += entries
        records += iter_records(data[:at])
        ends.append((base + at, why))
    assert ends == [
        *((blank["offset"], speed.WALK_BLANK) for blank in manifest["commitlog_padding"]),
        (manifest["commitlog_walk_end"], speed.WALK_EMPTY),
    ]
    assert walked == [expected_entry(row) for row in manifest["commitlog_walk"]]
    for record, row in zip(records, manifest["commitlog_walk"], strict=True):
        assert record.pairs() == row["properties"]
        assert (record.flag, record.body_crc) == (row["flag"], row["bodyCRC"])
        assert (record.born_ms, record.reconsume_times) == (
            row["bornTimestamp"],
            row["reconsumeTimes"],
        )
        assert record.prepared_offset == row["preparedTransactionOffset"]
        assert "{}:{}".format(*unpack_host(record.born_host)) == row["bornHost"]
        assert "{}:{}".format(*unpack_host(record.store_host)) == row["storeHost"]
        assert hashlib.sha256(record.body).hexdigest() == row["raw_body_sha256"]
        assert record.body_is_intact()


def expected_entry(row: dict[str, Any]) -> speed.Entry:
    properties = row["properties"]
    keys = [properties["UNIQ_KEY"]] if "UNIQ_KEY" in properties else []
    keys += properties.get("KEYS", "").split()
    return (
        row["commitLogOffset"],
        row["storeSize"],
        row["topic"],
        row["queueId"],
        row["queueOffset"],
        row["sysFlag"],
        row["storeTimestamp"],
        speed.java_hash(properties.get("TAGS", "")),
        int(properties.get("DELAY", "0")),
        tuple(keys),
    )


@each_golden
def test_records_of_java_are_written_byte_for_byte(golden: Golden) -> None:
    data = (golden.path / "store" / "commitlog" / "00000000000000000000").read_bytes()
    _, end, _ = speed.walk(memoryview(data), 0, 0, len(data), True, 1 << 30)
    for encode_record in (speed.encode_record, pure.encode_record):
        out = bytearray()
        for r in iter_records(data[:end]):
            encode_record(
                out,
                r.log_offset,
                r.queue_offset,
                r.store_ms,
                r.topic.encode(),
                r.queue_id,
                r.flag,
                r.sys_flag,
                r.born_ms,
                r.born_host,
                r.store_host,
                r.reconsume_times,
                r.prepared_offset,
                r.body,
                r.properties.encode(),
            )
        assert out == data[:end]
