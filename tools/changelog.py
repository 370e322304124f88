"""Joins the fragments in `changes/` into a section of CHANGELOG.md.

    python -m tools.changelog            # print the section that they make
    python -m tools.changelog 0.2.0      # write it under today's date and delete the fragments

A fragment is `changes/NAME.KIND.md`. `changes/README.md` explains the kinds.
"""

from __future__ import annotations

import argparse
import datetime
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {
    "compat": "Compatibility",
    "durability": "Durability",
    "feature": "Features",
    "speed": "Speed",
    "fix": "Fixes",
    "removal": "Removals",
}
WIDTH = 140


class BadFragmentError(ValueError):
    """A file in `changes/` is not a fragment; the message says what to do."""


def fragments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def section(folder: Path) -> str:
    """The fragments as Markdown, one heading for each kind; empty when there are none."""
    entries: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in fragments(folder):
        entries[_kind(path)].append(_entry(path))
    return "\n".join(
        f"### {KINDS[kind]}\n\n{''.join(texts)}" for kind, texts in entries.items() if texts
    )


def release(root: Path, version: str, date: datetime.date) -> None:
    """Write the section above the newest one, and delete the fragments."""
    folder, changelog = root / "changes", root / "CHANGELOG.md"
    body, page = section(folder), changelog.read_text()
    if not body:
        raise BadFragmentError(f"{folder} has no fragments, so there is nothing to release")
    if f"\n## {version} " in page:
        raise BadFragmentError(f"CHANGELOG.md has a section {version} already")
    before, newest, after = page.partition("\n## ")
    changelog.write_text(f"{before}\n## {version} ({date})\n\n{body}{newest}{after}")
    for path in fragments(folder):
        path.unlink()


def _kind(path: Path) -> str:
    name, _, kind = path.name.removesuffix(".md").rpartition(".")
    if path.suffix != ".md" or not name or kind not in KINDS:
        kinds = ", ".join(KINDS)
        raise BadFragmentError(f"{path.name}: name it NAME.KIND.md; the kinds are {kinds}")
    return kind


def _entry(path: Path) -> str:
    text = " ".join(path.read_text().split())
    if not text or text[0] in "-*#":
        raise BadFragmentError(f"{path.name}: write sentences, without a bullet or a heading")
    return (
        textwrap.fill(
            f"- {text}",
            WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("version", nargs="?", help="write the section of this version")
    version = parser.parse_args().version
    if version is None:
        print(section(ROOT / "changes"), end="")
    else:
        release(ROOT, version, datetime.date.today())


if __name__ == "__main__":
    main()
