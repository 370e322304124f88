"""The rows that are measured, group by group, and the bar of each.

Every function takes a `Bench` and returns rows. Repetitions are interleaved: one sample of every
case on every server, then the next round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from peers.raw import max_offset, put_topic

from bench.access import access
from bench.ballast import Ballast
from bench.brokers import ASYNC, SYNC, Brokers, Target
from bench.load import Generator
from bench.loadgen import cpu_seconds
from bench.replication import replication
from bench.verdict import Row, Sample, errors, figure, median, values

Load = Mapping[str, object]
CPU = "srv_cpu_us_msg"
CPU_UNIT = "CPU-µs/msg"

SMALL: Load = {"op": "send", "topic": "Small", "conns": 8, "window": 16, "size": 128}
SENDS: dict[str, tuple[Load, float]] = {
    "send 128 B, 8 × 16": (SMALL, 6),
    "send 128 B, 8 × 256": ({**SMALL, "window": 256}, 8),
    "send 1 KiB, 8 × 16": ({**SMALL, "topic": "Large", "size": 1024}, 6),
    "send 128 B in batches of 32": ({**SMALL, "topic": "Batch", "window": 4, "batch": 32}, 6),
    "send 128 B, 1 × 1": ({**SMALL, "topic": "Alone", "conns": 1, "window": 1}, 3),
}
FLOOR = ("send 128 B, 8 × 16", "send 128 B, 8 × 256")
ALONE = "send 128 B, 1 × 1"
PULL: Load = {"op": "pull", "conns": 8, "window": 8}
PULLS: dict[str, tuple[Load, float]] = {
    f"pull 32 × {title}": ({**PULL, "topic": f"Pull{size}0000", "size": size}, 4)
    for title, size in (("1 KiB", 1024), ("128 B", 128))
}
FILL_BATCHES = 6_000  # of 32 messages
POLL_RATES = (1_000, 10_000)
SYNC_BARS = {"1": ((1, 1), 1.5), "64": ((8, 8), 3.0), "256": ((8, 32), 4.0)}
TOPICS = ((1, 4), (64, 4), (256, 4), (1_024, 4), (1, 1_024))
LOSS_MAX = 0.15
DELAY_LEVEL, DELAY_S = 2, 5.0
DELAY_SEND_S = 3.0
DELIVERIES_MIN = 20_000
IDLE, HELD = 10_000, 2_000
REST_S = 10.0


@dataclass
class Bench:
    """Servers, a generator, and how long to look."""

    brokers: Brokers
    generator: Generator
    seconds: float
    repetitions: int
    warm_s: float
    ballast: Ballast | None = None  # keeps memory full
    seen: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)

    def pair(self) -> list[Target]:
        return [self.brokers.get("ours"), self.brokers.get("java")]

    def sample(self, target: Target, load: Load, seconds: float) -> Sample:
        self.fill_memory()
        with target.awake():
            return self.generator.run(target, load, seconds)

    def fill_memory(self) -> None:
        if self.ballast is not None:
            self.ballast.top_up()

    def warm(self, targets: Sequence[Target], load: Load, share: float = 1.0) -> None:
        """Java has the paths of this load compiled before it is measured; once per load."""
        for target in targets:
            key = repr(sorted(load.items()))
            if target.name == "java" and key not in target.warmed and self.warm_s:
                target.warmed.add(key)
                self.sample(target, load, self.warm_s * share)

    def rounds(
        self, loads: Mapping[str, Load], targets: Sequence[Target], seconds: float | None = None
    ) -> dict[tuple[str, str], list[Sample]]:
        """Samples by case and server, interleaved."""
        found: dict[tuple[str, str], list[Sample]] = {}
        for _ in range(self.repetitions):
            for name, load in loads.items():
                for target in targets:
                    sample = self.sample(target, load, seconds or self.seconds)
                    found.setdefault((name, target.name), []).append(sample)
        self.seen.update(found)
        return found

    def ring(self, target: Target, load: Load, seconds: float, warm_s: float = 1.0) -> Sample:
        self.fill_memory()
        words = {"duration": seconds, "warmup": warm_s, "pid": target.pid, **load}
        return self.generator.program("bench.ring", target, words, seconds + warm_s)


def footprint(bench: Bench) -> list[Row]:
    """A node that has done nothing yet."""
    ours, java = bench.brokers.get("ours", SYNC), bench.brokers.get("java")
    ready = [ours.ready_s] + [bench.brokers.start_seconds() for _ in range(bench.repetitions - 1)]
    rest_s = min(REST_S, 4 * bench.seconds)
    figures = []
    for target in (ours, java):
        with target.awake():
            time.sleep(1)
            before = cpu_seconds(list(target.pids))
            time.sleep(rest_s)
            share = (cpu_seconds(list(target.pids)) - before) / rest_s * 100
            figures.append((target.memory_mb, share))
    (our_mb, our_share), (java_mb, java_share) = figures
    note = "name server and broker on both sides"
    return [
        Row("idle, memory", "MB RSS", [our_mb], [java_mb], limit=80, note=note),
        Row("idle, CPU", "% of a core", [our_share], [java_share], limit=0.5, note=note),
        Row("ready after", "s", ready, [java.ready_s], limit=1.0),
    ]


def idle(bench: Bench) -> list[Row]:
    """Servers that were only started: connections and held pulls, nothing else."""
    samples = []
    # A pull is held for 15 s; a whole such time sees each of them once.
    seconds = 15.0 if bench.seconds >= 2 else bench.seconds
    share = 1.0 if bench.seconds >= 2 else 0.1
    counts = {"idle": int(IDLE * share), "pulls": int(HELD * share)}
    for target in (bench.brokers.get("ours", SYNC), bench.brokers.get("java")):
        with target.awake():
            put_topic(target.port, "Held", 8)
            words = {"duration": seconds, "pid": target.pid, **counts}
            samples.append([bench.generator.program("bench.holding", target, words, seconds + 60)])
    ours, java = samples
    what = f"{counts['idle']:,} idle connections and {counts['pulls']:,} held pulls"
    wrong = errors(ours, java)
    grown = f"from {ours[0]['before_mb']} and {java[0]['before_mb']} MB"
    took = f"connected in {ours[0]['connected_s']} and {java[0]['connected_s']} s"
    return [
        _row(f"{what}, memory", "MB RSS", "after_mb", ours, java, errors=wrong, note=grown),
        _row(f"{what}, CPU", "% of a core", "cpu_percent", ours, java, errors=wrong, note=took),
    ]


def sends(bench: Bench) -> list[Row]:
    targets = bench.pair()
    for number, (load, _) in enumerate(SENDS.values()):
        bench.warm(targets, load, 1.0 if number in (0, 3) else 0.4)
    found = bench.rounds({name: load for name, (load, _) in SENDS.items()}, targets)
    return [_cpu_row(name, found, times) for name, (_, times) in SENDS.items()]


def floor(bench: Bench) -> list[Row]:
    """How far the broker is from a server that stores nothing."""
    targets = [bench.brokers.get("ours"), bench.brokers.get("floor")]
    found = bench.rounds({name: SENDS[name][0] for name in FLOOR}, targets)
    rows = [_cpu_row(name, found, 0.5, peer="floor") for name in FLOOR]
    # Rows of the trend are told apart by their names.
    rows = [replace(row, name=f"{row.name}, against the floor") for row in rows]
    targets[1] = bench.brokers.get("bare")
    found = bench.rounds({ALONE: SENDS[ALONE][0]}, targets)
    row = _cpu_row(ALONE, found, None, peer="bare")
    return [*rows, replace(row, name=f"{ALONE}, against bench/bare.c")]


def pure(bench: Bench) -> list[Row]:
    """The same broker where nothing could be compiled."""
    name = next(iter(SENDS))
    targets = [bench.brokers.get("pure"), bench.brokers.get("java")]
    bench.warm(targets, SMALL)
    found = bench.rounds({f"{name}, without the compiled core": SMALL}, targets)
    return [_cpu_row(each, found, 1.5) for each, server in found if server == "ours"]


def workers(bench: Bench) -> list[Row]:
    """Two workers against one, under the same load from two generators."""
    seen: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    wrong = 0
    for _ in range(bench.repetitions):
        for count, figures in seen.items():
            with bench.brokers.workers(count) as (ports, pids), ThreadPoolExecutor(2) as pool:
                before = cpu_seconds(list(pids))
                loads = [
                    pool.submit(bench.generator.run_freely, port, SMALL, bench.seconds)
                    for port in (ports[0], ports[-1])
                ]
                samples = [load.result() for load in loads]
                took_s = cpu_seconds(list(pids)) - before
            rate = sum(values(samples, "tps"))
            # The CPU of the warm-up second is counted, its messages are not told.
            sent = rate * (bench.seconds + 1)
            figures.append((rate, took_s / sent * 1e6 if sent else 0))
            wrong += errors(samples)
    name = "send 128 B, 2 × (8 × 16), 2 workers against 1"
    note = "generators and workers share two cores"
    (one, one_cpu), (two, two_cpu) = (zip(*seen[count], strict=True) for count in (1, 2))
    return [
        Row(name, "msg/s", two, one, more=True, errors=wrong, note=note),
        Row(name, CPU_UNIT, two_cpu, one_cpu, errors=wrong, note=note),
    ]


def pulls(bench: Bench) -> list[Row]:
    targets = bench.pair()
    for target in targets:
        for load, _ in PULLS.values():
            with target.awake():
                size = load["size"]
                fill = {"topic": f"Pull{size}", "size": size, "queues": 8, "batch": 32, "window": 1}
                bench.ring(target, {**fill, "count": FILL_BATCHES}, 60, 0)
    for number, (load, _) in enumerate(PULLS.values()):
        bench.warm(targets, load, 0.4 if number else 1.0)
    found = bench.rounds({name: load for name, (load, _) in PULLS.items()}, targets)
    return [_cpu_row(name, found, times) for name, (_, times) in PULLS.items()]


def latency(bench: Bench) -> list[Row]:
    """Paced loads, far from saturation: how long things take, not how many there are."""
    targets = bench.pair()
    sample_key = (next(iter(SENDS)), "java")
    if sample_key not in bench.seen:
        bench.warm(targets, SMALL)
        bench.seen[sample_key] = [bench.sample(targets[1], SMALL, bench.seconds)]
    rate = int(median(values(bench.seen[sample_key], "tps")) / 2)
    cases: dict[str, Load] = {
        f"long poll at {each:,}/s": {
            "op": "pushlatency",
            "topic": "Polled",
            "conns": 1,
            "size": 128,
            "rate": each,
        }
        for each in POLL_RATES
    }
    # Windows that never fill, so that a slow answer does not hold back what is due.
    half = f"send 128 B at half of Java's saturation ({rate:,}/s)"
    cases[half] = {**SMALL, "topic": "Paced", "window": 256, "rate": rate}
    for load in cases.values():
        bench.warm(targets, load, 0.5)
    found = bench.rounds(cases, targets, 2.5 * bench.seconds)
    rows = []
    for name, load in cases.items():
        ours, java = found[name, "ours"], found[name, "java"]
        wrong = errors(ours, java)
        rates = [median(values(of, "tps")) for of in (ours, java)]
        wanted = float(str(load["rate"]))
        note = "" if min(rates) > 0.95 * wanted else "only " + _both(rates) + " msg/s"
        first = 4.0 if "poll" in name else None
        for key, title, times in (("p50_us", "p50", first), ("p99_us", "p99", 1.0)):
            rows.append(
                _row(
                    f"{name}, {title}", "µs", key, ours, java, times=times, errors=wrong, note=note
                )
            )
        rows.append(
            _row(f"{name}, p99.9", "µs", "p999_us", ours, java, times=1.0, errors=wrong, note=note)
        )
    return rows


def sync(bench: Bench) -> list[Row]:
    """Acknowledged when synced; then our default against Java's."""
    pair = [bench.brokers.get("ours", SYNC), bench.brokers.get("java", SYNC)]
    large = {**SMALL, "topic": "Large", "size": 1024}
    loads: dict[str, Load] = {
        name: {**large, "conns": conns, "window": window}
        for name, ((conns, window), _) in SYNC_BARS.items()
    }
    for name, load in loads.items():
        bench.warm(pair, load, 0.3 if name == "1" else 0.6)
    found = bench.rounds(loads, pair)
    rows = []
    for name, (_, times) in SYNC_BARS.items():
        ours, java = found[name, "ours"], found[name, "java"]
        note = "CPU-µs/msg " + _both([median(values(of, CPU)) for of in (ours, java)])
        title = f"SYNC_FLUSH, send 1 KiB, {name} in flight"
        wrong = errors(ours, java)
        rows.append(
            _row(title, "msg/s", "tps", ours, java, True, times=times, errors=wrong, note=note)
        )
    defaults = [pair[0], bench.brokers.get("java", ASYNC)]
    bench.warm(defaults, large, 0.6)
    name = "our default (SYNC_FLUSH) against Java's (ASYNC_FLUSH), send 1 KiB, 8 × 16"
    found = bench.rounds({name: large}, defaults)
    rows.append(_cpu_row(name, found, None))
    ours, java = found[name, "ours"], found[name, "java"]
    rows.append(_row(name, "msg/s", "tps", ours, java, True, errors=errors(ours, java)))
    return rows


