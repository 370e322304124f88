"""The Spark that the tests of a module share, and Sparks in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from peers.resolve import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEADLINE_S = 400  # on a machine that is busy with others


@contextlib.contextmanager
def local_spark() -> Iterator[SparkSession]:
    """A small session in this process; the environment is afterwards what it was."""
    from cosmodrome.spark.runtime.session import session, stop

    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAVA_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP"):
            if name in os.environ:
                patch.setenv(name, os.environ[name])
            else:
                patch.delenv(name, raising=False)
        conf = {"spark.driver.memory": "1g", "spark.sql.streaming.pollingDelay": "20ms"}
        made = session("oracle", master="local[2]", conf=conf, delta=False)
        yield made
        stop(made)


@dataclass(slots=True)
class Setting:
    """What programs are run by, and in which environment."""

    name: str
    python: str
    spark: str
    environ: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """In a process group of its own; what goes to stderr is added to `log`."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **self.environ}
        for name in ("JAVA_HOME", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            environ.pop(name, None)
        with log.open("ab") as errors:
            return subprocess.Popen(
                [self.python, *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def run(self, *words: str, log: Path) -> str:
        """To its end, which must be a good one; returns what it wrote to stdout."""
        with self.start(*words, log=log) as child:
            try:
                written = child.communicate(timeout=DEADLINE_S)[0].decode()
            finally:
                child.kill()
        said = log.read_text(errors="replace")[-4_000:]
        assert child.returncode == 0, f"{written}\n{said}"
        return written
