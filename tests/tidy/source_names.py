"""Every name that the source has: does a document speak of things that exist?"""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import os
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import click
from tests.tidy.tree import COMPILED, FILES, ROOT, SOURCE, parsed

from cosmodrome.cli.main import cosmo

SUFFIX = re.compile(r"\.(?:py|pyx|pxd|pxi|pyi|md|json|jsonl|toml|lock|txt|properties)$")
DEFINITION = re.compile(r"^\s*(?:cdef class|cpdef|cdef|class|def)\s+(?:[\w\[\]:*]+\s+)?(\w+)", re.M)

EVENT = re.compile(r"[a-z]+(?:_[a-z]+)+ ")  # how a line of the log begins


class Names:
    def __init__(self) -> None:
        self.defined: set[str] = set()
        self.strings: set[str] = set()  # what the code says, and the events of its log lines
        self.imported: set[str] = set()  # packages of others
        # Of modules and classes, by their names in lower case.
        self.members: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        for path in FILES:
            self._read(path)
        for path in COMPILED:
            self.defined.update(DEFINITION.findall(path.read_text()))
        self.modules = {path.stem for path in (*FILES, *COMPILED)}
        self.folders = {path.name for path in SOURCE.rglob("*") if path.is_dir()}
        self.files = {path.name for path in SOURCE.rglob("*") if path.is_file()}

    def _read(self, path: Path) -> None:
        module = path.parent.name if path.name == "__init__.py" else path.stem
        for statement in parsed(path).body:
            self.members[module].update(_bound(statement))
        prose = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Expr)}
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                self.members[node.name.lower()].update(_attributes(node))
                self.bases[node.name.lower()].update(
                    base.id.lower() for base in node.bases if isinstance(base, ast.Name)
                )
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
                self.strings.add(node.value)
                if EVENT.match(node.value):
                    self.strings.add(node.value.partition(" ")[0])
            if isinstance(node, ast.Import):
                self.imported.update(alias.name.partition(".")[0] for alias in node.names)
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imported.add(node.module.partition(".")[0])
            self.defined.update(_bound(node))


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        parts = [part for target in node.targets for part in ast.walk(target)]
        return {part.id for part in parts if isinstance(part, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.If | ast.Try):  # a module that chooses between twins
        return {name for inner in ast.walk(node) if inner is not node for name in _bound(inner)}
    return set()


def _attributes(node: ast.ClassDef) -> set[str]:
    found = {name for inner in node.body for name in _bound(inner)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.attr)
    return found


@cache
def names() -> Names:
    return Names()


def resolves(word: str) -> bool:
    """Whether something is really called so: a file, a name of the code, a setting, a command."""
    rules = (is_path, is_command, is_name, is_member, is_text, is_python)
    return any(rule(word) for rule in rules)


def is_path(word: str) -> bool:
    """Below the root, the package or a room; a bare name stands for a file or folder."""
    if "/" not in word.rstrip("/"):
        bare = word.rstrip("/")
        if word.endswith("/") and bare in names().folders:
            return True
        if SUFFIX.search(word) and word in names().files:
            return True
    if "/" not in word and not SUFFIX.search(word):
        return False
    rooms = [path for path in SOURCE.iterdir() if path.is_dir()]
    return any((folder / word).exists() for folder in (ROOT, SOURCE, *rooms))


def is_command(word: str) -> bool:
    """`cosmo …`, its verbs alone or with the group, and `make …`."""
    first, *rest = word.split()
    if first == "make":
        makefile = (ROOT / "Makefile").read_text()
        return bool(rest) and re.search(rf"^{re.escape(rest[0])}:", makefile, re.M) is not None
    words = rest if first == "cosmo" else [first, *rest]
    if words and words[0].startswith("--"):
        return words[0] in names().strings
    found: click.Command = cosmo
    for number, name in enumerate(words):
        if not isinstance(found, click.Group):
            return number > 0  # what follows a verb are its arguments
        inner = found.get_command(click.Context(found), name)
        if inner is None:
            return False
        found = inner
    return bool(words) or first == "cosmo"


def is_name(word: str) -> bool:
    bare = word.removesuffix("()")
    return bare in names().defined or bare in names().modules or bare in names().imported


def is_member(word: str) -> bool:
    """`Class.method`, `module.name`, `object.method` of an object named after its class."""
    owner, _, name = word.removesuffix("()").removeprefix("cosmodrome.").rpartition(".")
    if not owner:
        return is_name(name) and word.startswith("cosmodrome.")
    return _has(owner.rpartition(".")[2].lower(), name)


def _has(owner: str, name: str) -> bool:
    if name in names().members.get(owner, ()):
        return True
    return any(_has(base, name) for base in names().bases.get(owner, ()) if base != owner)


def is_text(word: str) -> bool:
    """Settings, options, header fields, log events: what the code says, perhaps with a value."""
    bare = word.partition("=")[0].rstrip("/")
    if bare in names().strings:
        return True
    field = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", bare).lower()
    return field != bare.lower() and field in names().defined


def is_python(word: str) -> bool:
    owner, _, name = word.rpartition(".")
    if owner in sys.stdlib_module_names:
        return hasattr(importlib.import_module(owner), name)
    if owner:
        return False
    return (
        keyword.iskeyword(name)
        or hasattr(builtins, name)
        or hasattr(os, name)
        or name in sys.stdlib_module_names
    )
