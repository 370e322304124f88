"""The fuzzer finds what it is there for, says the same twice, and every target takes its corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.fuzz.__main__ import TARGETS
from tests.fuzz.engine import Broken, Target, at_most, attempt, fuzz

SLOWER = {
    "store": 4,
    "http": 40,
    "lane": 170,
    "guarded": 170,
    "settings": 150,
}  # inputs; others take 500


class Planted(Target):
    """Breaks on a word that no input of the corpus has."""

    name = "planted"
    words: Sequence[bytes] = (b"boom",)

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def corpus(self) -> Sequence[bytes]:
        return [b"hello world", b"tick tock"]

    def check(self, data: bytes, chance: random.Random) -> str:
        self.seen.append(data)
        if b"boom" in data:
            raise KeyError("no such thing")
        return str(len(data))


def test_a_fault_is_found_saved_and_replayed(tmp_path: Path) -> None:
    result = fuzz(Planted(), 1, executions=5_000, folder=tmp_path)
    assert "KeyError" in result.fault and "INPUT=" in str(result)
    assert result.saved is not None and b"boom" in result.saved.read_bytes()
    with pytest.raises(KeyError):
        attempt(Planted(), result.saved.read_bytes())


def test_a_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    first, again, other = Planted(), Planted(), Planted()
    for target, seed in ((first, 3), (again, 3), (other, 4)):
        target.words = ()
        fuzz(target, seed, executions=200, folder=tmp_path)
    assert first.seen == again.seen != other.seen


def test_new_ends_join_the_corpus(tmp_path: Path) -> None:
    target = Planted()
    target.words = (b"a long word that grows",)
    result = fuzz(target, 1, executions=2_000, folder=tmp_path)
    # From inputs of eleven bytes no single step leads to so many.
    assert max(map(len, target.seen)) > 500 and len(result.ends) > 200


def test_an_input_that_takes_too_long_is_broken() -> None:
    with pytest.raises(Broken, match="CPU"), at_most(0.05):
        while True:
            pass


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_keeps_its_promises(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]()
    try:
        result = fuzz(target, 0, executions=SLOWER.get(name, 500), folder=tmp_path)
    finally:
        target.close()
    assert not result.fault, result
    assert len(result.ends) > 1
