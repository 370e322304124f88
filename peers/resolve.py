"""Downloads and builds what the peers need, once, into `build/peers`.

Each product (a class path, a binary, a virtual environment) is guarded by a stamp: the hash of the
files and words it was made from. A matching stamp means nothing is run; so a second run needs no
network. A file lock makes concurrent runs wait for each other instead of building twice.

Packages come through the machine's own clients (mvn, go, npm, pip) as they are configured.
Registries hiccup, so each command is tried three times with a growing pause.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "peers"
BUILD = ROOT / "build" / "peers"

_PAUSES_S = (2, 8)  # between the three tries
_pause = time.sleep


class ToolMissing(Exception):
    """A program that has to be on this machine is not."""


class ResolveFailed(Exception):
    """A download or a build failed three times; the text ends with the last output."""


def require(*tools: str) -> None:
    """Raises ToolMissing unless every program is on PATH."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise ToolMissing(f"not on PATH: {', '.join(missing)}; install it to run these peers")


def run_with_tries(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> str:
    """Runs a command that may need a registry; returns its output."""
    output = ""
    for pause_s in (*_PAUSES_S, None):
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            output = f"no end after {timeout_s} s"
        else:
            if done.returncode == 0:
                return done.stdout
            output = done.stdout
        if pause_s is not None:
            _pause(pause_s)
    raise ResolveFailed(f"{' '.join(command)} failed three times\n{output[-4000:]}")


def make_once(
    name: str, made_from: Iterable[Path | str], product: Path, make: Callable[[], None]
) -> Path:
    """Calls `make` unless `product` was already made from the same files and words."""
    stamp = BUILD / f"{name}.stamp"
    digest = _digest([*made_from, str(product)])
    with _lock(name):
        if product.exists() and stamp.exists() and stamp.read_text() == digest:
            return product
        stamp.unlink(missing_ok=True)
        make()
        if not product.exists():
            raise ResolveFailed(f"{name}: nothing was made at {product}")
        stamp.write_text(digest)
    return product


def _digest(parts: Iterable[Path | str]) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()


@contextmanager
def _lock(name: str) -> Iterator[None]:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
