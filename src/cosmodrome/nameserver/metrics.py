"""The metrics of a name server: their table, and how they are filled when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cosmodrome.nameserver.kv import KeyValues
from cosmodrome.nameserver.routes import Routes
from cosmodrome.transport.http.exposition import Metric, Sample, WalkItem
from cosmodrome.transport.http.request_metrics import RequestMetrics

READY = Metric("cosmodrome_ready", "gauge", "1 while requests are served.")
BROKERS = Metric(
    "cosmodrome_nameserver_brokers",
    "gauge",
    "Registered brokers of a cluster, both masters and slaves.",
    ("broker_cluster",),
)
SILENCE = Metric(
    "cosmodrome_nameserver_broker_silence_seconds",
    "gauge",
    "Time since the last registration of a broker. It is dropped after brokerExpiredTime.",
    ("broker_cluster", "broker_name", "broker_id", "address"),
)
TOPICS = Metric("cosmodrome_nameserver_topics", "gauge", "Topics that have a route.")
VALUES = Metric(
    "cosmodrome_nameserver_kv_entries", "gauge", "Entries of the KV table.", ("namespace",)
)
CONNECTIONS = Metric(
    "cosmodrome_connections", "gauge", "Open connections of brokers, clients and tools."
)
IN_FLIGHT = Metric("cosmodrome_requests_in_flight", "gauge", "Requests that are not answered yet.")
HELD_BYTES = Metric(
    "cosmodrome_connection_held_bytes",
    "gauge",
    "Bytes of incomplete requests, and of replies that peers do not read.",
)
REQUESTS = Metric(
    "cosmodrome_requests_total",
    "counter",
    "Requests, by the name of their code.",
    ("request_code",),
)
ERRORS = Metric(
    "cosmodrome_request_errors_total",
    "counter",
    "Requests that were not answered with success, by the name of their code.",
    ("request_code",),
)
SLOW = Metric(
    "cosmodrome_slow_requests_total",
    "counter",
    "Requests that took slowRequestMillis or longer.",
    ("request_code",),
)
TABLE = (
    READY,
    BROKERS,
    SILENCE,
    TOPICS,
    VALUES,
    CONNECTIONS,
    IN_FLIGHT,
    HELD_BYTES,
    REQUESTS,
    ERRORS,
    SLOW,
)


class NameServerMetrics:
    """A source of `Exposition`."""

    def __init__(
        self,
        address: Callable[[], str],
        routes: Routes,
        values: KeyValues,
        requests: RequestMetrics,
        *,
        ready: Callable[[], bool],
    ) -> None:
        self._address = address
        self._routes = routes
        self._values = values
        self._requests = requests
        self._ready = ready

    @property
    def labels(self) -> dict[str, str]:
        return {"cluster": "", "node_type": "nameserver", "node_id": self._address()}

    async def prepare(self) -> None:
        """Everything is in memory."""

    def walk(self) -> Iterator[WalkItem]:
        requests = self._requests
        yield Sample(READY, (), int(self._ready()))
        yield Sample(TOPICS, (), self._routes.topic_count)
        yield Sample(CONNECTIONS, (), requests.connections)
        yield Sample(IN_FLIGHT, (), requests.in_flight)
        yield Sample(HELD_BYTES, (), requests.held_bytes)
        yield from requests.counts(REQUESTS, ERRORS, SLOW)
        live = self._routes.silences_ms()
        clusters: dict[str, int] = {}
        for who, _ in live:
            clusters[who.cluster] = clusters.get(who.cluster, 0) + 1
        for cluster, count in clusters.items():
            yield Sample(BROKERS, (cluster,), count)
        for who, silent_ms in live:
            labels = (who.cluster, who.broker_name, str(who.broker_id), who.address)
            yield Sample(SILENCE, labels, silent_ms / 1000)
        for namespace, count in self._values.counts().items():
            yield Sample(VALUES, (namespace,), count)
