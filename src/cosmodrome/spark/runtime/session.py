"""Spark sessions for the jobs: they find a Java, listen on loopback only, and know the source.

On a local master everything listens on 127.0.0.1 and the workers run this very Python. On a
cluster only what was asked for is set; `archive_env` ships a packed virtual environment there,
and paths without a scheme should then be absolute: the driver's Java runs in a folder of its own.
Whatever `conf` says wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError
from cosmodrome.spark.runtime import delta as delta_lake
from cosmodrome.spark.runtime.java import cache_dir, use_java, write_program
from cosmodrome.spark.runtime.python import end_daemons, unzipped_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_MIN = (4, 2)
LOOPBACK = "127.0.0.1"
ENV_NAME = "env"  # the folder that an executor unpacks `archive_env` into
LOGGING = os.path.join(os.path.dirname(__file__), "log4j2.properties")
EXIT_WAIT_S = 15
# Arrow's Java code checks every access to a vector for its bounds and for nulls. Rows of a source
# in Python are read through it value by value, so these checks took an eighth of a scan. They find
# mistakes of the reader: Spark reads only up to the number of rows, and looks for nulls first.
# What comes from Python processes was written by Arrow itself, which keeps lengths right.
ARROW_UNCHECKED = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
# Parquet's writer keeps a dictionary of each column until it sees that it does not pay, in every
# row group anew. Here it never pays: no value comes twice, and among the properties is the id of
# every message. These dictionaries took a tenth of a write.
WITHOUT_DICTIONARY = (
    "queue_offset",
    "msg_id",
    "offset_msg_id",
    "commit_log_offset",
    "properties.key_value.value",
)

log = logging.getLogger(__name__)


def session(
    app: str = "cosmodrome",
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    delta: bool | None = None,
    archive_env: str | None = None,
) -> SparkSession:
    """A session with the source registered; the running one of this process if there is one.

    `master` defaults to local[*]. `delta` True demands Delta Lake, False leaves it out, None
    takes it where its jars are. `archive_env` is a venv-pack archive for a cluster's executors.
    """
    pyspark_version = check_version()
    from pyspark.sql import SparkSession

    from cosmodrome.spark.source import register

    chosen = dict(conf or {})
    master = master or chosen.get("spark.master") or "local[*]"
    settings = {"spark.app.name": app, "spark.master": master, **_common()}
    if is_local(master):
        settings |= _local(master)
    settings |= _shipped(master, archive_env)
    settings |= chosen
    settings |= _delta(pyspark_version, delta, settings)
    _set_environment(master, archive_env, settings)
    use_java()
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        with quiet_spark():
            if archive_env is not None:
                _launch_beside_env(settings)
            spark = builder.getOrCreate()
            register(spark)
    except Exception as error:
        if "JAVA_GATEWAY_EXITED" in str(error):
            raise ConfigError(
                "Spark's Java process ended while it started; its own words stand above."
                " Often it is memory: try --conf spark.driver.memory=512m"
            ) from error
        raise
    return spark


def stop(spark: SparkSession) -> None:
    """End the session and its Java process, so that nothing of it outlives the call."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    with contextlib.suppress(Exception):  # a Java process that died needs no stopping
        spark.sparkContext.setLogLevel("OFF")  # tasks that are still running complain of it
        if process is not None:
            end_daemons(process.pid)
        spark.stop()
    if gateway is None:
        return
    SparkContext._gateway = None
    SparkContext._jvm = None
    with contextlib.suppress(Exception):
        gateway.shutdown()
    if process is not None:
        process.stdin.close()  # which is what its Java process ends with
        try:
            process.wait(EXIT_WAIT_S)
        except Exception:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quiet_spark() -> Iterator[None]:
    """While entered, pyspark prints neither the errors that it raises nor warnings about pandas."""
    from pyspark.logger import PySparkLogger

    tellers = [
        PySparkLogger.getLogger(f"{kind}QueryContextLogger") for kind in ("SQL", "DataFrame")
    ]
    before = [teller.disabled for teller in tellers]
    for teller in tellers:
        teller.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
            yield
    finally:
        for teller, disabled in zip(tellers, before, strict=True):
            teller.disabled = disabled


def check_version() -> str:
    """The version of pyspark; ConfigError when it is missing or too old."""
    try:
        import pyspark
    except ModuleNotFoundError:
        raise ConfigError("pyspark is not installed; pip install 'cosmodrome[spark]'") from None
    version: str = pyspark.__version__
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < SPARK_MIN:
        minimum = ".".join(map(str, SPARK_MIN))
        raise ConfigError(
            f"pyspark {version} is too old, {minimum} or newer is needed;"
            f" pip install 'pyspark>={minimum}'"
        )
    return version


