"""Metrics as text: both formats, bounds, and that a large page lets others run in between."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cosmodrome.env.real import real_env
from cosmodrome.transport.http import exposition
from cosmodrome.transport.http.exposition import Exposition, Histogram, Metric, Sample, WalkItem
from cosmodrome.transport.http.process_metrics import ProcessMetrics

COUNTER = Metric("app_sent_total", "counter", "Sent.", ("topic",))
GAUGE = Metric("app_open", "gauge", "Open.")
TIMES = Metric("app_ms", "histogram", "Times.", ("topic",))


class Fixed:
    def __init__(self, items: Sequence[WalkItem], labels: Mapping[str, str] | None = None) -> None:
        self.items = items
        self.labels = labels or {}
        self.prepared = 0

    async def prepare(self) -> None:
        self.prepared += 1

    def walk(self) -> Iterator[WalkItem]:
        yield from self.items


async def text_of(*sources: Fixed, series_max: int = 1000, accept: str = "") -> str:
    page = await Exposition(lambda: sources, lambda: series_max).page(accept)
    return b"".join(page.chunks).decode()


def without_own(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if "cosmodrome_scrape" not in line)


async def test_prometheus_text() -> None:
    items = [Sample(COUNTER, ("a",), 3), Sample(GAUGE, (), 0.5), Sample(COUNTER, ('q"\\\n',), 1)]
    text = await text_of(Fixed(items, {"node": "x"}))
    assert without_own(text) == (
        "# HELP app_sent_total Sent.\n"
        "# TYPE app_sent_total counter\n"
        'app_sent_total{node="x",topic="a"} 3\n'
        'app_sent_total{node="x",topic="q\\"\\\\\\n"} 1\n'
        "# HELP app_open Open.\n"
        "# TYPE app_open gauge\n"
        'app_open{node="x"} 0.5\n'
    )
    assert "# EOF" not in text


async def test_open_metrics_names_a_counter_without_its_suffix_and_ends() -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    text = await text_of(Fixed([Sample(COUNTER, ("a",), 3)]), accept=accept)
    assert text.startswith(
        '# HELP app_sent Sent.\n# TYPE app_sent counter\napp_sent_total{topic="a"} 3\n'
    )
    assert text.endswith("# EOF\n")
    page = await Exposition(list, lambda: 10).page(accept)
    assert page.content_type.startswith("application/openmetrics-text")


async def test_histograms_without_a_sum() -> None:
    unsummed = Fixed([Sample(TIMES, ("a",), Histogram(("1", "5"), (2, 3, 4)))])
    buckets = (
        'app_ms_bucket{topic="a",le="1"} 2\napp_ms_bucket{topic="a",le="5"} 3\n'
        'app_ms_bucket{topic="a",le="+Inf"} 4\n'
    )
    text = without_own(await text_of(unsummed))
    assert text.partition("histogram\n")[2] == buckets + 'app_ms_count{topic="a"} 4\n'
    # There, a count needs a sum.
    text = without_own(await text_of(unsummed, accept="application/openmetrics-text"))
    assert text.partition("histogram\n")[2] == buckets + "# EOF\n"
    summed = Fixed([Sample(TIMES, ("a",), Histogram(("1",), (2, 3), 9.5))])
    assert 'app_ms_sum{topic="a"} 9.5\napp_ms_count{topic="a"} 3\n' in await text_of(summed)


async def test_series_are_bounded_and_what_is_left_out_is_counted() -> None:
    source = Fixed([Sample(COUNTER, (str(n),), n) for n in range(100)] + [7], {"n": "x"})
    page = Exposition(lambda: [source], lambda: 10)
    for scrapes in (1, 2):
        text = b"".join((await page.page()).chunks).decode()
        assert text.count("\napp_sent_total{") == 10
        assert f'cosmodrome_scrape_dropped_series_total{{n="x"}} {97 * scrapes}\n' in text
        assert 'cosmodrome_scrape_series{n="x"} 13\n' in text
    whole = Fixed([Sample(TIMES, ("a",), Histogram(("1",), (2, 3)))])
    assert "app_ms" not in await text_of(whole, series_max=2), "half a histogram says nothing"


async def test_two_sources_share_a_family() -> None:
    text = await text_of(
        Fixed([Sample(GAUGE, (), 1)], {"node": "a"}), Fixed([Sample(GAUGE, (), 2)], {"node": "b"})
    )
    assert text.count("# TYPE app_open gauge") == 1
    assert 'app_open{node="a"} 1\napp_open{node="b"} 2\n' in text


async def test_others_run_while_a_large_page_is_made() -> None:
    source = Fixed([Sample(COUNTER, (str(n),), n) for n in range(30_000)])
    # CPU time without the collector of a large test process: what is counted is ours.
    longest, turns, done = 0.0, 0, False

    async def watch() -> None:
        nonlocal longest, turns
        last = time.thread_time()
        while not done:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last, turns = max(longest, now - last), now, turns + 1

    gc.collect()
    gc.disable()
    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    page = await Exposition(lambda: [source], lambda: 50_000).page()
    done = True
    await watcher
    gc.enable()
    assert sum(map(len, page.chunks)) > 500_000
    assert turns > 30, "the page was made in a few long turns"
    assert longest < 0.02  # slices are 2 ms


async def test_scrapes_come_one_after_the_other() -> None:
    class Slow(Fixed):
        running = most = 0

        async def prepare(self) -> None:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.01)
            self.running -= 1

    source = Slow([Sample(GAUGE, (), 1)])
    page = Exposition(lambda: [source], lambda: 100)
    await asyncio.gather(*(page.page() for _ in range(5)))
    assert source.most == 1


async def test_a_source_that_fails_leaves_the_next_scrape_alone() -> None:
    class Broken(Fixed):
        def walk(self) -> Iterator[WalkItem]:
            raise RuntimeError("broke")

    sources: list[Fixed] = [Broken([])]
    page = Exposition(lambda: sources, lambda: 100)
    for _ in range(2):
        try:
            await page.page()
        except RuntimeError:
            continue
        raise AssertionError("it broke")
    sources[0] = Fixed([Sample(GAUGE, (), 1)])
    assert b"app_open 1" in b"".join((await page.page()).chunks)


def test_numbers() -> None:
    said = [exposition.number(value) for value in (True, 3, 0.25, float("inf"), float("nan"))]
    assert said == ["1", "3", "0.25", "+Inf", "NaN"]
    assert exposition.number(float("-inf")) == "-Inf"


async def test_the_process_tells_what_its_system_knows() -> None:
    source = ProcessMetrics(lambda: {"n": "x"}, real_env(), version="1", core="pure")
    await source.prepare()
    values: dict[str, Any] = {
        sample.metric.name: sample.value
        for sample in source.walk()
        if isinstance(sample, exposition.Sample)
    }
    assert values["cosmodrome_build_info"] == 1
    assert values["process_cpu_seconds_total"] > 0
    assert values["process_resident_memory_bytes"] > 1 << 20
    assert 3 <= values["process_open_fds"] <= values["process_max_fds"]
