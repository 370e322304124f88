"""The fast lane's half for consumers: pulls that find something or wait, and commits of offsets.

There are three ways, each of which may leave a frame to the next one, untouched and in order:

- compiled code (`speed.pulls`) serves pulls by a plan, made of what `Consume.verdict` said about
  the first such pull, for as long as all that verdict was made of is still in place;
- `Consume.at_once` serves what has no plan yet, and what lies awkwardly in the store;
- the slow lane.

A pull that finds nothing yet is parked with its plan, and answered by it when it is woken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from cosmodrome.broker.consume import MASTER_ID, PULL_COMMIT, Consume
from cosmodrome.broker.groups import Groups
from cosmodrome.broker.lane_replies import HOLES, templates
from cosmodrome.broker.offsets import Offsets
from cosmodrome.broker.topics import Topics
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Refused
from cosmodrome.layout import SERIALIZE_BINARY
from cosmodrome.speed import lanes as core
from cosmodrome.store.store import Store
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.router import Router
from cosmodrome.wire.bodies import PERM_READ
from cosmodrome.wire.commands.consume import PullMessage, PullReply
from cosmodrome.wire.commands.offset import UpdateConsumerOffset
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Reply

if TYPE_CHECKING:
    from cosmodrome.speed import pulls

PULL = PullMessage.request_code
COMMIT = UpdateConsumerOffset.request_code


def _never(view: memoryview, at: int) -> bool:
    return False


class PullLane:
    """Serves what is plain; see the module. `sniff` guesses whether a frame is for it."""

    def __init__(
        self,
        options: BrokerOptions,
        store: Store,
        topics: Topics,
        groups: Groups,
        consume: Consume,
        offsets: Offsets,
        router: Router,
    ) -> None:
        self._options = options
        self._consume = consume
        self._offsets = offsets
        self._router = router
        self._requests = router.requests
        self._waiters = consume.waiters
        self._found = templates(_found(*HOLES), HOLES)
        self._done = templates(Reply(), ())
        self._pulls: pulls.Pulls | None = None
        self._learned = False
        self._now: Callable[[], float] | None = None  # the clock of the loop, once there is one
        self.sniff: Callable[[memoryview, int], bool] = _never
        fast = _compiled()
        if fast is not None and fast.takes(self._found[0]):
            self._fast = fast
            self._pulls = fast.Pulls(
                *(groups.table, topics.table, consume.online, store.source, offsets.commit),
                *(self._found, self._done, options.broker_id == MASTER_ID),
            )
            self.sniff = fast.sniff
            consume.counts_from(self._pulls.settle)

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Serve pulls and commits from `at` on; where the first frame begins that is neither
        or is left to the slow lane."""
        pulls, options = self._pulls, self._options
        if pulls is None or not options.broker_permission & PERM_READ:
            return self._feed_one_by_one(connection, view, at)
        fast, now, size = self._fast, self._now, len(view)
        if now is None:
            now = self._now = asyncio.get_running_loop().time
        while at < size and not connection.writing_paused:
            out: list[bytes] = []
            began = now()
            at, why = pulls.feed(view, at, options.slave_read_enable, out, connection)
            if pulls.pulls:
                took_s = now() - began
                if took_s > 0:
                    pulls.took(took_s * 1000)
                self._requests[PULL] += pulls.pulls
            if pulls.commits:
                self._requests[COMMIT] += pulls.commits
            if pulls.saw_binary:
                connection.heard_binary()
            if out:
                connection.put(*out)
            if why == fast.NOTHING:
                break
            if why == fast.PULL:
                self._learned = False
                end = self._pull(connection, view, at)
                if not end and self._learned:
                    continue  # it finds nothing yet: by its plan it can be held
            elif why == fast.HOLD:
                end = self._hold(pulls, connection)
            elif why == fast.COMMIT:
                end = self._commit(connection, view, at)
            elif why == fast.FULL:
                continue
            else:
                break
            if not end:
                break
            at = end
        return at

    # --- by plan -----------------------------------------------------------------------------

    def _learn(self, pulls: pulls.Pulls, ask: PullMessage) -> None:
        """Make the plan of a pull that went another way for want of one."""
        verdict = self._consume.verdict(ask)
        if verdict is None:
            return
        self._learned = True
        group, online = verdict.group, verdict.online
        plan = self._fast.PullPlan(
            *(ask.consumer_group, ask.topic, ask.queue_id, ask.sys_flag, ask.sub_version),
            *(ask.subscription, ask.expression_type, group, verdict.topic, online),
            *(verdict.subscription, None if online is None else online.message_model),
            *(verdict.codes, group.broker_id, group.which_broker_when_consume_slowly),
        )
        pulls.learn(plan)

    def _hold(self, pulls: pulls.Pulls, connection: SocketConnection) -> int:
        """Where the pull ends that finds nothing yet, 0 when it is left to the slow lane."""
        held = pulls.held
        if held is None or not connection.room or connection.closed:
            return 0
        plan, options = held.plan, self._options
        try:
            if held.flags & PULL_COMMIT and options.broker_id == MASTER_ID:
                self._offsets.commit(plan.group, plan.topic, plan.queue_id, held.commit)
        except Refused:
            return 0
        wait_ms = held.wait_ms
        if not options.long_polling_enable:
            wait_ms = options.short_polling_time_mills
        if not self._waiters.park(_Parked(self, options, pulls, connection, held), wait_ms):
            return 0
        connection.accept(1)
        self._consume.missed_total += 1
        self._requests[PULL] += 1
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
            found = self._consume.again(ask)
        except Exception as error:
            self.fail(connection, held, error)
        else:
            self._router.finish(_frame(held), connection, found)

    def fail(self, connection: SocketConnection, held: pulls.Held, error: Exception) -> None:
        self._router.fail(_frame(held), connection, error)

    # --- one by one --------------------------------------------------------------------------

    def _feed_one_by_one(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        while not connection.writing_paused:
            end = self._pull(connection, view, at) or self._commit(connection, view, at)
            if not end:
                break
            at = end
        return at

    def _pull(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Where the pull ends, 0 when it is left to the slow lane."""
        asked = core.read_pull(view, at)
        if asked is None:
            return 0
        serialize, opaque, oneway, end = asked[:4]
        group, topic, queue_id, offset, count, flags, commit, wait_ms = asked[4:12]
        version, text, kind = asked[12:]
        if oneway:
            return 0
        ask = PullMessage(
            consumer_group=group,
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            max_msg_nums=count,
            sys_flag=flags,
            commit_offset=commit,
            suspend_timeout_millis=wait_ms,
            subscription=text,
            sub_version=version,
            expression_type=kind,
        )
        try:
            found = self._consume.at_once(ask)
        except Exception:
            return 0  # it will fail there too, where it is logged and answered
        if self._pulls is not None and self._pulls.wants_plan:
            self._learn(self._pulls, ask)
        if found is None:
            return 0
        broker_id, batch = found
        if serialize == SERIALIZE_BINARY:
            connection.heard_binary()
        self._router.count(PULL)
        head = self._found[serialize].head(
            *(opaque, len(batch.data), broker_id),
            *(batch.next_offset, batch.min_offset, batch.max_offset),
        )
        connection.put(head, batch.data)
        return end

    def _commit(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Where the commit ends, 0 when it is left to the slow lane."""
        asked = core.read_commit(view, at)
        if asked is None:
            return 0
        serialize, opaque, oneway, end, group, topic, queue_id, offset = asked
        try:
            self._offsets.commit(group, topic, queue_id, offset)
        except Refused:
            return 0
        if serialize == SERIALIZE_BINARY:
            connection.heard_binary()
        self._router.count(COMMIT)
        if not oneway:
            connection.put(self._done[serialize].head(opaque, 0))
        return end


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
        self.key: tuple[str, int] = plan.place
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
                self.connection.answer_many(1, reply)
                return
        self._lane.answer(self.connection, self._held)

    def refuse(self, error: Refused) -> None:
        self._lane.fail(self.connection, self._held, error)

    def drop(self) -> None:
        self.connection.answer(None)


def _frame(held: pulls.Held) -> Frame:
    return Frame(PULL, held.opaque, serialize=held.serialize)


def _found(broker_id: int, next_offset: int, least: int, most: int) -> PullReply:
    return PullReply(
        remark="FOUND",
        suggest_which_broker_id=broker_id,
        next_begin_offset=next_offset,
        min_offset=least,
        max_offset=most,
    )


def _compiled() -> ModuleType | None:
    """The compiled part, where it is built."""
    try:
        return import_module("cosmodrome.speed.pulls")
    except ImportError:
        return None
