"""The hot functions in plain Python. This file is the law: `native` must give the same results.

Header codec (JSON and binary), Java's string hash, the stored record's encoder and the walk over
records. Decoding leans towards what Java accepts; encoding towards what every client reads.
The rest of the law, about the entries of index and queues, is in `entries`.
Text that leaves a decoder never holds a lone surrogate, so whoever encodes it later cannot fail.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Annotated, Any, NoReturn

import msgspec

from cosmodrome.errors import MessageTooLarge, ProtocolError
from cosmodrome.layout import (
    BINARY_HEADER,
    CRC_MASK,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    INDEX_KEY,
    MAGIC_BLANK,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    PROPERTIES_BYTES_MAX,
    QUEUE_ENTRY,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_MIDDLE,
    SECTOR_BYTES,
    SERIALIZE_BINARY,
    SERIALIZE_JSON,
    SYS_BORN_V6,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_STORE_V6,
    SYS_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
    WALK_BLANK,
    WALK_CORRUPT,
    WALK_EMPTY,
    WALK_MORE,
)
from cosmodrome.speed.core.entries import SLOT_PAGE_BYTES as SLOT_PAGE_BYTES
from cosmodrome.speed.core.entries import Limits as Limits
from cosmodrome.speed.core.entries import chain as chain
from cosmodrome.speed.core.entries import select as select
from cosmodrome.speed.core.tails import Growing as Growing
from cosmodrome.speed.core.tails import QueueEnd as QueueEnd
from cosmodrome.speed.core.tails import Run as Run
from cosmodrome.speed.core.tails import Tail as Tail
from cosmodrome.speed.core.tails import put_back as put_back
from cosmodrome.speed.core.tails import spread as spread

# code, language, version, opaque, flag, remark, ext
Header = tuple[int, int, int, int, int, str | None, dict[str, str]]
# log_offset, size, topic, queue_id, queue_offset, sys_flag, store_ms, tags_code, delay_level, keys
Entry = tuple[int, int, str, int, int, int, int, int, int, tuple[str, ...]]

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"

LANGUAGES = (
    "JAVA",
    "CPP",
    "DOTNET",
    "PYTHON",
    "DELPHI",
    "ERLANG",
    "RUBY",
    "OTHER",
    "HTTP",
    "GO",
    "PHP",
    "OMS",
    "RUST",
    "NODE_JS",
)
LANGUAGE_OTHER = 7

_LANGUAGE_CODES = {name: code for code, name in enumerate(LANGUAGES)}
_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class _JsonHeader(msgspec.Struct):
    code: _Int32
    language: str | int | None = 0
    version: _Int32 = 0
    opaque: _Int32 = 0
    flag: _Int32 = 0
    remark: str | None = None
    extFields: dict[str, Any] | None = None


# Compat: Java writes the members in this order and leaves out nulls.
class _JsonHeaderOut(msgspec.Struct, omit_defaults=True):
    code: int
    extFields: dict[str, str] | None = None
    flag: Any = None
    language: Any = None
    opaque: Any = None
    remark: str | None = None
    serializeTypeCurrentRPC: Any = None
    version: Any = None


_read_json = msgspec.json.Decoder(_JsonHeader).decode
_write_json = msgspec.json.Encoder().encode


def decode_header(serialize: int, data: bytes) -> Header:
    """The header of a frame; ProtocolError says what is wrong with it."""
    if serialize == SERIALIZE_JSON:
        return _decode_json(data)
    if serialize == SERIALIZE_BINARY:
        return _decode_binary(data)
    _unknown_serialize(serialize)


def encode_header(
    serialize: int,
    code: int,
    language: int,
    version: int,
    opaque: int,
    flag: int,
    remark: str | None,
    ext: dict[str, str] | None,
) -> bytes:
    if serialize == SERIALIZE_JSON:
        return _encode_json(code, language, version, opaque, flag, remark, ext)
    if serialize == SERIALIZE_BINARY:
        return _encode_binary(code, language, version, opaque, flag, remark, ext)
    _unknown_serialize(serialize)


def _unknown_serialize(serialize: int) -> NoReturn:
    raise ProtocolError(f"unknown header serialize type {serialize}; 0 is JSON, 1 is binary")


# --- JSON header ---------------------------------------------------------------------------


def _decode_json(data: bytes) -> Header:
    try:
        header = _read_json(data)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"JSON header: {error}") from None
    except RecursionError:
        raise ProtocolError("JSON header: nested too deeply") from None
    except ValueError:
        header = _decode_json_leniently(data)
    language = header.language
    if not isinstance(language, int):
        language = _LANGUAGE_CODES.get(language or "OTHER", LANGUAGE_OTHER)
    elif not 0 <= language < len(LANGUAGES):
        language = LANGUAGE_OTHER
    ext = header.extFields
    if ext is None:
        ext = {}
    else:
        for value in ext.values():
            if value.__class__ is not str:
                ext = {name: _java_text(value) for name, value in ext.items() if value is not None}
                break
    return (
        header.code,
        language,
        header.version,
        header.opaque,
        header.flag,
        header.remark or None,
        ext,
    )


def _decode_json_leniently(data: bytes) -> _JsonHeader:
    # Compat: Java accepts broken UTF-8, lone surrogates and bare control characters in strings.
    try:
        text = bytes(data).decode("utf-8", "replace")
        value = json.loads(text, strict=False, parse_constant=_no_constant)
        return msgspec.convert(_without_surrogates(value), _JsonHeader)
    except RecursionError:
        raise ProtocolError("JSON header: nested too deeply") from None
    except ValueError as error:
        raise ProtocolError(f"JSON header: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value


def _java_text(value: object) -> str:
    """Header values as Java prints them; the C++ and Node clients send numbers and booleans."""
    if isinstance(value, str):
        return value
    if value is True:
        return "true"
    if value is False:
        return "false"
    try:
        if isinstance(value, int):
            return str(value)
        if isinstance(value, float):
            return repr(value)
        return _write_json(value).decode()
    except (ValueError, RecursionError):
        raise ProtocolError("JSON header: an extFields value is out of range") from None


def _encode_json(
    code: int,
    language: int,
    version: int,
    opaque: int,
    flag: int,
    remark: str | None,
    ext: dict[str, str] | None,
) -> bytes:
    for name, value in (("code", code), ("version", version), ("opaque", opaque), ("flag", flag)):
        if not -0x80000000 <= value <= 0x7FFFFFFF:
            raise ProtocolError(f"JSON header: {name} {value} does not fit in 32 bits")
    named = LANGUAGES[language] if 0 <= language < len(LANGUAGES) else "OTHER"
    out = _JsonHeaderOut(code, ext, flag, named, opaque, remark, "JSON", version)
    try:
        return _write_json(out)
    except UnicodeEncodeError:
        out.remark = _without_surrogates(remark)
        out.extFields = _without_surrogates(ext)
        return _write_json(out)


# --- binary header -------------------------------------------------------------------------


def _decode_binary(data: bytes) -> Header:
    end = len(data)
    if end < BINARY_HEADER.size + 4:
        raise ProtocolError(f"binary header: {end} bytes are too few")
    code, language, version, opaque, flag, remark_bytes = BINARY_HEADER.unpack_from(data)
    at = BINARY_HEADER.size
    if not 0 <= remark_bytes <= end - at - 4:
        raise ProtocolError(f"binary header: remark of {remark_bytes} bytes does not fit")
    remark = str(data[at : at + remark_bytes], "utf-8", "replace") if remark_bytes else None
    at += remark_bytes
    ext_bytes = int.from_bytes(data[at : at + 4], "big", signed=True)
    at += 4
    if not 0 <= ext_bytes <= end - at:
        raise ProtocolError(f"binary header: fields of {ext_bytes} bytes do not fit")
    ext: dict[str, str] = {}
    end = at + ext_bytes  # Compat: Java ignores what follows inside the header
    while at < end:
        key_end = at + 2 + int.from_bytes(data[at : at + 2], "big", signed=True)
        value_at = key_end + 4
        if key_end < at + 2 or value_at > end:
            raise ProtocolError("binary header: a field name does not fit")
        value_bytes = int.from_bytes(data[key_end:value_at], "big", signed=True)
        if not 0 <= value_bytes <= end - value_at:
            raise ProtocolError("binary header: a field value does not fit")
        if key_end > at + 2 and value_bytes:
            name = str(data[at + 2 : key_end], "utf-8", "replace")
            ext[name] = str(data[value_at : value_at + value_bytes], "utf-8", "replace")
        at = value_at + value_bytes
    if not 0 <= language < len(LANGUAGES):
        language = LANGUAGE_OTHER
    return code, language, version, opaque, flag, remark, ext


def _encode_binary(
    code: int,
    language: int,
    version: int,
    opaque: int,
    flag: int,
    remark: str | None,
    ext: dict[str, str] | None,
) -> bytes:
    for name, value in (("code", code), ("version", version)):
        if not -0x8000 <= value <= 0x7FFF:
            raise ProtocolError(
                f"binary header: {name} {value} does not fit in 16 bits; use a JSON header"
            )
    for name, value in (("opaque", opaque), ("flag", flag)):
        if not -0x80000000 <= value <= 0x7FFFFFFF:
            raise ProtocolError(f"binary header: {name} {value} does not fit in 32 bits")
    if not 0 <= language < len(LANGUAGES):
        language = LANGUAGE_OTHER
    remark_text = remark.encode("utf-8", "replace") if remark else b""
    pairs = bytearray()
    for field, text in ext.items() if ext else ():
        key = field.encode("utf-8", "replace")
        if len(key) > 0x7FFF:
            raise ProtocolError(f"binary header: field name of {len(key)} bytes is too long")
        data = text.encode("utf-8", "replace")
        pairs += len(key).to_bytes(2, "big")
        pairs += key
        pairs += len(data).to_bytes(4, "big")
        pairs += data
    return b"".join(
        (
            BINARY_HEADER.pack(code, language, version, opaque, flag, len(remark_text)),
            remark_text,
            len(pairs).to_bytes(4, "big"),
            pairs,
        )
    )


# --- hash ----------------------------------------------------------------------------------


def java_hash(text: str) -> int:
    """Java's String.hashCode: signed 32 bits, over UTF-16 units."""
    value = 0
    if text.isascii():
        units: tuple[int, ...] | bytes = text.encode()
    else:
        encoded = text.encode("utf-16-be", "surrogatepass")
        units = struct.unpack(f">{len(encoded) // 2}H", encoded)
    for unit in units:
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def key_hash(topic: str, key: str) -> int:
    """The hash under which the index keeps a key of a topic."""
    value = abs(java_hash(f"{topic}#{key}"))
    return 0 if value > 0x7FFFFFFF else value  # Compat: Java's abs of the smallest int


