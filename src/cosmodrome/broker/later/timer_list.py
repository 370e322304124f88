"""Lists the timed messages that wait, page by page, for operators.

Each comes with the handle that calls it back (see `recall`), unless its sender gave it no
unique key: nothing can name such a message.
"""

from __future__ import annotations

from cosmodrome.broker.later.recall import Handle, make_handle
from cosmodrome.broker.later.timers import Pending, Timers
from cosmodrome.errors import Code, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.commands.produce import ListPendingTimers, ListPendingTimersReply
from cosmodrome.wire.names import check_topic
from cosmodrome.wire.report_bodies import PendingTimer, PendingTimers
from cosmodrome.wire.table import Call

PAGE_COUNT_MAX = 1000
# What a queue entry can hold: larger ones name nothing.
ASKED_OFFSET_MAX = 2**48 - 1


class TimerList:
    def __init__(self, broker_name: str, timers: Timers) -> None:
        self._broker_name = broker_name
        self._timers = timers

    @ListPendingTimers.handler
    async def list_pending(self, ask: ListPendingTimers, call: Call) -> ListPendingTimersReply:
        if ask.topic:
            check_topic(ask.topic)
        if ask.max_num <= 0 or ask.after_queue_offset > ASKED_OFFSET_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"maxNum is {ask.max_num} and afterQueueOffset {ask.after_queue_offset}; ask for 1"
                f" to {PAGE_COUNT_MAX} messages, after a position that an answer named.",
            )
        page = await self._timers.page(
            (ask.after_deliver_ms, ask.after_queue_offset),
            min(ask.max_num, PAGE_COUNT_MAX),
            ask.topic or None,
        )
        next_ms, next_offset = page.reached or (None, None)
        return ListPendingTimersReply(
            waiting=self._timers.waiting,
            next_deliver_ms=next_ms,
            next_queue_offset=next_offset,
            body=bodies.encode(PendingTimers(pending=[self._shown(one) for one in page.pending])),
        )

    def _shown(self, one: Pending) -> PendingTimer:
        handle = ""
        if one.unique_key:
            handle = make_handle(
                Handle(one.topic, self._broker_name, one.deliver_ms, one.unique_key)
            )
        return PendingTimer(
            topic=one.topic,
            queue_id=one.queue_id,
            deliver_ms=one.deliver_ms,
            msg_id=one.unique_key,
            recall_handle=handle,
            size=one.size,
        )
