"""The fast lane: plain sends, pulls that find something, and commits of offsets.

The server offers every read buffer here first. Compiled code (`speed.lane`) walks through its
frames; this module tells it what is allowed and does what is left to do per buffer or per
pull. It decides nothing by itself:

- a send is taken when `Produce` says that only topic, queue and message matter, when its topic
  is a plain one, and when nothing in it is unusual; the plans of topics are forgotten whenever
  the table of topics changes;
- a pull is taken when `Consume` has messages for it at once, a commit when `Offsets` takes it;
- everything else is left, untouched and in order, to the slow lane, which is also the one to
  say what is wrong with a request.

Replies are cut from frames that the ordinary encoder made (`_template`), so they are the slow
lane's replies, byte for byte; `tests/twins` holds both lanes against each other.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from cosmodrome.broker.consume import Consume
from cosmodrome.broker.offsets import Offsets
from cosmodrome.broker.produce import BATCH_GROWTH_MAX, MULTI_TAG, Produce, packed_host
from cosmodrome.broker.put_times import PutTimes
from cosmodrome.broker.topics import Topics
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Refused, StoreUnwritable
from cosmodrome.layout import (
    BINARY_HEADER,
    BLANK_BYTES,
    FLAG_ONEWAY,
    FRAME_PREFIX,
    SERIALIZE_BINARY,
    SERIALIZE_JSON,
    SYS_MULTI_TAGS,
)
from cosmodrome.speed import lane as core
from cosmodrome.store.store import PutStatus, Store
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.router import Router, reply_frame
from cosmodrome.wire.commands.consume import PullMessage, PullReply
from cosmodrome.wire.commands.offset import UpdateConsumerOffset
from cosmodrome.wire.frame import Frame, encode
from cosmodrome.wire.table import Reply

# Stand for what a template leaves open; no part of a reply looks like them.
_OPAQUE = 1_987_654_321
_HOLES = (1_876_543_210, 1_765_432_109, 1_654_321_098, 1_543_210_987)
_QUEUES_MAX = 65_536

PULL = PullMessage.request_code
COMMIT = UpdateConsumerOffset.request_code


class Lane:
    """Serves what is plain; see the module."""

    def __init__(
        self,
        options: BrokerOptions,
        store: Store,
        topics: Topics,
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
        self._consume = consume
        self._offsets = offsets
        self._put_times = put_times
        self._router = router
        self._store_host = store_host
        self._intake = core.Intake(
            *(self._plan, options.broker_cluster_name, body_bytes_max),
            min(segment_bytes - BLANK_BYTES, BATCH_GROWTH_MAX * body_bytes_max),
        )
        self._sends: dict[PutStatus, tuple[SendShape, core.Template, core.Template]] = {}
        self._pulls = _templates(_found(*_HOLES), _HOLES)
        self._commits = _templates(Reply(), ())
        self._stuck = False  # the store did not take all of the last sends
        topics.changed.subscribe(lambda _: self._intake.known.clear())

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Serve whole frames from `at` on; where the first one begins that is left over."""
        while not connection.writing_paused:
            at, what = self._take_sends(connection, view, at)
            if what == core.COMMIT:
                end = self._commit(connection, view, at)
            elif what == core.PULL:
                end = self._pull(connection, view, at)
            else:
                break
            if not end:
                break
            # Pulls come together.
            while end and not connection.writing_paused:
                at, end = end, self._pull(connection, view, end)
            at = end or at
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

    def _take_sends(
        self, connection: SocketConnection, view: memoryview, at: int
    ) -> tuple[int, int]:
        intake = self._intake
        try:
            born_host = packed_host(*connection.peer)
        except ValueError:
            return at, core.OTHER  # the peer is gone already
        store_host = self._store_host() if self._produce.takes_plainly else b""
        # What the store leaves goes frame by frame through the slow lane: if each of them were
        # looked at together with all that follow it, a buffer would cost its square.
        limit = min(1, connection.room) if self._stuck else connection.room
        start = at
        at, what = intake.feed(*(view, at, limit, born_host, store_host, self._store.stage))
        if intake.left or at != start:
            self._stuck = intake.left > 0
        if at == start:
            return at, what
        if intake.saw_binary:
            connection.heard_binary()
        began = asyncio.get_running_loop().time()
        codes, tickets = intake.tickets()
        for code, count in codes:
            self._router.count(code, count)
        for end, wait, ticket in tickets:
            connection.accept(len(ticket))
            ticket.connection = connection
            ticket.began = began
            self._store.settle_then(end, functools.partial(self._settled, ticket), wait=wait)
        self._store.relieve()
        return at, what

    def _settled(self, ticket: core.Ticket, outcome: PutStatus | StoreUnwritable) -> None:
        connection: SocketConnection = ticket.connection
        if isinstance(outcome, StoreUnwritable):
            for code, opaque, serialize, oneway in ticket.requests():
                frame = Frame(code, opaque, FLAG_ONEWAY if oneway else 0, serialize=serialize)
                self._router.finish(frame, connection, self._produce.refusal(outcome))
            return
        self._put_times.add(asyncio.get_running_loop().time() - ticket.began, len(ticket))
        for topic, (requests, messages, size) in ticket.sums().items():
            self._produce.count(topic, 0, messages, size, requests=requests)
        json, binary = self._send_templates(outcome)
        host = _message_id_front(self._store_host())
        connection.answer_many(len(ticket), ticket.replies(json, binary, host))

    def _send_templates(self, status: PutStatus) -> tuple[core.Template, core.Template]:
        # Settings that are in the reply may change while the broker runs.
        shape = (self._options.region_id, self._options.trace_on)
        known = self._sends.get(status)
        if known is None or known[0] != shape:
            reply = self._produce.answer(status, str(_HOLES[0]), _HOLES[1], _HOLES[2])
            known = (shape, *_templates(reply, _HOLES[:3]))
            self._sends[status] = known
        return known[1], known[2]

    # --- pulls and commits -------------------------------------------------------------------

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
        if found is None:
            return 0
        broker_id, batch = found
        if serialize == SERIALIZE_BINARY:
            connection.heard_binary()
        self._router.count(PULL)
        head = self._pulls[serialize].head(
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
            connection.put(self._commits[serialize].head(opaque, 0))
        return end


SendShape = tuple[str, bool]


def _found(broker_id: int, next_offset: int, least: int, most: int) -> PullReply:
    return PullReply(
        remark="FOUND",
        suggest_which_broker_id=broker_id,
        next_begin_offset=next_offset,
        min_offset=least,
        max_offset=most,
    )


def _templates(reply: Reply, holes: Sequence[int]) -> tuple[core.Template, core.Template]:
    """The reply with its holes, by serialize type."""
    return _template(SERIALIZE_JSON, reply, holes), _template(SERIALIZE_BINARY, reply, holes)


def _template(serialize: int, reply: Reply, holes: Sequence[int]) -> core.Template:
    """Encode a reply whose open fields are `holes`, and cut it at them."""
    request = Frame(0, _OPAQUE, serialize=serialize)
    header = encode(reply_frame(request, reply))[FRAME_PREFIX.size :]
    binary = serialize == SERIALIZE_BINARY
    marks = [str(hole).encode() for hole in (*holes, *(() if binary else (_OPAQUE,)))]
    parts: list[bytes] = []
    rest = header
    for mark in marks:
        part, found, rest = rest.partition(mark)
        assert found and mark not in rest, (mark, header)
        parts.append(part)
    parts.append(rest)
    if not binary:
        return core.Template(parts, False, 0, 0)
    remark_bytes = BINARY_HEADER.unpack_from(header)[-1]
    fields_at = BINARY_HEADER.size + remark_bytes
    fields_bytes = int.from_bytes(header[fields_at : fields_at + 4], "big")
    return core.Template(parts, True, fields_at, fields_bytes - sum(map(len, marks)))


@functools.lru_cache(maxsize=16)
def _message_id_front(host: bytes) -> bytes:
    return host.hex().upper().encode()
