"""Delta Lake, where its jars are: which ones fit this Spark, and what a session needs to use them.

A release of Delta is made for one minor version of Spark, which stands in the name of its jar
(`delta-spark_4.2_2.13-4.4.0.jar`); with another one it fails in the middle of a write. So a jar
is taken only if its name says that it fits, or if the user named it. Nothing is fetched here:
`cosmo pipeline jars` does that, through the Maven of the machine.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cosmodrome.env.real import RealDisk
from cosmodrome.spark.runtime.java import cache_dir

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS_VARIABLE = "COSMODROME_DELTA_JARS"
GROUP = "io.delta"
# The newest release that was tried with a Spark. 4.4.0 for 4.2 does not run on 4.3 (a method of
# Spark that it calls is gone), and none for 4.3 was out.
RELEASES = {"4.2": "4.4.0"}
COMPANIONS = (
    "delta-storage",
    "delta-kernel-api",
    "delta-kernel-defaults",
    "delta-kernel-unitycatalog",
)

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

_MAIN = re.compile(r"delta-spark(?:_(\d+\.\d+))?_2\.13-(\d[\w.-]*)\.jar")


@dataclasses.dataclass(frozen=True, slots=True)
class Jars:
    """What was found. Without paths, `why` says why and what to do."""

    paths: tuple[str, ...] = ()
    why: str = ""


def find_jars(spark_version: str, environ: Mapping[str, str], *, spark_home: str = "") -> Jars:
    """Jars that fit: named ones, else those of Spark itself, our cache or Maven's repository."""
    minor = minor_version(spark_version)
    named = environ.get(JARS_VARIABLE, "").strip()
    if named:
        return _named(named, minor)
    seen: list[str] = []
    if spark_home:
        in_spark = _fitting(os.path.join(spark_home, "jars"), minor, seen)
        if in_spark:
            return Jars(in_spark)
    found = _fitting(jars_dir(environ), minor, seen) or _in_maven(environ, minor)
    if found:
        return Jars(found)
    return Jars(why=_why(minor, seen))


def active(spark: SparkSession) -> bool:
    """Whether this session can read and write Delta tables."""
    return EXTENSION in (spark.conf.get("spark.sql.extensions", "") or "")


def why_inactive(spark: SparkSession) -> str:
    """For a session without Delta: the reason and the way to have it."""
    found = find_jars(spark.version, os.environ, spark_home=os.environ.get("SPARK_HOME", ""))
    return found.why or "this session was started without Delta Lake; start it with --delta"


def minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


def jars_dir(environ: Mapping[str, str]) -> str:
    """Where `cosmo pipeline jars` puts them."""
    return os.path.join(cache_dir(environ), "jars")


def artifacts(minor: str) -> tuple[str, ...]:
    """Maven coordinates of the release for a Spark; empty when there is none."""
    release = RELEASES.get(minor)
    if release is None:
        return ()
    return (
        f"{GROUP}:delta-spark_{minor}_2.13:{release}",
        *(f"{GROUP}:{name}:{release}" for name in COMPANIONS),
    )


def _named(text: str, minor: str) -> Jars:
    disk = RealDisk()
    paths: list[str] = []
    for part in re.split(f"[,{re.escape(os.pathsep)}]", text):
        path = os.path.expanduser(part.strip())
        if disk.is_dir(path):
            inside = [name for name in disk.list(path) if name.endswith(".jar")]
            paths += [os.path.join(path, name) for name in inside]
        elif path and disk.exists(path):
            paths.append(path)
        elif path:
            return Jars(why=f"{JARS_VARIABLE} names {path}, which does not exist")
    mains = [match for path in paths if (match := _MAIN.fullmatch(os.path.basename(path)))]
    if not mains:
        return Jars(why=f"{JARS_VARIABLE} names no delta-spark_…_2.13-….jar")
    for match in mains:
        if match[1] not in (None, minor):
            return Jars(
                why=f"{match[0]} of {JARS_VARIABLE} is for Spark {match[1]}, this is {minor};"
                f" {advice(minor)}"
            )
    return Jars(tuple(paths))


def _fitting(folder: str, minor: str, seen: list[str]) -> tuple[str, ...]:
    """The newest fitting release in a folder with its companions; `seen` gets what does not fit."""
    names = RealDisk().list(folder)
    best = ""
    for name in names:
        match = _MAIN.fullmatch(name)
        if match is None:
            continue
        if match[1] == minor and _order(match[2]) > _order(best):
            best = match[2]
        elif match[1] != minor:
            seen.append(name)
    if not best:
        return ()
    expected = [f"delta-spark_{minor}_2.13", *COMPANIONS]
    present = [f"{name}-{best}.jar" for name in expected if f"{name}-{best}.jar" in names]
    return tuple(os.path.join(folder, name) for name in present)


def _in_maven(environ: Mapping[str, str], minor: str) -> tuple[str, ...]:
    home = environ.get("HOME") or os.path.expanduser("~")
    group = os.path.join(home, ".m2", "repository", *GROUP.split("."))
    disk = RealDisk()
    main = f"delta-spark_{minor}_2.13"
    for release in sorted(disk.list(os.path.join(group, main)), key=_order, reverse=True):
        paths = [
            os.path.join(group, name, release, f"{name}-{release}.jar")
            for name in (main, *COMPANIONS)
        ]
        present = tuple(path for path in paths if disk.exists(path))
        if len(present) >= 2 and present[0] == paths[0]:  # the storage jar is always needed
            return present
    return ()


def _order(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def _why(minor: str, seen: list[str]) -> str:
    wrong = f" ({seen[0]} is for another Spark)" if seen else ""
    return f"no jars of Delta Lake for Spark {minor} were found{wrong}; {advice(minor)}"


def advice(minor: str) -> str:
    """What to do for Delta Lake on a Spark."""
    if minor in RELEASES:
        return f"`cosmo pipeline jars` fetches them, or name them in {JARS_VARIABLE}"
    known = " or ".join(sorted(RELEASES))
    return (
        f"no release of Delta Lake for Spark {minor} is known: use Spark {known}"
        f" (pip install 'pyspark~={max(RELEASES)}.0'), or name jars that fit in {JARS_VARIABLE}"
    )
