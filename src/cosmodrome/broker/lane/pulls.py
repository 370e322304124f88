"""The fast lane's half for consumers: pulls that find something or wait, and commits of offsets.

Compiled code (`speed.pulls`) serves pulls by a plan, made of what `Consume.verdict` said about the
first such pull, for as long as all that verdict was made of is still in place. What has no plan,
or lies awkwardly in the store, goes to the slow lane, untouched and in order. So does everything
where the compiled code is not built.

A pull that finds nothing yet is parked with its plan, and answered by it when it is woken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.lane.replies import HOLES, templates
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.receive.consume import Consume
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Refused
from cosmodrome.layout import (
    FRAME_LENGTH,
    LANE_FULL,
    LANE_HOLD,
    LANE_PULL,
    PULL_COMMIT,
    SERIALIZE_BINARY,
)
from cosmodrome.speed.choice import compiled
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.router import Router
from cosmodrome.transport.turns import SLICE_S
from cosmodrome.wire import table
from cosmodrome.wire.bodies import PERM_READ
from cosmodrome.wire.commands.consume import PullMessage, PullReply
from cosmodrome.wire.commands.offset import UpdateConsumerOffset
from cosmodrome.wire.frame import Frame, decode, frame_end
from cosmodrome.wire.table import Reply

if TYPE_CHECKING:
    from cosmodrome.speed.pulls import native as pulls

PULL = PullMessage.request_code
COMMIT = UpdateConsumerOffset.request_code


def _never(view: memoryview, at: int) -> bool:
    return False


class PullLane:
    """Serves what is plain; see the module. `sniff` guesses whether a frame is for it."""

    def __init__(
        self, base: Foundation, members: Members, consume: Consume, router: Router
    ) -> None:
        self._options = base.options
        self._role = base.role
        self._consume = consume
        self._offsets = members.offsets
        self._router = router
        self._requests = router.requests  # the router's; a call more is 1 % of a pull
        self._waiters = consume.waiters
        self._pulls: pulls.Pulls | None = None
        self._now: Callable[[], float] | None = None  # the clock of the loop, once there is one
        self.sniff: Callable[[memoryview, int], bool] = _never
        if compiled("cosmodrome.speed.pulls.native") is None:
            return
        from cosmodrome.speed.pulls import native

        found = templates(_found_reply(), HOLES)
        if native.takes(found[0]):
            self._new_plan = native.PullPlan
            self._pulls = native.Pulls(
                groups=members.groups.table,
                topics=members.topics.table,
                online=consume.online,
                source=base.store.compiled_reader,
                commit=members.offsets.commit,
                found=found,
                done=templates(Reply(), ()),
                master=base.role.takes_sends,
                counts=consume.stats.get_counts,
            )
            self.sniff = native.sniff

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Serve pulls and commits from `at` on; where the first frame begins that is neither
        or is left to the slow lane."""
        pulls, options = self._pulls, self._options
        if pulls is None or not options.broker_permission & PERM_READ:
            return at
        now, size = self._now, len(view)
        if now is None:
            now = self._now = asyncio.get_running_loop().time
        learned_at, due = -1, 0.0
        while at < size and not connection.writing_paused:
            out: list[bytes] = []
            began = now()
            due = due or began + SLICE_S
            if began >= due:
                break
            at, why = pulls.feed(view, at, options.slave_read_enable, out, connection)
            if pulls.pulls:
                pulls.count((now() - began) * 1000)
                self._requests[PULL] += pulls.pulls
            if pulls.commits:
                self._router.count(COMMIT, pulls.commits)
            if pulls.saw_binary:
                connection.heard_binary()
            if out:
                connection.put(*out)
            if why == LANE_HOLD:
                end = self._hold(pulls, connection)
                if not end:
                    break
                at = end
            elif why == LANE_PULL and pulls.wants_plan and learned_at != at:
                if not self._learn(pulls, view, at):
                    break
                learned_at = at  # a plan that does not serve this very pull leaves it
            elif why != LANE_FULL:
                break
        return at

    # --- by plan -----------------------------------------------------------------------------

    def _learn(self, pulls: pulls.Pulls, view: memoryview, at: int) -> bool:
        """Make the plan of a pull that has none; whether there is one now."""
        try:
            frame = decode(bytes(view[at + FRAME_LENGTH.size : frame_end(view, at)]))
            ask = table.decode(PullMessage, frame.ext, frame.body)
            verdict = self._consume.verdict(ask)
        except Exception:
            return False  # it will fail in the slow lane too, where it is logged and answered
        if verdict is None:
            return False
        group, online = verdict.group, verdict.online
        plan = self._new_plan(
            group=ask.consumer_group,
            topic=ask.topic,
            queue_id=ask.queue_id,
            flags=ask.sys_flag,
            version=ask.sub_version,
            text=ask.subscription,
            kind=ask.expression_type,
            group_row=group,
            topic_row=verdict.topic,
            online=online,
            subscription=verdict.subscription,
            model=None if online is None else online.message_model,
            codes=verdict.codes,
            near_id=group.broker_id,
            far_id=group.which_broker_when_consume_slowly,
        )
        pulls.learn(plan)
        return True

    def _hold(self, pulls: pulls.Pulls, connection: SocketConnection) -> int:
        """Where the pull ends that finds nothing yet, 0 when it is left to the slow lane."""
        held = pulls.held
        if held is None or not connection.room or connection.closed:
            return 0
        plan, options = held.plan, self._options
        try:
            if held.flags & PULL_COMMIT and self._role.takes_sends:
                self._offsets.commit(plan.group, plan.topic, plan.queue_id, held.commit)
        except Refused:
            return 0
        wait_ms = held.wait_ms
        if not options.long_polling_enable:
            wait_ms = options.short_polling_time_mills
        if not self._waiters.park(_Parked(self, options, pulls, connection, held), wait_ms):
            return 0
        connection.accept(1)
        self._consume.count_missed()
        self._router.count(PULL)
        if held.serialize == SERIALIZE_BINARY:
            connection.heard_binary()
        return held.end

    def answer(self, connection: SocketConnection, held: pulls.Held) -> None:
        """Answer a pull that was held in another way than by its plan."""
        plan = held.plan
        ask = PullMessage(
            consumer_group=plan.group,
            topic=plan.topic,
            queue_id=plan.queue_id,
            queue_offset=held.offset,
            max_msg_nums=held.count,
            sys_flag=held.flags,
            commit_offset=held.commit,
            suspend_timeout_millis=held.wait_ms,
            subscription=plan.text,
            sub_version=plan.version,
            expression_type=plan.kind,
        )
        try:
            found = self._consume.rerun(ask)
        except Exception as error:
            self.fail(connection, held, error)
        else:
            self._router.finish(_frame(held), connection, found)

    def fail(self, connection: SocketConnection, held: pulls.Held, error: Exception) -> None:
        self._router.fail(_frame(held), connection, error)


