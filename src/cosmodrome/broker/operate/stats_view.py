"""Statistics by upstream's names and keys, as `mqadmin statsAll` and dashboards ask for them.

GROUP_GET_FALL_SIZE and GROUP_GET_FALL_TIME are not sums: they say how many bytes, and how many
milliseconds, a group reads behind the end of the log at this moment, the same for each span.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cosmodrome.broker.counts.stats import DAY, HOUR, MINUTE, Item, Stats, Totals
from cosmodrome.env.base import Clock
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Store
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import BrokerStatsData, BrokerStatsItem
from cosmodrome.wire.commands.broker import ViewBrokerStatsData
from cosmodrome.wire.table import Call, Reply

KEY_CHARACTERS_SHOWN = 400


class Kind(NamedTuple):
    """A statistic: the parts of its key, and what of an item it shows."""

    key: str
    figure: Callable[[Totals], int]
    times: Callable[[Totals], int] = lambda counted: counted.calls


def _messages(counted: Totals) -> int:
    return counted.messages


def _size(counted: Totals) -> int:
    return counted.size


TOPIC, GROUP, CLUSTER = "topic", "topic@group", "cluster"
PUT_QUEUE, GET_QUEUE = "topic@queueId", "topic@queueId@group"
GET_QUEUE_FIRST = "queueId@topic@group"

KINDS = {
    "TOPIC_PUT_NUMS": Kind(TOPIC, _messages),
    "TOPIC_PUT_SIZE": Kind(TOPIC, _size),
    "GROUP_GET_NUMS": Kind(GROUP, _messages),
    "GROUP_GET_SIZE": Kind(GROUP, _size),
    "GROUP_GET_LATENCY": Kind(GET_QUEUE_FIRST, lambda counted: counted.ms),
    "SNDBCK_PUT_NUMS": Kind(
        GROUP, lambda counted: counted.returned, lambda counted: counted.returned
    ),
    "BROKER_PUT_NUMS": Kind(CLUSTER, _messages),
    "BROKER_GET_NUMS": Kind(CLUSTER, _messages),
    "QUEUE_PUT_NUMS": Kind(PUT_QUEUE, _messages),
    "QUEUE_PUT_SIZE": Kind(PUT_QUEUE, _size),
    "QUEUE_GET_NUMS": Kind(GET_QUEUE, _messages),
    "QUEUE_GET_SIZE": Kind(GET_QUEUE, _size),
}
FALL_SIZE, FALL_TIME = "GROUP_GET_FALL_SIZE", "GROUP_GET_FALL_TIME"
NAMES = sorted((*KINDS, FALL_SIZE, FALL_TIME))


class StatsView:
    def __init__(self, stats: Stats, store: Store, clock: Clock, cluster: str) -> None:
        self._stats = stats
        self._store = store
        self._clock = clock
        self._cluster = cluster

    @ViewBrokerStatsData.handler
    def view(self, ask: ViewBrokerStatsData, call: Call) -> Reply:
        name, key = ask.stats_name, ask.stats_key
        if name not in NAMES:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"There is no statistic {name[:64]!r}; use one of {', '.join(NAMES)}.",
            )
        data = self._moment(name, key) if name in (FALL_SIZE, FALL_TIME) else self._sums(name, key)
        if data is None:
            form = self._form(name)
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Nothing was counted under {key[:KEY_CHARACTERS_SHOWN]!r} during the last day;"
                f" keys of {name} have the form {form}.",
            )
        return Reply(body=bodies.encode(data))

    # --- inside ------------------------------------------------------------------------------

    def _form(self, name: str) -> str:
        kind = KINDS.get(name)
        form = GET_QUEUE_FIRST if kind is None else kind.key
        # Compat: without details latency is kept per group.
        return GROUP if name == "GROUP_GET_LATENCY" and not self._stats.detailed else form

    def _sums(self, name: str, key: str) -> BrokerStatsData | None:
        kind = KINDS[name]
        if kind.key == CLUSTER:
            whole = self._stats.puts if name == "BROKER_PUT_NUMS" else self._stats.gets
            item = whole if key == self._cluster else None
        else:
            item = self._item(self._form(name), key)
        if item is None:
            return None
        day, hour, minute = (self._over(item, span, kind) for span in (DAY, HOUR, MINUTE))
        return BrokerStatsData(stats_day=day, stats_hour=hour, stats_minute=minute)

    def _item(self, form: str, key: str) -> Item | None:
        parts = key.split("@")
        if len(parts) != form.count("@") + 1:
            return None
        named = dict(zip(form.split("@"), parts, strict=True))
        group = named.get("group")
        owner = (
            self._stats.of_topic(named["topic"])
            if group is None
            else self._stats.of_group(named["topic"], group)
        )
        queue = named.get("queueId")
        if queue is None or owner is None:
            return owner
        return owner.queues.get(_number(queue))

    def _over(self, item: Item, span: tuple[int, int], kind: Kind) -> BrokerStatsItem:
        counted, seconds = item.over(self._stats.tick, span)
        figure, times = kind.figure(counted), kind.times(counted)
        return BrokerStatsItem(
            sum=figure,
            tps=figure / seconds if seconds else 0.0,
            avgpt=figure / times if times else 0.0,
        )

    def _moment(self, name: str, key: str) -> BrokerStatsData | None:
        item = self._item(GET_QUEUE_FIRST, key)
        if item is None:
            return None
        queue, topic, _ = key.split("@")
        position = (topic, _number(queue), item.next_offset - 1)
        behind = self._bytes_behind(*position) if name == FALL_SIZE else self._ms_behind(*position)
        shown = BrokerStatsItem(sum=behind, tps=0.0, avgpt=float(behind))
        return BrokerStatsData(stats_day=shown, stats_hour=shown, stats_minute=shown)

    def _bytes_behind(self, topic: str, queue_id: int, offset: int) -> int:
        entries = self._store.entries(topic, queue_id, offset, 1)
        if not entries:
            return 0
        log_offset, size, _ = entries[0]
        return max(0, self._store.facts().max_offset - log_offset - size)

    def _ms_behind(self, topic: str, queue_id: int, offset: int) -> int:
        stored_ms = self._store.store_time(topic, queue_id, offset)
        return max(0, self._clock.now_ms() - stored_ms) if stored_ms >= 0 else 0


def _number(text: str) -> int:
    return int(text) if len(text) <= 10 and text.isascii() and text.isdecimal() else -1
