"""`make asan`: twins, property and fuzz on compiled parts that notice every bad access.

The tree is copied to `build/asan` and compiled there with the address and undefined-behaviour
sanitizers of gcc, so the compiled parts in `src` stay as they are. Leaks are not looked for: the
interpreter itself leaves memory behind when it ends.

Usage: python -m tools.asan [words for pytest]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from peers.resolve import ROOT

BUILD = ROOT / "build" / "asan"
COPIED = ("src", "tests", "peers", "bench", "tools", "pyproject.toml", "setup.py", "README.md")
FLAGS = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
TESTS = ("tests/twins", "tests/property")
FUZZ_SECONDS = "10"


def library(name: str) -> str:
    """Where the compiler keeps one of its run-time libraries."""
    found = subprocess.run(
        [os.environ.get("CC", "gcc"), f"-print-file-name={name}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"{name} is not installed with the compiler; install gcc and its sanitizers")
    return str(Path(found).resolve())


def copy() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, BUILD / name, ignore=ignore)
        else:
            shutil.copy2(source, BUILD / name)
    setup = BUILD / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))  # else compiling takes for ever


def run(*command: str, env: dict[str, str]) -> int:
    return subprocess.run(
        [sys.executable, *command], cwd=BUILD, env={**os.environ, **env}
    ).returncode


def main() -> int:
    copy()
    built = {"CFLAGS": f"{os.environ.get('CFLAGS', '')} {FLAGS}", "LDFLAGS": FLAGS}
    if code := run("setup.py", "-q", "build_ext", "--inplace", env=built):
        return code
    watched = {
        "LD_PRELOAD": " ".join(map(library, ("libasan.so", "libubsan.so"))),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # else bad accesses hide in the interpreter's own arenas
        "PYTHONPATH": f"{BUILD / 'src'}{os.pathsep}{BUILD}",
        "COSMODROME_REQUIRE_NATIVE": "1",
        "FUZZ_SECONDS": os.environ.get("FUZZ_SECONDS", FUZZ_SECONDS),
    }
    # Not captured: a report ends the process, and what pytest holds would end with it.
    words = sys.argv[1:] or ["-q", "-n", "0", "-s"]
    tests = run("-m", "pytest", *TESTS, *words, env=watched)
    return run("-m", "tests.fuzz", env=watched) or tests


if __name__ == "__main__":
    sys.exit(main())
