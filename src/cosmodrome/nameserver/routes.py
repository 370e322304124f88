"""Which broker serves which queues, and which brokers are alive: tables and rules, no sockets.

Hidden here: how registrations merge, what a removal takes along, and what keeps a broker alive.

Invariants, true between any two calls:

- every live address stands under exactly one (broker name, broker id), and the other way round;
- a broker name has at least one address, belongs to one cluster, and only such names have rows;
- a registration that is refused leaves every table as it was.

A large registration is taken over in steps (`registering`), between which others may ask and change
what they like; it ends early when its address is gone or was registered anew meanwhile.

An address lives as long as the newest connection over which it registered. When that one closes,
its addresses are gone at once; an older connection of the same broker may close unnoticed.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from cosmodrome.env.background import Steps, at_once
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.bodies import MASTER_ID, PERM_READ, PERM_WRITE, QUEUES_MAX, TOPICS_MAX
from cosmodrome.wire.names import REPLY_TOPIC_SUFFIX, check_topic
from cosmodrome.wire.table import Connection

log = logging.getLogger(__name__)

PERM_MAX = 15

BROKER_ID_MAX = 2**63 - 1
ADDRESSES_MAX = 10_000  # live at once
ROWS_MAX = 1_000_000  # (topic, broker name) pairs
TOPICS_PER_STEP = 100
FILTER_SERVERS_MAX = 256  # per broker
LABEL_CHARACTERS_MAX = 255

# Host names carry dots, which topic names must not; a broker is often named like its host.
_LABEL = re.compile(r"[%|a-zA-Z0-9_.-]+\Z")
_ADDRESS = re.compile(r"(?:[a-zA-Z0-9._-]+|\[[0-9a-fA-F:.]+(?:%[a-zA-Z0-9._-]+)?\]):([0-9]{1,5})\Z")


class Version(NamedTuple):
    """A broker's count of changes to its topic table; compared, never ordered."""

    timestamp: int
    counter: int


NO_VERSION = Version(0, 0)


class TopicRow(msgspec.Struct, frozen=True, gc=False):
    """The queues that one broker name has of one topic."""

    read_queues: int
    write_queues: int
    perm: int
    sys_flag: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who a registration is about."""

    cluster: str
    broker_name: str
    broker_id: int
    address: str


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """What a broker says about itself. `topics` may be only those that changed."""

    identity: Identity
    ha_address: str = ""
    version: Version = NO_VERSION
    topics: dict[str, TopicRow] = dataclasses.field(default_factory=dict)
    filter_servers: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True)
class Broker:
    """A broker name: a master and its slaves."""

    cluster: str
    name: str
    addresses: dict[int, str]


@dataclasses.dataclass(slots=True)
class Live:
    """An address that is heard from."""

    identity: Identity
    connection: Connection
    heard_ms: int
    version: Version
    ha_address: str
    filter_servers: tuple[str, ...]
    applied: set[str]  # topics of this address whose rows were taken over already


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Where one topic lives."""

    brokers: Sequence[Broker]
    rows: Sequence[tuple[str, TopicRow]]  # broker name, queues
    filter_servers: dict[str, tuple[str, ...]]  # address -> filter servers


