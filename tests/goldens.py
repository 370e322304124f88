"""Where data recorded from the Java system lies: this repository's own, and more if it is there.

@each_golden
def test_something(golden: Golden) -> None:
    golden.wire("json", "send_v2")
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parent

# Sizes of the files in a folder that does not name them in options.json.
_OTHER_SIZES = {
    "mappedFileSizeCommitLog": 262_144,
    "mappedFileSizeConsumeQueue": 6000,
    "maxHashSlotNum": 100,
    "maxIndexNum": 400,
}


@dataclass(frozen=True, slots=True)
class Golden:
    """One folder of recorded data."""

    name: str
    path: Path

    @property
    def is_own(self) -> bool:
        """Whether it is this repository's: smaller, and without every kind of run."""
        return self.name == "own"

    @property
    def sizes(self) -> dict[str, int]:
        """File sizes of the stores, as keyword arguments of StoreOptions."""
        path = self.path / "options.json"
        sizes = json.loads(path.read_text()) if path.exists() else _OTHER_SIZES
        return {
            "mapped_file_size_commit_log": sizes["mappedFileSizeCommitLog"],
            "mapped_file_size_consume_queue": sizes["mappedFileSizeConsumeQueue"],
            "max_hash_slot_num": sizes["maxHashSlotNum"],
            "max_index_num": sizes["maxIndexNum"],
        }

    def manifest(self, name: str) -> dict[str, Any]:
        """What the Java side reads from the store of this name."""
        path = self.path / f"{name}.manifest.json"
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data

    def captures(self, *folders: str) -> list[Path]:
        """Files of recorded frames; of all folders when none is named."""
        found = sorted((self.path / "wire").glob("*/*.jsonl"))
        return [path for path in found if not folders or path.parent.name in folders]

    def wire(self, folder: str, scenario: str) -> list[dict[str, Any]]:
        """Frames of one scenario in the order they were seen."""
        return list(frames(self.path / "wire" / folder / f"{scenario}.jsonl"))

    def skip_without(self, part: str) -> None:
        """Skips the running test when this folder has no such part."""
        if not (self.path / part).exists():
            pytest.skip(f"{part} is not among the recordings called {self.name}")


def frames(path: Path) -> Iterator[dict[str, Any]]:
    """The frames of one file; raw bytes of the replication port are left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["kind"] != "raw":
                yield row


GOLDENS = [
    Golden(name, path)
    for name, path in (
        ("own", _TESTS / "golden"),
        ("shared", _TESTS.parents[1] / "shared" / "golden"),
    )
    if path.is_dir()
]
GOLDEN_DIRS = [golden.path for golden in GOLDENS]
GOLDEN_IDS = [golden.name for golden in GOLDENS]

each_golden = pytest.mark.parametrize("golden", GOLDENS, ids=GOLDEN_IDS)
