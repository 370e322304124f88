"""The table and the bodies against frames recorded from the Java system and its clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.goldens import Golden, each_golden, frames

from cosmodrome.wire import bodies, fastjson, table
from cosmodrome.wire.bodies import Body
from cosmodrome.wire.frame import Frame

# Fields that any request may carry and no handler reads: routing hints of 4.9 and 5.x clients,
# access control, and the request time.
GENERIC = {
    "bname", "ns", "nsd", "oway", "lo",
    "AccessKey", "Signature", "OnsChannel", "SecurityToken",
    "ReqT",
}  # fmt: skip

# Members that only 5.x writes and that nothing here reads.
ONLY_5X = {
    "enableActingMaster", "forbiddenTable", "heartbeatFingerprint", "mappingDataVersion",
    "pullOffset", "topicPutTps", "topicQueueMappingDetailMap", "topicQueueMappingInfoMap",
    "withoutSub",
}  # fmt: skip

REQUEST_BODIES: dict[int, type[Body]] = {
    34: bodies.HeartbeatData,
    41: bodies.LockBatchRequestBody,
    42: bodies.UnlockBatchRequestBody,
    46: bodies.CheckClientRequestBody,
    103: bodies.RegisterBrokerBody,
    200: bodies.SubscriptionGroupConfig,
    322: bodies.DataVersion,
}
REPLY_BODIES: dict[int, type[Body]] = {
    21: bodies.TopicConfigSerializeWrapper,
    28: bodies.KVTable,
    38: bodies.GetConsumerListByGroupResponseBody,
    41: bodies.LockBatchResponseBody,
    43: bodies.ConsumerOffsetSerializeWrapper,
    103: bodies.KVTable,
    105: bodies.TopicRouteData,
    106: bodies.ClusterInfo,
    201: bodies.SubscriptionGroupWrapper,
    202: bodies.TopicStatsTable,
    203: bodies.ConsumerConnection,
    204: bodies.ProducerConnection,
    206: bodies.TopicList,
    208: bodies.ConsumeStats,
    219: bodies.KVTable,
    224: bodies.TopicList,
    300: bodies.GroupList,
    304: bodies.TopicList,
    305: bodies.TopicList,
    311: bodies.TopicList,
    312: bodies.TopicList,
    313: bodies.TopicList,
    328: bodies.ProducerTableInfo,
    351: bodies.TopicConfig,
}


@cache
def recorded(golden: Golden) -> list[dict[str, Any]]:
    return [
        {**frame, "folder": path.parent.name}
        for path in golden.captures()
        for frame in frames(path)
    ]


def requests(golden: Golden) -> Iterator[dict[str, Any]]:
    # A code without a name was sent to see it refused.
    return (
        frame
        for frame in recorded(golden)
        if frame["kind"] in ("request", "oneway") and frame["name"] != str(frame["code"])
    )


def responses(golden: Golden) -> Iterator[dict[str, Any]]:
    return (
        frame
        for frame in recorded(golden)
        if frame["kind"] == "response" and frame.get("request") != str(frame.get("request_code"))
    )


def ext_of(frame: dict[str, Any]) -> dict[str, str]:
    """Header fields as strings, the way the codec hands them over."""
    ext = frame["header"].get("extFields") or {}
    return {name: value if isinstance(value, str) else _text(value) for name, value in ext.items()}


def _text(value: Any) -> str:
    return json.dumps(value)


@each_golden
def test_every_recorded_code_has_a_row(golden: Golden) -> None:
    index = json.loads((golden.path / "wire" / "index.json").read_text())
    table_names = {code: row.name for code, row in table.rows().items()}
    assert {entry["code"]: entry["name"] for entry in index}.items() <= table_names.items()
    assert {frame["code"] for frame in requests(golden)} <= set(table_names)


@each_golden
def test_request_fields_are_known_and_come_back(golden: Golden) -> None:
    seen = 0
    for frame in requests(golden):
        row = table.rows()[frame["code"]]
        ext = ext_of(frame)
        known = {field.encode_name for field in table.header_fields(row)}
        assert set(ext) - known <= GENERIC, row.name
        again = table.encode(table.decode(row, ext, b""))  # fails when a required one is missing
        wanted = {name: value for name, value in ext.items() if name in known}
        assert _normal(row, again) == _normal(row, wanted), row.name
        seen += 1
    assert seen > (400 if golden.is_own else 2000)


@each_golden
def test_reply_fields_are_known_and_come_back(golden: Golden) -> None:
    seen = 0
    for frame in responses(golden):
        if frame.get("request_code") is None:
            continue
        row = table.rows()[frame["request_code"]]
        ext = ext_of(frame)
        known = {field.encode_name for field in table.header_fields(row.reply)}
        assert set(ext) <= known, row.name
        if frame["code"] in row.success_codes:
            reply = table.decode_reply(row, Frame(code=frame["code"], opaque=1, ext=ext))
            assert table.encode(reply) == ext, row.name
            seen += 1
    assert seen > (300 if golden.is_own else 1500)


def _normal(row: type[table.Command[Any]], ext: dict[str, str]) -> dict[str, str]:
    """Booleans in one spelling: the C++ client writes them as digits."""
    flags = {field.encode_name for field in table.header_fields(row) if "bool" in str(field.type)}
    spelled = {"0": "false", "1": "true"}
    return {name: spelled.get(text, text) if name in flags else text for name, text in ext.items()}


@each_golden
def test_request_bodies_come_back(golden: Golden) -> None:
    seen = set()
    for frame in requests(golden):
        kind = REQUEST_BODIES.get(frame["code"])
        if kind is not None and "body_text" in frame:
            check_body(kind, frame)
            seen.add(frame["code"])
    assert seen == set(REQUEST_BODIES) - {322}


@each_golden
def test_reply_bodies_come_back(golden: Golden) -> None:
    seen = set()
    for frame in responses(golden):
        kind = REPLY_BODIES.get(frame.get("request_code", -1))
        if kind is not None and "body_text" in frame and frame["code"] == 0:
            check_body(kind, frame)
            seen.add(frame["request_code"])
    # The 4.9.7 broker does not know 351.
    assert seen == set(REPLY_BODIES) - ({351} if golden.is_own else set())


def check_body(kind: type[Body], frame: dict[str, Any]) -> None:
    text = frame["body_text"].encode()
    body = bodies.decode(kind, text)
    # A recorded body that is standard JSON where upstream has a choice asks for the same choice.
    standard = b'"brokerAddrs":{"' in text
    again = fastjson.loads(bodies.encode(body, standard=standard))
    assert comparable(again) == completed(comparable(fastjson.loads(text)), comparable(again))


def comparable(value: Any, name: str = "") -> Any:
    """Without what is ours or 5.x's alone, and with sets in one order."""
    if isinstance(value, dict):
        return {
            key: comparable(item, key)
            for key, item in value.items()
            if key not in ONLY_5X and key != "topicSynFlag" and item is not None
        }
    if isinstance(value, list):
        items = [comparable(item) for item in value]
        # Tag hashes are computed again, so text, order and faulty ones are not compared.
        return sorted(int(item) for item in items) if name == "codeSet" else items
    return value


