"""Which commands upstream's admin tool has, and which the tests run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def commands_of(help_text: str) -> list[str]:
    """Names of the commands that the tool lists when it is called without words."""
    return re.findall(r"^   (\w+) ", help_text, re.MULTILINE)


def flags_of(help_text: str) -> tuple[dict[str, tuple[str, bool]], set[str]]:
    """Flags of `help COMMAND`: letter → (first word of its name, takes a value); and those that
    must be given. -h and -n, which all commands have, are left out."""
    usage, _, listed = help_text.partition("\n -")
    flags = {
        letter: (name, bool(value))
        for letter, name, value in re.findall(
            r"^ -(\w),--(\w+)(?: \w+)? *(<arg>)?", " -" + listed, re.MULTILINE
        )
        if letter not in "hn"
    }
    plain = " ".join(usage.split())
    without_choices = re.sub(r"-\w <arg> \| -\w <arg>", "", re.sub(r"\[[^]]*\]", "", plain))
    return flags, set(re.findall(r" -(\w)\b", without_choices))


def commands_run(folder: Path) -> set[str]:
    """Commands that test files hand to `tool` and whose output they look at."""
    return {
        command
        for file in sorted(folder.glob("test_oracle_*.py"))
        for command in _calls(ast.parse(file.read_text()))
        if command != "help"
    }


def _calls(tree: ast.Module) -> Iterator[str]:
    # A call that is a statement of its own throws away what was printed.
    thrown = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in thrown:
            words = node.args
            match node.func:
                case ast.Name(id="tool"):
                    pass
                case ast.Attribute(value=ast.Name(id="tool"), attr="until"):
                    words = words[1:]
                case ast.Name(id="start_tool"):
                    words = words[3:]
                case _:
                    continue
            match words:
                case [ast.Constant(value=str(command)), *_]:
                    yield command
