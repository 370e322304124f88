"""A slave becomes the master in the middle of a copy: what its log has is delivered."""

from __future__ import annotations

from pathlib import Path

from tests.unit.broker.broker_pair_kit import Member, pair, until
from tests.unit.store.store_kit import bodies

from cosmodrome.replication.values import FollowerState
from cosmodrome.wire import commands
from cosmodrome.wire.bodies import TopicConfig
from cosmodrome.wire.names import SCHEDULE_TOPIC


def commit(offset: int) -> commands.UpdateConsumerOffset:
    return commands.UpdateConsumerOffset(
        consumer_group="g", topic="T", queue_id=0, commit_offset=offset
    )


def offset_at(member: Member) -> int:
    return member.broker._rooms.members.offsets.query("g", "T", 0)


def log_does_not_come(master: Member) -> None:
    """As when the network is slow and there is much to copy: rows come, the log does not."""
    master.store.log_bytes = lambda offset, size_max: None


async def test_a_slave_promoted_during_a_copy_delivers_what_its_log_has(tmp_path: Path) -> None:
    async with pair(tmp_path, message_delay_level="2s") as it:
        master, slave = it.master, it.slave
        await master.send(b"first")
        await master.send(b"delayed", DELAY="1")
        await until(lambda: slave.end() >= 1 and slave.end(SCHEDULE_TOPIC) == 1)
        await slave.stop()
        await master.has(2)  # delivered, which the slave does not know
        for _ in range(20):
            await master.send(b"x" * 3000)
        await master.call(commit(22))

        log_does_not_come(master)
        await slave.start()
        await until(lambda: slave.follower.state is FollowerState.COPYING)
        master.broker._rooms.members.topics.put(TopicConfig(topic_name="Last"))
        await until(lambda: slave.broker._rooms.members.topics.get("Last") is not None)
        await master.stop()
        await slave.stop()

        await slave.start("ASYNC_MASTER")
        await until(lambda: slave.end() >= 2)
        assert bodies(slave.store)[:2] == [b"first", b"delayed"]
        assert offset_at(slave) <= 2
