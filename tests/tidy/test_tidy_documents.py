"""Documents hold together: links lead somewhere, and commands can be pasted into a shell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in (".", "docs", "bench", "changes", "deploy")
    for path in (ROOT / folder).glob("*.md")
)
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ )?((?:\.venv/bin/)?cosmo .*)$", re.MULTILINE)


def prose(page: Path) -> str:
    """The text without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The names of its headings, as they are in links."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """The lines of shell code that begin with `cosmo`, continued lines joined."""
    blocks = [
        text for kind, text in FENCED.findall(page.read_text()) if kind in {"", "sh", "console"}
    ]
    return COMMAND.findall("".join(blocks).replace("\\\n", " "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", prose(page)):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def test_there_are_commands_to_look_at() -> None:
    assert len(PAGES) >= 20
    assert len([command for page in PAGES for command in commands(page)]) >= 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_shell_does_not_split_commands(page: Path) -> None:
    for command in commands(page):
        words = shlex.shlex(command, posix=True, punctuation_chars=";()")
        words.whitespace_split = True
        assert not set(words) & {";", "(", ")"}, (
            f"{page.name}: quote what a shell splits: {command}"
        )
