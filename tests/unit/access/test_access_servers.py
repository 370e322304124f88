"""A broker and a name server with access control, over sockets."""

from __future__ import annotations

import asyncio
import functools
import logging
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.access.access_kit import FILE, SECRETS, make_gate

import cosmodrome
from cosmodrome.access import account_table
from cosmodrome.client.options import ClientOptions, Credentials
from cosmodrome.errors import Code, ConfigError, CosmodromeError, Refused
from cosmodrome.node import Node, embedded
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.report_bodies import AccountList
from cosmodrome.wire.signature import sign
from cosmodrome.wire.table import Command


@pytest.fixture
async def node(tmp_path: pathlib.Path) -> AsyncIterator[Node]:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "plain_acl.yml").write_text(FILE)
    async with embedded(data=str(tmp_path), acl_enable=True) as node:
        yield node


def channel(address: str, account: str | None = None) -> Channel:
    host, _, port = address.rpartition(":")

    def prepare(frame: Frame) -> None:
        if account is not None:
            sign(frame, account, SECRETS[account])

    return Channel(host, int(port), prepare=prepare)


async def test_clients_with_an_account_send_and_consume_and_others_do_not(node: Node) -> None:
    client = ClientOptions(credentials=Credentials("the-team", "secret-of-team"))
    async with cosmodrome.Producer(node.namesrv, group="p", client=client) as producer:
        await producer.send(cosmodrome.Message("Mine", b"hello"))
        with pytest.raises(CosmodromeError, match="no right PUB to topic 'Theirs'"):
            await producer.send(cosmodrome.Message("Theirs", b"hello"))
    async with cosmodrome.Consumer(
        node.namesrv, group="our_group", client=client, consume_from="first"
    ) as consumer:
        await consumer.subscribe("Mine")
        async for message in consumer:
            assert message.body == b"hello"
            break
    stranger = channel(node.broker_address)
    with pytest.raises(Refused, match="no credentials"):
        await stranger.call(commands.GetMaxOffset(topic="Mine", queue_id=0))
    await stranger.close()


async def test_the_name_server_knows_the_broker_by_its_account(node: Node) -> None:
    stranger = channel(node.namesrv)
    with pytest.raises(Refused, match="no credentials"):
        await stranger.call(commands.GetBrokerClusterInfo())
    with pytest.raises(Refused, match="no credentials"):
        await stranger.call(
            commands.UnregisterBroker(
                broker_name="embedded",
                broker_addr=node.broker_address,
                cluster_name="DefaultCluster",
                broker_id=0,
            )
        )
    await stranger.close()
    known = channel(node.namesrv, "the-team")
    info = bodies.decode(
        bodies.ClusterInfo, (await known.call(commands.GetBrokerClusterInfo())).body
    )
    assert "embedded" in info.broker_addr_table
    await known.close()


