"""The delay of each level, as `messageDelayLevel` spells it: "1s 5s 10s 30s 1m ... 2h".

Levels count from 1. A message of a higher level than there is waits as long as the highest.
"""

from __future__ import annotations

import re

from cosmodrome.errors import ConfigError

LEVELS_MAX = 1024

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class DelayLevels:
    def __init__(self, text: str) -> None:
        words = text.split()
        if not 0 < len(words) <= LEVELS_MAX:
            raise ConfigError(
                f"messageDelayLevel names {len(words)} delays; 1 to {LEVELS_MAX} are expected,"
                " separated by spaces"
            )
        self._delays_ms = [_delay_ms(word) for word in words]

    def __len__(self) -> int:
        return len(self._delays_ms)

    def delay_ms(self, level: int) -> int:
        """How long a message of this level waits; LookupError below level 1."""
        if level < 1:
            raise LookupError(f"delay levels begin at 1, not {level}")
        return self._delays_ms[min(level, len(self)) - 1]


def _delay_ms(word: str) -> int:
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", word)
    if match is None:
        raise ConfigError(
            f"messageDelayLevel holds {word!r}; write each delay as a number and one of s, m, h"
            " and d, as in 30s or 2h"
        )
    return int(match[1]) * _UNIT_MS[match[2]]
