"""`cosmo timer` against a name server and a broker in this process."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cosmodrome.broker.app import build_broker
from cosmodrome.cli.main import cosmo
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, Refused, Unreachable
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands import SendMessageV2


async def cli(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cosmo, ["timer", *words])


async def send_timed(channel: Channel, topic: str, deliver_ms: int, key: str) -> None:
    await channel.call(
        SendMessageV2(
            producer_group="p",
            topic=topic,
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=1,
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties=f"TIMER_DELIVER_MS\x01{deliver_ms}\x02UNIQ_KEY\x01{key}",
            body=b"later",
        )
    )


async def test_list_and_cancel(tmp_path: Path) -> None:
    env = real_env()
    namesrv = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), env)
    await namesrv.start()
    broker = build_broker(
        BrokerOptions(broker_name="b0", listen_port=0, namesrv_addr=namesrv.address),
        StoreOptions(store_path_root_dir=str(tmp_path), mapped_file_size_commit_log=1 << 20),
        SocketOptions(),
        env,
    )
    await broker.start()
    channel = Channel("127.0.0.1", broker.port)
    try:
        while not broker.ready()[0]:
            await asyncio.sleep(0.01)
        base_ms = int(time.time() * 1000) + 60_000
        for number in range(5):
            await send_timed(channel, "U" if number == 4 else "T", base_ms + number, f"K{number}")
        where = ("-n", f"127.0.0.1:1;{namesrv.address}")
        result = await cli("list", *where, "-o", "json")
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert [(row["msgId"], row["deliverMs"] - base_ms) for row in rows] == [
            (f"K{number}", number) for number in range(5)
        ]
        assert rows[0]["brokerName"] == "b0" and rows[0]["queueId"] == 1
        assert "5 shown, 5 wait" in result.stderr

        result = await cli("list", *where, "-t", "U")
        assert result.stdout.splitlines()[0].split()[:2] == ["DELIVER", "AT"]
        assert "K4" in result.stdout and "K0" not in result.stdout

        result = await cli("list", *where, "--limit", "2", "-b", "b0")
        assert len(result.stdout.splitlines()) == 3 and "2 shown, 5 wait" in result.stderr

        result = await cli("cancel", *where, rows[2]["recallHandle"])
        assert result.exit_code == 0 and "K2 will not be delivered" in result.stderr
        result = await cli("list", *where, "-o", "json")
        assert [json.loads(line)["msgId"] for line in result.stdout.splitlines()] == [
            *("K0", "K1", "K3", "K4")
        ]

        for words, error in (
            (("list", *where, "-b", "nobody"), ConfigError),
            (("list", "-n", "nowhere"), ConfigError),
            (("list", "-n", ";"), ConfigError),
            (("list", "-n", "127.0.0.1:1"), Unreachable),
            (("cancel", *where, "nonsense"), Refused),
        ):
            assert isinstance((await cli(*words)).exception, error), words
    finally:
        await channel.close()
        await broker.stop()
        await namesrv.stop()


@pytest.mark.parametrize("words", [("list", "-n", "a:1", "--limit", "0"), ("cancel", "-n", "a:1")])
async def test_wrong_usage(words: tuple[str, ...]) -> None:
    assert (await cli(*words)).exit_code == 2
