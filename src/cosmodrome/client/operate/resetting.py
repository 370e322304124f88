"""Where a reset would put a group, worked out before anything is moved."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import re

from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.client.operate.offsets import GroupOffsets, Moment
from cosmodrome.client.operate.standing import GroupStanding, QueueStanding
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import ConfigError, Unreachable

_AGO = re.compile(r"-(\d{1,9})(ms|s|m|h|d)\Z")
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where to: one of the ends, a moment, or an offset of every chosen queue."""

    moment: Moment | None = None
    offset: int | None = None

    @classmethod
    def of(cls, text: str, now_ms: int) -> Target:
        """`earliest`, `latest`, an offset, a time, or how long ago (`-2h`)."""
        if text in ("earliest", "begin"):
            return cls(moment="begin")
        if text in ("latest", "end"):
            return cls(moment="end")
        if text.isascii() and text.isdigit():
            if len(text) > 18:
                raise ConfigError(f"{text} is beyond every offset")
            return cls(offset=int(text))
        ago = _AGO.match(text)
        if ago is not None:
            return cls(moment=max(0, now_ms - int(ago[1]) * _UNIT_MS[ago[2]]))
        try:
            return cls(moment=int(datetime.datetime.fromisoformat(text).timestamp() * 1000))
        except (ValueError, OverflowError):
            raise ConfigError(
                f"{text!r}: write earliest, latest, an offset, a time such as 2026-11-15T08:00:00,"
                " or how long ago such as -30m"
            ) from None


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    queue: MessageQueue
    before: int | None  # None: nothing was committed
    after: int


async def planned(
    fleet: Fleet,
    where: GroupStanding,
    target: Target,
    *,
    broker: str | None = None,
    queue_id: int | None = None,
) -> list[Move]:
    """One move per queue of the standing, or of those that are chosen. Nothing is changed."""
    if where.silent:
        failed = "; ".join(f"{name}: {why}" for name, why in where.silent.items())
        raise Unreachable(f"not all brokers answer, so nothing was planned: {failed}")
    rows = [
        row
        for row in where.queues
        if (broker is None or row.queue.broker_name == broker)
        and (queue_id is None or row.queue.queue_id == queue_id)
    ]
    if not rows:
        raise ConfigError("no queue is chosen; see `cosmo topic route` for brokers and queues")
    offsets = GroupOffsets(fleet)
    after = await asyncio.gather(*(_goal(offsets, row, target) for row in rows))
    return [Move(row.queue, row.offset, at) for row, at in zip(rows, after, strict=True)]


async def _goal(offsets: GroupOffsets, row: QueueStanding, target: Target) -> int:
    if row.first is None or row.end is None:
        raise Unreachable(row.why or "a broker does not tell the ends of its queues")
    if target.offset is not None:
        return min(max(target.offset, row.first), row.end)
    if target.moment == "begin":
        return row.first
    if target.moment == "end":
        return row.end
    assert isinstance(target.moment, int)
    return max(await offsets.at_time(row.queue, target.moment), 0)
