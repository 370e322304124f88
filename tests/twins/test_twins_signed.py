"""Signatures of requests: compiled and plain, and what neither may take for proven."""

from __future__ import annotations

import base64
import hmac
import json
import random
import struct
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.goldens import Golden, each_golden, frames
from tests.twins.signing import KEY, SECRET, signed, unsigned, with_field
from tests.twins.test_twins_lanes import frame, send_fields

from cosmodrome.layout import RIGHTS_KEPT_MAX
from cosmodrome.speed.choice import compiled
from cosmodrome.speed.signed import pure
from cosmodrome.wire.frame import decode
from cosmodrome.wire.signature import signature

ASKED = {310: ("b",), 320: ("b",), 10: ("topic",), 11: ("topic", "consumerGroup"), 15: ("topic",)}


@pytest.fixture(params=["native", "pure"])
def core(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "pure":
        return pure
    return native()


def native() -> ModuleType:
    module = compiled("cosmodrome.speed.signed.native")
    if module is None:
        pytest.skip("the compiled signatures are not built")
    return module


def checker(core: ModuleType, allows: Callable[..., bool] = lambda *_: True) -> Any:
    return core.Signatures(ASKED, {KEY: SECRET}.get, allows)


def proven(core: ModuleType, data: bytes) -> int:
    end: int = checker(core).proven_end(memoryview(data), 0)
    return end


@pytest.mark.parametrize("plain", [False, True])
def test_hmac_is_that_of_the_library(plain: bool) -> None:
    chance = random.Random(18)
    for _ in range(600):
        secret, first, second = (
            chance.randbytes(chance.randrange(size)) for size in (130, 260, 300)
        )
        found = native().hmac_sha1(secret, first, second, plain=plain)
        assert found == hmac.digest(secret, first + second, "sha1")


@pytest.mark.parametrize("style", range(6))
def test_what_is_signed_right_is_proven(core: ModuleType, style: int) -> None:
    texts = ("KEYS\x01k1\x02TAGS\x01A", "x\x01ü€\U0001f680", 'q\x01"\\/\b\n\t', "", "y" * 9000)
    data = b"".join(
        signed(
            frame(code, number, {**send_fields(i=text), "topic": "T", "consumerGroup": "g"}, body)
        )
        for number, (code, text) in enumerate((code, text) for code in ASKED for text in texts)
        for body in (b"", b"x", b"body" * 50)
    )
    assert proven(core, data) == len(data)
    assert proven(core, data[:-1]) < len(data) - 1
    bare = frame(310, 1, send_fields(), b"x", style=style)
    assert proven(core, signed(bare)) == len(signed(bare)) and proven(core, bare) == 0


def test_fields_are_signed_in_the_order_of_their_names(core: ModuleType) -> None:
    names = [
        "z",
        "Z",
        "_",
        "",
        "aa",
        "a b",
        "bornTimestamp",
        "bornTimestamq",
        "bornTimes",
        "B" * 70,
    ]
    chance = random.Random(5)
    for _ in range(20):
        chance.shuffle(names)
        ext = {**send_fields(), **{name: f"<{name}>" for name in names}}
        for style in (0, 4):
            data = signed(frame(310, 1, ext, b"x", style=style))
            assert proven(core, data) == len(data)


@pytest.mark.parametrize("style", [0, 4])
def test_of_fields_that_come_twice_the_last_counts(core: ModuleType, style: int) -> None:
    once = frame(310, 1, send_fields(), b"x", style=style)
    first, last = (with_field(once, "b", topic) for topic in ("Plain", "Other"))
    data = signed(last)
    assert decode(data[4:]).ext["b"] == "Plain"
    assert proven(core, data) == len(data) and proven(core, signed(first)) > 0
    other = with_field(frame(310, 1, send_fields(b="Other"), b"x", style=style), "b", "Plain")
    assert proven(core, data.replace(b"Other", b"Evil!")) == len(data)  # it is not signed
    rights: list[object] = []
    checker(core, lambda *right: not rights.append(right)).proven_end(memoryview(signed(other)), 0)
    assert rights == [(KEY, 310, ("Other",))]


@pytest.mark.parametrize("style", [0, 4, 5])
def test_headers_that_repeat_themselves(style: int) -> None:
    """Those that the compiled code recognises, and those that only look like them."""
    chance, compiled_one, law = random.Random(style), checker(native()), checker(pure)
    odd = ("", "x" * 70, "ü", 'q"', "back\\slash", "\u20ac", "a\x01b", "\x1f", "\U0001f680", "0")
    for number in range(400):
        fields = send_fields(e=str(number % 4), g=str(1690000000000 + number))
        fields["i"] = f"UNIQ_KEY\x01{number:032X}\x02TAGS\x01A"
        if number % 3 == 0:
            fields[chance.choice("abegij")] = chance.choice(odd)
        opaque = chance.choice((number, 0, -1, (1 << 31) - 1, 1 << 31)) if style != 4 else number
        data = signed(frame(310, opaque, fields, b"x" * number, style=style))
        if number % 7 == 0:
            data = data[:-1] + b"y"
        view = memoryview(data)
        assert compiled_one.proven_end(view, 0) == law.proven_end(view, 0), number
    assert compiled_one.shaped > 100


def test_what_the_server_leaves_out(core: ModuleType) -> None:
    data = signed(frame(310, 1, {**send_fields(), "_UNIQUE_KEY_QUERY": "true"}))
    assert proven(core, data) == len(data)
    assert proven(core, data.replace(b'"true"', b'"fals"')) == len(data)


@pytest.mark.parametrize("style", [0, 4, 5])
def test_no_byte_of_what_is_signed_may_differ(core: ModuleType, style: int) -> None:
    data = signed(frame(310, 77, send_fields(), b"some body", style=style))
    signatures, whole = checker(core), decode(data[4:])
    assert signatures.proven_end(memoryview(data), 0) == len(data)
    for at in range(len(data)):
        for bit in (1, 0x20, 0x80):
            other = bytearray(data)
            other[at] ^= bit
            if signatures.proven_end(memoryview(other), 0):
                # Names, code and opaque are not signed in 4.x: only values, in order, and body.
                read = decode(bytes(other[4:]))
                assert read.ext["AccessKey"] == KEY
                assert signature(SECRET, read.ext, read.body) == whole.ext["Signature"], at


def test_who_may_not_is_not_proven(core: ModuleType) -> None:
    asked: list[tuple[str, int, tuple[str, ...]]] = []

    def allows(key: str, code: int, values: tuple[str, ...]) -> bool:
        asked.append((key, code, values))
        return values[0] == "Plain"

    signatures = checker(core, allows)
    mine, others = (
        memoryview(signed(frame(310, 1, send_fields(b=topic)))) for topic in ("Plain", "Other")
    )
    for view, end in ((mine, len(mine)), (others, 0), (mine, len(mine)), (others, 0)):
        assert signatures.proven_end(view, 0) == end
    assert asked.count((KEY, 310, ("Plain",))) == 1  # what is allowed is remembered
    assert asked.count((KEY, 310, ("Other",))) == 2  # what is not, is not
    pull = signed(frame(11, 1, {"topic": "Plain", "consumerGroup": "g"}))
    assert signatures.proven_end(memoryview(pull), 0) == len(pull)
    assert asked[-1] == (KEY, 11, ("Plain", "g"))


def test_what_is_forgotten_is_asked_again(core: ModuleType) -> None:
    secrets, rights = {KEY: SECRET}, [True]
    signatures = core.Signatures(ASKED, secrets.get, lambda *_: rights[0])
    view = memoryview(signed(frame(310, 1, send_fields())))
    assert signatures.proven_end(view, 0) == len(view)
    rights[0] = False
    assert signatures.proven_end(view, 0) == len(view)
    signatures.forget()
    assert signatures.proven_end(view, 0) == 0
    rights[0], secrets[KEY] = True, b"another secret"
    signatures.forget()
    assert signatures.proven_end(view, 0) == 0
    del secrets[KEY]
    signatures.forget()
    assert signatures.proven_end(view, 0) == 0


def test_who_cannot_sign_is_not_remembered(core: ModuleType) -> None:
    asked: list[object] = []
    signatures = checker(core, lambda *right: not asked.append(right))
    for number in range(50):
        wrong = signed(frame(310, 1, send_fields(b=f"T{number}")), secret=b"no secret")
        assert signatures.proven_end(memoryview(wrong), 0) == 0
    assert not asked


def test_what_is_remembered_is_bounded(core: ModuleType) -> None:
    asked: list[object] = []
    signatures = checker(core, lambda *right: not asked.append(right))
    first = memoryview(signed(frame(310, 1, send_fields(b="T"))))
    signatures.proven_end(first, 0)
    for number in range(RIGHTS_KEPT_MAX):
        one = signed(frame(310, 1, send_fields(b=f"T{number}"), style=4))
        assert signatures.proven_end(memoryview(one), 0) == len(one)
    assert signatures.proven_end(first, 0) == len(first)
    assert len(asked) == RIGHTS_KEPT_MAX + 2


def test_other_codes_are_not_proven(core: ModuleType) -> None:
    assert proven(core, signed(frame(34, 1, send_fields()))) == 0


@each_golden
def test_frames_of_all_clients_are_proven(golden: Golden, core: ModuleType) -> None:
    seen = set()
    for path in golden.captures("json", "binary", "clients"):
        client = path.name.split("_")[0] if path.parent.name == "clients" else "java"
        for row in frames(path):
            if row["dir"] == "c2s" and row["kind"] != "response" and row["code"] in ASKED:
                data = base64.b64decode(row["frame_b64"])
                data = signed(unsigned(data) if not data[4] else data)
                if client == "node" and core is not pure:
                    continue  # it writes times as bare numbers: the lane leaves them as well
                assert proven(core, data) == len(data), (path.name, row["header"])
                seen.add((client, row["code"]))
    assert {client for client, _ in seen} >= {"java", "go", "cpp"}
    assert {code for _, code in seen} == set(ASKED)


@each_golden
def test_frames_that_java_signed(golden: Golden, core: ModuleType) -> None:
    golden.skip_without("wire/acl")
    secrets = dict.fromkeys(("rocketmq2", "RocketMQ"), b"12345678")
    signatures = core.Signatures(ASKED, secrets.get, lambda *_: True)
    count = 0
    for path in golden.captures("acl"):
        for row in frames(path):
            if row["dir"] == "c2s" and row["code"] in ASKED and row["kind"] != "response":
                data = base64.b64decode(row["frame_b64"])
                right = row["header"]["extFields"].get("AccessKey") in secrets
                right = right and "bad_signature" not in path.name
                assert signatures.proven_end(memoryview(data), 0) == (len(data) if right else 0)
                count += right
    assert count > 10


# --- any header ------------------------------------------------------------------------------

WORDS = st.text(st.sampled_from('ab"\\/\n\x01é€\U0001f680 {}:,'), max_size=12)
NAMES = st.one_of(st.sampled_from(["b", "i", "AccessKey", "Signature", "_UNIQUE_KEY_QUERY"]), WORDS)
VALUES = st.one_of(
    WORDS, st.integers(-5, 1 << 70), st.booleans(), st.none(), st.floats(), st.just([]), st.just({})
)


@st.composite
def texts_of_headers(draw: st.DrawFn) -> Iterator[bytes]:
    """A JSON header, perhaps with members or fields that come twice, of any kind."""
    pairs = [
        ("b", "Plain"),
        ("AccessKey", KEY),
        *draw(st.lists(st.tuples(NAMES, VALUES), max_size=6)),
    ]
    pairs = draw(st.permutations(pairs))
    ascii_only, blank = draw(st.booleans()), draw(st.sampled_from(["", " "]))

    def text(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    ext = f",{blank}".join(f"{text(name)}{blank}:{text(value)}" for name, value in pairs)
    members = [f'"code":{blank}310', f'"extFields":{{{ext}}}', '"opaque":7', '"language":"GO"']
    members += draw(
        st.lists(
            st.sampled_from(
                [
                    '"remark":null',
                    '"flag":0',
                    '"code":310',
                    '"extFields":{}',
                    '"x":{}',
                    '"remark":"é"',
                ]
            ),
            max_size=2,
        )
    )
    return f"{{{','.join(draw(st.permutations(members)))}}}".encode()  # type: ignore[return-value]


@settings(max_examples=150, deadline=None)
@given(header=texts_of_headers(), body=st.binary(max_size=70), noise=st.binary(max_size=2))
def test_compiled_code_proves_nothing_beyond_the_law(
    header: bytes, body: bytes, noise: bytes
) -> None:
    native()
    if noise:
        at = noise[0] % len(header)
        header = header[:at] + noise[1:] + header[at + 1 :]
    data = struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
    try:
        read = decode(data[4:])
    except Exception:
        assert proven(native(), data) == proven(pure, data) == 0
        return
    name = signature(SECRET, {**read.ext, "Signature": ""}, body)
    sign = f'"Signature":"{name}",'.encode()
    header = header.replace(b'"extFields":{', b'"extFields":{' + sign, 1)
    data = struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
    by_native, by_law = proven(native(), data), proven(pure, data)
    assert by_native in (0, by_law)
