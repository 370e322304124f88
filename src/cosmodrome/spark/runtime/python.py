"""The Python processes of a local Spark: which Python they run, and their end.

Spark puts its own copy of PySpark, a zip file of sources, before everything else that its Python
processes see. What comes out of a zip is compiled anew by each of them, and a first query starts
nine: that was half of the time that they took. A small program stands before Python and
takes the zip files from the path; what is installed is the same, compiled once.

They end before Java does: workers that find their connections closed say so on the terminal.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import signal
import sys

from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError
from cosmodrome.spark.runtime.java import cache_dir, write_program

_PROGRAM = """#!/bin/sh
set -f
kept=
IFS=:
for part in $PYTHONPATH; do
  case "$part" in
    {home}/python/lib/*.zip) ;;
    *) kept="$kept${{kept:+:}}$part" ;;
  esac
done
unset IFS
PYTHONPATH="$kept"
export PYTHONPATH
exec {python} "$@"
"""

_DAEMON = b"pyspark.daemon"  # which ends its workers when it is asked to end

log = logging.getLogger(__name__)


def unzipped_python(spark_home: str) -> str:
    """A program to be Spark's Python; this Python itself where that gains nothing or is not known
    to work."""
    import pyspark

    installed = os.path.dirname(os.path.abspath(pyspark.__file__))
    # Only where both are one: another Spark brings another PySpark in its zip file.
    if sys.platform == "win32" or os.path.realpath(spark_home) != os.path.realpath(installed):
        return sys.executable
    text = _PROGRAM.format(home=shlex.quote(spark_home), python=shlex.quote(sys.executable))
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = os.path.join(cache_dir(os.environ), f"python-{name}", "python")
    try:
        write_program(path, text.encode())
    except ConfigError as error:
        log.info("PySpark is read from its zip file: %s", error)
        return sys.executable
    return path


def end_daemons(java: int) -> None:
    """Ask the Python daemons below a Java process to end; does nothing without /proc."""
    disk = RealDisk()
    with contextlib.suppress(OSError, ValueError):  # it ended meanwhile, and they with it
        for task in os.listdir(f"/proc/{java}/task"):
            for child in disk.read(f"/proc/{java}/task/{task}/children").split():
                if _DAEMON in disk.read(f"/proc/{int(child)}/cmdline").split(b"\0"):
                    os.kill(int(child), signal.SIGTERM)
