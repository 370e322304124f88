"""Metrics as text, made when somebody scrapes: Prometheus' format and OpenMetrics.

Nothing is counted here and nothing is kept between scrapes: a source walks through what its owner
counts anyway. The walk is cut into slices, so that requests are served in between however much
there is to tell, and the number of series is bounded: what does not fit is left out and counted.
Sources therefore tell what matters most first, and in the same order each time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

SLICE_SECONDS = 0.002
SAMPLES_PER_LOOK = 16  # at the clock
LINES_PER_CHUNK = 500
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
NODE_LABELS = ("cluster", "node_type", "node_id")

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metric(NamedTuple):
    """A family of series. The name of a counter ends in _total."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


class Histogram(NamedTuple):
    """`counts` are cumulative, one for each of `edges` and a last one for all."""

    edges: Sequence[str]
    counts: Sequence[int]
    total: float | None = None  # the sum of what was observed, where that is known


class Sample(NamedTuple):
    metric: Metric
    labels: tuple[str, ...]  # values, in the order of the metric's
    value: float | Histogram


# None: the walk may be interrupted here. A number: so many series were left out by the source.
WalkItem = Sample | int | None


class Source(Protocol):
    @property
    def labels(self) -> Mapping[str, str]:
        """What all series of the source have in common."""

    async def prepare(self) -> None:
        """Whatever has to be asked off the loop; the walk follows."""

    def walk(self) -> Iterator[WalkItem]: ...


class Page(NamedTuple):
    content_type: str
    chunks: Sequence[bytes]


SCRAPE_SERIES = Metric(
    "cosmodrome_scrape_series",
    "gauge",
    "Number of series in this scrape, at most metricsSeriesMax.",
)
SCRAPE_DROPPED = Metric(
    "cosmodrome_scrape_dropped_series_total",
    "counter",
    "Series left out of scrapes because of metricsSeriesMax.",
)
SCRAPE_SECONDS = Metric(
    "cosmodrome_scrape_duration_seconds", "gauge", "Time that it took to collect this scrape."
)
TABLE = (SCRAPE_SERIES, SCRAPE_DROPPED, SCRAPE_SECONDS)


class Exposition:
    """The page of one process. `sources` is asked at each scrape; what the page says about itself
    carries the labels of the first one."""

    def __init__(
        self, sources: Callable[[], Sequence[Source]], series_max: Callable[[], int]
    ) -> None:
        self._sources = sources
        self._series_max = series_max
        self._one_at_a_time = asyncio.Lock()
        self._dropped_total = 0

    async def page(self, accept: str = "") -> Page:
        """What a scraper gets that accepts this, by its header."""
        openly = wants_open_metrics(accept)
        async with self._one_at_a_time:
            families = await self._families(openly)
        return Page(OPEN_METRICS if openly else PLAIN, await chunks(families, openly))

    async def _families(self, openly: bool) -> list[list[str]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        page = _Sheet(openly, self._series_max())
        sources = self._sources()
        for source in sources:
            await source.prepare()
        slice_end, count = loop.time() + SLICE_SECONDS, 0
        for source in sources:
            common = labels_text(source.labels)
            for sample in source.walk():
                count += 1
                if isinstance(sample, Sample):
                    page.add(sample, common)
                elif sample is not None:
                    page.dropped += sample
                if (sample is None or count % SAMPLES_PER_LOOK == 0) and loop.time() >= slice_end:
                    await asyncio.sleep(0)
                    slice_end = loop.time() + SLICE_SECONDS
        self._dropped_total += page.dropped
        common = labels_text(sources[0].labels) if sources else ""
        page.series_max = page.series + len(TABLE)  # the page's own are never left out
        page.add(Sample(SCRAPE_DROPPED, (), self._dropped_total), common)
        page.add(Sample(SCRAPE_SECONDS, (), loop.time() - began), common)
        page.add(Sample(SCRAPE_SERIES, (), page.series + 1), common)
        return list(page.families.values())


class _Sheet:
    """The lines of a page, by family: a family stands together, whoever adds to it."""

    def __init__(self, openly: bool, series_max: int) -> None:
        self.families: dict[str, list[str]] = {}
        self.series = self.dropped = 0
        self.series_max = series_max
        self._openly = openly

    def add(self, sample: Sample, common: str) -> None:
        metric, values, value = sample
        lines = self.families.get(metric.name)
        size = len(value.counts) + 1 if isinstance(value, Histogram) else 1
        if self.series + size > self.series_max:
            self.dropped += size
            return
        self.series += size
        if lines is None:
            lines = self.families[metric.name] = head(metric, self._openly)
        own = ",".join(
            f'{name}="{escaped(text)}"' for name, text in zip(metric.labels, values, strict=True)
        )
        labels = f"{common},{own}" if common and own else common or own
        if not isinstance(value, Histogram):
            lines.append(f"{metric.name}{_braced(labels)} {number(value)}\n")
            return
        for edge, count in zip((*value.edges, "+Inf"), value.counts, strict=True):
            bucket = f'{labels},le="{edge}"' if labels else f'le="{edge}"'
            lines.append(f"{metric.name}_bucket{_braced(bucket)} {count}\n")
        if value.total is not None:
            lines.append(f"{metric.name}_sum{_braced(labels)} {number(value.total)}\n")
        if value.total is not None or not self._openly:  # there, neither comes alone
            lines.append(f"{metric.name}_count{_braced(labels)} {value.counts[-1]}\n")


def wants_open_metrics(accept: str) -> bool:
    return "application/openmetrics-text" in accept


def head(metric: Metric, openly: bool) -> list[str]:
    name = metric.name.removesuffix("_total") if openly else metric.name
    return [
        f"# HELP {name} {metric.help}\n",
        f"# TYPE {name} {metric.kind}\n",
    ]


def labels_text(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())


def escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, bool) else str(value)


async def chunks(families: Sequence[Sequence[str]], openly: bool) -> list[bytes]:
    """The whole page in pieces; a large one is joined in several turns of the loop."""
    found: list[bytes] = []
    waiting: list[str] = []
    for lines in families:
        for first in range(0, len(lines), LINES_PER_CHUNK):
            waiting += lines[first : first + LINES_PER_CHUNK]
            if len(waiting) >= LINES_PER_CHUNK:
                found.append("".join(waiting).encode())
                waiting = []
                await asyncio.sleep(0)
    if openly:
        waiting.append("# EOF\n")
    found.append("".join(waiting).encode())
    return found


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
