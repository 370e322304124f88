"""/metrics of a supervisor: the metrics of its workers, beside its own.

All workers are asked at the same time and have the same few seconds. A worker that does not answer
is counted as not scraped; the page has the metrics of the others. The texts are merged by family,
because a family must stand together. Series cannot collide: each has the name of its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cosmodrome.cli.serve.supervise import Child
from cosmodrome.cli.serve.worker_link import HTTP_HOST
from cosmodrome.transport.http import exposition
from cosmodrome.transport.http.exposition import Exposition, Metric, Page

ASK_SECONDS = 5.0
READ_BYTES = 1 << 16
TEXT_BYTES_MAX = 64 << 20  # of all workers together
LINES_PER_TURN = 2000

SCRAPED = Metric(
    "cosmodrome_worker_scraped",
    "gauge",
    "1 when this page has the metrics of a worker, 0 when it did not answer.",
    ("worker",),
)
STARTS = Metric(
    "cosmodrome_worker_starts_total", "counter", "How often a worker was started.", ("worker",)
)
TABLE = (SCRAPED, STARTS)


class WorkerMetrics:
    def __init__(self, children: Sequence[Child], own: Exposition | None) -> None:
        self._children = children
        self._own = own
        self._one_at_a_time = asyncio.Lock()

    async def page(self, accept: str = "") -> Page:
        openly = exposition.wants_open_metrics(accept)
        async with self._one_at_a_time:
            texts = await asyncio.gather(*(self._ask(child, openly) for child in self._children))
            families: dict[str, list[str]] = {}
            if self._own is not None:
                own = await self._own.page(accept)
                await _merge(families, b"".join(own.chunks))
            left_bytes = TEXT_BYTES_MAX
            scraped = []
            for text in texts:
                fits = text is not None and len(text) <= left_bytes
                scraped.append(fits)
                if text is not None and fits:
                    left_bytes -= len(text)
                    await _merge(families, text)
            self._add(families, openly, scraped)
            chunks = await exposition.chunks(list(families.values()), openly)
        return Page(exposition.OPEN_METRICS if openly else exposition.PLAIN, chunks)

    def _add(self, families: dict[str, list[str]], openly: bool, scraped: Sequence[bool]) -> None:
        for metric, values in (
            (SCRAPED, [int(done) for done in scraped]),
            (STARTS, [child.starts for child in self._children]),
        ):
            families[metric.name] = [
                *exposition.head(metric, openly),
                *(
                    f'{metric.name}{{worker="{exposition.escaped(child.name)}"}} {value}\n'
                    for child, value in zip(self._children, values, strict=True)
                ),
            ]

    async def _ask(self, child: Child, openly: bool) -> bytes | None:
        """What a worker tells, None when it does not."""
        report = child.report
        if report is None or not report.http:
            return None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await _get(report.http, exposition.OPEN_METRICS if openly else "")
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            return None


async def _get(port: int, accept: str) -> bytes | None:
    reader, writer = await asyncio.open_connection(HTTP_HOST, port)
    try:
        writer.write(f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            return None
        lengths = [
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ]
        if len(lengths) != 1 or not 0 <= lengths[0] <= TEXT_BYTES_MAX:
            return None
        return await reader.readexactly(lengths[0])
    finally:
        writer.transport.abort()


async def _merge(families: dict[str, list[str]], text: bytes) -> None:
    """Add the lines of a page to the families they belong to."""
    lines: list[str] = []
    for number, line in enumerate(text.decode().splitlines(keepends=True)):
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            new = name not in families
            lines = families.setdefault(name, [])
            if new:
                lines.append(line)
        elif line.startswith("# TYPE "):
            if len(lines) == 1:
                lines.append(line)
        elif not line.startswith("#"):
            lines.append(line)
        if number % LINES_PER_TURN == 0:
            await asyncio.sleep(0)