# --- record --------------------------------------------------------------------------------


def encode_record(
    out: bytearray,
    log_offset: int,
    queue_offset: int,
    store_ms: int,
    topic: bytes,
    queue_id: int,
    flag: int,
    sys_flag: int,
    born_ms: int,
    born_host: bytes,
    store_host: bytes,
    reconsume_times: int,
    prepared_offset: int,
    body: bytes,
    properties: bytes,
) -> int:
    """Append one record to `out` and return its size; on an error `out` is unchanged.

    The address-family bits of `sys_flag` follow from the lengths of the hosts.
    """
    sys_flag &= ~(SYS_BORN_V6 | SYS_STORE_V6)
    sys_flag |= SYS_BORN_V6 if _is_v6("born", born_host) else 0
    sys_flag |= SYS_STORE_V6 if _is_v6("store", store_host) else 0
    if len(topic) > TOPIC_BYTES_MAX:
        raise MessageTooLarge(f"topic of {len(topic)} bytes; at most {TOPIC_BYTES_MAX} fit")
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise MessageTooLarge(
            f"properties of {len(properties)} bytes; at most {PROPERTIES_BYTES_MAX} fit,"
            " shorten keys, tags or user properties"
        )
    size = RECORD_BYTES_MIN - 2 * HOST_V4_BYTES + len(born_host) + len(store_host)
    size += len(body) + len(topic) + len(properties)
    crc = zlib.crc32(body) & CRC_MASK
    try:
        head = RECORD_HEAD.pack(
            size, MAGIC_RECORD, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms
        )
        stored = store_ms.to_bytes(8, "big", signed=True)
        middle = RECORD_MIDDLE.pack(reconsume_times, prepared_offset, len(body))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a record field does not fit: {error}") from None
    out += b"".join(
        (
            head,
            born_host,
            stored,
            store_host,
            middle,
            body,
            len(topic).to_bytes(1, "big"),
            topic,
            len(properties).to_bytes(2, "big"),
            properties,
        )
    )
    return size


