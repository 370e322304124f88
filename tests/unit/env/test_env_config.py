"""Settings: precedence, conversion, and what happens to keys that are not ours."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import cosmodrome
from cosmodrome.env.config import (
    Settings,
    Source,
    describe,
    environment_source,
    flag_source,
    resolve,
)
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.unused import REFUSED, UNUSED
from cosmodrome.errors import ConfigError

BROKER = (BrokerOptions, StoreOptions, SocketOptions)


def resolved(*sources: Source) -> Settings:
    return resolve(BROKER, sources)


def test_later_sources_win_and_origins_are_remembered() -> None:
    settings = resolved(
        Source("broker.conf", {"brokerName": "file", "listenPort": "1", "brokerId": "3"}),
        Source("environment", {"brokerName": "env", "listenPort": "2"}),
        Source("--set", {"brokerName": "flag"}),
    )
    broker = settings.get(BrokerOptions)
    assert (broker.broker_name, broker.listen_port, broker.broker_id) == ("flag", 2, 3)
    assert settings.origins["brokerName"] == "--set"
    assert settings.origins["listenPort"] == "environment"
    assert broker.default_topic_queue_nums == 8


def test_values_are_typed_and_ranges_hold() -> None:
    settings = resolved(Source("f", {"autoCreateTopicEnable": "false", "brokerIP1": "192.0.2.1"}))
    assert settings.get(BrokerOptions).auto_create_topic_enable is False
    assert settings.get(BrokerOptions).broker_ip1 == "192.0.2.1"
    with pytest.raises(ConfigError, match="listenPort=70000"):
        resolved(Source("f", {"listenPort": "70000"}))
    with pytest.raises(ConfigError, match="listenPort=ten"):
        resolved(Source("f", {"listenPort": "ten"}))
    with pytest.raises(ConfigError, match="flushDiskType=SOMETIMES"):
        resolved(Source("f", {"flushDiskType": "SOMETIMES"}))


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean brokerName"):
        resolved(Source("broker.conf", {"brokrName": "x"}))
    with pytest.raises(ConfigError, match="docs/settings"):
        resolved(Source("broker.conf", {"zzzzzzzz": "x"}))


def test_upstream_key_without_meaning_is_accepted_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "cosmo.config"):
        resolved(Source("broker.conf", {"sendMessageThreadPoolNums": "16"}))
    assert len(caplog.records) == 1
    assert "sendMessageThreadPoolNums" in caplog.text


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_would_promise_too_much_stops_the_start(key: str) -> None:
    resolved(Source("broker.conf", {key: "false"}))
    with pytest.raises(ConfigError, match=key):
        resolved(Source("broker.conf", {key: "true"}))


def test_environment() -> None:
    source = environment_source(
        {
            "NAMESRV_ADDR": "a:1",
            "COSMO_BROKER_NAME": "b",
            "COSMO_BROKER_IP1": "192.0.2.7",
            "X": "y",
        },
        BROKER,
    )
    assert source.values == {"namesrvAddr": "a:1", "brokerName": "b", "brokerIP1": "192.0.2.7"}
    with pytest.raises(ConfigError, match="COSMO_BROKER_NAME"):
        environment_source({"COSMO_BROKR_NAME": "b"}, BROKER)
    named = environment_source({"ROCKETMQ_HOME": "h"}, (NameServerOptions,))
    assert named.values == {"rocketmqHome": "h"}
    beside = {"COSMO_BROKER_NAME": "b"}  # of another server that is started from this shell
    with pytest.raises(ConfigError, match="names no setting"):
        environment_source(beside, (NameServerOptions,))
    assert environment_source(beside, (NameServerOptions,), neighbours=BROKER).values == {}


def test_variables_of_the_command_line_are_no_settings() -> None:
    source = Path(cosmodrome.__file__).parent
    read = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r'(?:envvar=|VARIABLES = \()"(COSMO_\w+)"', path.read_text())
    }
    assert "COSMO_NAMESRV" in read and "COSMO_SECRET_KEY" in read
    assert environment_source(dict.fromkeys(read, "x"), BROKER).values == {}


def test_flags() -> None:
    assert flag_source(["a=b=c", " d = e "]).values == {"a": "b=c", "d": "e"}
    with pytest.raises(ConfigError, match="key=value"):
        flag_source(["nonsense"])


def test_no_key_is_both_effective_and_unused() -> None:
    effective = {key for group in BROKER for key, *_ in describe(group)}
    assert not effective & (set(UNUSED) | set(REFUSED))


def test_every_setting_is_described() -> None:
    for group in (*BROKER, NameServerOptions):
        for key, kind, _default, meaning, _live in describe(group):
            assert kind and meaning, key
