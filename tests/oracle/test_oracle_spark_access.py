"""Source and sink at upstream's servers that ask who is there: access control, and TLS.

Each refusal is judged by what `.collect()`, `.save()` and a stream say: the broker's reason and the
option to set have to be in it.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from peers.clients import JAVA, Client
from peers.java import JavaCluster
from peers.process import free_port
from pyspark.errors import PySparkException
from tests.oracle.access_kit import ADMIN, guarded_cluster, make_certificate
from tests.oracle.spark_kit import local_spark

from cosmodrome import ClientOptions
from cosmodrome.blocking import Admin
from cosmodrome.spark.jobs.job import explain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # py4j's sockets
]

ROWS = 60
KEYS = {"accessKey": "cosmoUser", "secretKey": "user-secret-1"}
# Who asks, what the broker says to it, and what the user is told to do.
STRANGERS = {
    "wrong": (
        {**KEYS, "secretKey": "a-wrong-secret"},
        "Check signature failed for accessKey=cosmoUser",
        "check the options accessKey and secretKey",
    ),
    "none": ({}, "No accessKey is configured", "set the options accessKey and secretKey"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A cluster as a Spark program sees it."""

    spark: SparkSession
    cluster: JavaCluster
    folder: Path

    def write(self, topic: str, label: str, **options: str) -> set[bytes]:
        """Rows of two tasks; returns their bodies."""
        bodies = [f"{label} {number}".encode() for number in range(ROWS)]
        rows = self.spark.createDataFrame([(body,) for body in bodies], "body binary")
        given = {"namesrv": self.cluster.namesrv_address, "batchRows": "8", **options}
        rows.write.format("rocketmq").mode("append").options(**given).save(topic)
        return set(bodies)

    def read(self, topic: str, **options: str) -> set[bytes]:
        """The bodies of a topic, each of which is there once."""
        given = {"namesrv": self.cluster.namesrv_address, "columns": "body", **options}
        rows = self.spark.read.format("rocketmq").options(**given).load(topic).collect()
        bodies = {bytes(row.body) for row in rows}
        assert len(bodies) == len(rows)
        return bodies

    def copy(self, topic: str, to: str, **options: str) -> None:
        """A stream from one topic into another, up to now."""
        given = {"namesrv": self.cluster.namesrv_address, **options}
        source = self.spark.readStream.format("rocketmq").option("startingOffsets", "earliest")
        rows = source.options(**given, columns="body").load(topic)
        number = len(list(self.folder.iterdir()))
        given |= {"topic": to, "checkpointLocation": str(self.folder / f"checkpoint-{number}")}
        given.pop("consumerGroup", None)
        query = rows.writeStream.format("rocketmq").options(**given).trigger(availableNow=True)
        query.start().awaitTermination()


def refusal(act: Callable[[], object]) -> str:
    """What a program and `cosmo pipeline` say of something that must fail."""
    with pytest.raises(PySparkException) as failed:
        act()
    words = explain(failed.value)
    assert words in str(failed.value)
    assert "\n" not in words, words
    return words


def create_topics(cluster: JavaCluster, client: ClientOptions, *topics: str) -> None:
    with Admin(cluster.namesrv_address, client=client) as admin:
        for topic in topics:
            admin.topics.create(topic, queues=2)
        deadline = time.monotonic() + 20
        while not set(topics) <= set(admin.topics.names()):
            assert time.monotonic() < deadline, f"the name server does not know {topics}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder / name) for name in ("server", "client", "stranger")}


@pytest.fixture(scope="module")
def places(
    ready: Callable[[Client], Client],
    certificates: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Place, Place]]:
    """One with access control, one with TLS; they start side by side."""
    ready(JAVA)
    folder = tmp_path_factory.mktemp("places")
    guarded = guarded_cluster(folder / "guarded")
    sealed = JavaCluster(
        folder / "sealed", free_port(), free_port(-2, 1), tls=certificates["server"]
    )
    with ExitStack() as stack:
        for cluster in (guarded, sealed):
            stack.callback(cluster.kill9)
            cluster.begin()
        spark = stack.enter_context(local_spark())
        for cluster in (guarded, sealed):
            cluster.start()
        yield (
            Place(spark, guarded, tmp_path_factory.mktemp("guarded")),
            Place(spark, sealed, tmp_path_factory.mktemp("sealed")),
        )


@pytest.fixture(scope="module")
def guarded(places: tuple[Place, Place]) -> Place:
    create_topics(places[0].cluster, ADMIN, "Open", "Copied", "ReadOnly", "Closed")
    return places[0]


