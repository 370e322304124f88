"""Every file in `changes/` is a fragment of a known kind, and fragments make a section."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from tools.changelog import KINDS, BadFragmentError, release, section

ROOT = Path(__file__).parents[2]
PAGE = "# Changelog\n\nNew ones are elsewhere.\n\n## 0.1.0 (2026-11-17)\n\nThe first.\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("Rules.")
    (tmp_path / "CHANGELOG.md").write_text(PAGE)
    return tmp_path


def test_the_fragments_that_are_there() -> None:
    section(ROOT / "changes")


def test_the_rules_name_every_kind() -> None:
    rules = (ROOT / "changes" / "README.md").read_text()
    assert [kind for kind in KINDS if f"| `{kind}` |" not in rules] == []


def test_a_release_joins_fragments_by_kind_above_the_newest_section(repository: Path) -> None:
    changes = repository / "changes"
    (changes / "slow-start.fix.md").write_text("A start is\nfast.\n")
    (changes / "old-files.compat.md").write_text("Old files open.")
    (changes / "another.fix.md").write_text("Nothing is lost.")
    release(repository, "0.2.0", datetime.date(2026, 12, 1))
    assert (repository / "CHANGELOG.md").read_text() == (
        "# Changelog\n\nNew ones are elsewhere.\n\n"
        "## 0.2.0 (2026-12-01)\n\n"
        "### Compatibility\n\n- Old files open.\n\n"
        "### Fixes\n\n- Nothing is lost.\n- A start is fast.\n\n"
        "## 0.1.0 (2026-11-17)\n\nThe first.\n"
    )
    assert [path.name for path in changes.iterdir()] == ["README.md"]


def test_a_long_fragment_is_wrapped(repository: Path) -> None:
    (repository / "changes" / "words.feature.md").write_text("word " * 60)
    first, second, *_ = section(repository / "changes").splitlines()[2:]
    assert first.startswith("- word") and second.startswith("  word")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slow-start.md", "It has no kind."),
        ("slow-start.bug.md", "Nobody knows this kind."),
        (".fix.md", "It has no name."),
        ("slow-start.fix.txt", "It is not Markdown."),
        ("slow-start.fix.md", ""),
        ("slow-start.fix.md", "- It has a bullet."),
    ],
)
def test_what_is_no_fragment(name: str, text: str, repository: Path) -> None:
    (repository / "changes" / name).write_text(text)
    with pytest.raises(BadFragmentError, match=name):
        release(repository, "0.2.0", datetime.date(2026, 12, 1))
    assert (repository / "CHANGELOG.md").read_text() == PAGE


def test_what_cannot_be_released(repository: Path) -> None:
    with pytest.raises(BadFragmentError, match="nothing to release"):
        release(repository, "0.2.0", datetime.date(2026, 12, 1))
    (repository / "changes" / "again.fix.md").write_text("It is released once.")
    with pytest.raises(BadFragmentError, match=r"section 0\.1\.0 already"):
        release(repository, "0.1.0", datetime.date(2026, 12, 1))
