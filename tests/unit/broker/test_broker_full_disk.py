"""A disk that is full: what peers are told, and what probes see."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.unit.broker.test_broker_audit_log import send, topic
from tests.unit.store.store_kit import Faults, faulty_env

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import RealDisk
from cosmodrome.errors import CosmodromeError, Refused, name_of, reason_of
from cosmodrome.store.commit_log.failures import Failures
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands


@contextlib.asynccontextmanager
async def broker_on(folder: Path, faults: Faults) -> AsyncIterator[tuple[Broker, Channel]]:
    broker = build_broker(
        BrokerOptions(broker_name="b", listen_port=0),
        StoreOptions(
            store_path_root_dir=str(folder),
            mapped_file_size_commit_log=1 << 16,
            max_hash_slot_num=100,
            max_index_num=400,
        ),
        SocketOptions(),
        faulty_env(faults),
    )
    await broker.start()
    channel = Channel("127.0.0.1", broker.port)
    try:
        yield broker, channel
    finally:
        faults.write = faults.create = None
        await channel.close()
        await broker.stop()


async def refusal(call: Callable[[], Awaitable[object]], tries: int = 1) -> str:
    for _ in range(tries):
        try:
            await call()
        except Refused as refused:
            return refused.remark
    raise AssertionError("nothing was refused")


async def test_a_write_that_fails_makes_the_broker_not_ready_until_one_goes_well(
    tmp_path: Path,
) -> None:
    faults = Faults()
    async with broker_on(tmp_path, faults) as (broker, channel):
        await channel.call(send("T"))
        assert broker.ready()[0]
        faults.write = "commitlog"
        remark = await refusal(lambda: channel.call(send("T")))
        assert "could not be written (No space left on device, file commitlog/0000" in remark
        assert str(tmp_path) not in remark
        ready, why = broker.ready()
        assert not ready
        assert why == f"sends are refused: {remark}"
        faults.write = None
        await channel.call(send("T"))  # it is tried all the same
        assert broker.ready()[0]


async def test_a_file_that_cannot_be_made_makes_the_broker_not_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    large = send("T")
    large.body = bytes(20_000)
    async with broker_on(tmp_path, faults) as (broker, channel):
        await channel.call(large)
        faults.create = "commitlog"
        with caplog.at_level(logging.ERROR):
            remark = await refusal(lambda: channel.call(large), tries=20)
            for _ in range(20):
                with contextlib.suppress(CosmodromeError):
                    await channel.call(large)
        assert "could not be made (No space left on device)" in remark
        assert str(tmp_path) not in remark
        assert str(tmp_path) in caplog.text, "the log has the whole path"
        assert caplog.text.count("log_write_failed") <= 3, "and not a line per message"
        assert not broker.ready()[0]
        faults.create = None
        await channel.call(large)
        assert broker.ready()[0]


async def test_a_failure_that_nobody_repeats_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failures()
    assert failures.recent is None
    failures.log("f", 0, OSError(errno.ENOSPC, "full"))
    failures.why = "full"
    assert failures.recent == "full"
    monkeypatch.setattr("cosmodrome.store.commit_log.failures.RECENT_SECONDS", 0.0)
    assert failures.recent is None


async def test_tables_and_settings_that_cannot_be_saved_name_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RealDisk, path: str, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    async with broker_on(tmp_path, Faults()) as (_, channel):
        await channel.call(topic("T", 1))
        with monkeypatch.context() as patch:
            patch.setattr(RealDisk, "replace", full)
            for command in (
                topic("T", 2),
                commands.UpdateBrokerConfig(body=b"slowRequestMillis=7\n"),
            ):
                remark = await refusal(functools.partial(channel.call, command))
                assert "could not be saved" in remark
                assert "No space left on device" in remark
                assert str(tmp_path) not in remark


async def test_a_disk_above_the_ratio_is_named_by_its_folder(tmp_path: Path) -> None:
    async with broker_on(tmp_path, Faults(used_ratio=0.99)) as (broker, channel):
        await broker._base.store._upkeep.check_disk()
        remark = await refusal(lambda: channel.call(send("T")))
        assert "the disk of the store is 99.0% used, sends stop at 90%" in remark
        assert str(tmp_path) not in remark
        assert broker.ready() == (False, f"sends are refused: {remark}")


def test_what_peers_are_told() -> None:
    assert reason_of(OSError(errno.ENOSPC, "No space left", "/srv/secret")) == "No space left"
    assert reason_of(ValueError("odd")) == "odd"
    assert name_of("/srv/secret/commitlog/0") == "commitlog/0"
    assert name_of("topics.json") == "topics.json"
