"""Records as a pull brings them, filters made of functions, and a call without a connection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cosmodrome.env.real import real_env
from cosmodrome.filterserver.filters import Filter, Installed, Message
from cosmodrome.layout import MAGIC_RECORD, SYS_COMPRESSED, SYS_LZ4
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import compress, format_properties, pack_host
from cosmodrome.wire.record import Record, decode_record, encode_record
from cosmodrome.wire.table import Call

CALL = Call(Frame(code=0, opaque=0), None)  # type: ignore[arg-type]
PACKED = SYS_COMPRESSED | SYS_LZ4


def record(
    offset: int = 0,
    body: bytes = b"hello",
    *,
    sys_flag: int = 0,
    topic: str = "T",
    **properties: str,
) -> Record:
    made = Record(
        size=0,
        magic=MAGIC_RECORD,
        body_crc=0,
        queue_id=3,
        flag=9,
        queue_offset=offset,
        log_offset=1000 + offset,
        sys_flag=sys_flag,
        born_ms=111,
        born_host=pack_host("192.0.2.9", 1234),
        store_ms=222,
        store_host=pack_host("192.0.2.1", 10911),
        reconsume_times=2,
        prepared_offset=0,
        body=compress(body, sys_flag),
        topic=topic,
        properties=format_properties(properties),
    )
    return decode_record(encode_record(made))


def data(*records: Record) -> bytes:
    return b"".join(map(encode_record, records))


def filter_of(matches: Callable[[Message], object], name: str = "acme.F") -> Filter:
    return Filter(name, matches, "here")


def install(folder: Path, text: str, name: str = "some.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


GREEN = """
def green(message):
    return message.properties.get("colour") == "green"

FILTERS = {"com.acme.Green": green, "acme.filters.All": lambda message: True}
"""


async def installed(folder: Path, text: str = GREEN) -> Installed:
    install(folder, text)
    made = Installed(str(folder), real_env())
    await made.load()
    return made
