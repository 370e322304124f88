"""Every command in the operators' guide runs, in order, and prints the headings that are shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.unit.cli.operating_kit import cosmo

from cosmodrome import blocking

GUIDE = Path(__file__).parents[3] / "docs" / "operating.md"
BLOCKS = re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def as_a_shell_reads(command: str) -> list[str]:
    """The words of one command; a `;` or `|` without quotes would end it, so that fails."""
    words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    assert not [word for word in words if set(word) <= set("();<>|&")], command
    return shlex.split(command)


def test_the_guide_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    steps = re.findall(r"^\$ (cosmo .*)\n((?:(?!\$ ).*\n)*)", "".join(BLOCKS), re.MULTILINE)
    assert len(steps) >= 12
    with blocking.embedded() as node:
        for line, shown in steps:
            command, _, remark = line.partition("#")
            _, *words = as_a_shell_reads(command)
            done = cosmo(node.namesrv, *words)
            code = re.search(r"exits with (\d)", remark)
            assert done.code == (int(code.group(1)) if code else 0), (line, done)
            expected = shown.splitlines()
            if expected and expected[0].isupper():
                assert done.out.splitlines()[0].split() == expected[0].split(), line
                assert len(done.out.splitlines()) == len(expected), line
            elif expected:
                assert (done.out + done.err).splitlines()[0] == expected[0], line
