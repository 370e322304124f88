"""Sparks beside the one of this environment: the oldest that is supported, and a real cluster.

`oldest_python` is the Python of a virtual environment whose pyspark is the pinned old one and
whose other packages are those of the environment that asks: only Spark differs. `delta_jars` fit
it.

    with StandaloneSpark(tmp_path / "spark") as cluster:
        ... session(master=cluster.url, conf=cluster.conf) ...

`StandaloneSpark` is a master and a worker, each its own process on loopback, as the scripts of
the installed pyspark start them. Executors are children of the worker; they end with it.
"""

from __future__ import annotations

import os
import re
import site
import sys
import venv
from pathlib import Path

from peers.process import Process, Running, accepts, free_port
from peers.resolve import BUILD, ROOT, SOURCES, make_once, require, run_with_tries

OLDEST = "4.2.1"  # pinned in spark-requirements.txt
_DOWNLOAD_TIMEOUT_S = 1800  # pyspark is 450 MB, and has to be built
_EXECUTOR = b"CoarseGrainedExecutorBackend"
_LOOPBACK = "127.0.0.1"


def oldest_python() -> Path:
    """A Python with the pyspark OLDEST; made on first use."""
    locked = SOURCES / "spark-requirements.txt"
    folder = BUILD / "spark-venv"
    python = folder / "bin" / "python"
    made = folder / "made"
    others = site.getsitepackages()

    def make() -> None:
        venv.create(folder, clear=True, with_pip=True)
        run_with_tries(
            [
                *(str(python), "-m", "pip", "install", "--require-hashes", "--no-deps", "-q"),
                *("--disable-pip-version-check", "--retries", "8", "--timeout", "60"),
                *("-r", str(locked)),
            ],
            cwd=BUILD,
            timeout_s=_DOWNLOAD_TIMEOUT_S,
        )
        # Comes after this environment's own packages, so its pyspark wins.
        own = next(folder.glob("lib/python*/site-packages"))
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in others)
        (own / "others.pth").write_text(lines)
        made.touch()

    make_once("spark-venv", [locked, sys.version, *others], made, make)
    return python


def delta_jars() -> Path:
    """A folder with the jars of Delta Lake for OLDEST, fetched as users fetch them."""
    folder = BUILD / f"delta-jars-{OLDEST}"
    made = folder / "made"

    def make() -> None:
        require("mvn", "java")
        run_with_tries(
            [
                *(str(oldest_python()), "-m", "cosmodrome.cli", "pipeline", "jars"),
                *("--to", str(folder)),
            ],
            cwd=ROOT,
            env={
                "PYTHONPATH": str(ROOT / "src"),
                # What lies in the repository of the home is found by every session.
                "MAVEN_OPTS": f"-Dmaven.repo.local={BUILD / 'm2'}",
            },
            timeout_s=_DOWNLOAD_TIMEOUT_S,
        )
        made.touch()

    make_once("delta-jars", [OLDEST, ROOT / "src/cosmodrome/spark/runtime/delta.py"], made, make)
    return folder


class StandaloneSpark(Running):
    """A master and one worker with `cores` cores; everything they write is in `folder`."""

    def __init__(self, folder: Path, *, cores: int = 2) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"spark://{_LOOPBACK}:{self.port}"
        # What a driver on the same machine needs to be told, and executors with one core each.
        self.conf = {
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.driver.host": _LOOPBACK,
            "spark.ui.enabled": "false",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
        }
        self.master = self._process(
            "master.Master", "--host", _LOOPBACK, "--port", str(self.port), "--webui-port", "0"
        )
        self.worker = self._process(
            "worker.Worker",
            "--host",
            _LOOPBACK,
            "--port",
            str(free_port()),
            "--webui-port",
            "0",
            "--cores",
            str(cores),
            "--memory",
            "2g",
            "--work-dir",
            str(folder / "work"),
            self.url,
        )

    def start(self, timeout_s: float = 180) -> None:
        """Returns when the master knows the worker."""
        try:
            self.master.start()
            self.master.wait_until(lambda: accepts(self.port), timeout_s)
            self.worker.start()
            self.worker.wait_until(self._registered, timeout_s)
        except BaseException:
            self.stop()
            raise

    def executors(self) -> list[int]:
        """Process ids of the running executors."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and self._is_executor(entry)
        ]

    def stop(self) -> None:
        self.worker.stop()
        self.master.stop()

    def _process(self, main: str, *words: str) -> Process:
        import pyspark

        from cosmodrome.spark.runtime.java import find_java

        home = Path(pyspark.__file__).parent
        role = main.partition(".")[0]
        return Process(
            f"spark {role}",
            [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", *words],
            self.folder / f"{role}.log",
            env={
                "SPARK_HOME": str(home),
                "JAVA_HOME": find_java(os.environ).home,
                "SPARK_LOCAL_IP": _LOOPBACK,
                "SPARK_DAEMON_MEMORY": "256m",
                "PYTHONPATH": str(ROOT / "src"),  # for the executors
            },
        )

    def _registered(self) -> bool:
        return "Registering worker" in self.master.log.read_text(errors="replace")

    def _is_executor(self, entry: Path) -> bool:
        try:
            status = (entry / "status").read_text()
            return (
                re.search(rf"^PPid:\t{self.worker.pid}$", status, re.MULTILINE) is not None
                and _EXECUTOR in (entry / "cmdline").read_bytes()
            )
        except OSError:
            return False  # it ended meanwhile