class Routes:
    def __init__(self, elapsed_ms: Callable[[], int]) -> None:
        """`elapsed_ms` is a clock that never jumps; only differences of it matter."""
        self._elapsed_ms = elapsed_ms
        self._topics: dict[str, dict[str, TopicRow]] = {}
        self._brokers: dict[str, Broker] = {}
        self._live: dict[str, Live] = {}
        self._row_count = 0
        self._topics_of: dict[str, set[str]] = {}  # the topics in which a broker name has a row

    # --- brokers come and go -----------------------------------------------------------------

    def register(self, news: Registration, connection: Connection) -> tuple[str, str] | None:
        """Take over what a broker says about itself. For a slave whose master is alive, returns the
        master's address and the address of its replication port."""
        return at_once(self.registering(news, connection))

    def registering(
        self, news: Registration, connection: Connection
    ) -> Steps[tuple[str, str] | None]:
        """`register` in steps, each of a few topics. What is refused is so before the first change,
        except where others took the room meanwhile."""
        yield from self._check(news)
        who = news.identity
        self._displace(who)
        before = self._live.get(who.address)
        broker = self._brokers.get(who.broker_name)
        if broker is None:
            broker = self._brokers[who.broker_name] = Broker(who.cluster, who.broker_name, {})
        broker.addresses[who.broker_id] = who.address
        live = self._live[who.address] = Live(
            identity=who,
            connection=connection,
            heard_ms=self._elapsed_ms(),
            version=news.version,
            ha_address=news.ha_address,
            filter_servers=news.filter_servers,
            applied=before.applied if before else set(),
        )
        if before is None:
            log.info(
                "broker registered: cluster=%s name=%s id=%d address=%s",
                who.cluster,
                who.broker_name,
                who.broker_id,
                who.address,
            )
        if who.broker_id == MASTER_ID:
            changed = before is None or before.version != news.version
            yield from self._apply(news, live, changed=changed)
            return None
        master = self._live.get(broker.addresses.get(MASTER_ID, ""))
        return (master.identity.address, master.ha_address) if master else None

    def unregister(self, who: Identity) -> bool:
        """Forget an address; False when that broker was not registered with it."""
        live = self._live.get(who.address)
        if (
            live is None
            or live.identity.broker_name != who.broker_name
            or live.identity.broker_id != who.broker_id
        ):
            return False
        self._remove(who.address, "it unregistered")
        return True

    def connection_closed(self, connection: Connection) -> None:
        """Forget every address whose newest registration came over `connection`."""
        gone = [address for address, live in self._live.items() if live.connection is connection]
        for address in gone:
            self._remove(address, "its connection closed")

    def expire(self, silence_ms_max: int) -> list[Connection]:
        """Forget what was silent for longer; the caller closes the connections."""
        now_ms = self._elapsed_ms()
        silent = [live for live in self._live.values() if now_ms - live.heard_ms > silence_ms_max]
        for live in silent:
            self._remove(
                live.identity.address,
                f"it was silent for {now_ms - live.heard_ms} ms",
                logging.WARNING,
            )
        return [live.connection for live in silent]

    def confirm(self, who: Identity, version: Version | None) -> tuple[bool, Version | None]:
        """A broker asks whether its table is known: (whether it is not, the version known). Equal
        versions count as a sign of life."""
        live = self._live.get(who.address)
        if live is None or (live.identity.broker_name, live.identity.broker_id) != (
            who.broker_name,
            who.broker_id,
        ):
            return True, None
        if version == live.version:
            live.heard_ms = self._elapsed_ms()
            return False, live.version
        return True, live.version

    # --- questions ---------------------------------------------------------------------------

    @property
    def topic_count(self) -> int:
        return len(self._topics)

    def silences_ms(self) -> list[tuple[Identity, int]]:
        """Every live address, and how long it was not heard of."""
        now_ms = self._elapsed_ms()
        return [(live.identity, now_ms - live.heard_ms) for live in self._live.values()]

    def route(self, topic: str) -> Route | None:
        rows = self._topics.get(topic)
        if rows is None:
            return None
        brokers = [self._brokers[name] for name in rows]
        filter_servers = {
            address: self._live[address].filter_servers
            for broker in brokers
            for address in broker.addresses.values()
            if self._live[address].filter_servers
        }
        return Route(brokers, list(rows.items()), filter_servers)

    def brokers(self) -> list[Broker]:
        return list(self._brokers.values())

    def clusters(self) -> dict[str, list[str]]:
        """Cluster -> names of its brokers."""
        clusters: dict[str, list[str]] = {}
        for broker in self._brokers.values():
            clusters.setdefault(broker.cluster, []).append(broker.name)
        return clusters

    def topics(self) -> list[str]:
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        names = set(self.clusters().get(cluster, ()))
        return [topic for topic, rows in self._topics.items() if not names.isdisjoint(rows)]

    def topics_flagged(self, on: int, off: int = 0) -> list[str]:
        """Topics whose first row has all bits of `on` and none of `off`."""
        return [
            topic
            for topic, rows in self._topics.items()
            if (next(iter(rows.values())).sys_flag & (on | off)) == on
        ]

    def any_address(self) -> str | None:
        return next(iter(self._live), None)

    # --- an operator's changes ---------------------------------------------------------------

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Drop a topic's rows, of one cluster or of all. A broker that still has the topic brings
        it back with its next change."""
        rows = self._topics.get(topic)
        if rows is None:
            return
        for name in [n for n in rows if cluster is None or self._brokers[n].cluster == cluster]:
            self._drop_row(topic, name)

    def wipe_write_perm(self, broker_name: str) -> int:
        return self._change_perm(broker_name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        # Compat: upstream sets the two bits instead of restoring what was there.
        return self._change_perm(broker_name, lambda perm: PERM_READ | PERM_WRITE)

    # --- inside ------------------------------------------------------------------------------

    def _check(self, news: Registration) -> Iterator[None]:
        """Everything that can be wrong with a registration, before any table is touched."""
        who = news.identity
        check_label("cluster name", who.cluster)
        check_label("broker name", who.broker_name)
        if not 0 <= who.broker_id <= BROKER_ID_MAX:
            _refuse(f"The broker id is {who.broker_id}; use 0 for a master, more for a slave.")
        check_address("broker address", who.address)
        if news.ha_address:
            check_address("replication address", news.ha_address)
        if len(news.filter_servers) > FILTER_SERVERS_MAX:
            _refuse(
                f"{len(news.filter_servers)} filter servers are named;"
                f" name {FILTER_SERVERS_MAX} or fewer."
            )
        for address in news.filter_servers:
            check_address("filter server address", address)
        # A broker makes topics of its own names, which may be wider than topic names are.
        own = {who.broker_name, who.cluster, who.cluster + REPLY_TOPIC_SUFFIX}
        if len(news.topics) > TOPICS_MAX:
            _refuse_topics(who.broker_name, len(news.topics))
        known = self._topics_of.get(who.broker_name, set())
        new = 0
        for number, (topic, row) in enumerate(news.topics.items(), 1):
            new += topic not in known
            if topic not in own:
                check_topic(topic)
            _check_row(topic, row)
            if number % TOPICS_PER_STEP == 0:
                yield
        self._check_room(news, new)

    def _check_room(self, news: Registration, new: int) -> None:
        """What does not fit beside what is registered already; so many topics are new."""
        who = news.identity
        broker = self._brokers.get(who.broker_name)
        if (
            broker is not None
            and broker.cluster != who.cluster
            and set(broker.addresses.values()) != {who.address}
        ):
            _refuse(
                f"Broker name {who.broker_name} belongs to cluster {broker.cluster} here;"
                f" give the brokers of cluster {who.cluster} another brokerName."
            )
        if who.address not in self._live and len(self._live) >= ADDRESSES_MAX:
            _refuse(f"{ADDRESSES_MAX} brokers are registered; this name server takes no more.")
        known = self._topics_of.get(who.broker_name, set())
        if who.broker_id == MASTER_ID and news.topics:
            if len(known) + new > TOPICS_MAX:
                _refuse_topics(who.broker_name, len(known) + new)
            if self._row_count + new > ROWS_MAX:
                _refuse(
                    f"{self._row_count} topic rows are registered and {new} more would pass"
                    f" {ROWS_MAX}; delete topics, or spread them over more clusters."
                )

    def _displace(self, who: Identity) -> None:
        """Make way: an address has one identity, and an identity one address."""
        before = self._live.get(who.address)
        if before is not None and before.identity != who:
            was = before.identity
            if (was.cluster, was.broker_name) == (who.cluster, who.broker_name):
                # A slave became master or the other way round; its queues stay.
                del self._brokers[was.broker_name].addresses[was.broker_id]
                del self._live[who.address]
                log.info(
                    "broker changed its id: name=%s address=%s id=%d was=%d",
                    who.broker_name,
                    who.address,
                    who.broker_id,
                    was.broker_id,
                )
            else:
                self._remove(who.address, f"it now is {who.broker_name} of {who.cluster}")
        broker = self._brokers.get(who.broker_name)
        holder = broker.addresses.get(who.broker_id) if broker else None
        if holder is not None and holder != who.address:
            del self._live[holder]
            log.warning(
                "broker replaced: name=%s id=%d address=%s was=%s; if both run, give each its"
                " own brokerId",
                who.broker_name,
                who.broker_id,
                who.address,
                holder,
            )

    def _apply(self, news: Registration, live: Live, *, changed: bool) -> Iterator[None]:
        """Take over rows. With an unchanged version only topics that this address never named are
        new: so permissions that an operator took and topics that an operator dropped stay as they
        are until the broker's next change, and a full registration that follows an incremental one
        is not lost."""
        name = news.identity.broker_name
        for number, (topic, row) in enumerate(news.topics.items(), 1):
            if changed or topic not in live.applied:
                self._put_row(topic, name, row)
            if len(live.applied) > ROWS_MAX:
                live.applied.clear()  # what is forgotten is merely applied once more
            live.applied.add(topic)
            if number % TOPICS_PER_STEP == 0:
                yield
                if self._live.get(news.identity.address) is not live:
                    return

    def _remove(self, address: str, why: str, level: int = logging.INFO) -> None:
        who = self._live.pop(address).identity
        broker = self._brokers[who.broker_name]
        del broker.addresses[who.broker_id]
        log.log(
            level,
            "broker removed: cluster=%s name=%s id=%d address=%s reason=%r",
            who.cluster,
            who.broker_name,
            who.broker_id,
            address,
            why,
        )
        if broker.addresses:
            return
        del self._brokers[who.broker_name]
        for topic in list(self._topics_of.get(who.broker_name, ())):
            self._drop_row(topic, who.broker_name)

    def _put_row(self, topic: str, broker_name: str, row: TopicRow) -> None:
        rows = self._topics.setdefault(topic, {})
        if broker_name not in rows:
            self._row_count += 1
            self._topics_of.setdefault(broker_name, set()).add(topic)
        rows[broker_name] = row

    def _drop_row(self, topic: str, broker_name: str) -> None:
        rows = self._topics[topic]
        del rows[broker_name]
        self._row_count -= 1
        mine = self._topics_of[broker_name]
        mine.discard(topic)
        if not mine:
            del self._topics_of[broker_name]
        if not rows:
            del self._topics[topic]

    def _change_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        count = 0
        for rows in self._rows_of(broker_name):
            row = rows[broker_name]
            rows[broker_name] = msgspec.structs.replace(row, perm=change(row.perm))
            count += 1
        return count

    def _rows_of(self, broker_name: str) -> Iterator[dict[str, TopicRow]]:
        return (self._topics[topic] for topic in self._topics_of.get(broker_name, ()))


def check_label(kind: str, name: str) -> None:
    """A cluster or broker name."""
    if not name:
        _refuse(f"The {kind} is empty; give it a name.")
    if len(name) > LABEL_CHARACTERS_MAX:
        _refuse(
            f"The {kind} has {len(name)} characters; shorten it to {LABEL_CHARACTERS_MAX} or fewer."
        )
    if not _LABEL.match(name):
        _refuse(
            f"The {kind} {name[:64]!r} has characters that are not allowed;"
            " use letters, digits and the characters % | _ - ."
        )


def check_address(kind: str, address: str) -> None:
    match = _ADDRESS.match(address) if len(address) <= LABEL_CHARACTERS_MAX else None
    if match is None or not 1 <= int(match[1]) <= 65_535:
        _refuse(
            f"The {kind} {address[:64]!r} is not of the form host:port;"
            " check brokerIP1, brokerIP2 and listenPort of the broker."
        )


def _check_row(topic: str, row: TopicRow) -> None:
    for kind, count in (("read", row.read_queues), ("write", row.write_queues)):
        if not 0 <= count <= QUEUES_MAX:
            _refuse(f"Topic {topic} has {count} {kind} queues; use 0 to {QUEUES_MAX}.")
    if not 0 <= row.perm <= PERM_MAX:
        _refuse(
            f"Topic {topic} has permission {row.perm}; use a sum of 4 (read), 2 (write)"
            " and 1 (inherit)."
        )


def _refuse_topics(broker_name: str, count: int) -> None:
    _refuse(
        f"Broker {broker_name} has {count} topics; this name server takes {TOPICS_MAX}"
        " of one broker. Delete unused ones, or spread them over more brokers."
    )


def _refuse(remark: str) -> None:
    raise Refused(Code.SYSTEM_ERROR, remark)
