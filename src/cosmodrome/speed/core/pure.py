"""The hot functions in plain Python. This file is the law: `native` must give the same results.

Here is the header codec (JSON and binary). Decoding leans towards what Java accepts; encoding
towards what every client reads. The rest of the law is in `records`, `entries` and `tails`.
Text that leaves a decoder never holds a lone surrogate, so whoever encodes it later cannot fail.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import msgspec

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    BINARY_HEADER,
    SERIALIZE_BINARY,
    SERIALIZE_JSON,
)
from cosmodrome.speed.core.entries import SLOT_PAGE_BYTES as SLOT_PAGE_BYTES
from cosmodrome.speed.core.entries import Limits as Limits
from cosmodrome.speed.core.entries import chain as chain
from cosmodrome.speed.core.entries import select as select
from cosmodrome.speed.core.records import SCHEDULE_TOPIC as SCHEDULE_TOPIC
from cosmodrome.speed.core.records import Entry as Entry
from cosmodrome.speed.core.records import encode_record as encode_record
from cosmodrome.speed.core.records import gather as gather
from cosmodrome.speed.core.records import gather_next as gather_next
from cosmodrome.speed.core.records import java_hash as java_hash
from cosmodrome.speed.core.records import key_hash as key_hash
from cosmodrome.speed.core.records import walk as walk
from cosmodrome.speed.core.tails import Growing as Growing
from cosmodrome.speed.core.tails import QueueEnd as QueueEnd
from cosmodrome.speed.core.tails import Run as Run
from cosmodrome.speed.core.tails import Tail as Tail
from cosmodrome.speed.core.tails import put_back as put_back
from cosmodrome.speed.core.tails import spread as spread

# code, language, version, opaque, flag, remark, ext
Header = tuple[int, int, int, int, int, str | None, dict[str, str]]

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
