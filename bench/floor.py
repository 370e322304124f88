"""A server that parses sends and answers them, but stores nothing: the floor of a send's cost.

    python -m bench.floor PORT

It is the broker's transport and the broker's compiled parser; the record is encoded into memory
(the reply is made from that) and dropped. What a broker needs beyond this is the store's.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

from bench.loadgen import new_loop
from cosmodrome.broker.lane.replies import HOLES, templates
from cosmodrome.env.options import SocketOptions
from cosmodrome.speed import QueueEnd
from cosmodrome.speed.lane import native as core
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.commands.produce import SendReply
from cosmodrome.wire.table import Role

HOST = bytes((127, 0, 0, 1, 0, 0, 0, 0))
BODY_BYTES_MAX = 4 * 1024 * 1024
ROOM = 1 << 30
QUEUES = 1024


class Floor:
    """The lane of such a server."""

    def __init__(self) -> None:
        self._intake = core.Intake(self._plan, "Floor", BODY_BYTES_MAX, 2 * BODY_BYTES_MAX)
        reply = SendReply(
            msg_id=str(HOLES[0]),
            queue_id=HOLES[1],
            queue_offset=HOLES[2],
            region="DefaultRegion",
            trace_on=True,
        )
        self._replies = templates(reply, HOLES[:3])
        self._places: dict[tuple[str, int], QueueEnd] = {}
        self._host = HOST.hex().upper().encode()

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        intake = self._intake
        at, _, _ = intake.gather(connection, view, at, connection.room, HOST, HOST)
        while intake.left:
            intake.encode(bytearray(), 0, ROOM, 0, cast(Any, self._place), [])
        for _end, _wait, ticket in intake.tickets()[1]:
            json_reply, binary_reply = self._replies
            for _, _, replies in ticket.replies(json_reply, binary_reply, self._host):
                connection.put(replies)
        intake.clear()
        return at

    def _place(self, topic: str, queue_id: int) -> QueueEnd:
        return self._places.setdefault((topic, queue_id), QueueEnd(topic, queue_id, 0))

    def _plan(self, name: bytes) -> core.Plan:
        return core.Plan(name.decode(), QUEUES, 0)


def make_server() -> Server:
    return Server(Router(Role.BROKER, [], partial=True), SocketOptions(), "floor", lane=Floor())


async def serve(port: int) -> None:
    await make_server().listen("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_loop()) as runner:
        runner.run(serve(int(sys.argv[1])))
