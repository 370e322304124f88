"""The fast lane's half for consumers: pulls that find something, and commits of offsets.

A pull is taken when `Consume` has messages for it at once, a commit when `Offsets` takes it;
everything else is left, untouched and in order, to the slow lane.
"""

from __future__ import annotations

from cosmodrome.broker.consume import Consume
from cosmodrome.broker.lane_replies import HOLES, templates
from cosmodrome.broker.offsets import Offsets
from cosmodrome.errors import Refused
from cosmodrome.layout import SERIALIZE_BINARY
from cosmodrome.speed import lanes as core
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.router import Router
from cosmodrome.wire.commands.consume import PullMessage, PullReply
from cosmodrome.wire.commands.offset import UpdateConsumerOffset
from cosmodrome.wire.table import Reply

PULL = PullMessage.request_code
COMMIT = UpdateConsumerOffset.request_code


class PullLane:
    """Serves what is plain; see the module."""

    def __init__(self, consume: Consume, offsets: Offsets, router: Router) -> None:
        self._consume = consume
        self._offsets = offsets
        self._router = router
        self._pulls = templates(_found(*HOLES), HOLES)
        self._commits = templates(Reply(), ())

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        """Serve pulls and commits from `at` on; where the first frame begins that is neither
        or is left to the slow lane."""
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


def _found(broker_id: int, next_offset: int, least: int, most: int) -> PullReply:
    return PullReply(
        remark="FOUND",
        suggest_which_broker_id=broker_id,
        next_begin_offset=next_offset,
        min_offset=least,
        max_offset=most,
    )
