"""One local Spark and one embedded node per test process; both real, both on loopback.

Spark's workers are other processes: they reach the node over its ports. A test asks for topics of
its own (`lab.topic()`), so tests share the node without meeting.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cosmodrome.blocking import Node

CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.pollingDelay": "20ms",
    # Short work in a young JVM: compiling it well costs more than it brings.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of this test process; the source is registered in it."""
    from pyspark.find_spark_home import _find_spark_home
    from pyspark.sql import SparkSession

    from cosmodrome.spark.runtime.java import use_java
    from cosmodrome.spark.runtime.python import unzipped_python
    from cosmodrome.spark.source import register

    use_java()
    python = unzipped_python(_find_spark_home())
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = python
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    folder = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.appName("cosmodrome-tests").master("local[2,2]")
    for name, value in CONF.items():
        builder = builder.config(name, value)
    session = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse")).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    yield session
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        session.stop()


class Lab:
    """The node of the tests, filled by hand: which message lies where is known exactly."""

    def __init__(self, node: Node) -> None:
        from cosmodrome.blocking import Admin, Producer

        self.node = node
        self.namesrv = node.namesrv
        self.broker = node.broker_name
        self.admin = Admin(node.namesrv)
        self._producer = Producer(node.namesrv, group="lab")
        self._numbers = itertools.count(1)

    def start(self) -> None:
        self.admin.start()
        self._producer.start()

    def stop(self) -> None:
        self._producer.stop()
        self.admin.stop()

    def topic(self, queues: int = 2, prefix: str = "lab") -> str:
        """A new topic."""
        name = f"{prefix}-{next(self._numbers)}-{os.getpid()}"
        self.admin.topics.create(name, queues=queues)
        return name

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes | str],
        *,
        queue: int = 0,
        tags: str | None = None,
        keys: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Bodies into one queue, in this order, by one batch."""
        from cosmodrome import Message
        from cosmodrome.wire.bodies import MessageQueue

        target = MessageQueue(topic=topic, broker_name=self.broker, queue_id=queue)
        named: dict[str, Any] = {} if tags is None else {"tags": tags}
        if keys is not None:
            named["keys"] = keys
        messages = [
            Message(
                topic,
                body.encode() if isinstance(body, str) else body,
                properties=dict(properties or {}),
                **named,
            )
            for body in bodies
        ]
        if messages:
            self._producer.send_batch(messages, queue=target)

    def read(self, spark: SparkSession, topic: str | None = None, **options: object) -> DataFrame:
        """A batch read; options as of the source."""
        reader = spark.read.format("rocketmq").option("namesrv", self.namesrv)
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return reader.load() if topic is None else reader.load(topic)

    def stream(self, spark: SparkSession, topic: str | None = None, **options: object) -> DataFrame:
        """A streaming read."""
        reader = spark.readStream.format("rocketmq").option("namesrv", self.namesrv)
        for name, value in options.items():
            reader = reader.option(name, str(value))
        return reader.load() if topic is None else reader.load(topic)


@pytest.fixture(scope="session")
def lab(cosmo_node: Node) -> Iterator[Lab]:
    """The embedded node with tools to fill it."""
    made = Lab(cosmo_node)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Where a streaming query of this test keeps its progress."""
    return str(tmp_path / "checkpoint")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pyspark warns of a pandas that is newer than it knows; nothing here depends on that."""
    quiet = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(quiet)
            item.add_marker(pytest.mark.timeout(300))  # Spark on a busy machine starts slowly
