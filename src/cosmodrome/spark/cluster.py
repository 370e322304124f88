"""Blocking questions to a cluster about all but messages: topics, queues, bounds, times, progress.

All requests to one broker leave together, so asking about a thousand queues takes one round trip
per broker. Callers use names without a namespace; it is added on the wire. Name servers are asked
in turn. A request that finds no connection is tried again `retries` times, after a pause and with
fresh addresses. Reads go to a replica when the master does not answer. A broker that did not answer
after all that is asked only once per call until it answers, so that a caller who goes on without it
does not wait for it again and again.

When some brokers still do not answer, `PartlyUnreachable` carries what the others answered, for
callers that can do without the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from cosmodrome.client.namespace import unwrap, wrap
from cosmodrome.client.options import name_servers, split_address
from cosmodrome.client.routes import Route, decode_route, route_from
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import Code, CosmodromeError, ProtocolError, Refused, TimedOut, Unreachable
from cosmodrome.layout import PULL_SUBSCRIPTION
from cosmodrome.spark import links
from cosmodrome.spark.read.options import Connection
from cosmodrome.spark.read.times import Times
from cosmodrome.transport.plain import PlainConnection
from cosmodrome.transport.ports import VIP_OFFSET
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    EVERYTHING,
    MASTER_ID,
    TAG,
    MessageQueue,
    TopicList,
)
from cosmodrome.wire.commands.consume import PullMessage, PullReply, QueryMessage
from cosmodrome.wire.commands.offset import (
    GetMaxOffset,
    GetMinOffset,
    QueryConsumerOffset,
    SearchOffsetByTimestamp,
    UpdateConsumerOffset,
)
from cosmodrome.wire.commands.route import GetAllTopicListFromNameserver, GetRouteinfoByTopic
from cosmodrome.wire.message import UNIQ_KEY, join_address, parse_properties
from cosmodrome.wire.record import Record, decode_record, iter_records
from cosmodrome.wire.table import Command, R, Reply

GROUP = "cosmodrome_spark"  # of pulls, when the user named no group
EVER_MS = 2**63 - 1
SAMPLE_MESSAGES = 32
KEYS_AT_ONCE = 32  # searched in one round trip
COPIES_AT_ONCE = 32  # that a broker gives for one key
PAGES_MAX = 64
INDEX_STEP_MS = 1_000

# A group that has nothing stored; 5.x refuses groups that it does not know.
_NO_PROGRESS = (Code.QUERY_NOT_FOUND, Code.SUBSCRIPTION_GROUP_NOT_EXIST)
# A connection that ends in one of these is of no use any more.
BROKEN = (Unreachable, TimedOut, ProtocolError)

T = TypeVar("T")
Answers = list[Any]  # Reply | Refused, one per request


class PartlyUnreachable(Unreachable, Generic[T]):
    """Some brokers did not answer. `results` has the queues of the others."""

    def __init__(
        self, failures: Mapping[str, CosmodromeError], results: dict[MessageQueue, T]
    ) -> None:
        listed = "; ".join(f"{name}: {error}" for name, error in failures.items())
        super().__init__(f"no answer from {len(failures)} broker(s): {listed}")
        self.failures = dict(failures)
        self.results = results


class StoredCopy(NamedTuple):
    """A message that was found by its unique key."""

    broker: str
    queue_id: int
    queue_offset: int
    properties: dict[str, str]


_Copies = dict[tuple[str, int, int], StoredCopy]  # by broker, queue and offset


class Cluster:
    """See the module. Connections are taken when needed and given back by `close`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._name_servers = [
            join_address(host, port) for host, port in name_servers(connection.namesrv)
        ]
        self._links: dict[str, PlainConnection] = {}
        self._brokers: dict[str, dict[int, str]] = {}  # address by broker name and id
        # Brokers that did not answer the last time, and whether only their masters were asked.
        self._silent: set[tuple[str, bool]] = set()
        self._replica_answered: set[str] = set()  # brokers whose master did not, the last time

    # --- what there is -------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Every topic, system topics included; with a namespace those of the namespace."""
        (reply,) = self._ask_name_server([GetAllTopicListFromNameserver()])
        if isinstance(reply, Refused):
            raise reply
        names = bodies.decode(TopicList, reply.body).topic_list
        namespace = self._connection.namespace
        if namespace:
            names = [name for name in names if unwrap(namespace, name) != name]
        return sorted(unwrap(namespace, name) for name in names)

    def queues(self, topics: Iterable[str]) -> dict[MessageQueue, tuple[str, ...]]:
        """The readable queues of these topics with the addresses of their brokers, masters first.

        NoRoute names the topics that no broker has.
        """
        found: dict[MessageQueue, tuple[str, ...]] = {}
        for topic, route in self._routes(list(dict.fromkeys(topics))).items():
            for queue in route.read_queues:
                replicas = route.addresses.get(queue.broker_name)
                if replicas:
                    plain = MessageQueue(
                        topic=topic, broker_name=queue.broker_name, queue_id=queue.queue_id
                    )
                    found[plain] = tuple(replicas[number] for number in sorted(replicas))
        return found

    def addresses(self, queue: MessageQueue) -> tuple[str, ...]:
        """Where the broker of a queue is now, its master first; asked anew, once."""
        self._routes([queue.topic], retries=0)
        return self._known_addresses(queue.broker_name)

    # --- offsets -------------------------------------------------------------------------------

    def bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, tuple[int, int]]:
        """Offsets of the oldest message that is kept and of the next one to come."""

        def ask(topic: str, queue: MessageQueue) -> list[Command[Any]]:
            number = queue.queue_id
            return [
                GetMinOffset(topic=topic, queue_id=number),
                GetMaxOffset(topic=topic, queue_id=number),
            ]

        def read(queue: MessageQueue, answers: Answers) -> tuple[int, int]:
            # Compat: Java says -1 for a queue that never had a message.
            least, most = (max(0, _reply_or_raise(queue, answer).offset) for answer in answers)
            return min(least, most), most

        return self._each(queues, ask, read)

    def answered_by_replica(self, broker: str) -> bool:
        """Whether a replica, which may lack the newest messages, gave the last answer."""
        return broker in self._replica_answered

    def at_time(self, queues: Iterable[MessageQueue], time_ms: int) -> dict[MessageQueue, int]:
        """Offsets of the first message stored at or after a time; the end when there is none."""
        asked = list(queues)
        try:
            bounds = self.bounds(asked)
        except PartlyUnreachable as error:
            raise PartlyUnreachable[int](error.failures, {}) from error

        def ask(topic: str, queue: MessageQueue) -> list[Command[Any]]:
            number = queue.queue_id
            return [SearchOffsetByTimestamp(topic=topic, queue_id=number, timestamp=time_ms)]

        def read(queue: MessageQueue, answers: Answers) -> int:
            return int(_reply_or_raise(queue, answers[0]).offset)

        guesses = self._each(asked, ask, read)
        return Times(self._store_times).first(time_ms, bounds, guesses)

    def _store_times(
        self, positions: list[tuple[MessageQueue, int]]
    ) -> dict[tuple[MessageQueue, int], int | None]:
        by_queue: dict[MessageQueue, list[int]] = {}
        for queue, offset in positions:
            by_queue.setdefault(queue, []).append(offset)

        def ask(topic: str, queue: MessageQueue) -> list[Command[Any]]:
            number = queue.queue_id
            return [pull_command(topic, number, offset, 1) for offset in by_queue[queue]]

        def read(queue: MessageQueue, answers: Answers) -> list[int | None]:
            return [_store_ms(_reply_or_raise(queue, answer).body) for answer in answers]

        found: dict[tuple[MessageQueue, int], int | None] = {}
        for queue, times in self._each(by_queue, ask, read).items():
            found.update(zip(((queue, at) for at in by_queue[queue]), times, strict=True))
        return found

    def average_bytes(self, queue: MessageQueue, offset: int) -> float | None:
        """Mean size of the messages from an offset on, by a sample; None when there is none."""

        def ask(topic: str, queue: MessageQueue) -> list[Command[Any]]:
            return [pull_command(topic, queue.queue_id, offset, SAMPLE_MESSAGES)]

        def read(queue: MessageQueue, answers: Answers) -> float | None:
            reply: PullReply = _reply_or_raise(queue, answers[0])
            sizes = [record.size for record in iter_records(reply.body)]
            return sum(sizes) / len(sizes) if sizes else None

        return self._each([queue], ask, read)[queue]

    # --- progress of groups ----------------------------------------------------------------------

    def committed(self, group: str, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """What a group has stored; queues in which it has nothing are left out."""
        full = self._full(group)

        def ask(topic: str, queue: MessageQueue) -> list[Command[Any]]:
            return [QueryConsumerOffset(consumer_group=full, topic=topic, queue_id=queue.queue_id)]

        def read(queue: MessageQueue, answers: Answers) -> int:
            answer = answers[0]
            if isinstance(answer, Refused) and answer.code in _NO_PROGRESS:
                return -1
            return int(_reply_or_raise(queue, answer).offset)

        found = self._each(queues, ask, read, masters_only=True)
        return {queue: offset for queue, offset in found.items() if offset >= 0}

    def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Store how far a group has come; a smaller offset is stored too."""
        full = self._full(group)

        def ask(topic: str, queue: MessageQueue) -> list[Command[Any]]:
            return [
                UpdateConsumerOffset(
                    consumer_group=full,
                    topic=topic,
                    queue_id=queue.queue_id,
                    commit_offset=offsets[queue],
                )
            ]

        def introduce(topic: str, queue: MessageQueue) -> list[Command[Any]]:
            return [pull_command(topic, queue.queue_id, offsets[queue], 1, group=full)]

        def is_known(queue: MessageQueue, answers: Answers) -> bool:
            answer = answers[0]
            if isinstance(answer, Refused) and answer.code == Code.SUBSCRIPTION_GROUP_NOT_EXIST:
                return False
            _reply_or_raise(queue, answer)
            return True

        known = self._each(offsets, ask, is_known, masters_only=True)
        unknown = [queue for queue, stored in known.items() if not stored]
        # Compat: 5.x stores offsets only of groups that it knows, and learns them by pulls. It
        # serves pulls and commits side by side, so the pulls must be answered first.
        self._each(unknown, introduce, lambda queue, answers: None, masters_only=True)
        stored = self._each(unknown, ask, is_known, masters_only=True)
        for queue in (queue for queue in unknown if not stored[queue]):
            raise Refused(
                Code.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"broker {queue.broker_name} does not know group {group}; create it there first",
            )

    # --- messages --------------------------------------------------------------------------------

    def find_by_unique_keys(self, topic: str, keys: Sequence[str]) -> dict[str, list[StoredCopy]]:
        """Every message of a topic whose sender gave it one of these ids, by id.

        Every master of the topic must answer: a replica may lack the newest messages.

        Compat: a broker gives the newest 32 at once; where there are as many, older ones are
        asked for. Its index counts time in seconds: of more than 32 in one second some are missed.
        """
        found: dict[str, _Copies] = {key: {} for key in keys}
        for name in sorted(self._routes([topic])[topic].addresses):
            until = dict.fromkeys(found, EVER_MS)
            for _ in range(PAGES_MAX):
                until = self._find_before(name, topic, until, found)
                if not until:
                    break
        return {key: list(copies.values()) for key, copies in found.items()}

    def _find_before(
        self, name: str, topic: str, until: Mapping[str, int], found: Mapping[str, _Copies]
    ) -> dict[str, int]:
        """Copies stored up to a time by key, into `found`; the keys that may have older ones."""
        left: dict[str, int] = {}
        asked = list(until)
        for first in range(0, len(asked), KEYS_AT_ONCE):
            some = asked[first : first + KEYS_AT_ONCE]
            commands = [
                QueryMessage(
                    topic=self._full(topic),
                    key=key,
                    max_num=COPIES_AT_ONCE,
                    begin_timestamp=0,
                    end_timestamp=until[key],
                    unique_key_query=True,
                )
                for key in some
            ]
            answers = self._ask_broker(name, topic, commands, masters_only=True)
            for key, answer in zip(some, answers, strict=True):
                records = _found_records(answer)
                for copy in _matches(name, key, records):
                    found[key][copy[:3]] = copy
                if len(records) >= COPIES_AT_ONCE:
                    oldest_ms = min(record.store_ms for record in records)
                    left[key] = min(oldest_ms, until[key] - INDEX_STEP_MS)
        return left

    # --- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the connections back; usable again afterwards."""
        held, self._links = self._links, {}
        for address, link in held.items():
            links.give_back(address, self._connection, link)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- asking ----------------------------------------------------------------------------------

    def _each(
        self,
        queues: Iterable[MessageQueue],
        ask: Callable[[str, MessageQueue], list[Command[Any]]],
        read: Callable[[MessageQueue, Answers], T],
        *,
        masters_only: bool = False,
    ) -> dict[MessageQueue, T]:
        """Requests about each queue, to its broker; what `read` makes of the answers."""
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            by_broker.setdefault(queue.broker_name, []).append(queue)
        results: dict[MessageQueue, T] = {}
        failures: dict[str, CosmodromeError] = {}
        for name, mine in by_broker.items():
            requests = [ask(self._full(queue.topic), queue) for queue in mine]
            commands = [command for some in requests for command in some]
            try:
                answers = iter(
                    self._ask_broker(name, mine[0].topic, commands, masters_only=masters_only)
                )
            except BROKEN as error:
                failures[name] = error
                continue
            for queue, some in zip(mine, requests, strict=True):
                results[queue] = read(queue, [next(answers) for _ in some])
        if failures:
            raise PartlyUnreachable(failures, results)
        return results

    def _ask_broker(
        self, name: str, topic: str, commands: Sequence[Command[R]], *, masters_only: bool = False
    ) -> list[R | Refused]:
        asked = (name, masters_only)
        attempts = links.Attempts(0 if asked in self._silent else self._connection.retries)
        if name not in self._brokers:
            self._routes([topic])
        while True:
            failure: CosmodromeError = Unreachable(
                f"no route of {topic} has an address of broker {name}; brokers known are:"
                f" {', '.join(sorted(self._brokers)) or 'none'}"
            )
            for number, address in sorted(self._brokers.get(name, {}).items()):
                if masters_only and number != MASTER_ID:
                    continue
                try:
                    answers = self._call_all(self._dialled(address), commands)
                except BROKEN as error:
                    failure = error
                    continue
                self._silent.discard(asked)
                if number == MASTER_ID:
                    self._replica_answered.discard(name)
                else:
                    self._replica_answered.add(name)
                return answers
            if not attempts.failed(failure):
                self._silent.add(asked)
                raise Unreachable(
                    f"broker {name} does not answer, {attempts.describe()}"
                ) from failure
            attempts.wait()
            try:
                self._routes([topic], retries=0)  # it may be somewhere else by now
            except CosmodromeError:
                pass  # the addresses that are known stay in use

    def _ask_name_server(
        self, commands: Sequence[Command[R]], retries: int | None = None
    ) -> list[R | Refused]:
        attempts = links.Attempts(self._connection.retries if retries is None else retries)
        while True:
            for address in list(self._name_servers):
                try:
                    return self._call_all(address, commands)
                except BROKEN as error:
                    failure = error
                    # The next one is asked first from now on.
                    self._name_servers.append(self._name_servers.pop(0))
            if not attempts.failed(failure):
                raise Unreachable(f"no name server answers, {attempts.describe()}") from failure
            attempts.wait()

    def _call_all(self, address: str, commands: Sequence[Command[R]]) -> list[R | Refused]:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = links.take(address, self._connection)
        try:
            answers = link.call_all(commands, self._connection.timeout_ms)
        except BROKEN as error:
            del self._links[address]
            link.close()
            raise links.explained(error, self._connection) from error.__cause__
        return [
            links.explained(answer, self._connection) if isinstance(answer, Refused) else answer
            for answer in answers
        ]

    def _routes(self, topics: Sequence[str], retries: int | None = None) -> dict[str, Route]:
        """Asked anew; the addresses in them are remembered."""
        commands = [GetRouteinfoByTopic(topic=self._full(topic)) for topic in topics]
        found: dict[str, Route] = {}
        missing: list[str] = []
        for topic, reply in zip(topics, self._ask_name_server(commands, retries), strict=True):
            if not isinstance(reply, Refused):
                full = self._full(topic)
                found[topic] = route_from(full, decode_route(full, reply.body))
                self._brokers.update(found[topic].addresses)
            elif reply.code == Code.TOPIC_NOT_EXIST:
                missing.append(topic)
            else:
                raise reply
        if missing:
            raise NoRoute(
                f"no broker has topic {', '.join(missing)}; check the name or create it first"
                f" (asked {self._name_servers[0]})"
            )
        return found

    def _known_addresses(self, name: str) -> tuple[str, ...]:
        replicas = self._brokers.get(name, {})
        return tuple(replicas[number] for number in sorted(replicas))

    def _dialled(self, advertised: str) -> str:
        if not self._connection.vip:
            return advertised
        host, port = split_address(advertised)
        return join_address(host, port + VIP_OFFSET)

    def _full(self, name: str) -> str:
        return wrap(self._connection.namespace, name)


def pull_command(
    topic: str,
    queue_id: int,
    offset: int,
    count: int,
    *,
    group: str = GROUP,
    expression: str = EVERYTHING,
    kind: str = TAG,
    bytes_max: int | None = None,
) -> PullMessage:
    """A pull that brings its subscription along and never waits at the broker."""
    return PullMessage(
        consumer_group=group,
        topic=topic,
        queue_id=queue_id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=PULL_SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=expression,
        sub_version=0,
        expression_type=kind,
        max_msg_bytes=bytes_max,
    )


def _reply_or_raise(queue: MessageQueue, answer: Any) -> Any:
    """The reply; a refusal is raised with the name of the queue."""
    if isinstance(answer, Refused):
        raise Refused(
            answer.code,
            f"{queue.topic}, queue {queue.queue_id} on {queue.broker_name}: {answer.remark}",
        )
    return answer


def _store_ms(body: bytes) -> int | None:
    return decode_record(body).store_ms if body else None


def _found_records(answer: Reply | Refused) -> list[Record]:
    if isinstance(answer, Refused):
        if answer.code == Code.QUERY_NOT_FOUND:
            return []
        raise answer
    return list(iter_records(answer.body))


def _matches(broker: str, key: str, records: Iterable[Record]) -> list[StoredCopy]:
    found: list[StoredCopy] = []
    for record in records:
        properties = parse_properties(record.properties)
        # The index knows hashes of keys only.
        if properties.get(UNIQ_KEY) == key:
            found.append(StoredCopy(broker, record.queue_id, record.queue_offset, properties))
    return found
