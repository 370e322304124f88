"""The job `jars`: fetches the jars of Delta Lake through the Maven of the machine.

Maven knows the registries, mirrors and proxies that this machine may use. Each jar is fetched
without its dependencies, because they list all of Spark again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping

import click

from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs.job import EXTRA_FIX
from cosmodrome.spark.runtime import delta

COPY_GOAL = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
TRIES = 3
TIMEOUT_S = 600
OUTPUT_CHARACTERS_MAX = 2_000

Run = Callable[[list[str]], tuple[int, str]]


def fetch(minor: str, folder: str, run: Run) -> list[str]:
    """Bring the release for a Spark into `folder`; returns the paths of its jars."""
    artifacts = delta.artifacts(minor)
    if not artifacts:
        raise ConfigError(delta.advice(minor))
    disk = RealDisk()
    disk.make_dirs(folder)
    paths = []
    for artifact in artifacts:
        _group, name, release = artifact.split(":")
        path = os.path.join(folder, f"{name}-{release}.jar")
        paths.append(path)
        if disk.exists(path):
            continue
        command = ["mvn", "-B", "-q", COPY_GOAL, f"-Dartifact={artifact}"]
        output = ""
        for _ in range(TRIES):
            code, output = run([*command, f"-DoutputDirectory={folder}"])
            if code == 0 and disk.exists(path):
                break
        else:
            raise ConfigError(
                f"{artifact} could not be fetched, Maven said:\n{output[-OUTPUT_CHARACTERS_MAX:]}"
            )
    return paths


def by_hand(minor: str, folder: str) -> str:
    """What to do on a machine without Maven."""
    names = "\n".join(f"  {artifact}" for artifact in delta.artifacts(minor))
    return (
        "mvn is not on PATH. Install Maven and run this again, or put these jars of Maven Central"
        f" into {folder}\n(or name them in {delta.JARS_VARIABLE}):\n{names}"
    )


@click.command("jars")
@click.option("--to", "folder", metavar="DIR", help="Where to put them.  [default: the cache]")
@click.option(
    "--spark", "version", metavar="X.Y", help="The Spark version.  [default: the installed one]"
)
def command(folder: str | None, version: str | None) -> None:
    """Fetch the jars of Delta Lake that fit the installed Spark, once, through Maven.

    Sessions find them in the cache by themselves; in another folder, name it in
    COSMODROME_DELTA_JARS.
    """
    minor = delta.minor_version(version or _installed())
    if not delta.artifacts(minor):
        raise ConfigError(delta.advice(minor))
    target = folder or delta.jars_dir(os.environ)
    if shutil.which("mvn") is None:
        raise ConfigError(by_hand(minor, target))
    for path in fetch(minor, target, lambda words: _run(words, os.environ)):
        click.echo(path)


def _installed() -> str:
    try:
        from pyspark import __version__
    except ModuleNotFoundError:
        raise ConfigError(f"pyspark is not installed; {EXTRA_FIX}") from None
    return str(__version__)


def _run(words: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end after {TIMEOUT_S} s"
    return done.returncode, done.stdout.decode(errors="replace")