def topics(bench: Bench) -> list[Row]:
    """What many topics and queues cost a message: messages per CPU second against one topic."""
    targets = bench.pair()
    loads: dict[tuple[int, int], Load] = {}
    for count, queues in TOPICS:
        load: Load = {"topic": f"T{count}q{queues}n", "topics": count, "queues": queues}
        loads[count, queues] = load
        for target in targets:
            names = [f"{load['topic']}{number:04d}" for number in range(count)]
            with target.awake(), ThreadPoolExecutor(16) as pool:
                for made in [pool.submit(put_topic, target.port, name, queues) for name in names]:
                    made.result()
    found: dict[tuple[tuple[int, int], str], list[Sample]] = {}
    seconds = bench.seconds * 2 / 3
    for repetition in range(bench.repetitions):
        for places, load in loads.items():
            for target in targets:
                if repetition and target.name == "java":
                    continue  # it has no bar here, and the time is better spent
                with target.awake():
                    if not repetition:  # every queue gets its files, and Java its compiler
                        bench.ring(target, load, seconds)
                    sample = bench.ring(target, load, seconds)
                found.setdefault((places, target.name), []).append(sample)
    rows = []
    for places in TOPICS:
        ours, java = found[places, "ours"], found[places, "java"]
        keeps = {}
        for name in ("ours", "java"):
            one = median(values(found[TOPICS[0], name], CPU))
            keeps[name] = [
                one / cpu * 100 if cpu else 0 for cpu in values(found[places, name], CPU)
            ]
        title = f"{places[0]:,} topics of {places[1]:,} queues"
        note = "CPU-µs/msg " + _both([median(values(of, CPU)) for of in (ours, java)])
        note += ", msg/s " + _both([median(values(of, "tps")) for of in (ours, java)])
        rows.append(
            Row(
                title,
                "% of one topic",
                keeps["ours"],
                keeps["java"],
                limit=None if places == TOPICS[0] else (1 - LOSS_MAX) * 100,
                more=True,
                errors=errors(ours, java),
                note=note,
            )
        )
    return rows


