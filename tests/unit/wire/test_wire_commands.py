"""Facts about the table as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmodrome.wire import commands, document, table
from cosmodrome.wire.commands import (
    SendBatchMessage,
    SendMessage,
    SendMessageV2,
    SendReplyMessage,
    SendReplyMessageV2,
    SendRequest,
)
from cosmodrome.wire.table import Command, Role

ROOT = Path(__file__).parents[3]


def codes(text: str) -> list[int]:
    """Codes and ranges of codes, as in "10 25-43"."""
    spans = [
        (int(first), int(last or first))
        for first, _, last in (word.partition("-") for word in text.split())
    ]
    return [code for first, last in spans for code in range(first, last + 1)]


# Every request code of 4.9.8, and the 5.x codes that clients were seen to send.
CODES_498 = codes("10-15 17 21-23 25-43 45 46 50-54 100-106 200-216 219-224 300-329")
CODES_5X = codes("351 352 361 370 400 401 907 200050 200051 200053")
CODES_OURS = [31001, 31010]

SERVED = {
    Role.BROKER: codes(
        "10-12 14 15 17 21 25 26 28-38 41-43 45 46 50-53 200-204 207 208 215 222 223 300 301 303"
        " 305-310 314-317 320 321 323-325 328 329 351 352 361 370 907 31001 31010"
    ),
    Role.NAMESERVER: codes("100-106 205 206 216 219 224 304 311-313 318 319 322 327"),
    Role.FILTERSERVER: codes("11 302"),
}


def all_rows() -> list[type[Command[Any]]]:
    return list(table.rows().values())


def test_every_code_has_a_row() -> None:
    assert sorted(table.rows()) == sorted(CODES_498 + CODES_5X + CODES_OURS)


@pytest.mark.parametrize("role", SERVED)
def test_what_is_served(role: Role) -> None:
    served = [row.request_code for row in all_rows() if role in row.served_by and not row.planned]
    assert sorted(served) == sorted(SERVED[role])


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: row.name)
def test_a_row_is_named_after_its_code_and_exported(row: type[Command[Any]]) -> None:
    camel = "".join(word.capitalize() for word in row.name.split("_"))
    assert row.__name__ == camel
    assert getattr(commands, camel) is row
    assert row.__name__ in commands.__all__
    assert row.__doc__ and row.__doc__.strip().endswith(".")


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: row.name)
def test_a_row_survives_its_own_codec(row: type[Command[Any]]) -> None:
    example = {str: "text", bool: "true"}
    ext = {
        field.encode_name: example.get(_plain(field.type), "7")
        for field in table.header_fields(row)
    }
    assert table.encode(table.decode(row, ext, b"")) == ext


def _plain(kind: Any) -> Any:
    options = [option for option in getattr(kind, "__args__", (kind,)) if option is not type(None)]
    return options[0]


SENDS = (SendMessage, SendMessageV2, SendBatchMessage, SendReplyMessage, SendReplyMessageV2)


@pytest.mark.parametrize("row", SENDS)
def test_sends_look_alike_to_a_handler(row: type[SendRequest]) -> None:
    ask = row(
        producer_group="P",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=1,
        sys_flag=0,
        born_timestamp=5,
        flag=0,
        properties="p",
        reconsume_times=0,
        unit_mode=False,
        max_reconsume_times=16,
        batch=False,
        broker_name="b",
    )
    assert isinstance(ask, SendRequest)
    short = row.request_code in (310, 320, 325)
    names = set("abcdefghijklmn") if short else {"producerGroup", "topic", "bname"}
    assert names <= set(table.encode(ask))
    assert row.success_codes == {0, 10, 11, 12}


def test_pulls_carry_offsets_in_four_codes() -> None:
    assert commands.PullMessage.success_codes == {0, 19, 20, 21}
    assert commands.LitePullMessage.success_codes == {0, 19, 20, 21}


def test_relayed_codes_are_served_by_both_ends() -> None:
    for code in (307, 309):
        assert table.rows()[code].served_by == {Role.BROKER, Role.CLIENT}


def test_codes_sent_to_clients() -> None:
    to_clients = [row.request_code for row in all_rows() if row.served_by == {Role.CLIENT}]
    assert sorted(to_clients) == [39, 40, 220, 221, 326]


def test_the_protocol_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert page == document.render(), "run: python -m cosmodrome.wire.document > docs/protocol.md"


def test_the_page_shows_types_requirements_and_reasons() -> None:
    page = document.render()
    assert "| 30 | GET_MAX_OFFSET | `GetMaxOffset` | topic: string!, queueId: int32! |" in page
    assert "offset: int64!" in page
    assert "not served: brokers do not assign queues (5.x) yet" in page
