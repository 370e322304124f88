"""Messages for later: where they wait.

A message with a delay level waits in `SCHEDULE_TOPIC_XXXX`, one queue per level; a message with
a delivery time of its own waits in `rmq_sys_wheel_timer`. Both are ordinary records that carry
their real topic and queue as properties. `Deferral` sends them there when they are stored;
`delivery` brings them back.

Compat: a delivered message keeps every property of its wait (DELAY, REAL_TOPIC, ...). Only a
fresh send is deferred, so that does not delay it a second time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Final

from cosmodrome.broker.members.topics import PERM_READ_WRITE, Topics
from cosmodrome.env.base import Clock
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import SYS_PREPARED, SYS_ROLLBACK, SYS_TRANSACTION_MASK
from cosmodrome.store.store import DelayLevels, Draft
from cosmodrome.wire.message import (
    DELAY,
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SECONDS,
    TIMER_DELETE_UNIQ_KEY,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
)
from cosmodrome.wire.names import SCHEDULE_TOPIC, TIMER_TOPIC

log = logging.getLogger(__name__)

TIMER_NAMES: Final = (TIMER_DELAY_SECONDS, TIMER_DELAY_MS, TIMER_DELIVER_MS)
TIMER_QUEUES: Final = 1

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)


class Deferral:
    """Sends a message that asks for a later delivery to the queue where it waits."""

    def __init__(
        self,
        levels: DelayLevels,
        topics: Topics,
        clock: Clock,
        *,
        timer_delay_seconds_max: int,
        timers_full: Callable[[], bool],
    ) -> None:
        self._levels = levels
        self._topics = topics
        self._clock = clock
        self._timer_delay_seconds_max = timer_delay_seconds_max
        self._timers_full = timers_full

    def redirect(self, draft: Draft, pairs: dict[str, str]) -> int | None:
        """Change topic and queue of `draft`, and `pairs`, its properties, if it has to wait.

        Returns the delivery time of a message that has one of its own. The caller writes the
        text of `pairs` into the draft.
        """
        if draft.sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
            return None  # what the commit writes is deferred
        level = delay_level(pairs)
        if level > 0:
            for name in TIMER_NAMES:
                pairs.pop(name, None)  # Compat: 5.x prefers the level
            level = min(level, len(self._levels))
            pairs[DELAY] = str(level)
            _move(draft, pairs, SCHEDULE_TOPIC, level - 1)
            return None
        if not is_timed(pairs):
            return None
        now_ms = self._clock.now_ms()
        deliver_ms = _deliver_ms(pairs, now_ms)
        if deliver_ms <= now_ms:
            if TIMER_DELETE_UNIQ_KEY in pairs:
                raise Refused(
                    Code.MESSAGE_ILLEGAL,
                    "The delivery time of the message to cancel is over; it was delivered.",
                )
            return None
        if deliver_ms - now_ms > self._timer_delay_seconds_max * 1000:
            raise Refused(
                Code.MESSAGE_ILLEGAL,
                f"The message is to be delivered in {(deliver_ms - now_ms) // 1000} s, more than"
                f" timerMaxDelaySec {self._timer_delay_seconds_max}; choose an earlier time or"
                " raise the limit.",
            )
        if self._timers_full():
            raise Refused(
                Code.SYSTEM_ERROR,
                "This broker holds as many timed messages as it can; send to another one or wait.",
            )
        self._topics.ensure(TIMER_TOPIC, TIMER_QUEUES, PERM_READ_WRITE)
        pairs[TIMER_OUT_MS] = str(deliver_ms)
        _move(draft, pairs, TIMER_TOPIC, 0)
        return deliver_ms


def delay_level(pairs: dict[str, str]) -> int:
    text = pairs.get(DELAY, "0")
    if not _INTEGER.fullmatch(text):
        raise Refused(
            Code.MESSAGE_ILLEGAL,
            f"The delay level {text[:32]!r} is not a number; use a level from 1 to 18.",
        )
    return int(text)


def is_timed(pairs: dict[str, str]) -> bool:
    """Whether a message asks for a delivery time that it did not have yet."""
    return TIMER_OUT_MS not in pairs and any(name in pairs for name in TIMER_NAMES)


def _move(draft: Draft, pairs: dict[str, str], topic: str, queue_id: int) -> None:
    pairs[REAL_TOPIC] = draft.topic
    pairs[REAL_QUEUE_ID] = str(draft.queue_id)
    draft.topic, draft.queue_id = topic, queue_id


def _deliver_ms(pairs: dict[str, str], now_ms: int) -> int:
    name = next(name for name in TIMER_NAMES if name in pairs)
    text = pairs[name]
    if not _INTEGER.fullmatch(text):
        raise Refused(
            Code.MESSAGE_ILLEGAL,
            f"The property {name} is {text[:32]!r}; give it a whole number.",
        )
    if name == TIMER_DELIVER_MS:
        return int(text)
    return now_ms + int(text) * (1000 if name == TIMER_DELAY_SECONDS else 1)