def is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _common() -> dict[str, str]:
    return {
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.session.timeZone": "UTC",  # days of the archive are days of UTC
        "spark.ui.showConsoleProgress": "false",
        # Scans make much garbage and few old objects: the parallel collector takes least CPU.
        "spark.driver.extraJavaOptions": (
            f"-XX:+UseParallelGC {ARROW_UNCHECKED} -Dlog4j2.configurationFile=file:{LOGGING}"
        ),
        # Beside what the cluster or its user say in extraJavaOptions.
        "spark.executor.defaultJavaOptions": ARROW_UNCHECKED,
        **parquet_settings(WITHOUT_DICTIONARY),
    }


def parquet_settings(without_dictionary: Iterable[str]) -> dict[str, str]:
    """How Parquet is written: no dictionaries of these columns, times as numbers.

    Columns are known by their names alone, whatever table they are written to.
    """
    setting = "spark.hadoop.parquet.enable.dictionary"
    names = {f"{setting}#{name}": "false" for name in without_dictionary}
    # INT96, Spark's default, costs more and has no statistics: nothing can be skipped by time.
    return {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS", **names}


def _local(master: str) -> dict[str, str]:
    return {
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.ui.enabled": "false",
        # Batches come from Python processes: cheaper than TCP, and no port.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": str(_cores(master)),
    }


def _cores(master: str) -> int:
    """How many tasks run at once on a local master."""
    match = re.match(r"local\[(\d+|\*)", master)
    if match is None:
        return 1
    return int(match[1]) if match[1] != "*" else os.cpu_count() or 1


def _shipped(master: str, archive_env: str | None) -> dict[str, str]:
    if archive_env is None:
        return {}
    if is_local(master):
        raise ConfigError(
            f"archive_env is for the executors of a cluster; master {master} has none"
        )
    if "://" not in archive_env and not RealDisk().exists(archive_env):
        raise ConfigError(
            f"{archive_env} does not exist; make it with"
            f" `venv-pack -o {os.path.basename(archive_env)}` in an environment that has"
            " cosmodrome[spark]"
        )
    path = archive_env if "://" in archive_env else os.path.abspath(archive_env)
    return {"spark.archives": f"{path}#{ENV_NAME}"}


def _launch_beside_env(settings: Mapping[str, str]) -> None:
    """Start the Java process of the driver where `./env/bin/python` is, too.

    Spark plans with the same Python path on the driver as it runs tasks with on the executors,
    but only they have the archive unpacked beside them. Here that path leads to this Python.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    name = hashlib.sha256(sys.executable.encode()).hexdigest()[:16]
    folder = os.path.join(cache_dir(os.environ), f"driver-{name}")
    text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    write_program(os.path.join(folder, ENV_NAME, "bin", "python"), text.encode())
    conf = SparkConf()
    for key, value in settings.items():
        conf.set(key, value)
    gateway = launch_gateway(conf, {"cwd": folder})  # type: ignore[no-untyped-call]
    SparkContext._ensure_initialized(gateway=gateway)


def _delta(version: str, asked: bool | None, settings: Mapping[str, str]) -> dict[str, str]:
    """What is to be set for Delta Lake, beside the jars and extensions that `settings` has."""
    if asked is False:
        return {}
    jars, extensions = settings.get("spark.jars", ""), settings.get("spark.sql.extensions", "")
    if "delta-spark" in jars + settings.get("spark.jars.packages", ""):
        found = delta_lake.Jars()
    else:
        found = delta_lake.find_jars(version, os.environ, spark_home=_spark_home())
        if not found.paths:
            if asked:
                raise ConfigError(found.why)
            log.info("without Delta Lake: %s", found.why)
            return {}
    return {
        "spark.jars": _joined(jars, *found.paths),
        "spark.sql.extensions": _joined(extensions, delta_lake.EXTENSION),
        "spark.sql.catalog.spark_catalog": delta_lake.CATALOG,
    }


def _joined(*parts: str) -> str:
    return ",".join(part for part in parts if part)


def _set_environment(master: str, archive_env: str | None, settings: Mapping[str, str]) -> None:
    """Settings that Spark takes only from the environment of this process."""
    chosen = settings.get("spark.pyspark.python")
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
        os.environ["PYSPARK_PYTHON"] = chosen or unzipped_python(_spark_home())
    elif chosen:
        os.environ["PYSPARK_PYTHON"] = chosen
    elif archive_env is not None:
        os.environ["PYSPARK_PYTHON"] = f"./{ENV_NAME}/bin/python"
    else:
        # Right where the executors see the same files; otherwise --archive-env or the
        # setting spark.pyspark.python tells them where Python is.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # With this one the driver looks for sources.
    driver = os.environ["PYSPARK_PYTHON"] if is_local(master) else sys.executable
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", driver)


def _spark_home() -> str:
    from pyspark.find_spark_home import _find_spark_home

    return str(_find_spark_home())
