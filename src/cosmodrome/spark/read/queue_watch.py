"""What a running stream sees of its queues: bounds, addresses, and which are away or gone.

A broker that does not answer is *away*: its queues stay where they are and the others go on; it is
asked again after a pause. A queue is *gone* only when its broker is there and has it no more, and
*aside* when it is not subscribed to any more: its offset is kept. If no broker answers at all, the
watch asks a few times more and then gives up with an error.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from cosmodrome.client.values import NoRoute
from cosmodrome.env.backoff import Backoff
from cosmodrome.errors import Code, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.subscription import ClusterView, Subscription
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.names import SELF_TEST_TOPIC

log = logging.getLogger(__name__)

_PAUSE_S = 10.0
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """One look at the cluster."""

    bounds: dict[MessageQueue, tuple[int, int]]
    away: frozenset[MessageQueue]
    gone: frozenset[MessageQueue]
    aside: frozenset[MessageQueue] = frozenset()
    replicas: frozenset[str] = frozenset()  # brokers for which a replica answered

    def waits(self, queue: MessageQueue, at: int) -> bool:
        """Whether a queue that was read up to `at` is to be left where it is."""
        if queue in self.away or queue in self.aside:
            return True
        # A replica may lack the newest messages: nothing is lost before its master says so.
        return queue.broker_name in self.replicas and at > self.bounds.get(queue, (0, at))[1]


class QueueWatch:
    """Looks at the queues before every batch; remembers addresses and who did not answer."""

    def __init__(
        self,
        options: ReadOptions,
        cluster: ClusterView,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._retries = options.connection.retries
        self._cluster = cluster
        self._subscription = Subscription(options, cluster)
        self._now = now
        self._sleep = sleep
        self._silent_until: dict[str, float] = {}  # broker -> when to ask it again
        self._reasons: dict[str, str] = {}  # what the last failure to ask a broker said
        self._unregistered: set[str] = set()  # what was warned of
        self.addresses: dict[MessageQueue, tuple[str, ...]] = {}

    def look(self, known: Iterable[MessageQueue]) -> QueueSnapshot:
        """All queues there are, and what became of the `known` ones."""
        expected = frozenset(known)
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        for attempt in range(self._retries + 1):
            snapshot = self._look_once(expected)
            if snapshot.bounds or not (snapshot.away or self._silent_until):
                return snapshot
            if attempt < self._retries:
                self._sleep(backoff.next_s())
                self._silent_until = dict.fromkeys(self._silent_until, 0.0)
        brokers = sorted({q.broker_name for q in snapshot.away} | set(self._silent_until))
        raise Unreachable(
            f"no broker answers: {', '.join(brokers)} (asked {self._retries + 1} times);"
            " see whether they run and are registered at the name server, or raise retries"
            + "".join(f"; {reason}" for reason in dict.fromkeys(self._reasons.values()))
        )

    def _look_once(self, known: frozenset[MessageQueue]) -> QueueSnapshot:
        queues = self._routes()
        bounds: dict[MessageQueue, tuple[int, int]] = {}
        for broker in sorted({queue.broker_name for queue in queues}):
            bounds.update(self._ask(broker, [q for q in queues if q.broker_name == broker]))
        aside = frozenset(queue for queue in known if not self._subscription.reads(queue))
        missing = known - bounds.keys() - aside
        unrouted = {queue for queue in missing if queue not in queues}
        registered = self._registered() if unrouted else frozenset()
        gone = frozenset(q for q in unrouted if q.broker_name in registered)
        self._note_away({queue.broker_name for queue in unrouted - gone})
        brokers = {queue.broker_name for queue in bounds}
        replicas = frozenset(filter(self._cluster.answered_by_replica, brokers))
        return QueueSnapshot(bounds, missing - gone, gone, aside, replicas)

    def _routes(self) -> dict[MessageQueue, tuple[str, ...]]:
        try:
            found = self._subscription.queues(absent_ok=True)
        except (Unreachable, TimedOut) as error:
            if not self.addresses:
                raise
            if self._is_new_silence("the name servers"):
                log.warning("going on with the routes known so far: %s", error)
            return dict(self.addresses)
        self._silent_until.pop("the name servers", None)
        self.addresses.update(found)
        return found

    def _ask(self, broker: str, queues: list[MessageQueue]) -> dict[MessageQueue, tuple[int, int]]:
        if self._silent_until.get(broker, 0.0) > self._now():
            return {}
        try:
            bounds = self._cluster.bounds(queues)
        except (Unreachable, TimedOut, NoRoute) as error:
            self._reasons[broker] = str(error)
            if self._is_new_silence(broker):
                log.warning("broker %s does not answer, its queues wait: %s", broker, error)
            return {}
        except Refused as error:
            if error.code != Code.TOPIC_NOT_EXIST:
                raise
            return {}  # deleted just now; the next look has routes without it
        self._reasons.pop(broker, None)
        if self._silent_until.pop(broker, None) is not None:
            log.warning("broker %s answers again", broker)
        return bounds

    def _registered(self) -> frozenset[str]:
        """Brokers that are registered, found by a topic that every broker has."""
        try:
            return frozenset(q.broker_name for q in self._cluster.queues([SELF_TEST_TOPIC]))
        except CosmodromeError:
            return frozenset()

    def _note_away(self, brokers: set[str]) -> None:
        for broker in sorted(brokers - self._unregistered):
            log.warning("broker %s is not registered any more, its queues wait", broker)
        self._unregistered = brokers

    def _is_new_silence(self, who: str) -> bool:
        new = who not in self._silent_until
        self._silent_until[who] = self._now() + _PAUSE_S
        return new
