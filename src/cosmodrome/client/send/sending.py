"""Gets packed messages to brokers: which queue, which connection, whether to try again.

Theory of operation. A `Delivery` is one send request with all its attempts. It takes the next
step in callbacks, never in a task of its own: the answer, or the end of the connection, ends
the attempt; a failed attempt begins the next one or ends the delivery. Deliveries that need a
route or a connection first wait in one line per topic or address, and whatever is sent
meanwhile lines up behind them, so messages to one queue leave in the order in which they were sent.

Invariants: a delivery ends exactly once, at the latest at its deadline, and gives its room in the
window back then; a message whose queue the caller chose is tried once, because a second try
could overtake a later message.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Coroutine
from typing import Any

from cosmodrome.client.instance import Instance
from cosmodrome.client.namespace import unwrap
from cosmodrome.client.routes import Route
from cosmodrome.client.send.choosing import Chooser
from cosmodrome.client.send.delivery import Delivery
from cosmodrome.client.send.failures import Attempt, SendFailed, SendTimedOut, another
from cosmodrome.client.send.faults import Faults
from cosmodrome.client.send.hooks import Hooks, SendContext
from cosmodrome.client.send.window import Window
from cosmodrome.client.values import MessageQueue, NoRoute, SendStatus
from cosmodrome.errors import (
    Code,
    CosmodromeError,
    ProtocolError,
    Refused,
    TimedOut,
    Unreachable,
)
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.timeouts import CATCH_UP_S, STOOD_STILL_S
from cosmodrome.wire.commands.produce import SendMessageV2
from cosmodrome.wire.frame import Frame, Prepared, prepare_json
from cosmodrome.wire.message import MAX_RECONSUME_TIMES, RECONSUME_TIME, parse_properties
from cosmodrome.wire.names import AUTO_CREATE_TOPIC, RETRY_PREFIX
from cosmodrome.wire.table import decode

log = logging.getLogger(__name__)

# Answers after which another broker may do better. 204 and 205: no buyer id, another unit.
RETRY_CODES = frozenset(
    {
        Code.SYSTEM_ERROR,
        Code.SERVICE_NOT_AVAILABLE,
        Code.NO_PERMISSION,
        Code.TOPIC_NOT_EXIST,
        204,
        205,
    }
)
_STATUS = {int(status.value): status for status in SendStatus}
SWEEP_MIN_S = 0.005
REFRESH_MIN_S = 1.0
PREPARED_MAX = 4_096  # headers: one per queue and kind of message
CONGESTED_S = 0.005  # between looks at a connection that takes no more


class Sender:
    """The deliveries of one producer."""

    def __init__(
        self,
        instance: Instance,
        group: str,
        window: Window,
        *,
        hooks: Hooks,
        retry_when_not_ok: bool = False,
        avoid_slow_brokers: bool = False,
        default_topic_queues: int = 4,
    ) -> None:
        self.window = window
        self.hooks = hooks
        self._group = group
        self._namespace = instance.options.namespace
        self._routes = instance.routes
        self._links = instance.links
        self._now_ms = instance.env.clock.now_ms
        self._loop = asyncio.get_running_loop()
        self._retry_when_not_ok = retry_when_not_ok
        self._faults = Faults(instance.env.random) if avoid_slow_brokers else None
        self._queues_wished = str(default_topic_queues)
        self._chooser = Chooser(instance.env, self._namespace, self._faults)
        self._out: set[Delivery] = set()
        self._routing: dict[str, deque[Delivery]] = {}
        self._connecting: dict[str, deque[Delivery]] = {}
        self._connections: dict[str, tuple[str, SocketConnection]] = {}  # by broker name
        self._connections_version = -1
        self._headers: dict[tuple[str, str, int, int, int, str], Prepared] = {}
        self._hooked = bool(hooks)
        self._tasks: set[asyncio.Task[None]] = set()
        self._refreshed: dict[str, float] = {}
        self._sweep_at = math.inf
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests that have no outcome yet."""
        return len(self._out)

    def post(self, delivery: Delivery) -> None:
        """Send; room in the window was taken before."""
        self._out.add(delivery)
        if delivery.deadline < self._sweep_at:
            self._arm(delivery.deadline)
        self._go(delivery)

    async def post_oneway(self, delivery: Delivery) -> None:
        """Send without answer and without a second try; returns when it is written or will be."""
        route = await self._routes.for_sending(delivery.packed.topic)
        if not route.write_queues:
            raise self._no_queue(route.topic)
        queue = delivery.queue = self._chooser.choose(delivery, route)
        address = self._routes.address(queue.broker_name)
        if address is None:
            raise Unreachable(f"no name server knows a master of broker {queue.broker_name}")
        delivery.address = address
        delivery.began = self._loop.time()
        channel = self._links.channel(address)
        await channel.connect()
        while (connection := channel.live) is not None and connection.congested:  # noqa: ASYNC110
            await asyncio.sleep(CONGESTED_S)  # rare, and bounded by the caller's time limit
        if connection is None:
            raise Unreachable(f"the connection to {address} broke")
        context = self._context(delivery, queue) if self._hooked else None
        if context is not None:
            self.hooks.before(context)
        ext, body = self.header(delivery, queue)
        connection.push(decode(SendMessageV2, ext, body))
        if context is not None:
            self._after(delivery, context)

    async def quiet(self, timeout_s: float) -> bool:
        """Whether everything had an outcome within that time."""
        if self._out:
            self._idle.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return True

    async def stop(self, why: str) -> None:
        """End what is still out."""
        for delivery in list(self._out):
            self._end(delivery)
            delivery.fail(SendFailed(delivery.packed.message.topic, delivery.tried, f"; {why}"))
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- on the way out ----------------------------------------------------------------------

    def _go(self, delivery: Delivery) -> None:
        topic = delivery.packed.topic
        line = self._routing.get(topic)
        if line is not None:
            line.append(delivery)
            return
        route = self._routes.known(topic)
        if route is None or not route.write_queues:
            self._routing[topic] = deque((delivery,))
            self._spawn(self._find_route(topic))
            return
        self._dispatch(delivery, route)

    async def _find_route(self, topic: str) -> None:
        found: Route | Exception
        try:
            found = await self._routes.for_sending(topic)
            if not found.write_queues:
                found = self._no_queue(topic)
        except Exception as error:  # whatever it is, those who wait must hear of it
            found = error
        for delivery in self._routing.pop(topic):
            if delivery.ended or self._dropped(delivery):
                continue
            if isinstance(found, Route):
                self._dispatch(delivery, found)
            else:
                self._end(delivery)
                delivery.fail(another(found))

    def _dispatch(self, delivery: Delivery, route: Route) -> None:
        try:
            queue = self._chooser.choose(delivery, route)
        except Exception as error:
            self._end(delivery)
            delivery.fail(error)
            return
        delivery.queue = queue
        if self._routes.version != self._connections_version:
            self._connections_version = self._routes.version
            self._connections.clear()
        ready = self._connections.get(queue.broker_name)
        if ready is not None and not ready[1].closed and not self._connecting:
            delivery.address = ready[0]
            self._put(delivery, ready[1])
        else:
            self._reach(delivery, queue)

    def _reach(self, delivery: Delivery, queue: MessageQueue) -> None:
        """Send over a connection that must be found, or made first."""
        delivery.began = self._loop.time()
        address = self._routes.address(queue.broker_name)
        if address is None:
            delivery.address = "?"
            self.attempt_failed(
                delivery,
                Unreachable(f"no name server knows a master of broker {queue.broker_name}"),
            )
            return
        delivery.address = address
        line = self._connecting.get(address)
        if line is not None:
            line.append(delivery)
            return
        try:
            connection = self._links.channel(address).live
        except Unreachable as error:
            self.attempt_failed(delivery, error)
            return
        if connection is None:
            self._connecting[address] = deque((delivery,))
            self._spawn(self._connect(address))
            return
        self._connections[queue.broker_name] = (address, connection)
        self._put(delivery, connection)

    async def _connect(self, address: str) -> None:
        connection = None
        why = f"the connection to {address} broke at once"
        try:
            channel = self._links.channel(address)
            await channel.connect()
            connection = channel.live
        except Exception as error:
            why = str(error)
        for delivery in self._connecting.pop(address):
            if delivery.ended or self._dropped(delivery):
                continue
            if connection is None:
                self.attempt_failed(delivery, Unreachable(why))
            else:
                self._put(delivery, connection)

    def _dropped(self, delivery: Delivery) -> bool:
        """Whether nobody waits for it any more; then it ends here."""
        if not delivery.abandoned:
            return False
        self._end(delivery)
        delivery.fail(Unreachable("nobody waits for this message any more"))
        return True

    def _put(self, delivery: Delivery, connection: SocketConnection) -> None:
        queue = delivery.queue
        assert queue is not None
        delivery.began = self._loop.time()
        if self._hooked:
            delivery.context = context = self._context(delivery, queue)
            try:
                self.hooks.before(context)
            except Exception as error:
                self._end(delivery)
                delivery.fail(error)
                return
        try:
            if connection.takes_prepared and not delivery.packed.topic.startswith(RETRY_PREFIX):
                sys_flag, flag, properties, body = delivery.request()
                header = self._prepared(delivery, queue, sys_flag, flag)
                delivery.opaque = connection.begin_prepared(
                    header, self._now_ms(), properties, body, delivery
                )
            else:
                ext, body = self.header(delivery, queue)
                delivery.opaque = connection.begin(delivery.code, ext, body, delivery)
        except CosmodromeError as error:
            self.attempt_failed(delivery, error)
            return
        delivery.connection = connection

    def _prepared(
        self, delivery: Delivery, queue: MessageQueue, sys_flag: int, flag: str
    ) -> Prepared:
        """The parts of the JSON header that messages like this one to this queue share."""
        code = delivery.code
        key = (delivery.packed.topic, queue.broker_name, queue.queue_id, code, sys_flag, flag)
        parts = self._headers.get(key)
        if parts is None:
            ext, _ = self.header(delivery, queue)
            del ext["g"], ext["i"]  # they differ every time and come last
            if len(self._headers) >= PREPARED_MAX:
                self._headers.clear()
            parts = self._headers[key] = prepare_json(code, ext, "g")
        return parts

    def header(self, delivery: Delivery, queue: MessageQueue) -> tuple[dict[str, str], bytes]:
        """The request's header fields under their short names, and its body."""
        sys_flag, flag, properties, body = delivery.request()
        topic = delivery.packed.topic
        ext = {
            "a": self._group,
            "b": topic,
            "c": AUTO_CREATE_TOPIC,
            "d": self._queues_wished,
            "e": str(queue.queue_id),
            "f": str(sys_flag),
            "g": str(self._now_ms()),
            "h": flag,
            "i": properties,
            "j": "0",
            "k": "false",
            "m": delivery.batch,
            "n": queue.broker_name,
        }
        if topic.startswith(RETRY_PREFIX):
            # Compat: a message that is sent back says in the header how often it was consumed.
            pairs = parse_properties(properties)
            ext["j"] = pairs.get(RECONSUME_TIME, "0")
            if MAX_RECONSUME_TIMES in pairs:
                ext["l"] = pairs[MAX_RECONSUME_TIMES]
        return ext, body

    # --- on the way back ---------------------------------------------------------------------

    def answered(self, delivery: Delivery, frame: Frame) -> None:
        status = _STATUS.get(frame.code)
        if status is None:
            remark = frame.remark or "no remark"
            self.attempt_failed(delivery, Refused(frame.code, remark))
            return
        queue = delivery.queue
        assert queue is not None
        delivery.connection = None  # the session has forgotten it already
        try:
            number = int(frame.ext["queueId"])
            if number != queue.queue_id or self._namespace:
                queue = MessageQueue(
                    topic=delivery.packed.message.topic,
                    broker_name=queue.broker_name,
                    queue_id=number,
                )
            results = delivery.results(status, queue, frame)
        except (KeyError, ValueError) as error:
            problem = ProtocolError(f"the answer to a send is malformed: {error!r}")
            self.attempt_failed(delivery, problem)
            return
        if self._faults is not None:
            now = self._loop.time()
            self._faults.answered(queue.broker_name, (now - delivery.began) * 1000, now)
        context = delivery.context
        if context is not None:
            context.results = results
            context.trace_on = frame.ext.get("TRACE_ON") != "false"
            self._after(delivery, context)
        if status is not SendStatus.OK and self._retry_when_not_ok and delivery.retries_left:
            delivery.stored = results
            self._again(delivery)
            return
        self._end(delivery)
        delivery.succeed(results)

    def attempt_failed(self, delivery: Delivery, error: CosmodromeError) -> None:
        """This attempt is over; perhaps another one helps."""
        if delivery.ended:
            return
        delivery.connection = None
        queue = delivery.queue
        assert queue is not None
        now = self._loop.time()
        cost_ms = round((now - delivery.began) * 1000)
        attempt = Attempt(queue.broker_name, delivery.address, error, cost_ms)
        delivery.tried = (*delivery.tried, attempt)
        refused = isinstance(error, Refused)
        helpful = (
            error.code in RETRY_CODES
            if isinstance(error, Refused)
            else isinstance(error, Unreachable)
        )
        if self._faults is not None and (helpful or isinstance(error, TimedOut)):
            self._faults.failed(queue.broker_name, now)
        context = delivery.context
        if context is not None:
            context.error = error
            self._after(delivery, context)
        if not refused:
            self._refresh_route(delivery.packed.topic, now)
        if helpful and delivery.retries_left and now < delivery.deadline:
            self._again(delivery)
            return
        self._end(delivery)
        if delivery.stored is not None:
            delivery.succeed(delivery.stored)
        elif isinstance(error, TimedOut):
            delivery.fail(SendTimedOut(delivery.packed.message.topic, delivery.tried, " in time"))
        else:
            delivery.fail(SendFailed(delivery.packed.message.topic, delivery.tried))

    def _again(self, delivery: Delivery) -> None:
        assert delivery.queue is not None
        delivery.retries_left -= 1
        delivery.last_broker = delivery.queue.broker_name
        if not self._dropped(delivery):
            self._go(delivery)

    def _end(self, delivery: Delivery) -> None:
        delivery.ended = True
        if delivery.connection is not None:
            delivery.connection.forget(delivery.opaque)
            delivery.connection = None
        self._out.discard(delivery)
        self.window.give(delivery.count, delivery.bytes)
        if not self._out:
            self._idle.set()

    # --- time --------------------------------------------------------------------------------

    def _arm(self, when: float) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        # One pass serves all deadlines that are close together.
        self._sweep_at = max(when, self._loop.time() + SWEEP_MIN_S)
        self._sweep_timer = self._loop.call_at(self._sweep_at, self._sweep)

    def _sweep(self, caught_up: bool = False) -> None:
        self._sweep_timer = None
        # A timer may fire a little before its time.
        now = max(self._sweep_at, self._loop.time())
        if now - self._sweep_at > STOOD_STILL_S and not caught_up:
            # A whole window would time out although its answers may be there already.
            self._sweep_at = now + CATCH_UP_S
            self._sweep_timer = self._loop.call_at(self._sweep_at, self._sweep, True)
            return
        self._sweep_at = math.inf
        earliest = math.inf
        for delivery in list(self._out):
            if delivery.deadline <= now:
                self._expire(delivery)
            elif delivery.deadline < earliest:
                earliest = delivery.deadline
        if earliest < self._sweep_at:
            self._arm(earliest)

    def _expire(self, delivery: Delivery) -> None:
        if delivery.queue is not None:
            if delivery.connection is not None:
                delivery.connection.forget(delivery.opaque)
                why = f"{delivery.address} did not answer"
            else:
                why = f"no connection to {delivery.address}"
            self.attempt_failed(delivery, TimedOut(why))
            return
        self._end(delivery)
        delivery.fail(
            SendTimedOut(delivery.packed.message.topic, (), " in time: no name server gave a route")
        )

    # --- small things ------------------------------------------------------------------------

    def _refresh_route(self, topic: str, now: float) -> None:
        """A broker that fails may have moved: ask for its route before the next refresh."""
        if now - self._refreshed.get(topic, -math.inf) < REFRESH_MIN_S:
            return
        if len(self._refreshed) > 10_000:
            self._refreshed.clear()
        self._refreshed[topic] = now
        self._spawn(self._ask_again(topic))

    async def _ask_again(self, topic: str) -> None:
        try:
            await self._routes.get(topic, fresh=True)
        except CosmodromeError as error:
            log.debug("route not refreshed: topic=%s reason=%s", topic, error)

    def _context(self, delivery: Delivery, queue: MessageQueue) -> SendContext:
        members = delivery.members
        return SendContext(
            group=unwrap(self._namespace, self._group),
            messages=[member.message for member in members],
            msg_ids=[member.msg_id for member in members],
            queue=self._chooser.shown(queue),
            address=delivery.address,
            mode=delivery.mode,
            kind=delivery.packed.kind,
            began_ms=self._now_ms(),
            body_bytes=[len(member.body) for member in members],
        )

    def _after(self, delivery: Delivery, context: SendContext) -> None:
        delivery.context = None
        context.cost_ms = round((self._loop.time() - delivery.began) * 1000)
        self.hooks.after(context)

    def _no_queue(self, topic: str) -> NoRoute:
        return NoRoute(
            f"topic {unwrap(self._namespace, topic)} has no queue that takes messages;"
            " check its permission and that the master of its broker runs"
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