@pytest.fixture(scope="module")
def sealed(places: tuple[Place, Place], certificates: dict[str, Path]) -> Place:
    context = ssl.create_default_context(cafile=str(certificates["server"] / "cert.pem"))
    context.load_cert_chain(certificates["client"] / "cert.pem", certificates["client"] / "key.pem")
    create_topics(places[1].cluster, ClientOptions(tls=context), "Open", "Copied")
    return places[1]


@pytest.fixture(scope="module")
def tls(certificates: dict[str, Path]) -> dict[str, str]:
    """Options of somebody who is let in."""
    return {
        "tlsCa": str(certificates["server"] / "cert.pem"),
        "tlsCert": str(certificates["client"] / "cert.pem"),
        "tlsKey": str(certificates["client"] / "key.pem"),
        "retries": "1",
    }


def test_keys_open_the_topics(guarded: Place) -> None:
    sent = guarded.write("Open", "batches", **KEYS)
    sent |= guarded.write("Open", "one by one", batchRows="1", **KEYS)
    assert guarded.read("Open", **KEYS) == sent
    guarded.copy("Open", "Copied", consumerGroup="readers", **KEYS)
    assert guarded.read("Copied", **KEYS) == sent


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_told_what_to_set(guarded: Place, who: str) -> None:
    options, reason, advice = STRANGERS[who]
    there = guarded.read("Open", **KEYS)
    attempts: list[Callable[[], object]] = [
        lambda: guarded.read("Open", **options),
        lambda: guarded.write("Open", "stranger", **options),
        lambda: guarded.copy("Open", "Copied", **options),
    ]
    for act in attempts:
        words = refusal(act)
        assert reason in words and advice in words
        assert words.count(reason) == 1, "it was tried again"
        assert "a-wrong-secret" not in words
    assert guarded.read("Open", **KEYS) == there


def test_rights_are_those_of_the_key(guarded: Place) -> None:
    assert guarded.read("ReadOnly", **KEYS) == set()
    advice = "access control must allow it to accessKey=cosmoUser"
    words = refusal(lambda: guarded.write("ReadOnly", "no", batchRows="1", **KEYS))
    assert "ReadOnly" in words and advice in words
    # Compat: 4.9 looks at the topic of single messages only; a batch needs no more than good keys.
    sent = guarded.write("Closed", "batches", **KEYS)
    assert guarded.read("Closed", accessKey="cosmoAdmin", secretKey="admin-secret") == sent
    words = refusal(lambda: guarded.read("Closed", **KEYS))
    assert "No default permission for topic:Closed" in words and advice in words
    words = refusal(lambda: guarded.read("Open", consumerGroup="others", **KEYS))
    assert "No default permission for group:others" in words and advice in words
    assert "option consumerGroup" in words


def test_rows_through_tls(sealed: Place, tls: dict[str, str]) -> None:
    sent = sealed.write("Open", "sealed", **tls)
    assert sealed.read("Open", **tls) == sent
    unverified = {**tls, "tlsVerify": "false"}
    del unverified["tlsCa"]
    sent |= sealed.write("Open", "unverified", **unverified)
    assert sealed.read("Open", **unverified) == sent
    sealed.copy("Open", "Copied", **tls)
    assert sealed.read("Copied", **tls) == sent


def told(place: Place, options: dict[str, str], advice: str) -> None:
    """Batch, sink and stream fail, and each says who refused and what to set."""
    attempts: list[Callable[[], object]] = [
        lambda: place.read("Open", **options),
        lambda: place.write("Open", "stranger", **options),
        lambda: place.copy("Open", "Copied", **options),
    ]
    for act in attempts:
        words = refusal(act)
        assert advice in words and "127.0.0.1:" in words, words


def test_who_is_not_let_through_is_told_why(
    sealed: Place, tls: dict[str, str], certificates: dict[str, Path]
) -> None:
    there = sealed.read("Open", **tls)
    wrong = {**tls, "tlsCa": str(certificates["stranger"] / "cert.pem")}
    told(sealed, wrong, "self-signed certificate: name who signed the certificate in the option")
    nameless = {name: value for name, value in tls.items() if name not in ("tlsCert", "tlsKey")}
    told(sealed, nameless, "set the options tlsCert and tlsKey")
    assert sealed.read("Open", **tls) == there
    # Compat: 4.9 closes a connection without TLS, but acts upon the first request that came in.
    told(sealed, {"retries": "0"}, "set the option tls=true")
