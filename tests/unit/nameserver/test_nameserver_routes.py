from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from cosmodrome.errors import Refused
from cosmodrome.layout import TOPIC_UNIT, TOPIC_UNIT_SUBSCRIPTION
from cosmodrome.nameserver import routes as module
from cosmodrome.nameserver.routes import Identity, Registration, Routes, TopicRow, Version

ROW = TopicRow(4, 4, 6)


class Peer:
    """Stands for a connection: only its identity matters."""

    def __init__(self, name: str = "") -> None:
        self.name = name


class Time:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def routes(time: Time) -> Routes:
    return Routes(time)


def news(
    name: str = "a",
    broker_id: int = 0,
    address: str = "10.0.0.1:10911",
    cluster: str = "C",
    version: int = 1,
    topics: dict[str, TopicRow] | None = None,
    **more: Any,
) -> Registration:
    return Registration(
        identity=Identity(cluster, name, broker_id, address),
        version=Version(7, version),
        topics={"T": ROW} if topics is None else topics,
        **more,
    )


def add(routes: Routes, peer: Any = None, **words: Any) -> tuple[str, str] | None:
    return routes.register(news(**words), peer or cast(Any, Peer()))


def snapshot(routes: Routes) -> Any:
    """Everything the tables hold, comparable."""
    live = {
        address: (live.identity, id(live.connection), live.heard_ms, live.version, live.ha_address,
                  live.filter_servers, set(live.applied))
        for address, live in routes._live.items()
    }  # fmt: skip
    brokers = {b.name: (b.cluster, dict(b.addresses)) for b in routes.brokers()}
    return copy.deepcopy((live, brokers, routes._topics, routes._row_count))


def check_invariants(routes: Routes) -> None:
    under = {
        address: (broker.cluster, broker.name, broker_id)
        for broker in routes.brokers()
        for broker_id, address in broker.addresses.items()
    }
    held = {
        live.identity.address: (
            live.identity.cluster,
            live.identity.broker_name,
            live.identity.broker_id,
        )
        for live in routes._live.values()
    }
    assert under == held
    assert all(broker.addresses for broker in routes.brokers())
    names = {broker.name for broker in routes.brokers()}
    assert all(rows and set(rows) <= names for rows in routes._topics.values())
    assert routes._row_count == sum(len(rows) for rows in routes._topics.values())


def rows_of(routes: Routes, topic: str) -> dict[str, TopicRow]:
    route = routes.route(topic)
    return dict(route.rows) if route else {}


# --- registering


def test_a_registered_topic_has_a_route(routes: Routes) -> None:
    add(routes, filter_servers=("10.0.0.1:40000",))
    route = routes.route("T")
    assert route is not None
    assert [(b.cluster, b.name, b.addresses) for b in route.brokers] == [
        ("C", "a", {0: "10.0.0.1:10911"})
    ]
    assert list(route.rows) == [("a", ROW)]
    assert route.filter_servers == {"10.0.0.1:10911": ("10.0.0.1:40000",)}
    assert routes.route("Other") is None


def test_a_slave_is_told_its_master_and_brings_no_rows(routes: Routes) -> None:
    assert add(routes, broker_id=1, address="s:1", ha_address="s:2") is None
    assert routes.topics() == []
    assert add(routes, address="m:1", ha_address="m:2") is None
    assert add(routes, broker_id=1, address="s:1", ha_address="s:2") == ("m:1", "m:2")
    assert routes.brokers()[0].addresses == {0: "m:1", 1: "s:1"}


def test_losing_the_master_keeps_the_rows_of_a_slave(routes: Routes) -> None:
    master = Peer()
    add(routes, master, address="m:1")
    add(routes, broker_id=1, address="s:1")
    routes.connection_closed(master)  # type: ignore[arg-type]
    assert rows_of(routes, "T") == {"a": ROW}
    assert routes.brokers()[0].addresses == {1: "s:1"}
    assert add(routes, broker_id=1, address="s:1") is None


