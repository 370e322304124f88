from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from cosmodrome.env.config import describe
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    Options,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.reload import apply, dangerous_keys, judge, live_keys
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.layout import FRAME_BYTES_MAX

ALL: tuple[type[Options], ...] = (BrokerOptions, StoreOptions, SocketOptions, NameServerOptions)
TEXTS = {"deleteWhen", "productEnvName"}


@pytest.mark.parametrize("group", ALL)
def test_nothing_live_names_a_path_an_address_or_a_program(group: type[Options]) -> None:
    for field in msgspec.structs.fields(group):
        if field.encode_name not in live_keys(group):
            continue
        kind = get_args(field.type)[0]
        if kind in (int, bool):  # a number may count paths or addresses; it names none
            words: tuple[str, ...] = ("listen", "server")
        else:
            assert field.encode_name in TEXTS
            words = ("path", "dir", "home", "addr", "listen", "ip1", "ip2", "server", "cmd")
        for word in words:
            assert word not in field.encode_name.lower(), field.encode_name


@pytest.mark.parametrize("group", ALL)
def test_every_live_number_has_a_range_and_its_default_lies_inside(group: type[Options]) -> None:
    live = live_keys(group)
    for field in msgspec.structs.fields(group):
        kind, meta = get_args(field.type)[:2]
        if kind is int and field.encode_name in live:
            assert meta.ge is not None and meta.le is not None, field.encode_name
            assert meta.ge <= getattr(group(), field.name) <= meta.le, field.encode_name


def test_what_a_pull_may_bring_fits_into_a_frame() -> None:
    header_bytes_max = 64 * 1024
    for name in ("maxTransferBytesOnMessageInMemory", "maxTransferBytesOnMessageInDisk"):
        for key, kind, *_ in describe(StoreOptions):
            if key == name:
                assert int(kind.partition("–")[2]) <= FRAME_BYTES_MAX - header_bytes_max


def test_what_removes_messages_or_stops_clients_is_marked() -> None:
    marked = dangerous_keys(StoreOptions) | dangerous_keys(BrokerOptions)
    assert marked <= live_keys(StoreOptions) | live_keys(BrokerOptions)
    assert marked == {
        "brokerPermission",
        "cleanFileForciblyEnable",
        "deleteWhen",
        "diskMaxUsedSpaceRatio",
        "diskSpaceCleanForciblyRatio",
        "diskSpaceWarningLevelRatio",
        "fileReservedTime",
        "startAcceptSendRequestTimeStamp",
    }


def test_an_update_is_judged_and_done_as_a_whole() -> None:
    broker, store = BrokerOptions(), StoreOptions()
    groups = (broker, store)
    asked = {"fileReservedTime": " 48 ", "traceOn": "false", "longPollingEnable": "true"}
    changes = judge(groups, asked, {}, "broker")
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
        ("fileReservedTime", "3000000000", Code.SYSTEM_ERROR, "expected int <= 878400"),
        ("startAcceptSendRequestTimeStamp", "9" * 4000, Code.SYSTEM_ERROR, "TimeStamp=999"),
        ("maxTransferBytesOnMessageInMemory", "2147483647", Code.SYSTEM_ERROR, "<= 15728640"),
        ("cleanResourceInterval", "1", Code.SYSTEM_ERROR, "expected int >= 100"),
        ("traceOn", "maybe", Code.SYSTEM_ERROR, "traceOn=maybe: expected bool"),
        ("deleteWhen", "25", Code.SYSTEM_ERROR, "25 is no hour; list hours"),
    ],
)
def test_what_is_refused(key: str, text: str, code: int, said: str) -> None:
    store = StoreOptions()
    with pytest.raises(Refused) as refused:
        asked = {"diskMaxUsedSpaceRatio": "50", key: text}
        judge((BrokerOptions(), store), asked, {"deleteWhen": no}, "broker")
    assert refused.value.code == code
    assert said in refused.value.remark and "Nothing was changed" in refused.value.remark
    assert store.disk_max_used_space_ratio == 75
