"""What /metrics of a process tells: its servers and the process itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cosmodrome import __version__, speed
from cosmodrome.broker.app import Broker
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.nameserver.app import NameServer
from cosmodrome.transport.http.exposition import Exposition, Source
from cosmodrome.transport.http.process_metrics import ProcessMetrics

SERIES_MAX = BrokerOptions().metrics_series_max


def of_nameserver(env: Env, nameserver: NameServer) -> Exposition:
    return of_node(env, nameserver, lambda: None)


def of_node(env: Env, nameserver: NameServer, broker: Callable[[], Broker | None]) -> Exposition:
    """Of `cosmo up`, whose broker comes later and may never come."""
    process = _process(env, lambda: (broker() or nameserver.metrics).labels)

    def sources() -> Sequence[Source]:
        running = broker()
        return [process, nameserver.metrics, *(() if running is None else running.metrics())]

    def series_max() -> int:
        running = broker()
        return SERIES_MAX if running is None else running.series_max

    return Exposition(sources, series_max)


def of_broker(env: Env, broker: Broker) -> Exposition:
    process = _process(env, lambda: broker.labels)
    return Exposition(lambda: [process, *broker.metrics()], lambda: broker.series_max)


def _process(env: Env, labels: Callable[[], Mapping[str, str]]) -> ProcessMetrics:
    return ProcessMetrics(labels, env, version=__version__, core=speed.FLAVOUR)
