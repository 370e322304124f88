"""Both lanes behind access control: what is signed, badly signed and not signed at all."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.twins.signing import KEY, SECRET, cut, signed
from tests.twins.test_twins_lanes import (
    COUNT,
    Side,
    compare,
    frame,
    random_repeat,
    send_fields,
    stream,
)

from cosmodrome.broker.lane import guarded
from cosmodrome.speed.choice import compiled
from cosmodrome.speed.signed import pure
from cosmodrome.wire.frame import decode

FILE = f"""
globalWhiteRemoteAddresses: [192.0.2.1]
accounts:
  - accessKey: {KEY}
    secretKey: {SECRET.decode()}
    defaultTopicPerm: PUB|SUB
    defaultGroupPerm: PUB|SUB
    topicPerms: [Multi=SUB]
    groupPerms: [other=DENY]
  - accessKey: reader-key
    secretKey: reader-secret
    defaultTopicPerm: SUB
    defaultGroupPerm: SUB
"""


@pytest.fixture(autouse=True)
def signatures(lane_core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures of the same twin as the lane."""
    native = None if lane_core.__name__.endswith("pure") else "cosmodrome.speed.signed.native"
    monkeypatch.setattr(guarded, "core", compiled(native) if native else pure)


@pytest.fixture
def access(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "plain_acl.yml"
    path.write_text(FILE)
    return {"acl_enable": True, "acl_file": str(path)}


def signed_in_a_way(chance: random.Random, one: bytes) -> bytes:
    """Mostly as it should be."""
    way = chance.random()
    if way < 0.75:
        return signed(one)
    if way < 0.8:
        return signed(one, "reader-key", b"reader-secret")
    if way < 0.85:
        return signed(one, secret=b"wrong secret")
    if way < 0.9:
        return signed(one, "nobody-here")
    if way < 0.95:
        return one
    spoilt = bytearray(signed(one))
    at = 8 + (int.from_bytes(spoilt[4:8], "big") & 0xFFFFFF)
    if at < len(spoilt):
        spoilt[at] ^= 1
    return bytes(spoilt)


@pytest.mark.parametrize("seed", range(3))
async def test_any_stream(tmp_path: Path, access: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    frames = [signed_in_a_way(chance, one) for one in cut(stream(seed)[0])]
    data, at, cuts = b"".join(frames), 0, []
    while at < len(data):
        at = min(len(data), at + chance.choice((3, 50, 700, 5000, 60_000, 200_000)))
        cuts.append(at)

    async def drive(side: Side) -> None:
        at = 0
        for end in cuts:
            await side.feed(data[at:end])
            at = end

    slow, fast = await compare(tmp_path, drive, seed=seed, broker=access)
    assert slow.dispatched == COUNT
    assert 20 < fast.dispatched < COUNT * 0.85
    denied = sum(b"signature" in reply for reply in slow.replies().values())
    assert denied > 10


async def test_what_is_plain_and_signed_takes_the_lane(
    tmp_path: Path, access: dict[str, Any]
) -> None:
    chance = random.Random(3)
    frames = [signed(random_repeat(chance, opaque)) for opaque in range(1, 200)]

    async def drive(side: Side) -> None:
        for at in range(0, len(frames), 9):
            await side.feed(b"".join(frames[at : at + 9]))

    slow, fast = await compare(tmp_path, drive, broker=access)
    assert slow.dispatched == len(frames) and fast.dispatched < 0.3 * len(frames)


async def test_replies_come_in_order(tmp_path: Path, access: dict[str, Any]) -> None:
    """A request that is not proven is not served before what came ahead of it."""
    good, bad = (
        [frame(310, number, send_fields(e="0"), b"x", style=4) for number in numbers]
        for numbers in ((1, 3, 5), (2, 4, 6))
    )
    plain = signed(frame(310, 7, {**send_fields(e="0"), "zz": None}, b"y"))
    data = (
        b"".join(part for pair in zip(map(signed, good), bad, strict=True) for part in pair) + plain
    )
    orders = []

    async def drive(side: Side) -> None:
        await side.feed(data)
        await side.answered()
        stored = [
            decode(one[4:]).ext["queueOffset"]
            for one in cut(bytes(side.wire.out))
            if "queueOffset" in decode(one[4:]).ext
        ]
        orders.append(stored)

    await compare(tmp_path, drive, broker=access)
    assert orders[0] == orders[1] == ["0", "1", "2", "3"]


async def test_an_account_that_is_taken_away_is_not_served(
    tmp_path: Path, access: dict[str, Any]
) -> None:
    one = signed(frame(310, 1, send_fields(), b"x"))
    two = signed(frame(310, 2, send_fields(), b"x"))

    async def drive(side: Side) -> None:
        path = Path(access["acl_file"])
        await side.feed(one)
        path.write_text(FILE.replace(KEY, "somebody"))
        await side.broker._base.gate.accounts.load()
        await side.feed(two)
        await side.answered()
        path.write_text(FILE)
        assert b"no account" in side.replies()[2] and b"no account" not in side.replies()[1]

    await compare(tmp_path, drive, broker=access)


async def test_white_addresses_need_not_sign(tmp_path: Path, access: dict[str, Any]) -> None:
    async def drive(side: Side) -> None:
        side.connection.peer = ("192.0.2.1", 4000)
        await side.feed(b"".join(frame(310, number, send_fields(), b"x") for number in range(1, 9)))

    slow, fast = await compare(tmp_path, drive, broker=access)
    assert (slow.dispatched, fast.dispatched) == (8, 0)


class Counting:
    """Signatures that note how many bytes they proved."""

    def __init__(self, signatures: Any) -> None:
        self.signatures = signatures
        self.forget = signatures.forget
        self.proven_bytes = 0

    def proven_end(self, view: memoryview, at: int) -> int:
        end: int = self.signatures.proven_end(view, at)
        self.proven_bytes += end - at
        return end


async def test_each_signature_is_checked_once(tmp_path: Path, access: dict[str, Any]) -> None:
    """Also when the lane leaves every one of many requests to the slow lane."""
    delayed = send_fields(i="DELAY\x013")
    data = b"".join(signed(frame(310, number, delayed, b"x")) for number in range(1, 101))

    async def drive(side: Side) -> None:
        lane: Any = side.broker._server._lane
        if side.fast:
            lane._signatures = Counting(lane._signatures)
        await side.feed(data)
        if side.fast:
            assert lane._signatures.proven_bytes == len(data)

    _, fast = await compare(tmp_path, drive, broker=access)
    assert fast.dispatched == 100
