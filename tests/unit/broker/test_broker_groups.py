"""Consumer groups and their file."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.goldens import Golden, each_golden

from cosmodrome.broker.members.groups import GroupDeleted, Groups
from cosmodrome.broker.role import SLAVE
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ProtocolError, Refused, StoreCorrupt
from cosmodrome.wire import bodies, fastjson
from cosmodrome.wire.bodies import SubscriptionGroupConfig, SubscriptionGroupWrapper
from cosmodrome.wire.commands.group import (
    DeleteSubscriptiongroup,
    GetAllSubscriptiongroupConfig,
    GetSubscriptiongroupConfig,
    UpdateAndCreateSubscriptiongroup,
)
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.names import BUILT_IN_GROUPS
from cosmodrome.wire.table import Call

OPTIONS = BrokerOptions(broker_name="broker-a")
CLOSED = BrokerOptions(broker_name="broker-a", auto_create_subscription_group=False)


class Peer:
    peer = ("192.0.2.7", 4711)


CALL = Call(Frame(code=0, opaque=0), Peer())  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "subscriptionGroup.json")


@pytest.fixture
async def groups(path: str) -> AsyncIterator[Groups]:
    service = Groups(OPTIONS, path, real_env())
    await service.start()
    yield service
    await service.stop()


def ask(config: SubscriptionGroupConfig) -> UpdateAndCreateSubscriptiongroup:
    return UpdateAndCreateSubscriptiongroup(body=bodies.encode(config))


async def test_built_in_groups_have_the_defaults(groups: Groups) -> None:
    assert set(groups.table) == set(BUILT_IN_GROUPS)
    tools = groups.table["TOOLS_CONSUMER"]
    assert (tools.consume_enable, tools.consume_from_min_enable) == (True, True)
    assert (tools.consume_broadcast_enable, tools.notify_consumer_ids_changed_enable) == (
        True,
        True,
    )
    assert (tools.retry_queue_nums, tools.retry_max_times) == (1, 16)
    assert (tools.broker_id, tools.which_broker_when_consume_slowly) == (0, 1)


async def test_find_creates_where_allowed(groups: Groups) -> None:
    made = groups.find("g")
    assert made is not None and made.group_name == "g"
    assert groups.find("g") is made
    assert groups.version.counter == 1
    with pytest.raises(Refused, match="not allowed"):
        groups.find("../g")


async def test_find_creates_only_system_groups_otherwise(path: str) -> None:
    groups = Groups(CLOSED, path, real_env())
    await groups.start()
    assert groups.find("g") is None
    assert groups.find("CID_RMQ_SYS_TRANS") is not None
    assert groups.find("TOOLS_CONSUMER") is not None
    await groups.stop()


async def test_update_is_on_disk_before_the_answer(groups: Groups, path: str) -> None:
    await groups.update_and_create(
        ask(SubscriptionGroupConfig(group_name="g", retry_max_times=5, consume_enable=False)), CALL
    )
    row = fastjson.loads(Path(path).read_bytes())["subscriptionGroupTable"]["g"]
    assert row["retryMaxTimes"] == 5
    assert row["consumeEnable"] is False


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (SubscriptionGroupConfig(group_name=""), "empty"),
        (SubscriptionGroupConfig(group_name="a b"), "not allowed"),
        (SubscriptionGroupConfig(group_name="g", retry_queue_nums=-1), "retryQueueNums is -1"),
        (SubscriptionGroupConfig(group_name="g", retry_queue_nums=65_536), "retryQueueNums"),
        (SubscriptionGroupConfig(group_name="g", retry_max_times=-2), "retryMaxTimes is -2"),
    ],
)
async def test_update_refused(groups: Groups, config: SubscriptionGroupConfig, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        await groups.update_and_create(ask(config), CALL)
    assert refused.value.code == Code.SYSTEM_ERROR
    assert config.group_name not in groups.table


async def test_update_needs_a_body(groups: Groups) -> None:
    with pytest.raises(ProtocolError, match="SubscriptionGroupConfig"):
        await groups.update_and_create(UpdateAndCreateSubscriptiongroup(), CALL)


async def test_delete_tells_about_offsets(groups: Groups, path: str) -> None:
    await groups.update_and_create(ask(SubscriptionGroupConfig(group_name="g")), CALL)
    gone: list[GroupDeleted] = []
    groups.deleted.subscribe(gone.append)
    await groups.delete_group(DeleteSubscriptiongroup(group_name="g", remove_offset=True), CALL)
    assert "g" not in fastjson.loads(Path(path).read_bytes())["subscriptionGroupTable"]
    await groups.delete_group(DeleteSubscriptiongroup(group_name="h"), CALL)
    await groups.delete_group(DeleteSubscriptiongroup(group_name="h", clean_offset=True), CALL)
    assert gone == [GroupDeleted("g", True), GroupDeleted("h", False), GroupDeleted("h", True)]


async def test_a_slave_refuses_changes(path: str) -> None:
    groups = Groups(OPTIONS, path, real_env(), role=SLAVE)
    await groups.start()
    with pytest.raises(Refused, match="slave"):
        await groups.update_and_create(ask(SubscriptionGroupConfig(group_name="g")), CALL)
    with pytest.raises(Refused, match="slave"):
        await groups.delete_group(DeleteSubscriptiongroup(group_name="g"), CALL)
    await groups.stop()


async def test_queries(groups: Groups) -> None:
    groups.put(SubscriptionGroupConfig(group_name="g", retry_max_times=3))
    everything = bodies.decode(
        SubscriptionGroupWrapper, (await groups.get_all(GetAllSubscriptiongroupConfig(), CALL)).body
    )
    assert everything.subscription_group_table == groups.table
    assert everything.data_version == groups.version
    one = groups.get_one(GetSubscriptiongroupConfig(group="g"), CALL)
    assert bodies.decode(SubscriptionGroupConfig, one.body).retry_max_times == 3
    with pytest.raises(Refused) as refused:
        groups.get_one(GetSubscriptiongroupConfig(group="h"), CALL)
    assert refused.value.code == Code.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_group_count_is_bounded(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = dataclasses.replace(groups._table._kind, rows_max=len(groups.table))
    monkeypatch.setattr(groups._table, "_kind", fewer)
    with pytest.raises(Refused, match="delete unused"):
        groups.find("one-more")


async def test_everything_survives_a_restart(path: str) -> None:
    first = Groups(OPTIONS, path, real_env())
    await first.start()
    first.find("g")
    await first.stop()
    second = Groups(CLOSED, path, real_env())
    await second.start()
    assert second.table == first.table
    assert second.version == first.version
    assert second.find("g") is not None
    await second.stop()


async def test_damaged_pair_is_an_error(path: str) -> None:
    Path(path).write_bytes(b"{")
    Path(path + ".bak").write_bytes(b"}")
    with pytest.raises(StoreCorrupt, match="move both away"):
        await Groups(OPTIONS, path, real_env()).start()


@each_golden
async def test_golden_file_round_trip(golden: Golden, path: str) -> None:
    data = (golden.path / "store/config/subscriptionGroup.json").read_bytes()
    Path(path).write_bytes(data)
    groups = Groups(OPTIONS, path, real_env())
    await groups.start()
    assert groups.table["g_custom"].retry_max_times == 5
    assert groups.table["g_custom"].consume_broadcast_enable is False
    await groups._table._file.save()
    assert Path(path).read_bytes() == data
    await groups.stop()
