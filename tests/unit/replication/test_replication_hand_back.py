"""Offsets that were committed at a slave while its master was away reach the master."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.replication.tables_kit import handlers, pair, served, side, until

from cosmodrome.broker.replicate import hand_back
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.commands.fields import OffsetReply
from cosmodrome.wire.commands.offset import QueryConsumerOffset, UpdateConsumerOffset
from cosmodrome.wire.table import Call, Reply


async def test_offsets_committed_here_reach_the_master(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        theirs, ours = master.rooms.members.offsets, slave.rooms.members.offsets
        theirs.commit("g", "T", 0, 50)
        theirs.commit("g", "T", 1, 50)
        theirs.commit("g", "T", 2, 50)
        slave.follow(master)()
        ours.commit("g", "T", 0, 80)
        ours.commit("g", "T", 1, 20)  # older: must not move the master back
        ours.commit("new", "T", 0, 7)
        theirs.commit("g", "T", 2, 10)  # an operator moved it back meanwhile
        # The link comes again, and its tables before anything was handed back.
        slave.follow(master)
        assert ours.rows() == {"T@g": {0: 80, 1: 50, 2: 10}, "T@new": {0: 7}}
        async with served(*handlers(master)) as port:
            await slave.hand_back.linked("127.0.0.1", port)
            await until(lambda: not slave.hand_back.kept)
            await slave.hand_back.unlinked()
        assert theirs.rows() == {"T@g": {0: 80, 1: 50, 2: 10}, "T@new": {0: 7}}
        assert ours.rows() == theirs.rows()
        theirs.commit("g", "T", 0, 60)  # from now on the master's counts again
        assert ours.query("g", "T", 0) == 60


async def test_the_master_is_never_moved_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave), served(*handlers(master)) as port:
        theirs = master.rooms.members.offsets
        theirs.commit("g", "T", 0, 50)
        slave.rooms.members.offsets.commit("g", "T", 0, 20)
        # No table has come before.
        await slave.hand_back.linked("127.0.0.1", port)
        await until(lambda: not slave.hand_back.kept)
        await slave.hand_back.unlinked()
        assert theirs.query("g", "T", 0) == 50


async def test_many_offsets_and_a_commit_at_the_slave_while_linked(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        theirs, ours = master.rooms.members.offsets, slave.rooms.members.offsets
        for number in range(500):
            ours.commit(f"g{number}", "T", 0, number + 1)
        async with served(*handlers(master)) as port:
            await slave.hand_back.linked("127.0.0.1", port)
            await until(lambda: not slave.hand_back.kept)
            assert theirs.rows() == ours.rows()
            ours.commit("g1", "T", 0, 1000)
            await until(lambda: theirs.query("g1", "T", 0) == 1000)
            await slave.hand_back.unlinked()


async def test_what_the_master_overtakes_is_kept_no_longer(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave):
        slave.follow(master)
        slave.rooms.members.offsets.commit("g", "T", 0, 5)
        slave.rooms.members.offsets.commit("h", "T", 0, 5)
        slave.rooms.members.offsets.commit("i", "T", 0, 5)
        assert set(slave.hand_back.kept) == {"T@g", "T@h", "T@i"}
        master.rooms.members.offsets.commit("g", "T", 0, 9)
        assert slave.rooms.members.offsets.query("g", "T", 0) == 9
        slave.applied.take("consumerOffset", {"T@h": None}, whole=False)
        assert slave.hand_back.kept == {"T@i": {0: 5}}
        slave.applied.take("consumerOffset", {}, whole=True)
        assert slave.rooms.members.offsets.rows() == {"T@i": {0: 5}}


async def test_a_master_that_cannot_be_reached_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hand_back, "RETRY_SECONDS", (0.01, 0.05))
    async with pair(tmp_path) as (master, slave):
        async with served() as port:
            pass
        slave.rooms.members.offsets.commit("g", "T", 0, 5)
        await slave.hand_back.linked("127.0.0.1", port)
        await until(lambda: "offsets_not_handed_back" in caplog.text)
        slave.follow(master)
        assert slave.rooms.members.offsets.query("g", "T", 0) == 5
        async with served(*handlers(master), port=port):
            await until(lambda: master.rooms.members.offsets.query("g", "T", 0) == 5)
            await slave.hand_back.unlinked()


async def test_a_slave_that_is_restarted_remembers(tmp_path: Path) -> None:
    async with side(tmp_path / "slave", slave=True) as slave:
        slave.rooms.members.offsets.commit("g", "T", 0, 5)
    async with side(tmp_path / "slave", slave=True) as slave, side(tmp_path / "m") as master:
        assert slave.hand_back.kept == {"T@g": {0: 5}}
        slave.follow(master)
        assert slave.rooms.members.offsets.query("g", "T", 0) == 5
        async with served(*handlers(master)) as port:
            await slave.hand_back.linked("127.0.0.1", port)
            await until(lambda: master.rooms.members.offsets.query("g", "T", 0) == 5)
            await until(lambda: not slave.hand_back.kept)
    assert "committedHere" not in (slave.config / "consumerOffset.json").read_text()


async def test_a_slave_that_became_the_master_forgets(tmp_path: Path) -> None:
    async with side(tmp_path, slave=True) as slave:
        slave.rooms.members.offsets.commit("g", "T", 0, 5)
    assert "committedHere" in (slave.config / "consumerOffset.json").read_text()
    async with side(tmp_path) as master:
        assert master.rooms.members.offsets.kept == {}
        master.rooms.members.offsets.commit("g", "T", 0, 6)
    assert "committedHere" not in (master.config / "consumerOffset.json").read_text()


class Reluctant:
    """A master that is busy first, refuses one group for good, and is slow to answer others."""

    def __init__(self) -> None:
        self.busy = 2
        self.taken: dict[str, int] = {}
        self.answer = asyncio.Event()

    @QueryConsumerOffset.handler
    def query(self, ask: QueryConsumerOffset, call: Call) -> OffsetReply:
        if self.busy:
            self.busy -= 1
            raise Refused(Code.SYSTEM_BUSY, "busy")
        raise Refused(Code.QUERY_NOT_FOUND, "none")

    @UpdateConsumerOffset.handler
    async def update(self, ask: UpdateConsumerOffset, call: Call) -> Reply:
        if ask.consumer_group == "bad":
            raise Refused(Code.SYSTEM_ERROR, "never")
        await self.answer.wait()
        self.taken[ask.consumer_group] = ask.commit_offset
        return Reply()


async def test_refusals_and_commits_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hand_back, "RETRY_SECONDS", (0.01, 0.05))
    master = Reluctant()
    async with pair(tmp_path) as (_, slave), served(master) as port:
        offsets = slave.rooms.members.offsets
        offsets.commit("bad", "T", 0, 5)
        offsets.commit("g", "T", 0, 5)
        await slave.hand_back.linked("127.0.0.1", port)
        await until(lambda: "T@bad" not in slave.hand_back.kept)
        assert "offset_refused_by_master key=T@bad" in caplog.text
        offsets.commit("g", "T", 0, 6)  # while 5 is on its way
        master.answer.set()
        await until(lambda: master.taken == {"g": 6})
        await until(lambda: not slave.hand_back.kept)
        assert master.busy == 0
        await slave.hand_back.unlinked()
