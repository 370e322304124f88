"""ARCHITECTURE.md speaks of things that exist."""

from __future__ import annotations

import re

import pytest
from tests.tidy.source_names import resolves
from tests.tidy.tree import ROOT

SHELL_WORDS: set[str] = set()  # what a shell has and this tree has not


def ticked(text: str) -> list[str]:
    """What stands between back-ticks, outside of blocks of code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return sorted(set(re.findall(r"`([^`]+)`", prose)))


@pytest.mark.parametrize("word", ticked((ROOT / "ARCHITECTURE.md").read_text()))
def test_a_name_in_the_architecture_exists(word: str) -> None:
    assert word in SHELL_WORDS or resolves(word), f"nothing is called `{word}` (any more)"


@pytest.mark.parametrize(
    "word",
    [
        "store/store.py",
        "tests/tidy",
        "wire/commands/",
        "pure.py",
        "jobs/",
        "docs/settings.md",
        "Producer.send",
        "TransactionProducer.send",
        "producer.send",
        "speed.gather",
        "cosmodrome.blocking",
        "Producer",
        "flushDiskType",
        "fastLaneEnable=false",
        "cosmo store check",
        "cosmo topic create Orders --queues 4",
        "group explain",
        "make check",
        "--workers N",
        "COSMODROME_PURE=1",
        "/metrics",
        "time.time",
        "fdatasync",
        "await",
    ],
)
def test_what_exists_is_found(word: str) -> None:
    assert resolves(word)


@pytest.mark.parametrize(
    "word",
    [
        "store/stores.py",
        "tests/tidies",
        "wire/comands/",
        "purer.py",
        "jobz/",
        "docs/setting.md",
        "Producer.sendz",
        "Producerz.send",
        "speed.gathers",
        "cosmodrome.blockings",
        "Producerz",
        "Every",
        "flushDiskTypes",
        "fastLaneEnables=false",
        "cosmo store chek",
        "group explains",
        "make checks",
        "--workerz N",
        "time.times",
        "COSMODROME_PURER=1",
    ],
)
def test_what_does_not_exist_is_not_found(word: str) -> None:
    assert not resolves(word)