# What a member means when a client leaves it out or writes it in another way.
_SAME = {
    "consumeType": bodies.CONSUME_TYPES,
    "messageModel": bodies.MESSAGE_MODELS,
    "consumeFromWhere": bodies.CONSUME_FROM_WHERE,
}


def completed(recorded: Any, ours: Any) -> Any:
    """The recorded value with members that its client left out taken from ours."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        out = {}
        for key in {**ours, **recorded}:
            if key not in recorded:
                out[key] = ours[key]
            elif key == "codeSet" and not any(recorded[key]):
                out[key] = ours[key]  # the C++ client does not compute hashes
            elif key in _SAME and isinstance(recorded[key], int):
                out[key] = _SAME[key][recorded[key]]
            elif isinstance(ours.get(key), int) and isinstance(recorded[key], str):
                out[key] = int(recorded[key])
            else:
                out[key] = completed(recorded[key], ours.get(key))
        return out
    if isinstance(recorded, list) and isinstance(ours, list) and len(recorded) == len(ours):
        return [completed(item, mine) for item, mine in zip(recorded, ours, strict=True)]
    return recorded


@each_golden
def test_java_bodies_are_complete_without_help(golden: Golden) -> None:
    """`completed` must not hide members that this side forgot: Java writes all of them."""
    checked = 0
    for frame in requests(golden):
        kind = REQUEST_BODIES.get(frame["code"])
        if kind is None or "body_text" not in frame or frame["header"]["language"] != "JAVA":
            continue
        if frame["folder"] == "clients":
            continue  # the Node client calls itself Java
        text = frame["body_text"].encode()
        again = fastjson.loads(bodies.encode(bodies.decode(kind, text)))
        assert comparable(again) == comparable(fastjson.loads(text))
        checked += 1
    assert checked > (40 if golden.is_own else 200)