def _is_v6(whose: str, host: bytes) -> bool:
    if len(host) not in (HOST_V4_BYTES, HOST_V6_BYTES):
        raise ValueError(f"{whose} host of {len(host)} bytes; expected 8 or 20")
    return len(host) == HOST_V6_BYTES


def walk(
    view: memoryview,
    base: int,
    start: int,
    end: int,
    check_crc: bool,
    limit: int,
    whole_ms: int = 0,
) -> tuple[list[Entry], int, int]:
    """Walk the records in view[start:end], where view[0] has log offset `base`.

    Returns the entries of good records (at most `limit`), the position behind the last of them
    and why the walk ended (WALK_*). A record is good only when all its lengths add up to its
    size and it holds its own log offset. Any bytes may be given; none of them raise.

    With `check_crc` the body must match its checksum, which covers nothing else, so the rest
    is examined for what a power cut leaves: a zero byte in the topic, or a sector of zeros,
    counted from view[0], in the properties unless the record was stored before `whole_ms`.
    """
    if not 0 <= start <= end <= len(view):
        raise ValueError(f"walk from {start} to {end} outside a view of {len(view)} bytes")
    entries: list[Entry] = []
    at = start
    while at < end and len(entries) < limit:
        if end - at < 8:
            return entries, at, WALK_CORRUPT if any(view[at:end]) else WALK_EMPTY
        size = int.from_bytes(view[at : at + 4], "big", signed=True)
        magic = int.from_bytes(view[at + 4 : at + 8], "big", signed=True)
        if magic == MAGIC_BLANK and size >= 8:
            return entries, at, WALK_BLANK
        if not size and not magic:
            return entries, at, WALK_EMPTY
        entry = None
        if size <= end - at:
            entry = _entry(view, base, at, size, magic, check_crc, whole_ms)
        if entry is None:
            return entries, at, WALK_CORRUPT
        entries.append(entry)
        at += size
    return entries, at, WALK_MORE


