"""The fast lane: plain sends, pulls that find something, and commits of offsets.

The server offers every read buffer here first. Compiled code (`speed.lane`) walks through its
frames; this module tells it what is allowed and does what is left to do per turn of the loop
or per pull. It decides nothing by itself:

- a send is taken when `Produce` says that only topic, queue and message matter, when its topic
  is a plain one, and when nothing in it is unusual; the plans of topics are forgotten whenever
  the table of topics changes; the sends of all connections in one turn are staged together;
- pulls and commits of offsets are for `PullLane`;
- everything else is left, untouched and in order, to the slow lane, which is also the one to
  say what is wrong with a request.

Replies are cut from frames that the ordinary encoder made (`replies.py`), so they are the slow
lane's replies, byte for byte; `tests/twins` holds both lanes against each other.
"""

from __future__ import annotations

import asyncio
import functools

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.lane.pulls import PullLane
from cosmodrome.broker.lane.replies import HOLES, templates
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.receive.consume import Consume
from cosmodrome.broker.send.produce import BATCH_GROWTH_MAX, MULTI_TAG, packed_host
from cosmodrome.broker.send.room import Send
from cosmodrome.errors import StoreUnwritable
from cosmodrome.layout import (
    BLANK_BYTES,
    FLAG_ONEWAY,
    LANE_COMMIT,
    LANE_NOTHING,
    LANE_OTHER,
    LANE_PULL,
    SYS_MULTI_TAGS,
)
from cosmodrome.speed import lane as core
from cosmodrome.store.store import PutStatus
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.router import Router
from cosmodrome.wire.bodies import QUEUES_MAX
from cosmodrome.wire.frame import Frame

GATHERED_BYTES_MAX = 1024 * 1024  # of a turn of the loop, before they are staged