def test_an_incremental_registration_first_does_not_hide_the_full_one(routes: Routes) -> None:
    add(routes, topics={"New": ROW}, version=5)
    add(routes, topics={"New": ROW, "Old": ROW}, version=5)
    assert sorted(routes.topics()) == ["New", "Old"]


def test_missing_in_the_body_does_not_mean_deleted(routes: Routes) -> None:
    add(routes, topics={"A": ROW, "B": ROW})
    add(routes, topics={"B": TopicRow(8, 8, 6)}, version=2)
    assert rows_of(routes, "A") == {"a": ROW}
    assert rows_of(routes, "B") == {"a": TopicRow(8, 8, 6)}


def test_a_slave_that_becomes_master_leaves_its_old_id(routes: Routes) -> None:
    add(routes, broker_id=1, address="s:1")
    add(routes, broker_id=0, address="s:1")
    assert routes.brokers()[0].addresses == {0: "s:1"}
    assert rows_of(routes, "T") == {"a": ROW}
    check_invariants(routes)


def test_the_last_writer_takes_an_id(routes: Routes) -> None:
    first, second = Peer(), Peer()
    add(routes, first, address="x:1")
    add(routes, second, address="y:1")
    assert routes.brokers()[0].addresses == {0: "y:1"}
    routes.connection_closed(first)  # type: ignore[arg-type]
    assert routes.brokers()[0].addresses == {0: "y:1"}
    check_invariants(routes)


def test_an_address_that_changes_its_name_leaves_nothing_behind(routes: Routes) -> None:
    add(routes, name="a")
    add(routes, name="b", topics={"U": ROW})
    assert [broker.name for broker in routes.brokers()] == ["b"]
    assert routes.topics() == ["U"]
    check_invariants(routes)


def test_a_broker_alone_may_move_to_another_cluster(routes: Routes) -> None:
    add(routes, cluster="C")
    add(routes, cluster="D")
    assert routes.clusters() == {"D": ["a"]}
    check_invariants(routes)


# --- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"cluster": ""}, "cluster name"),
        ({"cluster": "../etc"}, "cluster name"),
        ({"name": "a b"}, "broker name"),
        ({"name": "a" * 256}, "broker name"),
        ({"broker_id": -1}, "broker id"),
        ({"broker_id": 2**63}, "broker id"),
        ({"address": "10.0.0.1"}, "broker address"),
        ({"address": ":10911"}, "broker address"),
        ({"address": "h:0"}, "broker address"),
        ({"address": "h:65536"}, "broker address"),
        ({"address": "h:1;i:2"}, "broker address"),
        ({"address": "h:1\n"}, "broker address"),
        ({"address": "h" * 260 + ":1"}, "broker address"),
        ({"ha_address": "nowhere"}, "replication address"),
        ({"filter_servers": ("x",)}, "filter server"),
        ({"filter_servers": ("x:1",) * 300}, "filter servers"),
        ({"topics": {"Good": ROW, "../../x": ROW}}, "topic name"),
        ({"topics": {"Good": ROW, "": ROW}}, "topic name"),
        ({"topics": {"Good": ROW, "t" * 128: ROW}}, "topic name"),
        ({"topics": {"Good": ROW, "Bad": TopicRow(-1, 4, 6)}}, "read queues"),
        ({"topics": {"Good": ROW, "Bad": TopicRow(4, 70_000, 6)}}, "write queues"),
        ({"topics": {"Good": ROW, "Bad": TopicRow(4, 4, 16)}}, "permission"),
        ({"topics": {"Good": ROW, "Bad": TopicRow(4, 4, -1)}}, "permission"),
        ({"name": "shared", "cluster": "Other", "address": "z:9"}, "belongs to cluster"),
    ],
)
def test_a_bad_registration_changes_nothing(
    routes: Routes, words: dict[str, Any], said: str
) -> None:
    add(routes, filter_servers=("f:1",), topics={"Good": TopicRow(1, 1, 6)})
    add(routes, name="shared", address="q:1")
    before = snapshot(routes)
    with pytest.raises(Refused, match=said):
        add(routes, **{"version": 2, **words})
    assert snapshot(routes) == before