async def test_administrators_change_accounts_and_secrets_stay_secret(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    admin = channel(node.broker_address, "the-admin")
    with caplog.at_level(logging.INFO):
        await admin.call(
            commands.UpdateAndCreateAclConfig(
                access_key="a-new-team",
                secret_key="its-own-secret",
                topic_perms="A=PUB,B=SUB|PUB",
                default_group_perm="SUB",
            )
        )
        info = await admin.call(commands.GetBrokerClusterAclInfo())
        assert '"counter":1' in info.version and "plain_acl.yml" in (
            info.all_acl_file_version or ""
        )
        assert info.broker_name == "embedded"
        await admin.call(
            commands.UpdateGlobalWhiteAddrsConfig(global_white_addrs="10.0.0.{1,2},10.1.*.*")
        )
        listed = await admin.call(commands.ListAccounts())
        accounts = bodies.decode(AccountList, listed.body)
        (new,) = (one for one in accounts.accounts if one.access_key == "a-new-team")
        assert new.topic_perms == ["A=PUB", "B=PUB|SUB"] and new.default_group_perm == "SUB"
        assert accounts.global_white_remote_addresses == ["10.0.0.{1,2}", "10.1.*.*"]
        config = await admin.call(commands.GetBrokerConfig())
        for text in (listed.body, config.body, caplog.text.encode()):
            assert b"its-own-secret" not in text and b"secret-of" not in text
        assert "account_created" in caplog.text and "access_key=the-admin" in caplog.text
        with pytest.raises(Refused, match="secretKey must have") as refused:
            await admin.call(commands.UpdateAndCreateAclConfig(access_key="no-secret-given"))
        assert refused.value.code == Code.UPDATE_AND_CREATE_ACL_CONFIG_FAILED == 209
        await admin.call(commands.DeleteAclConfig(access_key="a-new-team"))
        with pytest.raises(Refused) as refused:
            await admin.call(commands.DeleteAclConfig(access_key="a-new-team"))
        assert refused.value.code == Code.DELETE_ACL_CONFIG_FAILED == 210
        with pytest.raises(Refused) as refused:
            await admin.call(commands.UpdateGlobalWhiteAddrsConfig(global_white_addrs="nobody"))
        assert refused.value.code == Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED == 211
    await admin.close()


async def test_the_secret_of_the_broker_itself_is_not_shown(tmp_path: pathlib.Path) -> None:
    async with embedded(broker_access_key="my-own-key", broker_secret_key="my-own-secret") as node:
        anybody = channel(node.broker_address)
        text = (await anybody.call(commands.GetBrokerConfig())).body
        assert b"brokerSecretKey=***" in text and b"my-own-secret" not in text
        with pytest.raises(Refused, match="aclEnable=true"):
            await anybody.call(commands.DeleteAclConfig(access_key="whatever"))
        await anybody.close()


async def test_without_accounts_a_server_does_not_start(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="there is no account file"):
        async with embedded(data=str(tmp_path), acl_enable=True):
            pass


async def test_a_message_of_another_topic_is_not_got_by_a_detour(node: Node) -> None:
    admin, team = (channel(node.broker_address, who) for who in ("the-admin", "the-team"))
    send = functools.partial(
        commands.SendMessageV2,
        producer_group="p",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="KEYS\x01k",
    )
    await admin.call(send(topic="Theirs", body=b"for them"))
    stored = await admin.call(commands.ViewMessageById(offset=0))
    assert b"for them" in stored.body
    asks: tuple[Command[Any], ...] = (
        commands.ViewMessageById(offset=0),
        commands.ConsumerSendMsgBack(offset=0, group="our_group", delay_level=1),
        commands.QueryMessage(
            topic="Theirs", key="k", max_num=1, begin_timestamp=0, end_timestamp=1 << 62
        ),
    )
    for ask in asks:
        with pytest.raises(Refused, match="no right SUB to topic 'Theirs'"):
            await team.call(ask)
    await admin.close()
    await team.close()


async def test_a_running_broker_follows_its_account_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account_table, "LOOK_SECONDS", 0.01)
    path = tmp_path / "plain_acl.yml"
    path.write_text(FILE)
    async with embedded(acl_enable=True, acl_file=str(path)) as node:
        reader = channel(node.broker_address, "the-reader")
        ask = commands.GetMaxOffset(topic="Theirs", queue_id=0)
        with pytest.raises(Refused, match="no right SUB to topic 'Theirs'"):
            await reader.call(ask)
        path.write_text(FILE.replace("Mine=SUB", "Theirs=SUB"))
        async with asyncio.timeout(30):
            while not await _is_let_in(reader, ask):
                await asyncio.sleep(0.01)
        await reader.close()


async def _is_let_in(reader: Channel, ask: commands.GetMaxOffset) -> bool:
    try:
        await reader.call(ask)
    except Refused as refusal:
        return "no right" not in refusal.remark  # past the gate, there may be no such topic
    return True


@pytest.mark.parametrize(
    ("options", "level", "said"),
    [
        ({"acl_enable": False, "bind_address": "0.0.0.0"}, logging.INFO, "protected_mode"),
        (
            {"acl_enable": False, "bind_address": "0.0.0.0", "protected_mode": False},
            logging.WARNING,
            "NO ACCESS CONTROL",
        ),
    ],
)
async def test_a_server_on_a_network_says_at_its_start_how_open_it_is(
    options: dict[str, Any],
    level: int,
    said: str,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = await make_gate(tmp_path, **options)
    with caplog.at_level(logging.INFO):
        await gate.start()
    (line,) = caplog.records
    assert line.levelno == level and said in line.getMessage()
    await gate.stop()


def test_the_files_are_looked_at_at_least_as_often_as_upstream_does() -> None:
    assert account_table.LOOK_SECONDS <= 5