class _Parked:
    """A held pull; see `waiters.Parked`."""

    __slots__ = (
        "_held",
        "_lane",
        "_options",
        "_pulls",
        "connection",
        "gone",
        "key",
        "matches",
        "offset",
    )
    skip = None  # what arrives is looked at by its tag only

    def __init__(
        self,
        lane: PullLane,
        options: BrokerOptions,
        pulls: pulls.Pulls,
        connection: SocketConnection,
        held: pulls.Held,
    ) -> None:
        plan = held.plan
        self.key: tuple[str, int] = plan.queue_key
        self.offset = held.offset
        self.matches = plan.codes
        self.connection = connection
        self.gone = False
        self._lane = lane
        self._options = options
        self._pulls = pulls
        self._held = held

    def run(self) -> None:
        options = self._options
        if options.broker_permission & PERM_READ:
            try:
                reply = self._pulls.serve(self._held, options.slave_read_enable)
            except Exception:
                reply = None  # it will fail below too
            if reply is not None:
                # How long it took is not counted: what arrived just now is in memory.
                self._pulls.count(0.0)
                self.connection.answer_many(1, reply)
                return
        self._lane.answer(self.connection, self._held)

    def refuse(self, error: Refused) -> None:
        self._lane.fail(self.connection, self._held, error)

    def drop(self) -> None:
        self.connection.answer(None)


def _frame(held: pulls.Held) -> Frame:
    return Frame(PULL, held.opaque, serialize=held.serialize)


def _found_reply() -> PullReply:
    broker_id, next_offset, least, most = HOLES
    return PullReply(
        remark="FOUND",
        suggest_which_broker_id=broker_id,
        next_begin_offset=next_offset,
        min_offset=least,
        max_offset=most,
    )