def _entry(
    view: memoryview, base: int, at: int, size: int, magic: int, check_crc: bool, whole_ms: int
) -> Entry | None:
    if size < RECORD_BYTES_MIN or magic not in (MAGIC_RECORD, MAGIC_RECORD_V2):
        return None
    _, _, crc, queue_id, _, queue_offset, log_offset, sys_flag, _ = RECORD_HEAD.unpack_from(
        view, at
    )
    if log_offset != base + at:
        return None
    end = at + size
    store_at = at + RECORD_HEAD.size + (HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES)
    middle_at = store_at + 8 + (HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES)
    body_at = middle_at + RECORD_MIDDLE.size
    topic_width = 1 if magic == MAGIC_RECORD else 2
    if body_at + topic_width + 2 > end:
        return None
    store_ms = int.from_bytes(view[store_at : store_at + 8], "big", signed=True)
    body_bytes = int.from_bytes(view[body_at - 4 : body_at], "big", signed=True)
    if not 0 <= body_bytes <= end - body_at - topic_width - 2:
        return None
    topic_at = body_at + body_bytes + topic_width
    topic_bytes = int.from_bytes(view[topic_at - topic_width : topic_at], "big", signed=True)
    if not 0 <= topic_bytes <= end - topic_at - 2:
        return None
    properties_at = topic_at + topic_bytes + 2
    properties_bytes = int.from_bytes(view[properties_at - 2 : properties_at], "big", signed=True)
    if properties_bytes != end - properties_at:
        return None
    if check_crc and (
        zlib.crc32(view[body_at : body_at + body_bytes]) & CRC_MASK != crc
        or 0 in view[topic_at : topic_at + topic_bytes]
        or (store_ms >= whole_ms and _lost_sector(view, properties_at, end))
    ):
        return None
    topic = str(view[topic_at : topic_at + topic_bytes], "utf-8", "replace")
    tags_code, delay_level, keys = _facts(bytes(view[properties_at:end]))
    return (
        log_offset,
        size,
        topic,
        queue_id,
        queue_offset,
        sys_flag,
        store_ms,
        tags_code,
        delay_level,
        keys,
    )


