from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.later_kit import START_MS, Later, SetClock

from cosmodrome.errors import Code, Refused
from cosmodrome.layout import SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK
from cosmodrome.store.store import Draft
from cosmodrome.wire.message import parse_properties
from cosmodrome.wire.names import SCHEDULE_TOPIC, TIMER_TOPIC


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Later]:
    kit = await Later(tmp_path, SetClock()).open(deliver=False)
    yield kit
    await kit.close()


def redirected(
    kit: Later, properties: str, sys_flag: int = 0
) -> tuple[str, int, dict[str, str], int | None]:
    draft = Draft("T", 5, b"", "", bytes(8), bytes(8), sys_flag=sys_flag)
    pairs = parse_properties(properties)
    deliver_ms = kit.deferral.redirect(draft, pairs)
    return draft.topic, draft.queue_id, pairs, deliver_ms


@pytest.mark.parametrize(
    "properties",
    [
        "",
        "TAGS\x01a",
        "DELAY\x010",
        "DELAY\x01-1",
        "TIMER_DELAY_MS\x010",
        f"TIMER_DELIVER_MS\x01{START_MS}",
        "TIMER_DELAY_MS\x015000\x02TIMER_OUT_MS\x017",  # it had its time
    ],
)
async def test_what_does_not_wait_is_left_alone(kit: Later, properties: str) -> None:
    assert redirected(kit, properties) == ("T", 5, parse_properties(properties), None)


@pytest.mark.parametrize("sys_flag", [SYS_PREPARED, SYS_ROLLBACK])
async def test_half_messages_wait_only_when_they_are_committed(kit: Later, sys_flag: int) -> None:
    assert redirected(kit, "DELAY\x012", sys_flag)[0] == "T"
    assert redirected(kit, "DELAY\x012", SYS_COMMIT)[0] == SCHEDULE_TOPIC


@pytest.mark.parametrize(("asked", "level"), [("1", 1), ("3", 3), ("4", 3), ("2147483647", 3)])
async def test_a_level(kit: Later, asked: str, level: int) -> None:
    topic, queue_id, pairs, deliver_ms = redirected(kit, f"DELAY\x01{asked}")
    assert (topic, queue_id, deliver_ms) == (SCHEDULE_TOPIC, level - 1, None)
    assert pairs == {"DELAY": str(level), "REAL_TOPIC": "T", "REAL_QID": "5"}


async def test_a_level_wins_over_a_time(kit: Later) -> None:
    topic, _, pairs, _ = redirected(
        kit, "DELAY\x011\x02TIMER_DELAY_SEC\x019\x02TIMER_DELAY_MS\x019"
    )
    assert topic == SCHEDULE_TOPIC
    assert not any(name.startswith("TIMER_") for name in pairs)


@pytest.mark.parametrize(
    ("properties", "ms"),
    [
        ("TIMER_DELAY_SEC\x017", 7000),
        ("TIMER_DELAY_MS\x017", 7),
        (f"TIMER_DELIVER_MS\x01{START_MS + 9}", 9),
        (
            f"TIMER_DELIVER_MS\x01{START_MS + 9}\x02TIMER_DELAY_MS\x017\x02TIMER_DELAY_SEC\x012",
            2000,
        ),
        (f"TIMER_DELIVER_MS\x01{START_MS + 9}\x02TIMER_DELAY_MS\x017", 7),
        ("TIMER_DELAY_SEC\x01259200", 259_200_000),
    ],
)
async def test_a_time(kit: Later, properties: str, ms: int) -> None:
    topic, queue_id, pairs, deliver_ms = redirected(kit, properties)
    assert (topic, queue_id, deliver_ms) == (TIMER_TOPIC, 0, START_MS + ms)
    assert pairs["TIMER_OUT_MS"] == str(START_MS + ms)
    assert (pairs["REAL_TOPIC"], pairs["REAL_QID"]) == ("T", "5")
    config = kit.topics.get(TIMER_TOPIC)
    assert config is not None and (config.write_queue_nums, config.perm) == (1, 6)


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ("DELAY\x01soon", "'soon' is not a number"),
        ("DELAY\x01١", "not a number"),
        ("TIMER_DELAY_SEC\x01259201", "timerMaxDelaySec 259200"),
        ("TIMER_DELIVER_MS\x019999999999999999999", "timerMaxDelaySec|whole number"),
        ("TIMER_DELAY_MS\x01" + "9" * 40, "whole number"),
        ("TIMER_DELAY_MS\x011.5", "TIMER_DELAY_MS is '1.5'"),
    ],
)
async def test_what_is_refused(kit: Later, properties: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        redirected(kit, properties)
    assert refused.value.code == Code.MESSAGE_ILLEGAL
