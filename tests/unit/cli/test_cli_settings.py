"""What a command runs with: flags over environment over file over default."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cosmodrome.cli.main import cosmo
from cosmodrome.cli.support import settings
from cosmodrome.env.options import BrokerOptions, NameServerOptions, StoreOptions
from cosmodrome.errors import ConfigError


def test_precedence_of_a_broker(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text(
        "brokerName=file\nlistenPort=1000\nbrokerClusterName = C1\nfileReservedTime=48\n"
    )
    chosen = settings.for_broker(
        {"COSMO_LISTEN_PORT": "2000", "NAMESRV_ADDR": "ns:9876", "COSMO_BROKER_NAME": "env"},
        file=str(file),
        pairs=["brokerName=set"],
        port=3000,
    )
    assert chosen.broker is not None
    broker = chosen.broker.get(BrokerOptions)
    assert broker.broker_name == "set"
    assert broker.listen_port == 3000
    assert broker.broker_cluster_name == "C1"
    assert broker.namesrv_addr == "ns:9876"
    assert chosen.broker.get(StoreOptions).store_path_root_dir.endswith("/store")


def test_data_is_the_store_root_itself(tmp_path: Path) -> None:
    chosen = settings.for_up({}, data=str(tmp_path / "d"))
    assert chosen.broker is not None and chosen.nameserver is not None
    assert chosen.broker.get(StoreOptions).store_path_root_dir == str(tmp_path / "d")
    assert chosen.nameserver.get(NameServerOptions).kv_config_path == str(
        tmp_path / "d" / "config" / "kvConfig.json"
    )


def test_up_gives_each_part_its_own_keys() -> None:
    chosen = settings.for_up(
        {},
        pairs=["orderMessageEnable=true", "brokerName=b", "serverSocketBacklog=7"],
        namesrv_port=0,
        broker_port=0,
        host="0.0.0.0",
    )
    assert chosen.broker is not None and chosen.nameserver is not None
    assert chosen.nameserver.get(NameServerOptions).order_message_enable
    assert chosen.nameserver.get(NameServerOptions).bind_address == "0.0.0.0"
    assert chosen.broker.get(BrokerOptions).broker_name == "b"
    assert "serverSocketBacklog=7" in chosen.text()
    with pytest.raises(ConfigError, match="orderMessageEnable"):
        settings.for_up({}, pairs=["orderMesageEnable=true"])


def test_up_guards_both_servers_alike(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("aclEnable=true\npeerAddresses=10.1.2.3\nbrokerSecretKey=not-for-eyes\n")
    chosen = settings.for_up({}, file=str(file), pairs=["protectedMode=false"])
    assert chosen.broker is not None and chosen.nameserver is not None
    for options in (
        chosen.broker.get(BrokerOptions),
        chosen.nameserver.get(NameServerOptions),
    ):
        assert options.acl_enable and options.peer_addresses == "10.1.2.3"
        assert not options.protected_mode
    assert "brokerSecretKey=***" in chosen.text() and "not-for-eyes" not in chosen.text()


def test_rocketmq_home_places_the_kv_file() -> None:
    chosen = settings.for_nameserver({"ROCKETMQ_HOME": "/opt/mq"})
    assert chosen.nameserver is not None
    options = chosen.nameserver.get(NameServerOptions)
    assert options.kv_config_path == "/opt/mq/namesrv/kvConfig.json"
    assert options.rocketmq_home == "/opt/mq"


def test_print_config_shows_what_is_in_effect_and_starts_nothing() -> None:
    result = CliRunner().invoke(
        cosmo, ["broker", "run", "-n", "x:1", "-p", "--set", "flushDiskType=ASYNC_FLUSH"]
    )
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "flushDiskType=ASYNC_FLUSH" in lines
    assert "namesrvAddr=x:1" in lines or "namesrvAddr=x\\:1" in lines
    assert "autoCreateTopicEnable=true" in lines


def test_wrong_setting_is_an_error_with_the_nearest_name() -> None:
    result = CliRunner().invoke(cosmo, ["up", "-p", "--set", "flushDisktype=ASYNC_FLUSH"])
    assert isinstance(result.exception, ConfigError)
    assert "did you mean flushDiskType" in str(result.exception)


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.conf"):
        settings.for_broker({}, file="nowhere.conf")
