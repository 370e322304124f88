"""What every consensus engine has to do: cases that the simulated one and a real etcd both pass.

A case gets an engine and keys of its own. It waits for what must come with a bound that no machine
reaches, and never for a time in which something must not come, except where that time is the
engine's own (a lease).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

import pytest

from cosmodrome.errors import ConsensusRefused, ConsensusUnavailable, LeaseGone
from cosmodrome.replication.consensus import (
    Changes,
    Compare,
    Consensus,
    Delete,
    Entry,
    Put,
    Reading,
)

BOUND_S = 60.0


class Engine(Protocol):
    prefix: str  # ends with a slash; nobody else uses it

    def client(self) -> Consensus: ...

    async def compact(self) -> None:
        """Forget all changes up to now."""

    async def empty(self) -> None:
        """Put an engine without data in its place."""


Case = Callable[[Engine], Awaitable[None]]
CASES: list[Case] = []


def case(test: Case) -> Case:
    CASES.append(test)
    return test


class Heard:
    """What a watch said, put together as a user would."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self.readings = 0
        self.revision = 0
        self.log: list[Entry | str] = []

    def take(self, news: Reading | Changes) -> None:
        if isinstance(news, Reading):
            self.readings += 1
            self.known = {entry.key: entry.value for entry in news.entries}
        else:
            assert news.revision > self.revision, "changes come in order, once"
            self.known.update({entry.key: entry.value for entry in news.entries})
            for key in news.deleted:
                self.known.pop(key, None)
            self.log += [*news.entries, *news.deleted]
        self.revision = news.revision

    async def until(
        self, watch: AsyncGenerator[Reading | Changes, None], reached: Callable[[Heard], bool]
    ) -> None:
        async with asyncio.timeout(BOUND_S):
            while not reached(self):
                self.take(await anext(watch))


async def put(client: Consensus, key: str, value: bytes, lease: int = 0) -> int:
    outcome = await client.commit([], [Put(key, value, lease)])
    assert outcome.succeeded
    return outcome.revision


async def until_gone(client: Consensus, key: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await client.get(key)).entries:
            await asyncio.sleep(0.1)


# --- the map --------------------------------------------------------------------------------------