def delays(bench: Bench) -> list[Row]:
    """Everything that waits is due at once: how fast it is delivered.

    The server is halted from the last send until the last message is due, otherwise messages
    would fall due no faster than they were sent.
    """
    found: dict[str, list[Sample]] = {}
    targets = bench.pair()
    for repetition in range(bench.repetitions + 1):
        for target in targets:
            if repetition or target.name == "java":  # the first one warms Java up
                sample = _deliver(bench, target, f"Delay{repetition}")
                if repetition:
                    found.setdefault(target.name, []).append(sample)
    ours, java = found["ours"], found["java"]
    wrong = errors(ours, java)
    note = "messages " + _both([median(values(of, "messages")) for of in (ours, java)])
    name = "delayed messages delivered"
    return [
        _row(
            name,
            "msg/s",
            "tps",
            ours,
            java,
            True,
            limit=DELIVERIES_MIN,
            errors=wrong,
            note=note,
        ),
        _row(name, CPU_UNIT, CPU, ours, java, errors=wrong),
    ]


def _deliver(bench: Bench, target: Target, topic: str) -> Sample:
    queues = 4

    def delivered() -> int:
        return sum(max_offset(target.port, f"{topic}0000", queue) for queue in range(queues))

    with target.awake():
        put_topic(target.port, f"{topic}0000", queues)
        load = {"topic": topic, "queues": queues, "delay": DELAY_LEVEL}
        sent = bench.ring(target, load, min(DELAY_SEND_S, bench.seconds), 0)
        early = delivered()
        target.halt()
        time.sleep(DELAY_S + 0.5)
        stored = int(str(sent["stored"]))
        cpu, began = cpu_seconds([target.pid]), time.monotonic()
        target.wake()
        came = early
        while came < stored and time.monotonic() < began + 60:
            time.sleep(0.05)
            came = delivered()
        seconds, cpu = time.monotonic() - began, cpu_seconds([target.pid]) - cpu
    messages = max(1, came - early)
    return {
        "tps": messages / seconds,
        "messages": messages,
        CPU: cpu / messages * 1e6,
        "errors": int(str(sent["errors"])) + stored - came,
    }


