"""The figures of a listening server that brokers and name servers both tell when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cosmodrome.transport.http.exposition import Metric, Sample
from cosmodrome.transport.router import UNKNOWN, Router
from cosmodrome.transport.server import Server
from cosmodrome.wire import table


class RequestMetrics:
    """`server` is asked each time: a server may be made at the start only."""

    def __init__(self, router: Router, server: Callable[[], Server | None]) -> None:
        self._router = router
        self._server = server

    @property
    def tasks(self) -> int:
        return self._router.tasks

    @property
    def connections(self) -> int:
        server = self._server()
        return 0 if server is None else server.connections

    @property
    def held_bytes(self) -> int:
        server = self._server()
        return 0 if server is None else server.held_bytes

    @property
    def in_flight(self) -> int:
        server = self._server()
        return 0 if server is None else server.in_flight

    def counts(self, requests: Metric, errors: Metric, slow: Metric) -> Iterator[Sample]:
        """By name of the request code, for those that came at least once."""
        router = self._router
        seen = [(code, _name(code), count) for code, count in router.requests.items() if count]
        for _, name, count in seen:
            yield Sample(requests, (name,), count)
        for code, name, _ in seen:
            yield Sample(errors, (name,), router.errors[code])
        for code, name, _ in seen:
            yield Sample(slow, (name,), router.slow.get(code, 0))


def _name(code: int) -> str:
    row = table.rows().get(code)
    return "unknown" if code == UNKNOWN or row is None else row.name.lower()
