from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    Options,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.reload import apply, judge, live_keys
from cosmodrome.errors import Code, ConfigError, Refused

ALL: tuple[type[Options], ...] = (BrokerOptions, StoreOptions, SocketOptions, NameServerOptions)
TEXTS = {"deleteWhen", "productEnvName"}


@pytest.mark.parametrize("group", ALL)
def test_nothing_live_names_a_path_an_address_or_a_program(group: type[Options]) -> None:
    for field in msgspec.structs.fields(group):
        if field.encode_name not in live_keys(group):
            continue
        key = field.encode_name.lower()
        for word in ("path", "dir", "home", "addr", "listen", "ip1", "ip2", "server", "cmd"):
            assert word not in key, key
        assert get_args(field.type)[0] in (int, bool) or field.encode_name in TEXTS


def test_an_update_is_judged_and_done_as_a_whole() -> None:
    broker, store = BrokerOptions(), StoreOptions()
    groups = (broker, store)
    changes = judge(
        groups, {"fileReservedTime": " 48 ", "traceOn": "false", "longPollingEnable": "true"}, {}
    )
    assert [(change.key, change.text) for change in changes] == [
        ("fileReservedTime", "48"),
        ("traceOn", "false"),  # and what is as it was is no change
    ]
    assert store.file_reserved_time == 72
    apply(changes)
    assert (store.file_reserved_time, broker.trace_on) == (48, False)
    with pytest.raises(AttributeError):
        store.file_reserved_time = 1  # type: ignore[misc]


def no(text: str) -> None:
    raise ConfigError(f"{text} is no hour; list hours")


@pytest.mark.parametrize(
    ("key", "text", "code", "said"),
    [
        ("storePathRootDir", "/tmp/x", Code.NO_PERMISSION, "set it in the settings file and rest"),
        ("namesrvAddr", "evil:1", Code.NO_PERMISSION, "namesrvAddr is fixed"),
        ("listenPort", "1", Code.NO_PERMISSION, "listenPort is fixed"),
        ("brokerPermision", "1", Code.SYSTEM_ERROR, "did you mean brokerPermission?"),
        ("filterServerNums", "1", Code.SYSTEM_ERROR, "filterServerNums"),
        ("rocketmqHome", "x;sh", Code.SYSTEM_ERROR, "rocketmqHome"),
        ("brokerPermission", "9", Code.SYSTEM_ERROR, "brokerPermission=9: expected int <= 7"),
        ("brokerPermission", "", Code.SYSTEM_ERROR, "brokerPermission="),
        ("fileReservedTime", "9" * 30, Code.SYSTEM_ERROR, "fileReservedTime=999"),
        ("fileReservedTime", "3000000000", Code.SYSTEM_ERROR, "use at most 2147483647"),
        ("traceOn", "maybe", Code.SYSTEM_ERROR, "traceOn=maybe: expected bool"),
        ("deleteWhen", "25", Code.SYSTEM_ERROR, "25 is no hour; list hours"),
    ],
)
def test_what_is_refused(key: str, text: str, code: int, said: str) -> None:
    store = StoreOptions()
    with pytest.raises(Refused) as refused:
        judge(
            (BrokerOptions(), store), {"diskMaxUsedSpaceRatio": "50", key: text}, {"deleteWhen": no}
        )
    assert refused.value.code == code
    assert said in refused.value.remark and "Nothing was changed" in refused.value.remark
    assert store.disk_max_used_space_ratio == 75