def _lost_sector(view: memoryview, start: int, end: int) -> bool:
    """Whether a sector that begins between `start` and `end` holds nothing but zeros there.

    Sectors that also hold other parts of a record need no look: zeros there break its lengths.
    """
    first = -(-start // SECTOR_BYTES) * SECTOR_BYTES
    return any(
        not any(view[at : min(at + SECTOR_BYTES, end)]) for at in range(first, end, SECTOR_BYTES)
    )


def _facts(properties: bytes) -> tuple[int, int, tuple[str, ...]]:
    """What dispatch needs from a properties text: hash of the tags, delay level, keys."""
    found: dict[bytes, bytes] = {}
    for pair in properties.split(b"\x02"):
        name, _, value = pair.partition(b"\x01")
        if value and name in _WANTED:
            found[name] = value
    tags = found.get(b"TAGS")
    unique = found.get(b"UNIQ_KEY")
    words = found.get(b"KEYS")
    keys = [str(unique, "utf-8", "replace")] if unique else []
    if words:
        keys += [str(word, "utf-8", "replace") for word in words.split(b" ") if word]
    return (
        java_hash(str(tags, "utf-8", "replace")) if tags else 0,
        _level(found.get(b"DELAY", b"")),
        tuple(keys),
    )


_WANTED = frozenset({b"TAGS", b"KEYS", b"UNIQ_KEY", b"DELAY"})


def _level(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"+" else text
    if not digits.isdigit() or len(digits) > 10:
        return 0
    level = int(digits)
    return level if level <= 0x7FFFFFFF else 0


# --- many records at once ------------------------------------------------------------------


def gather(
    view: memoryview,
    base: int,
    start: int,
    end: int,
    check_crc: bool,
    limit: int,
    whole_ms: int = 0,
) -> tuple[list[Run], bytes, list[Entry], int, int, int, int]:
    """Walk as `walk` does and return what queues and index need of it, packed.

    Returns runs of queue entries (consecutive offsets of one queue, in log order within it),
    the keys of all records as packed INDEX_KEYs, the entries of delayed messages, whose tags
    code depends on a setting (they are in no run), the number of records, the last store time
    (0 without records), position and why.
    """
    entries, position, why = walk(view, base, start, end, check_crc, limit, whole_ms)
    current: dict[tuple[str, int], tuple[int, bytearray]] = {}
    runs: list[tuple[str, int, int, bytearray]] = []
    keys = bytearray()
    delayed: list[Entry] = []
    for entry in entries:
        log_offset, size, topic, queue_id, queue_offset, sys_flag, store_ms, tags_code = entry[:8]
        kind = sys_flag & SYS_TRANSACTION_MASK
        if kind != SYS_ROLLBACK:
            for key in entry[9]:
                keys += INDEX_KEY.pack(key_hash(topic, key), log_offset, store_ms)
        if topic == SCHEDULE_TOPIC:
            delayed.append(entry)
        elif kind not in (SYS_PREPARED, SYS_ROLLBACK):
            expected, data = current.get((topic, queue_id), (None, None))
            if data is None or expected != queue_offset:
                data = bytearray()
                runs.append((topic, queue_id, queue_offset, data))
            data += QUEUE_ENTRY.pack(log_offset, size, tags_code)
            current[topic, queue_id] = queue_offset + 1, data
    packed = [(topic, queue_id, first, bytes(data)) for topic, queue_id, first, data in runs]
    last_ms = entries[-1][6] if entries else 0
    return packed, bytes(keys), delayed, len(entries), last_ms, position, why
