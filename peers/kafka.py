"""A real Kafka, one node that is broker and controller (KRaft), from the jars on Maven Central.

    with KafkaNode(tmp_path / "kafka") as kafka:
        ... kafka.address ...

Topics make themselves with `partitions` partitions. Records carry the time of their append, as
RocketMQ's store time does. `connector_jars` is what Spark's own Kafka source and sink add to Spark.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.java import class_path
from peers.process import Process, Running, accepts, free_port
from peers.resolve import require

KAFKA_VERSION = "4.1.0"
_HEAP = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
_FORMAT_TIMEOUT_S = 60


def connector_jars() -> list[str]:
    """Jar files for `spark.jars`."""
    return class_path("spark-kafka").split(os.pathsep)


class KafkaNode(Running):
    """One Kafka with its files in `folder`; start() after stop() is a restart.

    `settings` are added to server.properties and win over what is chosen here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        partitions: int = 4,
        heap: Sequence[str] = _HEAP,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._settings = dict(settings or {})
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._controller_port = free_port()
        self._partitions = partitions
        self._properties = folder / "server.properties"
        self._process = Process(
            "kafka",
            [*_java(*heap), "kafka.Kafka", str(self._properties)],
            folder / "kafka.log",
            cwd=folder,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, timeout_s: float = 60) -> None:
        """Returns when clients can connect."""
        self._format()
        try:
            self._process.start()
            self._process.wait_until(lambda: accepts(self.port), timeout_s)
        except BaseException:
            self._process.kill9()
            raise

    def stop(self) -> None:
        self._process.stop()

    def _format(self) -> None:
        """Writes the settings and gives the log directory its cluster id, once."""
        if self._properties.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.address},"
            f"CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "log.dirs": str(self.folder / "logs"),
            "num.partitions": str(self._partitions),
            "log.message.timestamp.type": "LogAppendTime",
            # What one node needs: no replicas, and consumers that need not wait for company.
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            **self._settings,
        }
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        cluster_id = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
        words = ["format", "--cluster-id", cluster_id, "--config", str(self._properties)]
        done = subprocess.run(
            [*_java("-Xmx256m"), "kafka.tools.StorageTool", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_FORMAT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            self._properties.unlink()
            raise RuntimeError(f"Kafka could not format {self.folder}\n{done.stdout[-2000:]}")


def _java(*options: str) -> list[str]:
    require("java")
    return ["java", *options, "-Dfile.encoding=UTF-8", "-cp", class_path("kafka")]