@pytest.mark.parametrize(
    "address", ["h:1", "a-b.c_d:65535", "[fe80::1%eth0]:10911", "[::1]:1", "127.0.0.1:10911"]
)
def test_good_addresses(routes: Routes, address: str) -> None:
    add(routes, address=address)
    assert routes.any_address() == address


def test_a_broker_named_like_its_host_may_bring_its_own_topics(routes: Routes) -> None:
    own = {"host.example.org": ROW, "east.1": ROW, "east.1_REPLY_TOPIC": ROW}
    add(routes, name="host.example.org", cluster="east.1", topics=own)
    assert set(routes.topics()) == set(own)


def test_tables_are_bounded(routes: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_MAX", 3)
    monkeypatch.setattr(module, "ADDRESSES_MAX", 2)
    add(routes, topics={"A": ROW, "B": ROW, "C": ROW})
    add(routes, topics={"A": ROW, "B": ROW, "C": ROW}, version=2)  # nothing new: fits
    before = snapshot(routes)
    with pytest.raises(Refused, match="topic rows"):
        add(routes, topics={"D": ROW}, version=3)
    assert snapshot(routes) == before
    add(routes, name="b", address="y:1", topics={})
    with pytest.raises(Refused, match="takes no more"):
        add(routes, name="c", address="z:1", topics={})
    check_invariants(routes)


# --- liveness


def test_silence_expires(routes: Routes, time: Time) -> None:
    peer = Peer()
    add(routes, peer)
    time.now_ms += 120_000
    assert routes.expire(120_000) == []
    time.now_ms += 1
    assert routes.expire(120_000) == [peer]
    assert routes.brokers() == [] and routes.topics() == []


def test_every_registration_and_every_equal_version_is_a_sign_of_life(
    routes: Routes, time: Time
) -> None:
    add(routes)
    who = news().identity
    for sign in (
        lambda: add(routes),
        lambda: routes.confirm(who, Version(7, 1)),
        lambda: add(routes, topics={}),
    ):
        time.now_ms += 100_000
        sign()
        assert routes.expire(120_000) == []
    time.now_ms += 100_000
    routes.confirm(who, Version(7, 2))  # different: not a sign of life
    time.now_ms += 100_000
    assert len(routes.expire(120_000)) == 1


def test_confirm(routes: Routes) -> None:
    who = news().identity
    assert routes.confirm(who, Version(7, 1)) == (True, None)
    add(routes)
    assert routes.confirm(who, Version(7, 1)) == (False, Version(7, 1))
    assert routes.confirm(who, Version(8, 1)) == (True, Version(7, 1))
    assert routes.confirm(who, None) == (True, Version(7, 1))
    assert routes.confirm(Identity("C", "b", 0, who.address), Version(7, 1)) == (True, None)


def test_a_closed_connection_takes_its_brokers_along_at_once(routes: Routes) -> None:
    peer, other = Peer(), Peer()
    add(routes, peer, name="a", address="x:1")
    add(routes, peer, name="b", address="y:1")
    add(routes, other, name="c", address="z:1")
    routes.connection_closed(peer)  # type: ignore[arg-type]
    assert [broker.name for broker in routes.brokers()] == ["c"]
    check_invariants(routes)


def test_registering_over_a_new_connection_moves_liveness(routes: Routes) -> None:
    old, new = Peer(), Peer()
    add(routes, old)
    add(routes, new)
    routes.connection_closed(old)  # type: ignore[arg-type]
    assert routes.topics() == ["T"]
    routes.connection_closed(new)  # type: ignore[arg-type]
    assert routes.topics() == []


def test_unregister(routes: Routes) -> None:
    add(routes)
    before = snapshot(routes)
    for stranger in (
        Identity("C", "b", 0, "10.0.0.1:10911"),
        Identity("C", "a", 1, "10.0.0.1:10911"),
        Identity("C", "a", 0, "10.0.0.2:10911"),
    ):
        assert not routes.unregister(stranger)
        assert snapshot(routes) == before
    assert routes.unregister(news().identity)
    assert routes.brokers() == [] and routes.topics() == []


# --- operators


def test_write_permission_is_wiped_and_set(routes: Routes) -> None:
    topics = {"A": TopicRow(1, 1, 7), "B": TopicRow(1, 1, 6), "D": TopicRow(1, 1, 2)}
    add(routes, topics=topics)
    add(routes, name="b", address="y:1", topics={"A": ROW})
    assert routes.wipe_write_perm("a") == 3
    assert [rows_of(routes, t)["a"].perm for t in "ABD"] == [5, 4, 0]
    assert rows_of(routes, "A")["b"] == ROW
    add(routes, topics=topics)  # unchanged: the operator's word stands
    assert [rows_of(routes, t)["a"].perm for t in "ABD"] == [5, 4, 0]
    assert routes.add_write_perm("a") == 3
    assert [rows_of(routes, t)["a"].perm for t in "ABD"] == [6, 6, 6]
    add(routes, topics=topics, version=2)
    assert [rows_of(routes, t)["a"].perm for t in "ABD"] == [7, 6, 2]
    assert routes.wipe_write_perm("nobody") == 0


def test_a_deleted_topic_stays_away_until_the_broker_changes(routes: Routes) -> None:
    add(routes)
    add(routes, name="b", address="y:1", cluster="D")
    routes.delete_topic("T", "C")
    assert rows_of(routes, "T") == {"b": ROW}
    routes.delete_topic("T", "Nowhere")
    routes.delete_topic("T")
    assert routes.topics() == []
    add(routes)
    assert routes.topics() == []
    add(routes, version=2)
    assert routes.topics() == ["T"]
    routes.delete_topic("Unknown")


def test_topic_lists(routes: Routes) -> None:
    flags = {"U": TOPIC_UNIT, "S": TOPIC_UNIT_SUBSCRIPTION, "Both": 3, "None": 0}
    add(routes, topics={topic: TopicRow(1, 1, 6, flag) for topic, flag in flags.items()})
    add(routes, name="b", address="y:1", cluster="D", topics={"X": ROW})
    assert set(routes.topics()) == {*flags, "X"}
    assert routes.topics_of_cluster("D") == ["X"]
    assert set(routes.topics_of_cluster("C")) == set(flags)
    assert routes.topics_of_cluster("E") == []
    assert routes.topics_flagged(TOPIC_UNIT) == ["U", "Both"]
    assert routes.topics_flagged(TOPIC_UNIT_SUBSCRIPTION) == ["S", "Both"]
    assert routes.topics_flagged(TOPIC_UNIT_SUBSCRIPTION, TOPIC_UNIT) == ["S"]
    assert routes.clusters() == {"C": ["a"], "D": ["b"]}


# --- against a model


class Model:
    """The rules once more, told as plain facts about (address -> who) and (topic, name -> row)."""

    def __init__(self) -> None:
        self.who: dict[str, tuple[str, int]] = {}
        self.peer: dict[str, Peer] = {}
        self.version: dict[str, int] = {}
        self.seen: dict[str, set[str]] = {}
        self.rows: dict[tuple[str, str], TopicRow] = {}

    def forget(self, address: str, *, keep_rows: bool = False) -> None:
        name = self.who.pop(address)[0]
        for table in (self.peer, self.version, self.seen):
            table.pop(address)
        if not keep_rows and all(other != name for other, _ in self.who.values()):
            self.rows = {key: row for key, row in self.rows.items() if key[1] != name}

    def register(self, it: Registration, peer: Peer) -> None:
        name, broker_id, address = (
            it.identity.broker_name,
            it.identity.broker_id,
            it.identity.address,
        )
        if address in self.who and self.who[address] != (name, broker_id):
            self.forget(address, keep_rows=self.who[address][0] == name)
        for other, who in list(self.who.items()):
            if who == (name, broker_id) and other != address:
                self.forget(other, keep_rows=True)
        changed = self.version.get(address) != it.version.counter
        seen = self.seen.setdefault(address, set())
        self.who[address], self.peer[address] = (name, broker_id), peer
        self.version[address] = it.version.counter
        if broker_id == 0:
            for topic, row in it.topics.items():
                if changed or topic not in seen:
                    self.rows[topic, name] = row
            seen.update(it.topics)


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_agree_with_the_model(seed: int, routes: Routes) -> None:
    chance = random.Random(seed)
    model = Model()
    peers = [Peer(str(number)) for number in range(4)]

    def register() -> None:
        it = news(
            name=chance.choice("ab"),
            broker_id=chance.choice((0, 0, 1)),
            address=chance.choice(("x:1", "y:1", "z:1")),
            version=chance.randrange(3),
            topics={
                topic: TopicRow(chance.randrange(4), 4, 6)
                for topic in chance.sample(("A", "B", "C"), chance.randrange(4))
            },
        )
        peer = chance.choice(peers)
        routes.register(it, peer)  # type: ignore[arg-type]
        model.register(it, peer)

    def close() -> None:
        peer = chance.choice(peers)
        routes.connection_closed(peer)  # type: ignore[arg-type]
        for address in [a for a, p in model.peer.items() if p is peer]:
            model.forget(address)

    def unregister() -> None:
        if model.who:
            address, (name, broker_id) = chance.choice(list(model.who.items()))
            assert routes.unregister(Identity("C", name, broker_id, address))
            model.forget(address)

    def delete() -> None:
        topic = chance.choice("ABC")
        routes.delete_topic(topic)
        model.rows = {key: row for key, row in model.rows.items() if key[0] != topic}

    steps: list[Callable[[], None]] = [register, register, register, close, unregister, delete]
    for _ in range(120):
        chance.choice(steps)()
        check_invariants(routes)
        actual = {
            (topic, name): row
            for topic in routes.topics()
            for name, row in rows_of(routes, topic).items()
        }
        assert actual == model.rows
        assert {a: live.connection for a, live in routes._live.items()} == model.peer


# --- large registrations ----------------------------------------------------------------------


def many(count: int, **words: Any) -> Registration:
    return news(**words, topics={f"T{number}": TopicRow(1, 1, 6) for number in range(count)})


def test_a_large_registration_is_taken_over_in_steps(routes: Routes) -> None:
    peer = cast(Any, Peer())
    steps = 0
    for _ in routes.registering(many(2 * module.TOPICS_PER_STEP + 1), peer):
        steps += 1
        assert routes.topic_count <= steps * module.TOPICS_PER_STEP
    assert steps == 4  # two while it is checked, two while it is taken over
    assert routes.topic_count == 2 * module.TOPICS_PER_STEP + 1


def test_a_broker_that_goes_while_it_registers_leaves_nothing(routes: Routes) -> None:
    peer = cast(Any, Peer())
    steps = routes.registering(many(2 * module.TOPICS_PER_STEP), peer)
    for _ in range(3):
        next(steps)
    assert routes.topic_count == module.TOPICS_PER_STEP
    routes.connection_closed(peer)
    assert list(steps) == []
    assert routes.topic_count == 0 and routes.brokers() == []


def test_one_broker_has_a_bounded_number_of_topics(
    routes: Routes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOPICS_MAX", 5)
    peer = cast(Any, Peer())
    with pytest.raises(Refused, match="has 6 topics; this name server takes 5"):
        routes.register(many(6), peer)
    assert routes.brokers() == []
    routes.register(many(3), peer)
    routes.register(many(5), peer)
    parts = news(topics={f"U{number}": TopicRow(1, 1, 6) for number in range(2)})
    with pytest.raises(Refused, match="has 7 topics"):
        routes.register(parts, peer)
    assert routes.topic_count == 5
    routes.delete_topic("T0")
    routes.delete_topic("T1")
    routes.register(parts, peer)
    routes.connection_closed(peer)
    assert routes.topic_count == 0