class Lane:
    """Serves what is plain; see the module."""

    def __init__(
        self, base: Foundation, members: Members, send: Send, consume: Consume, router: Router
    ) -> None:
        self._options = base.options
        self._store = base.store
        self._produce = send.produce
        self._put_times = send.put_times
        self._router = router
        self._store_host = base.address.store_host
        body_bytes_max = base.store_options.max_message_size
        segment_bytes = base.store_options.mapped_file_size_commit_log
        self._intake = core.Intake(
            self._plan,
            base.options.broker_cluster_name,
            body_bytes_max,
            min(segment_bytes - BLANK_BYTES, BATCH_GROWTH_MAX * body_bytes_max),
        )
        self._sends: dict[PutStatus, tuple[SendShape, core.Template, core.Template]] = {}
        self._pulls = PullLane(base, members, consume, router)
        self._host = b""  # of the store, for what is gathered; empty when no send is taken
        self._due: asyncio.Handle | None = None  # stages what is gathered
        self._last: SocketConnection | None = None  # whose sends were gathered last
        members.topics.changed.subscribe(self._on_topics_changed)

    def feed(
        self, connection: SocketConnection, view: memoryview, at: int, *, more: bool = False
    ) -> int:
        """Serve whole frames from `at` on; where the first one begins that is left over.

        `more`: behind the view is a request for the slow lane, so the sends here go before it.
        """
        if self._pulls.sniff(view, at):
            at = self._pulls.feed(connection, view, at)
            if (at >= len(view) and not more) or self._pulls.sniff(view, at):
                return at
        while not connection.writing_paused:
            at, what = self._gather(connection, view, at, more)
            if what == LANE_NOTHING:
                break
            self._stage(at_once=False)  # what follows comes behind the sends
            if what != LANE_PULL and what != LANE_COMMIT:
                break
            start, at = at, self._pulls.feed(connection, view, at)
            if at == start:
                break
        return at

    # --- sends -------------------------------------------------------------------------------

    def _plan(self, name: bytes) -> core.Plan | None:
        try:
            topic = self._produce.plain_topic(name.decode())
        except UnicodeDecodeError:
            return None
        if topic is None:
            return None
        queues = min(max(topic.read_queue_nums, topic.write_queue_nums), QUEUES_MAX)
        multi = topic.topic_filter_type == MULTI_TAG
        return core.Plan(topic.topic_name, queues, SYS_MULTI_TAGS if multi else 0)

    def _gather(
        self, connection: SocketConnection, view: memoryview, at: int, more: bool
    ) -> tuple[int, int]:
        """Note the sends at `at`; they are staged at the end of the turn, with everybody's."""
        intake = self._intake
        try:
            born_host = packed_host(*connection.peer)
        except ValueError:
            return at, LANE_OTHER  # the peer is gone already
        if not intake.kept_bytes:
            self._host = self._store_host() if self._produce.takes_plainly else b""
        at, what, count = intake.gather(
            connection, view, at, connection.room, born_host, self._host
        )
        if more and what == LANE_NOTHING:
            what = LANE_OTHER
        if not count:
            return at, what
        connection.accept(count)
        if intake.saw_binary:
            connection.heard_binary()
        # A connection that comes twice in a row is the only busy one: when all that it sent is
        # taken, nobody will add to it in this turn of the loop.
        alone = connection is self._last
        self._last = connection
        if what == LANE_NOTHING:
            if alone or intake.kept_bytes > GATHERED_BYTES_MAX:
                self._stage()
            elif self._due is None:
                self._due = asyncio.get_running_loop().call_soon(self._stage)
        return at, what

    def _stage(self, *, at_once: bool = True) -> None:
        """Have what was gathered put into the log, and what it does not take served slowly.

        With `at_once` nobody else is expected to come in this turn of the loop.
        """
        if self._due is not None:
            self._due.cancel()
            self._due = None
        intake = self._intake
        if not intake.kept_bytes:
            return
        try:
            self._store.stage(intake)
        finally:
            codes, tickets = intake.tickets()
            left = intake.left_over() if intake.left else ()
            intake.clear()
            began = asyncio.get_running_loop().time()
            for code, count in codes:
                self._router.count(code, count)
            listener = self._on_durable
            for end, wait, ticket in tickets:
                ticket.began = began
                self._store.when_durable(end, listener, ticket, wait=wait)
            self._store.relieve(at_once=at_once)
            for connection, count, frames in left:
                connection.hand_back(count, frames)

    def _on_topics_changed(self, _: object) -> None:
        self._intake.known.clear()
        # What was gathered was let in by the old table.
        left = self._intake.left_over()
        self._intake.clear()
        for connection, count, frames in left:
            connection.hand_back(count, frames)

    def _on_durable(self, tickets: list[core.Ticket], outcome: PutStatus | StoreUnwritable) -> None:
        if isinstance(outcome, StoreUnwritable):
            for ticket in tickets:
                for connection, code, opaque, serialize, oneway in ticket.requests():
                    frame = Frame(code, opaque, FLAG_ONEWAY if oneway else 0, serialize=serialize)
                    self._router.finish(frame, connection, self._produce.refusal(outcome))
            return
        json, binary = self._send_templates(outcome)
        host = _message_id_front(self._store_host())
        now = asyncio.get_running_loop().time()
        counts = self._produce.stats.put_counts
        times, error = core.answer(tickets, json, binary, host, now, counts)
        for ms, requests in times.items():
            self._put_times.add_ms(ms, requests)
        if outcome is not PutStatus.OK:
            self._produce.unpromised[outcome] += sum(times.values())
        if error is not None:
            raise error

    def _send_templates(self, status: PutStatus) -> tuple[core.Template, core.Template]:
        # Settings that are in the reply may change while the broker runs.
        shape = (self._options.region_id, self._options.trace_on)
        known = self._sends.get(status)
        if known is None or known[0] != shape:
            reply = self._produce.answer(status, str(HOLES[0]), HOLES[1], HOLES[2])
            known = (shape, *templates(reply, HOLES[:3]))
            self._sends[status] = known
        return known[1], known[2]


SendShape = tuple[str, bool]


@functools.lru_cache(maxsize=16)
def _message_id_front(host: bytes) -> bytes:
    return host.hex().upper().encode()
