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

Replies are cut from frames that the ordinary encoder made (`lane_replies`), so they are the slow
lane's replies, byte for byte; `tests/twins` holds both lanes against each other.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from cosmodrome.broker.consume import Consume
from cosmodrome.broker.groups import Groups
from cosmodrome.broker.lane_replies import HOLES, templates
from cosmodrome.broker.offsets import Offsets
from cosmodrome.broker.produce import BATCH_GROWTH_MAX, MULTI_TAG, Produce, packed_host
from cosmodrome.broker.pull_lane import PullLane
from cosmodrome.broker.put_times import PutTimes
from cosmodrome.broker.topics import Topics
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import StoreUnwritable
from cosmodrome.layout import BLANK_BYTES, FLAG_ONEWAY, SYS_MULTI_TAGS
from cosmodrome.speed import lanes as core
from cosmodrome.store.store import PutStatus, Store
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.router import Router
from cosmodrome.wire.frame import Frame

GATHERED_BYTES_MAX = 1024 * 1024  # of a turn of the loop, before they are staged

_QUEUES_MAX = 65_536


class Lane:
    """Serves what is plain; see the module."""

    def __init__(
        self,
        options: BrokerOptions,
        store: Store,
        topics: Topics,
        groups: Groups,
        produce: Produce,
        consume: Consume,
        offsets: Offsets,
        put_times: PutTimes,
        router: Router,
        store_host: Callable[[], bytes],
        *,
        body_bytes_max: int,
        segment_bytes: int,
    ) -> None:
        self._options = options
        self._store = store
        self._produce = produce
        self._put_times = put_times
        self._router = router
        self._store_host = store_host
        self._intake = core.Intake(
            *(self._plan, options.broker_cluster_name, body_bytes_max),
            min(segment_bytes - BLANK_BYTES, BATCH_GROWTH_MAX * body_bytes_max),
        )
        self._sends: dict[PutStatus, tuple[SendShape, core.Template, core.Template]] = {}
        self._pulls = PullLane(options, store, topics, groups, consume, offsets, router)
        self._counted: list[core.Plan] = []  # whose sums are not told yet
        self._line = store.line(self._settled)
        self._host = b""  # of the store, for what is gathered; empty when no send is taken
        self._due: asyncio.Handle | None = None  # stages what is gathered
        self._last: SocketConnection | None = None  # whose sends were gathered last
        topics.changed.subscribe(self._on_topics_changed)
        produce.counts_from(self._take_counts)

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Serve whole frames from `at` on; where the first one begins that is left over."""
        if self._pulls.sniff(view, at):
            at = self._pulls.feed(connection, view, at)
            if at >= len(view) or self._pulls.sniff(view, at):
                return at
        while not connection.writing_paused:
            at, what = self._gather(connection, view, at)
            if what == core.NOTHING:
                break
            self._stage(at_once=False)  # what follows comes behind the sends
            if what != core.PULL and what != core.COMMIT:
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
        queues = min(max(topic.read_queue_nums, topic.write_queue_nums), _QUEUES_MAX)
        multi = topic.topic_filter_type == MULTI_TAG
        return core.Plan(topic.topic_name, queues, SYS_MULTI_TAGS if multi else 0)

    def _gather(self, connection: SocketConnection, view: memoryview, at: int) -> tuple[int, int]:
        """Note the sends at `at`; they are staged at the end of the turn, with everybody's."""
        intake = self._intake
        born_host = connection.note
        if not born_host:
            try:
                born_host = connection.note = packed_host(*connection.peer)
            except ValueError:
                return at, core.OTHER  # the peer is gone already
        if not intake.kept_bytes:
            self._host = self._store_host() if self._produce.takes_plainly else b""
        at, what, count = intake.gather(
            connection, view, at, connection.room, born_host, self._host
        )
        if not count:
            return at, what
        connection.accept(count)
        if intake.saw_binary:
            connection.heard_binary()
        # A connection that comes twice in a row is the only busy one: when all that it sent is
        # taken, nobody will add to it in this turn of the loop.
        alone = connection is self._last
        self._last = connection
        if what == core.NOTHING:
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
            for end, wait, ticket in tickets:
                ticket.began = began
                self._store.join(self._line, end, ticket, wait=wait)
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

    def _settled(self, tickets: list[core.Ticket], outcome: PutStatus | StoreUnwritable) -> None:
        if isinstance(outcome, StoreUnwritable):
            for ticket in tickets:
                for connection, code, opaque, serialize, oneway in ticket.requests():
                    frame = Frame(code, opaque, FLAG_ONEWAY if oneway else 0, serialize=serialize)
                    self._router.finish(frame, connection, self._produce.refusal(outcome))
            return
        json, binary = self._send_templates(outcome)
        host = _message_id_front(self._store_host())
        now = asyncio.get_running_loop().time()
        times, error = core.answer(tickets, json, binary, host, now, self._counted)
        for ms, requests in times.items():
            self._put_times.add_ms(ms, requests)
        if error is not None:
            raise error

    def _take_counts(self) -> list[tuple[str, int, int, int]]:
        counted, self._counted = self._counted, []
        return [plan.take() for plan in counted]

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
