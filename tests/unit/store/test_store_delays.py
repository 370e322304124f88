"""Delay levels: what a level means, and that queue entries rebuilt from the log keep it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.unit.store.store_kit import HandClock, draft, faulty_env, put, small

from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import ConfigError
from cosmodrome.store.delays import DelayLevels
from cosmodrome.store.store import Store

DEFAULT = StoreOptions().message_delay_level


@pytest.mark.parametrize(
    ("level", "delay_ms"), [(1, 1000), (5, 60_000), (10, 360_000), (18, 7_200_000)]
)
def test_levels_of_upstream(level: int, delay_ms: int) -> None:
    assert DelayLevels(DEFAULT).delay_ms(level) == delay_ms


def test_level_above_the_highest_is_the_highest() -> None:
    assert len(DelayLevels(DEFAULT)) == 18
    assert DelayLevels("1s 3d").delay_ms(99) == 3 * 86_400_000


@pytest.mark.parametrize("level", [0, -1])
def test_level_below_one_is_none(level: int) -> None:
    with pytest.raises(LookupError):
        DelayLevels(DEFAULT).delay_ms(level)


@pytest.mark.parametrize("text", ["", "1s 5", "1s  x2h", "-1s", "1.5m", "1S"])
def test_bad_text_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match="messageDelayLevel"):
        DelayLevels(text)


async def test_a_rebuilt_queue_of_delayed_messages_keeps_their_times(tmp_path: Path) -> None:
    options = small(tmp_path)
    store = Store(options, faulty_env(clock=HandClock(1_000_000)))
    await store.start()
    await put(store, draft(topic="SCHEDULE_TOPIC_XXXX", queue_id=9, properties="DELAY\x0110"))
    await store.abandon()
    shutil.rmtree(tmp_path / "consumequeue", ignore_errors=True)

    store = Store(options, faulty_env(clock=HandClock(2_000_000)))
    await store.start()
    queue = store._queues.get("SCHEDULE_TOPIC_XXXX", 9)
    assert queue is not None
    entry = queue.entry(0)
    assert entry is not None and entry[2] == 1_000_000 + 360_000
    await store.stop()
