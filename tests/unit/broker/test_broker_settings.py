"""Settings changed over the wire: at once, as a whole, and still there after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.broker.operate.settings import Settings, is_local
from cosmodrome.cli.support.settings import Chosen, for_broker
from cosmodrome.env.config import OVERRIDES_NAME
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.real import RealDisk, real_env
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands, properties_text
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Call

SMALL = (
    "listenPort=0",
    "brokerName=b",
    "mappedFileSizeCommitLog=65536",
    "maxHashSlotNum=100",
    "maxIndexNum=400",
)


def chosen(folder: Path, *pairs: str, file: str | None = None, **environ: str) -> Chosen:
    return for_broker(environ, file=file, pairs=(*SMALL, *pairs), data=str(folder))


@contextlib.asynccontextmanager
async def running(folder: Path, *pairs: str, **more: Any) -> AsyncIterator[tuple[Broker, Channel]]:
    settings = chosen(folder, *pairs, **more).broker
    assert settings is not None
    broker = build_broker(
        settings.get(BrokerOptions), settings.get(StoreOptions), SocketOptions(), real_env(seed=1)
    )
    await broker.start()
    channel = Channel("127.0.0.1", broker.port)
    try:
        yield broker, channel
    finally:
        await channel.close()
        await broker.stop()


def broker_now_ms() -> int:
    return real_env().clock.now_ms()


async def update(channel: Channel, text: str) -> None:
    await channel.call(commands.UpdateBrokerConfig(body=text.encode()))


async def shown(channel: Channel) -> tuple[dict[str, str], int]:
    answer = await channel.call(commands.GetBrokerConfig())
    return properties_text.loads(answer.body), json.loads(answer.version)["counter"]


async def send(channel: Channel, topic: str = "T") -> None:
    await channel.call(
        commands.SendMessageV2(
            producer_group="p",
            topic=topic,
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=0,
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties="UNIQ_KEY\x01k",
            body=b"x",
        )
    )


async def refusal(work: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        await work
    return refused.value


async def test_a_change_is_shown_and_survives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, channel):
        before, counter = await shown(channel)
        assert (before["fileReservedTime"], counter) == ("72", 0)
        await update(channel, "fileReservedTime=48\ntraceOn=false")
        await update(channel, "deleteWhen=03;04")
        after, counter = await shown(channel)
        assert counter == 2
        changed = {key for key in after if after[key] != before[key]}
        assert changed == {"fileReservedTime", "traceOn", "deleteWhen"}
        await update(channel, "fileReservedTime=48")  # as it is: no new version
        await update(channel, "")
        assert (await shown(channel))[1] == 2
    path = tmp_path / "config" / OVERRIDES_NAME
    assert properties_text.loads(path.read_bytes()) == {
        "deleteWhen": "03;04",
        "fileReservedTime": "48",
        "traceOn": "false",
    }
    assert "deleteWhen" not in (path.parent / f"{OVERRIDES_NAME}.bak").read_text()
    file = tmp_path / "broker.conf"
    file.write_text("fileReservedTime=24\nbrokerClusterName=C\n")
    async with running(tmp_path, file=str(file)) as (_, channel):
        assert (await shown(channel))[0] == {**after, "brokerClusterName": "C"}


async def test_all_or_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, channel):
        before, _ = await shown(channel)
        for text, code in (
            ("fileReservedTime=48\nstorePathRootDir=/tmp/x", Code.NO_PERMISSION),
            ("fileReservedTime=48\nnoSuchKey=1", Code.SYSTEM_ERROR),
            ("fileReservedTime=48\ndeleteWhen=77", Code.SYSTEM_ERROR),
            ("fileReservedTime=48\ntraceOn=perhaps", Code.SYSTEM_ERROR),
            ("fileReservedTime=4\\u00", Code.SYSTEM_ERROR),
        ):
            refused = await refusal(update(channel, text))
            assert refused.code == code
        refused = await refusal(channel.call(commands.UpdateBrokerConfig(body=b"\xff\xfe=1")))
        assert refused.code == Code.SYSTEM_ERROR and "UTF-8" in refused.remark
        assert await shown(channel) == (before, 0)
    assert not (tmp_path / "config" / OVERRIDES_NAME).exists()


async def test_a_change_that_cannot_be_kept_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RealDisk.replace

    def full(self: RealDisk, path: str, data: bytes, *, keep: bool = True) -> None:
        if path.endswith(OVERRIDES_NAME):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, path, data, keep=keep)

    async with running(tmp_path) as (_, channel):
        monkeypatch.setattr(RealDisk, "replace", full)
        refused = await refusal(update(channel, "traceOn=false"))
        assert "No space left" in refused.remark and "Nothing was changed" in refused.remark
        assert (await shown(channel))[0]["traceOn"] == "true"


async def test_changes_act_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, channel):
        await send(channel)
        await update(channel, "autoCreateTopicEnable=false")
        refused = await refusal(send(channel, "Unknown"))
        assert refused.code == Code.TOPIC_NOT_EXIST
        await update(channel, "autoCreateTopicEnable=true")
        await send(channel, "Unknown")
        soon = broker_now_ms() + 3_600_000
        await update(channel, f"startAcceptSendRequestTimeStamp={soon}")
        assert (await refusal(send(channel))).code == Code.SYSTEM_ERROR
        await update(channel, "startAcceptSendRequestTimeStamp=0")
        await update(channel, "autoCreateSubscriptionGroup=false\nlongPollingEnable=false")
        pull = commands.PullMessage(
            consumer_group="g",
            topic="T",
            queue_id=0,
            queue_offset=0,
            max_msg_nums=1,
            sys_flag=4,
            commit_offset=0,
            suspend_timeout_millis=0,
            subscription="*",
            sub_version=1,
        )
        assert (await refusal(channel.call(pull))).code == Code.SUBSCRIPTION_GROUP_NOT_EXIST
        await update(channel, "autoCreateSubscriptionGroup=true\nbrokerPermission=2")
        assert (await refusal(channel.call(pull))).code == Code.NO_PERMISSION


async def test_sends_are_not_closed_for_ever(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, channel):
        in_a_month = broker_now_ms() + 30 * 24 * 3_600_000
        refused = await refusal(update(channel, f"startAcceptSendRequestTimeStamp={in_a_month}"))
        assert "more than 7 days; use at most" in refused.remark
        await send(channel)


class Elsewhere:
    """A connection from another machine."""

    peer = ("192.0.2.7", 40_000)
    closed = False


@pytest.mark.parametrize("allowed", [False, True])
async def test_what_is_dangerous_is_not_changed_from_another_machine(
    tmp_path: Path, *, allowed: bool
) -> None:
    broker, store = BrokerOptions(dangerous_settings_live=allowed), StoreOptions()
    settings = Settings((broker, store), real_env(seed=1), str(tmp_path))
    call = Call(Frame(25, 1), Elsewhere())  # type: ignore[arg-type]

    async def ask(text: bytes) -> None:
        await settings.update_broker_config(commands.UpdateBrokerConfig(body=text), call)

    await ask(b"traceOn=false")
    if allowed:
        await ask(b"fileReservedTime=1")
    else:
        refused = await refusal(ask(b"fileReservedTime=1\ntraceOn=true\nbrokerPermission=0"))
        assert refused.code == Code.NO_PERMISSION
        assert refused.remark.startswith("brokerPermission, fileReservedTime can remove messages")
        assert "dangerousSettingsLive=true" in refused.remark
    assert (broker.trace_on, store.file_reserved_time) == (False, 1 if allowed else 72)


def test_which_addresses_are_of_this_machine() -> None:
    assert all(map(is_local, ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_local, ("192.0.2.1", "::2", "::ffff:192.0.2.1", "localhost.evil", "")))


async def test_topics_are_created_although_that_was_off_at_the_start(tmp_path: Path) -> None:
    async with running(tmp_path, "autoCreateTopicEnable=false") as (_, channel):
        assert (await refusal(send(channel, "New"))).code == Code.TOPIC_NOT_EXIST
        await update(channel, "autoCreateTopicEnable=true")
        await send(channel, "New")


async def test_a_permission_reaches_the_name_server(tmp_path: Path) -> None:
    nameserver = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await nameserver.start()
    to_nameserver = Channel("127.0.0.1", nameserver.port)

    async def permission() -> int:
        ask = commands.GetRouteinfoByTopic(topic="T")
        answer = await to_nameserver.call(ask)
        return bodies.decode(bodies.TopicRouteData, answer.body).queue_datas[0].perm

    try:
        where = f"namesrvAddr={nameserver.address}"
        async with running(tmp_path, where) as (_, channel), asyncio.timeout(60):
            await send(channel)
            for wanted in (4, 6):
                await update(channel, f"brokerPermission={wanted}")
                with contextlib.suppress(Refused):
                    while await permission() != wanted:
                        await asyncio.sleep(0.01)
                assert await permission() == wanted
    finally:
        await to_nameserver.close()
        await nameserver.stop()


# --- the file of overrides ----------------------------------------------------------------------


def overrides(folder: Path, text: str, backup: str | None = None) -> None:
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / OVERRIDES_NAME).write_text(text)
    if backup is not None:
        (folder / "config" / f"{OVERRIDES_NAME}.bak").write_text(backup)


def reserved(settings: Chosen) -> int:
    assert settings.broker is not None
    return settings.broker.get(StoreOptions).file_reserved_time


def test_flags_and_environment_win_over_overrides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides(tmp_path, "fileReservedTime=48\n")
    assert reserved(chosen(tmp_path)) == 48
    assert "override without effect" not in caplog.text
    assert reserved(chosen(tmp_path, COSMO_FILE_RESERVED_TIME="12")) == 12
    assert reserved(chosen(tmp_path, "fileReservedTime=24")) == 24
    assert "key=fileReservedTime" in caplog.text and "set by --set" in caplog.text


@pytest.mark.parametrize("text", ["fileReservedTime=a\n", "listenPort=1\n", "x=1\n", "a=\\u0\n"])
def test_damaged_overrides_give_way_to_the_generation_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    overrides(tmp_path, text)
    with pytest.raises(ConfigError, match=OVERRIDES_NAME):
        chosen(tmp_path)
    overrides(tmp_path, text, "fileReservedTime=36\n")
    assert reserved(chosen(tmp_path)) == 36
    assert "overrides_damaged" in caplog.text


async def test_what_tools_take_for_granted_is_shown_and_stays_as_it_is(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, channel):
        settings, _ = await shown(channel)
        # Everything that upstream's exportConfigs and exportMetrics ask for.
        assert {
            "brokerClusterName",
            "brokerId",
            "brokerName",
            "brokerRole",
            "fileReservedTime",
            "filterServerNums",
            "flushDiskType",
            "maxMessageSize",
            "messageDelayLevel",
            "msgTraceTopicName",
            "slaveReadEnable",
            "traceOn",
            "traceTopicEnable",
            "useTLS",
            "autoCreateTopicEnable",
            "autoCreateSubscriptionGroup",
            "clientCallbackExecutorThreads",
        } <= set(settings)
        assert settings["useTLS"] == "false"
        with pytest.raises(Refused):
            await update(channel, "useTLS=true")
        assert (await shown(channel))[0] == settings
