"""The JSON dialect: what it accepts, what it refuses, and the bytes it writes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.goldens import Golden, each_golden

from cosmodrome.env.background import at_once
from cosmodrome.errors import ProtocolError
from cosmodrome.speed.dialect import DEPTH_MAX
from cosmodrome.wire import fastjson
from cosmodrome.wire.fastjson import ObjectKey, dumping, dumps, loads

QUEUE = ObjectKey.of({"topic": "T", "queueId": 3, "brokerName": "b"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":[1,-2.5,true,false,null,"x"]}', {"a": [1, -2.5, True, False, None, "x"]}),
        ("{0:6,1:10}", {0: 6, 1: 10}),
        ('{"0":6}', {"0": 6}),
        ("{-1:{2:{}}}", {-1: {2: {}}}),
        ('{{"brokerName":"b","queueId":3,"topic":"T"}:5}', {QUEUE: 5}),
        ('{{"topic":"T","brokerName":"b","queueId":3}:[],{}:{}}', {QUEUE: [], ObjectKey(): {}}),
        ('{{"a":{"b":[1,{}]}}:1}', {ObjectKey.of({"a": {"b": [1, {}]}}): 1}),
        ('\t{ 1 : 2 ,\n "a" : [ 1 , 2 ] } \n', {1: 2, "a": [1, 2]}),
        ('{1:"\\u4e2d\\n\\ud83d\\ude00"}', {1: "中\n😀"}),
        ('{1:1,"@type":"java.lang.Runtime"}', {1: 1}),
        ('{"@type":"x","a":1}', {"a": 1}),
        ('{1:1e3,2:{"a":1,"a":2}}', {1: 1000.0, 2: {"a": 2}}),
        ("7\n", 7),
    ],
)
def test_reads(text: str, value: Any) -> None:
    assert loads(text) == value
    assert loads(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "position", "why"),
    [
        ("", 0, "ends early"),
        ("{", 1, "expected a key"),
        ("{1:2,}", 5, "expected a key"),
        ("{1.5:2}", 1, "expected a key"),
        ("{true:2}", 1, "expected a key"),
        ("{1 2}", 3, "expected ':'"),
        ("{1:2 3}", 5, "expected ',' or '}'"),
        ("[1,]", 3, "expected a value"),
        ("[1 2]", 3, "expected ',' or ']'"),
        ("{0:1} x", 6, "more text"),
        ('{0:"abc', 3, "no end"),
        ('{0:"\\q"}', 3, "bad escape"),
        ('{0:"\\ud800"}', 3, "bad escape"),
        ('{0:"a\nb"}', 3, "control character"),
        ("{{0:1}:2}", 6, "name is not a string"),
        ("{0:NaN}", 3, "expected a value"),
        ("{0:1e999}", 8, "out of range"),
        ("{0:" + "9" * 500 + "}", 3, "more than 400 characters"),
        ("[" * 200, 101, "nested more than 100"),
        ("{" * 200, 101, "nested more than 100"),
    ],
)
def test_refuses_with_position(text: str, position: int, why: str) -> None:
    with pytest.raises(ProtocolError, match=f"at character {position}: .*{why}"):
        loads(text)


def test_refuses_bytes_that_are_not_utf8() -> None:
    with pytest.raises(ProtocolError, match="not UTF-8 at byte 4"):
        loads(b'{0:"\xff"}')


@pytest.mark.parametrize("text", ["[" * 1_000_000, "{" * 1_000_000, '{"a":' * 500_000])
def test_depth_never_crashes(text: str) -> None:
    with pytest.raises(ProtocolError, match="nested"):
        loads(text)


def test_time_is_linear() -> None:
    def seconds(count: int) -> float:
        text = "{" + ",".join(f'{i}:["a\\\\",{i}]' for i in range(count)) + "}"
        times = []
        for _ in range(3):
            start = time.process_time()
            loads(text)
            times.append(time.process_time() - start)
        return min(times)

    # Quadratic work would take a hundred times as long for ten times the text.
    assert seconds(20_000) < 50 * seconds(2_000)


class TestReferences:
    def test_stands_for_the_value_at_its_path(self) -> None:
        text = '{"a":{"c":{0:[5,6]}},"b":{"$ref":"$.a.c"},"d":[{"$ref":"$.a.c.0[1]"}]}'
        assert loads(text) == {"a": {"c": {0: [5, 6]}}, "b": {0: [5, 6]}, "d": [6]}

    def test_may_lead_to_what_an_earlier_one_completed(self) -> None:
        text = '{"a":[1],"b":{"x":{"$ref":"$.a"}},"c":{"$ref":"$.b"}}'
        assert loads(text) == {"a": [1], "b": {"x": [1]}, "c": {"x": [1]}}

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("$.x", "leads nowhere"),
            ("$.a[9]", "leads nowhere"),
            ("$.a.zero", "leads nowhere"),
            ("..", "does not start at the root"),
            ("$x", "malformed"),
            ("$", "another reference"),
            ("$.b", "another reference"),
        ],
    )
    def test_refused(self, path: str, why: str) -> None:
        with pytest.raises(ProtocolError, match=why):
            loads('{"a":[1],"b":{"$ref":"' + path + '"}}')

    def test_small_text_cannot_stand_for_a_huge_value(self) -> None:
        steps = ['"a0":[' + ",".join("1" for _ in range(100)) + "]"]
        for i in range(1, 30):
            double = ",".join(f'{{"$ref":"$.a{i - 1}"}}' for _ in range(10))
            steps.append(f'"a{i}":[{double}]')
        with pytest.raises(ProtocolError, match="too much data"):
            loads("{" + ",".join(steps) + "}")


def test_one_reference_cannot_stand_for_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastjson, "REFERENCED_VALUES_MAX", 3)
    assert loads('{"a":[1,2],"b":{"$ref":"$.a"}}')["b"] == [1, 2]
    with pytest.raises(ProtocolError, match="too much data"):
        loads('{"a":[1,2,3],"b":{"$ref":"$.a"}}')


def test_writes_compact() -> None:
    value = {"a": {0: 1.5, 1: None}, "t": {QUEUE: [True, "中\n"]}, "e": {}, "l": []}
    assert dumps(value).decode() == (
        '{"a":{0:1.5,1:null},"t":{{"brokerName":"b","queueId":3,"topic":"T"}:[true,"中\\n"]},'
        '"e":{},"l":[]}'
    )


def test_quote_keys_writes_standard_json() -> None:
    assert dumps({0: {QUEUE: 1}}, quote_keys=True).decode() == (
        '{"0":{"{\\"brokerName\\":\\"b\\",\\"queueId\\":3,\\"topic\\":\\"T\\"}":1}}'
    )


@pytest.mark.parametrize(
    "value", [{1.5: 1}, {True: 1}, {(1,): 1}, float("nan"), object(), b"x", "\ud800"]
)
def test_refuses_to_write(value: Any) -> None:
    with pytest.raises(ProtocolError, match=r"JSON|surrogate"):
        dumps(value)


def test_refuses_to_write_endless_values() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ProtocolError, match=f"more than {DEPTH_MAX} deep"):
        dumps(value)


@pytest.mark.parametrize(
    "name",
    [
        "store/config/topics.json",
        "store/config/subscriptionGroup.json",
        "store/config/consumerOffset.json",
        "store/config/consumerFilter.json",
        "store/config/delayOffset.json",
        "store-crash/config/topics.json",
        "client/broadcast-offsets.json",
    ],
)
@each_golden
def test_files_are_written_as_upstream_writes_them(golden: Golden, name: str) -> None:
    golden.skip_without(name)
    path = golden.path / name
    assert dumps(loads(path.read_bytes()), pretty=True) == path.read_bytes()
    assert b"".join(at_once(dumping(loads(path.read_bytes()), pretty=True))) == path.read_bytes()


@pytest.mark.parametrize(
    "value",
    [7, [], {}, {"t": {}}, {"a": [1, {"b": 2}], "t": {f"é{n}": {n: None} for n in range(100)}}],
    ids=repr,
)
@pytest.mark.parametrize("pretty", [False, True])
def test_what_is_written_in_steps_is_the_same(value: Any, pretty: bool) -> None:
    assert b"".join(at_once(dumping(value, pretty=pretty))) == dumps(value, pretty=pretty)


def test_a_large_table_is_written_a_few_rows_at_a_time() -> None:
    table = {f"T{n}": {"n": n} for n in range(10 * fastjson.ROWS_PER_STEP)}
    assert sum(1 for _ in dumping({"version": 1, "table": table})) == 10