def _row(
    name: str,
    unit: str,
    key: str,
    ours: Sequence[Sample],
    java: Sequence[Sample],
    more: bool = False,
    *,
    times: float | None = None,
    limit: float | None = None,
    errors: int = 0,
    note: str = "",
) -> Row:
    both = values(ours, key), values(java, key)
    return Row(name, unit, *both, times, limit, more, errors, note)


def _cpu_row(
    name: str,
    found: Mapping[tuple[str, str], list[Sample]],
    times: float | None,
    peer: str = "java",
) -> Row:
    ours, other = found[name, "ours"], found[name, peer]
    note = "msg/s " + _both([median(values(of, "tps")) for of in (ours, other)])
    note += ", p99 µs " + _both([median(values(of, "p99_us")) for of in (ours, other)])
    wrong = errors(ours, other)
    return _row(name, CPU_UNIT, CPU, ours, other, times=times, errors=wrong, note=note)


def _both(figures: Sequence[float]) -> str:
    return " / ".join(map(figure, figures))


# In the order in which they are measured: what needs fresh servers first.
GROUPS: dict[str, tuple[str, Callable[[Bench], list[Row]]]] = {
    "footprint": ("Footprint of an idle node", footprint),
    "idle": ("Silent connections", idle),
    "sends": ("Sends, ASYNC_FLUSH", sends),
    "access": ("Signed sends", access),
    "floor": ("Distance to a server that stores nothing", floor),
    "pure": ("Without the compiled core", pure),
    "pulls": ("Pulls", pulls),
    "latency": ("Latency, ASYNC_FLUSH", latency),
    "sync": ("Synced sends", sync),
    "topics": ("Many topics and queues", topics),
    "delays": ("Delayed deliveries", delays),
    "workers": ("Two workers", workers),
    "replication": ("A master and its slave", replication),
}
