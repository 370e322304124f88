"""A master and its slaves, whole brokers: what clients see, also when one of them goes away."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_pair_kit import Member, Pair, pair, send, until

from cosmodrome.broker.replicate.ask_master import AskMaster
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.diagnosis.explain import explain
from cosmodrome.client.operate.diagnosis.facts import Limits
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.env.real import WallClock
from cosmodrome.errors import Code, CosmodromeError, Refused, Unreachable
from cosmodrome.layout import PULL_SUBSCRIPTION, PULL_SUSPEND
from cosmodrome.replication.values import FollowerState
from cosmodrome.transport.ports import HA_OFFSET, free_base_port
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.record import iter_records


def log_of(member: Member) -> bytes:
    store = member.store
    data = b"".join(path.read_bytes() for path in sorted((member.folder / "commitlog").iterdir()))
    return data[: store.log_end - store.log_start]


def pull(offset: int, *, wait_ms: int = 0, group: str = "g") -> commands.PullMessage:
    return commands.PullMessage(
        consumer_group=group,
        topic="T",
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=PULL_SUBSCRIPTION | (PULL_SUSPEND if wait_ms else 0),
        commit_offset=0,
        suspend_timeout_millis=wait_ms,
        subscription="*",
        sub_version=0,
    )


def offset_at(member: Member, group: str = "g") -> int:
    return member.broker._rooms.members.offsets.query(group, "T", 0)


# --- the log --------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [True, False])
async def test_what_a_sync_master_answered_is_on_both(tmp_path: Path, lane: bool) -> None:
    async with pair(tmp_path, broker_role="SYNC_MASTER", fast_lane_enable=lane) as it:
        for number in range(50):
            reply = await it.master.send(b"%d" % number + b"x" * 2000)
            assert reply.code == Code.SUCCESS
            assert it.slave.store.log_end >= it.master.store.log_end
        assert it.master.store.log_end > 1 << 16  # over the end of a file
        await it.slave.has(50)
        assert log_of(it.master) == log_of(it.slave)


async def test_a_new_slave_copies_everything(tmp_path: Path) -> None:
    async with pair(tmp_path, slaves=0) as it:
        for number in range(80):
            await it.master.send(b"%d" % number + b"x" * 2000)
        slave = Member(tmp_path / "new", it.namesrv, 1, {})
        await slave.start()
        try:
            await until(lambda: slave.in_step and slave.end() == 80)
            assert log_of(it.master) == log_of(slave)
        finally:
            await slave.stop()


async def test_any_slave_is_enough(tmp_path: Path) -> None:
    async with pair(tmp_path, slaves=2, broker_role="SYNC_MASTER") as it:
        assert {link.node for link in it.master.source.links} == {"pair:1", "pair:2"}
        await it.slave.stop()
        assert (await it.master.send()).code == Code.SUCCESS
        await until(lambda: len(it.master.source.links) == 1)
        await it.slaves[1].stop()
        await until(lambda: not it.master.source.links)
        assert (await it.master.send()).code == Code.SLAVE_NOT_AVAILABLE
        await it.slave.start()
        await until(lambda: it.slave.in_step and it.slave.end() == 2)
        assert (await it.master.send()).code == Code.SUCCESS


@pytest.mark.parametrize("lane", [True, False])
async def test_a_slave_that_does_not_report_is_answered_12(tmp_path: Path, lane: bool) -> None:
    settings = {"broker_role": "SYNC_MASTER", "slave_timeout": 200, "fast_lane_enable": lane}
    async with pair(tmp_path, slaves=0, **settings) as it:
        assert (await it.master.send()).code == Code.SLAVE_NOT_AVAILABLE
        end = it.master.store.log_end
        _, writer = await asyncio.open_connection("127.0.0.1", it.master.broker.ha_port)
        writer.write(struct.pack(">q", end))
        await until(lambda: len(it.master.source.links) == 1)
        assert (await it.master.send()).code == Code.FLUSH_SLAVE_TIMEOUT
        assert (await it.master.send(WAIT="false")).code == Code.SUCCESS
        writer.write(struct.pack(">q", it.master.store.log_end + 1))  # more than there is
        await until(lambda: not it.master.source.links)
        assert (await it.master.send()).code == Code.SLAVE_NOT_AVAILABLE
        writer.close()


async def test_a_slave_of_a_slave(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        last = Member(tmp_path / "last", "", 2, {})
        await last.start(ha_master_address=f"127.0.0.1:{it.slave.broker.ha_port}")
        try:
            await it.master.send()
            await until(lambda: last.in_step and last.end() == 1)
            assert log_of(last) == log_of(it.master)
        finally:
            await last.stop()


async def test_a_slave_does_not_follow_itself(tmp_path: Path) -> None:
    port = free_base_port("127.0.0.1")
    slave = Member(tmp_path, "", 1, {})
    await slave.start(listen_port=port, ha_master_address=f"127.0.0.1:{port + HA_OFFSET}")
    try:
        await until(lambda: slave.follower.state is FollowerState.REFUSED)
        assert "follows itself" in slave.follower.why
    finally:
        await slave.stop()


# --- the tables -----------------------------------------------------------------------------


async def test_tables_follow(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.master.send()
        await it.master.call(pull(0))  # makes the group
        await it.master.call(
            commands.UpdateConsumerOffset(
                consumer_group="g", topic="T", queue_id=0, commit_offset=1
            )
        )
        members = it.slave.broker._rooms.members
        await until(lambda: offset_at(it.slave) == 1, seconds=60)
        topic = members.topics.get("T")
        assert topic is not None and topic.read_queue_nums == 2
        assert "g" in members.groups.table
        assert len(list(iter_records((await it.slave.call(pull(0))).body))) == 1


# --- what a slave does not do ---------------------------------------------------------------


async def refused(member: Member, command: Any) -> int:
    try:
        reply = await member.call(command)
    except Refused as refusal:
        return refusal.code
    return int(reply.code)


async def test_what_a_slave_refuses(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.master.send()
        await it.slave.has(1)
        lock = bodies.LockBatchRequestBody(
            client_id="c",
            consumer_group="g",
            mq_set=[bodies.MessageQueue(topic="T", broker_name="pair", queue_id=0)],
        )
        batch = send(b"")
        batch.batch = True
        back = commands.ConsumerSendMsgBack(offset=0, group="g", delay_level=0)
        end = commands.EndTransaction(
            producer_group="p",
            tran_state_table_offset=0,
            commit_log_offset=0,
            commit_or_rollback=8,
            from_transaction_check=False,
            msg_id="m",
        )
        for command, code in (
            (send(), Code.SERVICE_NOT_AVAILABLE),
            (batch, Code.SERVICE_NOT_AVAILABLE),
            (back, Code.SYSTEM_ERROR),
            (end, Code.SLAVE_NOT_AVAILABLE),
            (commands.LockBatchMq(body=bodies.encode(lock)), Code.SYSTEM_ERROR),
        ):
            assert await refused(it.slave, command) == code, command
        assert await refused(it.slave, send(topic="NEW")) == Code.SERVICE_NOT_AVAILABLE
        assert it.slave.broker._rooms.members.topics.get("NEW") is None


# --- reading at a slave ---------------------------------------------------------------------


async def test_arrivals_wake_pulls_at_a_slave(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.master.send()
        await it.slave.has(1)
        held = asyncio.create_task(it.slave.call(pull(1, wait_ms=30_000), 40_000))
        beyond = asyncio.create_task(it.slave.call(pull(2, wait_ms=30_000), 40_000))
        await until(lambda: it.slave.broker._rooms.receive.waiters.held == 2)
        await it.master.send(b"second")
        assert [one.body for one in iter_records((await held).body)] == [b"second"]
        assert not beyond.done()
        await it.master.send(b"third")
        assert [one.body for one in iter_records((await beyond).body)] == [b"third"]


async def test_who_is_far_behind_is_sent_to_the_slave(tmp_path: Path) -> None:
    async with pair(tmp_path, slave_read_enable=True) as it:
        for _ in range(3):
            await it.master.send()
        await it.slave.has(3)
        for member in (it.master, it.slave):
            assert (await member.call(pull(0))).suggest_which_broker_id == 0
        change = commands.UpdateBrokerConfig(body=b"accessMessageInMemoryMaxRatio=0")
        await it.master.call(change)
        assert (await it.master.call(pull(0))).suggest_which_broker_id == 1
        got: list[bytes] = []
        async with consuming(it, got):
            await until(lambda: len(got) == 3)
            await it.master.send(b"more")
            await until(lambda: len(got) == 4)
        assert it.slave.broker._rooms.receive.consume.messages_total > 0


# --- a master that goes away ----------------------------------------------------------------


class consuming:
    """A consumer of group g that notes what it gets."""

    def __init__(self, it: Pair, got: list[bytes], **options: Any) -> None:
        self._options = {"consume_from": "first", "commit_every_ms": 200, **options}
        self._it = it
        self._got = got

    async def __aenter__(self) -> Consumer:
        self.consumer = Consumer(self._it.namesrv, group="g", **self._options)
        await self.consumer.start()
        await self.consumer.subscribe("T")
        self._running = asyncio.create_task(self.consumer.run(self._handle))
        return self.consumer

    def _handle(self, message: ReceivedMessage) -> None:
        self._got.append(message.body)

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.wait((self._running,))
        await self.consumer.stop()


async def test_a_consumer_goes_on_at_the_slave_and_its_offsets_come_back(tmp_path: Path) -> None:
    async with pair(tmp_path, broker_role="SYNC_MASTER") as it:
        for number in range(10):
            assert (await it.master.send(b"%d" % number)).code == Code.SUCCESS
        await it.slave.has(10)
        got: list[bytes] = []
        async with consuming(it, got):
            await until(lambda: len(got) == 10)
            await until(lambda: offset_at(it.slave) == 10)
            await it.master.stop()
            # What was not read before is read at the slave, and what is committed stays there.
            async with Admin(it.namesrv, timeout_ms=10_000) as admin:
                found = await explain(
                    admin.fleet, "g", None, clock=WallClock(), limits=Limits(sample_ms=100)
                )
            away = next(one for one in found.findings if one.code == "MASTER_AWAY")
            assert "SYNC_MASTER or ASYNC_MASTER" in away.remedy
            await it.slave.call(
                commands.UpdateConsumerOffset(
                    consumer_group="h", topic="T", queue_id=0, commit_offset=7
                )
            )
            await it.master.start()
            assert offset_at(it.master, "h") == -1
            await until(lambda: offset_at(it.master, "h") == 7)
            await until(lambda: it.slave.in_step)
            await it.master.send(b"again")
            await until(lambda: got[-1] == b"again")
            await until(lambda: offset_at(it.master) == 11)
        assert got == [*(b"%d" % number for number in range(10)), b"again"]


async def test_offsets_come_back_without_a_name_server(tmp_path: Path) -> None:
    """The master says on the link where clients reach it."""
    master = Member(tmp_path / "0", "", 0, {})
    slave = Member(tmp_path / "1", "", 1, {})
    try:
        await master.start()
        await slave.start(ha_master_address=f"127.0.0.1:{master.broker.ha_port}")
        await until(lambda: slave.in_step)
        await master.send()
        await slave.has(1)
        commit = commands.UpdateConsumerOffset(
            consumer_group="h", topic="T", queue_id=0, commit_offset=1
        )
        await slave.call(commit)
        await until(lambda: offset_at(master, "h") == 1)
    finally:
        await slave.stop()
        await master.stop()


async def test_a_consumer_that_lags_reads_the_rest_at_the_slave(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        for number in range(10):
            await it.master.send(b"%d" % number)
        await it.slave.has(10)
        await it.master.stop()
        got: list[bytes] = []
        async with consuming(it, got):
            await until(lambda: len(got) == 10)
            await until(lambda: offset_at(it.slave) == 10)
            assert it.slave.follower.state is not FollowerState.IN_STEP
            await it.master.start()
            await until(lambda: offset_at(it.master) == 10)
            await it.master.send(b"more")
            await until(lambda: len(got) == 11)


async def test_ordered_consumers_wait_for_the_master(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path) as it:
        await it.master.send()
        await it.slave.has(1)
        await it.master.stop()
        got: list[bytes] = []
        async with consuming(it, got, orderly=True):
            await until(lambda: "ordered consumers wait for it" in caplog.text)
            assert got == []
            await it.master.start()
            await until(lambda: got == [b"x"], seconds=60)


# --- promotion by hand ----------------------------------------------------------------------


async def test_a_slave_is_made_master(tmp_path: Path) -> None:
    async with pair(tmp_path, slaves=2, broker_role="SYNC_MASTER") as it:
        for number in range(10):
            await it.master.send(b"%d" % number)
        await until(lambda: all(slave.end() == 10 for slave in it.slaves))
        await it.master.stop()
        await it.slave.stop()
        await it.slave.start("ASYNC_MASTER")
        reply = await it.slave.send(b"new")
        assert (reply.code, reply.queue_offset) == (Code.SUCCESS, 10)
        # The other slave finds the new master by itself.
        await until(lambda: it.slaves[1].in_step and it.slaves[1].end() == 11)
        # The old one is behind, so it can follow.
        await it.master.start("SLAVE")
        await until(lambda: it.master.in_step and it.master.end() == 11)
        assert log_of(it.master) == log_of(it.slave) == log_of(it.slaves[1])


async def test_an_old_master_that_is_ahead_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path) as it:
        await it.master.send(b"both")
        await it.slave.has(1)
        await it.slave.stop()
        await it.master.send(b"only here")
        await it.master.stop()
        await it.slave.start("ASYNC_MASTER")
        await it.master.start("SLAVE")
        await until(lambda: it.master.follower.state is FollowerState.REFUSED)
        assert "--cut-at" in it.master.follower.why
        assert it.master.end() == 2  # nothing is discarded
        refusals: Callable[[], int] = lambda: it.slave.source.refused_links  # noqa: E731
        assert refusals() == 1


async def test_a_slave_without_master_says_so(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.master.stop()
        await until(lambda: not it.slave.in_step)
        facts = it.slave.follower
        assert facts.state in (FollowerState.NO_MASTER, FollowerState.CONNECTING) and facts.why
        with pytest.raises(CosmodromeError):
            await it.slave.call(commands.GetRouteinfoByTopic(topic="T"))


async def test_what_the_follower_asks_its_master(tmp_path: Path) -> None:
    async with pair(tmp_path, slaves=0) as it:
        ask = AskMaster()
        assert await ask.speaks_ours() is None
        with pytest.raises(Unreachable, match="namesrvAddr"):
            await ask.bounds()
        ask.address = it.master.broker.address
        assert await ask.speaks_ours() is True
        assert await ask.first_record() == b""
        await it.master.send(b"first")
        assert await ask.bounds() == (0, it.master.store.log_end)
        assert await ask.first_record() == log_of(it.master)