@case
async def values_are_read_as_they_were_put(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    before = await client.get(f"{at}a")
    assert before.entries == () and before.entry(f"{at}a") is None
    first = await put(client, f"{at}a", bytes(range(256)))
    second = await put(client, f"{at}b/ü", b"")
    assert before.revision < first < second
    assert (await client.get(f"{at}a")).entries == (Entry(f"{at}a", bytes(range(256)), first),)
    found = await client.get(f"{at}b/ü")
    assert found.entry(f"{at}b/ü") == Entry(f"{at}b/ü", b"", second) and found.revision >= second
    await client.close()


@case
async def a_key_with_a_slash_at_its_end_is_all_below_it(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    for name in ("d", "d/b", "d/a", "d/a/x", "d0", "c/a"):
        await put(client, at + name, name.encode())
    assert [entry.value for entry in (await client.get(f"{at}d/")).entries] == [
        *(b"d/a", b"d/a/x", b"d/b")
    ]
    assert [entry.value for entry in (await client.get(f"{at}d")).entries] == [b"d"]
    assert len((await client.get(at)).entries) == 6
    await client.close()


@case
async def who_finds_a_key_absent_is_the_only_one(engine: Engine) -> None:
    one, other, key = engine.client(), engine.client(), f"{engine.prefix}leader"
    results = await asyncio.gather(
        *(
            client.commit([Compare(key)], [Put(key, b"%d" % n)])
            for n, client in enumerate((one, other))
        )
    )
    assert sorted(result.succeeded for result in results) == [False, True]
    (entry,) = (await other.get(key)).entries
    assert entry.value == b"%d" % [result.succeeded for result in results].index(True)
    assert {result.revision for result in results} == {entry.revision}
    await one.close()
    await other.close()


@case
async def all_changes_are_made_or_none(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    state = await put(client, f"{at}state", b"1")
    changes: list[Put | Delete] = [
        Put(f"{at}state", b"2"),
        Put(f"{at}leader", b"x"),
        Delete(f"{at}wish"),
    ]
    await put(client, f"{at}wish", b"w")
    for compares in (
        [Compare(f"{at}state", state - 1)],
        [Compare(f"{at}state", state), Compare(f"{at}wish")],
    ):
        assert not (await client.commit(compares, changes)).succeeded
        assert {e.key[len(at) :]: e.value for e in (await client.get(at)).entries} == {
            "state": b"1",
            "wish": b"w",
        }
    done = await client.commit([Compare(f"{at}state", state), Compare(f"{at}leader")], changes)
    found = await client.get(at)
    assert done.succeeded and done.revision == found.revision
    assert found.entries == (
        Entry(f"{at}leader", b"x", done.revision),
        Entry(f"{at}state", b"2", done.revision),
    )
    assert (await client.commit([Compare(f"{at}wish")], [])).succeeded
    await client.close()


@case
async def what_changes_nothing_has_no_revision(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    revision = await put(client, f"{at}a", b"")
    done = await client.commit([], [Delete(f"{at}b")])
    assert done.succeeded and done.revision == revision
    await client.close()


@case
async def a_key_is_changed_once_in_a_transaction(engine: Engine) -> None:
    client, key = engine.client(), f"{engine.prefix}a"
    second: Put | Delete
    for second in (Put(key, b"2"), Delete(key)):
        with pytest.raises(ConsensusRefused):
            await client.commit([], [Put(key, b"1"), second])
    assert (await client.get(key)).entries == ()
    await client.close()


@case
async def compares_serialize_writers(engine: Engine) -> None:
    key = f"{engine.prefix}count"

    async def add(client: Consensus, times: int) -> None:
        while times:
            entry = (await client.get(key)).entry(key)
            revision, value = (entry.revision, int(entry.value)) if entry else (0, 0)
            put = Put(key, b"%d" % (value + 1))
            times -= (await client.commit([Compare(key, revision)], [put])).succeeded
        await client.close()

    await asyncio.gather(*(add(engine.client(), 5) for _ in range(3)))
    client = engine.client()
    assert (await client.get(key)).entries[0].value == b"15"
    await client.close()


# --- leases ---------------------------------------------------------------------------------------


@case
async def a_lease_takes_its_keys_with_it(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    lease = await client.grant(1)
    assert lease.ttl_s >= 1 and lease.id > 0
    begun = await put(client, f"{at}members/1", b"here", lease.id)
    await put(client, f"{at}state", b"stays")
    assert (await client.get(f"{at}members/1")).entries[0].lease == lease.id
    heard = Heard()
    async with aclosing(client.watch(f"{at}members/", begun + 1)) as watch:
        await heard.until(watch, lambda heard: heard.log == [f"{at}members/1"])
    assert [entry.key for entry in (await client.get(at)).entries] == [f"{at}state"]
    with pytest.raises(LeaseGone):
        await client.keep(lease.id)
    with pytest.raises(LeaseGone):
        await client.commit([], [Put(f"{at}state", b"2"), Put(f"{at}leader", b"", lease.id)])
    assert (await client.get(at)).entries[0].value == b"stays"
    await client.revoke(lease.id)
    await client.close()


@case
async def a_lease_that_is_kept_lasts(engine: Engine) -> None:
    client, key, loop = engine.client(), f"{engine.prefix}leader", asyncio.get_running_loop()
    while True:
        lease = await client.grant(4)
        await put(client, key, b"", lease.id)
        begun = kept = loop.time()
        try:
            while loop.time() < begun + 1.5 * lease.ttl_s:
                await asyncio.sleep(0.2)
                before = loop.time()
                assert 0 < await client.keep(lease.id) <= lease.ttl_s
                kept = before
            assert (await client.get(key)).entries
            break
        except LeaseGone:  # a machine that stood still for so long proves nothing
            assert loop.time() - kept >= lease.ttl_s
    await until_gone(client, key)
    await client.close()


@case
async def a_lease_can_be_given_back(engine: Engine) -> None:
    client, other, key = engine.client(), engine.client(), f"{engine.prefix}leader"
    lease = await client.grant(3600)
    await put(client, key, b"", lease.id)
    await other.revoke(lease.id)
    assert (await client.get(key)).entries == ()
    await client.revoke(lease.id)
    with pytest.raises(LeaseGone):
        await client.keep(lease.id)
    await client.close()
    await other.close()


@case
async def a_put_without_the_lease_takes_the_key_out_of_it(engine: Engine) -> None:
    client, key = engine.client(), f"{engine.prefix}leader"
    lease = await client.grant(3600)
    await put(client, key, b"1", lease.id)
    revision = await put(client, key, b"2")
    await client.revoke(lease.id)
    assert (await client.get(key)).entries == (Entry(key, b"2", revision),)
    await client.close()


# --- watches --------------------------------------------------------------------------------------


@case
async def a_watch_tells_what_was_and_what_comes(engine: Engine) -> None:
    client, writer, at = engine.client(), engine.client(), engine.prefix
    lease = await client.grant(3600)
    first = await put(writer, f"{at}d/a", b"1")
    await put(writer, f"{at}e", b"not asked for")
    second = await put(writer, f"{at}d/b", b"2", lease.id)
    heard = Heard()
    async with aclosing(client.watch(f"{at}d/", first)) as watch:
        await heard.until(watch, lambda heard: len(heard.log) == 2)
        assert heard.log == [
            Entry(f"{at}d/a", b"1", first),
            Entry(f"{at}d/b", b"2", second, lease.id),
        ]
        done = await writer.commit(
            [], [Delete(f"{at}d/a"), Put(f"{at}d/c", b"3"), Put(f"{at}f", b"")]
        )
        await heard.until(watch, lambda heard: heard.revision == done.revision)
        assert heard.log[2:] == [Entry(f"{at}d/c", b"3", done.revision), f"{at}d/a"]
        await writer.revoke(lease.id)
        await heard.until(watch, lambda heard: f"{at}d/b" not in heard.known)
    assert heard.known == {f"{at}d/c": b"3"} and not heard.readings
    await client.close()
    await writer.close()


@case
async def a_watch_of_one_key_hears_nothing_else(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    begin = (await client.get(f"{at}a")).revision + 1
    heard = Heard()
    async with aclosing(client.watch(f"{at}a", begin)) as watch:
        await put(client, f"{at}ab", b"")
        await put(client, f"{at}a/", b"")
        last = await put(client, f"{at}a", b"1")
        await heard.until(watch, lambda heard: heard.revision >= last)
    assert heard.log == [Entry(f"{at}a", b"1", last)]
    await client.close()


@case
async def a_watch_that_was_compacted_reads_again(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    begin = await put(client, f"{at}a", b"1")
    await put(client, f"{at}b", b"2")
    await client.commit([], [Delete(f"{at}a")])
    await engine.compact()
    heard = Heard()
    heard.known = {f"{at}old": b""}
    async with aclosing(client.watch(at, begin)) as watch:
        await heard.until(watch, lambda heard: heard.readings == 1)
        assert heard.known == {f"{at}b": b"2"}
        await put(client, f"{at}c", b"3")
        await heard.until(watch, lambda heard: f"{at}c" in heard.known)
    assert heard.known == {f"{at}b": b"2", f"{at}c": b"3"} and heard.readings == 1
    await client.close()


@case
async def a_watch_notices_that_the_engine_was_emptied(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    lease = await client.grant(3600)
    for number in range(10):
        last = await put(client, f"{at}{number}", b"", lease.id)
    heard = Heard()
    heard.known = {f"{at}0": b""}
    async with aclosing(client.watch(at, last + 1)) as watch:
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.1)
        await engine.empty()
        async with asyncio.timeout(BOUND_S):
            heard.take(await waiting)
        assert heard.readings == 1 and heard.known == {} and heard.revision < last
        await put(client, f"{at}new", b"1")
        await heard.until(watch, lambda heard: f"{at}new" in heard.known)
    with pytest.raises(LeaseGone):
        await client.keep(lease.id)
    await client.close()


@case
async def a_slow_listener_misses_nothing(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    heard, value = Heard(), b"v" * 2000
    begin = (await client.get(at)).revision + 1
    async with aclosing(client.watch(at, begin)) as watch:
        waiting = asyncio.ensure_future(anext(watch))
        for number in range(100):
            last = await put(client, f"{at}{number % 7}", value + b"%d" % number)
        heard.take(await waiting)
        await heard.until(watch, lambda heard: heard.revision >= last)
    assert heard.known == {entry.key: entry.value for entry in (await client.get(at)).entries}
    await client.close()


# --- ends -----------------------------------------------------------------------------------------


@case
async def a_cancelled_call_spoils_nothing(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    for turns in range(12):
        call = asyncio.ensure_future(client.commit([], [Put(f"{at}a", b"%d" % turns)]))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        key = f"{at}b{turns}"
        await put(client, key, key.encode())
        assert (await client.get(key)).entries[0].value == key.encode()
    watch = client.watch(at, 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await watch.aclose()
    assert (await client.get(f"{at}b0")).entries
    await client.close()


@case
async def a_closed_client_says_so(engine: Engine) -> None:
    client, at = engine.client(), engine.prefix
    begin = (await client.get(at)).revision + 1
    waiting = asyncio.ensure_future(anext(client.watch(at, begin)))
    await asyncio.sleep(0.1)
    await client.close()
    await client.close()
    with pytest.raises(ConsensusUnavailable, match="closed"):
        await client.get(at)
    with pytest.raises(ConsensusUnavailable, match="closed"):
        await client.commit([], [Put(f"{at}a", b"")])
    with pytest.raises(ConsensusUnavailable, match="closed"):
        async with asyncio.timeout(BOUND_S):
            await waiting
