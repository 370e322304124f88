"""Documents that are made from the code are current, and no file knows one machine."""

from __future__ import annotations

import re
from pathlib import Path

from tests.tidy.tree import ROOT

TEXTS = {".py", ".md", ".toml", ".lock", ".xml", ".json", ".mod", ".sum", ".js", ".yaml", ".in"}
MADE = {".git", ".venv", "build", "dist", "node_modules", "__pycache__", "target"}


def test_settings_document_is_current() -> None:
    from cosmodrome.env.document import render

    assert (ROOT / "docs" / "settings.md").read_text() == render(), "run `make docs`"


def test_no_machine_or_registry_is_named() -> None:
    """Paths of one machine and hosts of registries do not belong into a repository."""
    machine = re.compile(r"(?<![\w.])/(?:work|farm|root|home)/")
    registry = re.compile(r"index[-]url|https?://[^ \"]*/(?:simple|maven[2]|npm|packages)/")
    for path in ROOT.rglob("*"):
        if MADE & set(path.relative_to(ROOT).parts) or path == Path(__file__):
            continue
        if path.is_file() and (path.suffix in TEXTS or path.name in {"Makefile", "run"}):
            text = path.read_text(errors="replace")
            assert not machine.search(text), f"{path} names a path of one machine"
            assert not registry.search(text), f"{path} names a registry"
