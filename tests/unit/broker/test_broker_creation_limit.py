"""How many topics sends may create per minute."""

from __future__ import annotations

import pytest

from cosmodrome.broker.members import creation_limit
from cosmodrome.broker.members.creation_limit import CreationLimit
from cosmodrome.errors import Code, Refused


class World:
    """A limit of 3 per minute from one address and 5 in all, and its clock."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.limit = CreationLimit(lambda: self.now_ms, lambda: 3, lambda: 5)

    def created(self, address: str, count: int) -> int:
        """How many of them were let through."""
        for number in range(count):
            try:
                self.limit.take("T", address)
            except Refused:
                return number
        return count


def test_one_address_has_its_share_and_all_have_theirs() -> None:
    world = World()
    assert world.created("a", 10) == 3
    assert world.created("b", 10) == 2
    world.now_ms += 20_000  # a third of a minute
    assert world.created("a", 10) == 1
    world.now_ms -= 60_000
    assert world.created("c", 10) == 0
    world.now_ms += 600_000
    assert world.created("a", 10) == 3


def test_the_refusal_names_the_setting_and_when_to_try_again() -> None:
    world = World()
    world.created("192.0.2.1", 3)
    with pytest.raises(Refused) as refused:
        world.limit.take("T", "192.0.2.1")
    assert refused.value.code == Code.SYSTEM_BUSY
    assert "autoCreateTopicsPerMinuteByAddress" in refused.value.remark
    assert "in 20 s" in refused.value.remark


def test_addresses_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation_limit, "ADDRESSES_MAX", 4)
    world = World()
    for number in range(20):
        world.now_ms += 60_000
        assert world.created(f"host{number}", 1) == 1
        assert len(world.limit._addresses) <= 4
