"""The benches without Java: what is made of samples, and our generators against a floor server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bench import access, java, load, loadgen, replication, ring, verdict
from bench.brokers import ACCOUNT
from bench.verdict import Row

from cosmodrome.speed.signed.pure import Signatures


def test_medians_take_the_figure_of_each_repetition() -> None:
    samples = [{"tps": 30, "errors": 0}, {"tps": 10, "errors": 2}, {"tps": 20}]
    assert verdict.median(verdict.values(samples, "tps")) == 20
    assert verdict.errors(samples, [{"errors": 1}]) == 3
    assert verdict.median([]) == 0


def test_a_figure_that_is_missing_or_no_number_counts_as_nothing() -> None:
    assert verdict.values([{}, {"tps": "many"}], "tps") == [0, 0]


@pytest.mark.parametrize(
    ("ours", "peer", "more", "ratio"),
    [([2, 4, 3], [18], False, 6.0), ([90], [30], True, 3.0), ([0], [5], False, None)],
)
def test_a_ratio_says_how_many_times_better(
    ours: list[float], peer: list[float], more: bool, ratio: float | None
) -> None:
    assert Row("r", "u", ours, peer, more=more).ratio == ratio


def test_a_pair_is_judged_by_both_processes_and_by_what_waiting_costs() -> None:
    def sample(cpu: float, tps: float, p99_us: float) -> verdict.Sample:
        return {replication.CPU: cpu, "tps": tps, "p99_us": p99_us}

    found: dict[tuple[str, str, str], list[verdict.Sample]] = {
        ("64", "ASYNC_MASTER", "ours"): [sample(10, 100, 5)],
        ("64", "ASYNC_MASTER", "java"): [sample(41, 50, 6)],
        ("64", "SYNC_MASTER", "ours"): [sample(10, 69, 7)],
        ("64", "SYNC_MASTER", "java"): [sample(39, 50, 6)],
    }
    rows = replication.rows_of("SYNC_FLUSH", "64", found)
    assert [row.passed for row in rows] == [True, True, False, False, False]
    assert rows[-1].ours == [69]


def test_checks_of_signed_sends_are_judged_without_their_hmac() -> None:
    cpu = {"plain": (2.0, 20.0), "signed, not checked": (2.1, 20.0)}
    cpu["signed and checked"] = (2.5, 30.0)
    found = {
        (case, server): [{access.CPU: figure, "tps": 1}]
        for case, both in cpu.items()
        for server, figure in zip(access.SERVERS, both, strict=True)
    }
    rows = access.rows_of(found, [0.4], [0.5], [2.0])
    assert rows[-1].ours == [pytest.approx(5.0)]
    assert rows[-1].note == "(signed − plain − HMAC) / plain is 5.00 % / 40.00 %"
    assert access.rows_of(found, [0.3], [0.5], [2.0])[-1].passed is False  # 10 % are left
    assert access.rows_of(found, [0.41], [0.5], [2.0])[-1].passed is True


def test_the_hmac_is_measured_over_what_a_request_signs() -> None:
    first, second = access.signed_parts()
    assert ACCOUNT[0].encode() in first and len(second) == 128
    pytest.importorskip("cosmodrome.speed.signed.native")
    assert access.walk_us() > 0 and access.hmac_us() > 0


def test_a_ring_is_signed_by_its_account() -> None:
    data, _ = ring.make_ring(options(account=":".join(ACCOUNT)))
    asked = []

    def allows(access_key: str, code: int, values: tuple[str, ...]) -> bool:
        asked.append((access_key, code, values))
        return True

    secrets = {ACCOUNT[0]: ACCOUNT[1].encode()}
    law = Signatures({310: ("b",)}, secrets.get, allows)
    assert law.proven_end(data, 0) == len(data)
    assert (ACCOUNT[0], 310, ("Ring0002",)) in asked


def test_a_bar_against_the_peer() -> None:
    assert Row("r", "u", [4], [24], times=6).passed is True
    assert Row("r", "u", [4.1], [24], times=6).passed is False
    assert Row("r", "u", [4], (), times=6).passed is False  # nothing to compare with
    assert Row("r", "u", [4], [24]).passed is None


def test_a_bar_of_our_own() -> None:
    assert Row("r", "u", [79], limit=80).passed is True
    assert Row("r", "u", [81], limit=80).passed is False
    assert Row("r", "u", [20_000], limit=20_000, more=True).passed is True
    assert Row("r", "u", [19_999], limit=20_000, more=True).passed is False


def test_errors_fail_a_row_that_is_otherwise_good() -> None:
    row = Row("r", "u", [1], [24], times=6, errors=3)
    assert row.passed is False
    assert row.verdict == "**fail** (3 errors)"


def test_the_table_shows_median_range_ratio_bar_and_verdict() -> None:
    text = verdict.table([Row("send", "CPU-µs", [3, 2, 4], [30, 24, 28], times=6, note="n")])
    assert text.splitlines()[2] == (
        "| send | CPU-µs | 3.00 (2.00–4.00) | 28.00 (24.00–30.00) | 9.33 × | ≥ 6 × | pass | n |"
    )


def test_figures_keep_what_can_be_read() -> None:
    assert [verdict.figure(value) for value in (0.234, 12.5, 123.4, 12345.6)] == [
        *("0.23", "12.50", "123", "12,346")
    ]


def test_a_section_is_replaced_and_the_others_stay_in_their_order() -> None:
    page = "head\n<!-- measured -->\nold words\n<!-- end -->\ntail\n"
    order = ("sends", "pulls")
    page = verdict.put_sections(page, {"pulls": "P1"}, order)
    page = verdict.put_sections(page, {"sends": "S1"}, order)
    page = verdict.put_sections(page, {"pulls": "P2"}, order)
    assert page == (
        "head\n<!-- measured -->\n"
        "<!-- rows sends -->\nS1\n<!-- end rows -->\n\n"
        "<!-- rows pulls -->\nP2\n<!-- end rows -->\n"
        "<!-- end -->\ntail\n"
    )


def test_the_trend_says_what_moved() -> None:
    old = verdict.trend_line(
        "d", "abc", [Row("send", "µs", [4], [24]), Row("pull", "µs", [1], [4])]
    )
    assert json.loads(old)["rows"] == {"send, µs": [4, 24], "pull, µs": [1, 4]}
    other = verdict.trend_line("d", "def", [Row("pull", "µs", [1], [4])])
    now = [Row("send", "µs", [3], [24]), Row("pull", "µs", [1], [4.2]), Row("new", "µs", [1], [2])]
    assert verdict.changes(f"{old}\n{other}\n", now) == ["send, µs: 6.00 × at abc, now 8.00 ×"]
    assert verdict.changes("", now) == []


def test_the_result_of_a_generator_is_its_last_line() -> None:
    assert load.parse('words\n{"tps": 5}\n') == {"tps": 5}
    for bad in ("", "words", "[1]\n"):
        with pytest.raises(RuntimeError, match="no result"):
            load.parse(bad)


def test_groups_are_chosen_in_the_order_of_measuring() -> None:
    assert java.chosen("pulls,footprint,sends") == ["footprint", "sends", "pulls"]
    for bad in ("", "sends,speed"):
        with pytest.raises(argparse.ArgumentTypeError):
            java.chosen(bad)


OPTIONS = {
    "addr": "",
    "topic": "Ring",
    "topics": 3,
    "queues": 2,
    "tag": "TagA",
    "conns": 2,
    "window": 4,
    "size": 16,
    "batch": 1,
    "delay": 0,
    "account": "",
    "count": 0,
    "pid": "",
    "op": "send",
    "duration": 0.2,
    "warmup": 0.0,
    "rate": 0,
    "pullmax": 32,
}


def options(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{**OPTIONS, **changed})


def test_a_ring_has_every_topic_and_queue_in_frames_of_one_length() -> None:
    data, size = ring.make_ring(options(delay=2))
    frames = [bytes(data[at : at + size]) for at in range(0, len(data), size)]
    places, keys = set(), set()
    for each in frames:
        length = int.from_bytes(each[4:8], "big")
        fields = json.loads(each[8 : 8 + length])["extFields"]
        places.add((fields["b"], int(fields["e"])))
        keys.add(fields["i"])
        assert "DELAY\x012" in fields["i"]
    assert places == {(f"Ring000{topic}", queue) for topic in range(3) for queue in range(2)}
    assert len(keys) == len(frames) >= ring.FRAMES_MIN


@pytest.fixture
async def floor_address() -> AsyncIterator[str]:
    pytest.importorskip("cosmodrome.speed.lane.native", reason="the floor needs the compiled part")
    from bench import floor

    server = floor.make_server()
    port = await server.listen("127.0.0.1", 0)
    yield f"127.0.0.1:{port}"
    await server.stop(grace_ms=100)


async def test_the_floor_answers_what_a_ring_sends(floor_address: str) -> None:
    result = await ring.run(options(addr=floor_address, count=1000, duration=10.0))
    assert (result["stored"], result["errors"], result["first_error"]) == (1000, 0, "")


async def test_the_floor_answers_sends_and_batches_of_the_generator(floor_address: str) -> None:
    for batch in (1, 4):
        result = await loadgen.run(options(addr=floor_address, batch=batch))
        assert result["msgs"] and result["errors"] == 0


async def test_the_generators_run_on_the_loop_they_choose(floor_address: str) -> None:
    """A program of its own, as the benches start it."""
    host, port = floor_address.split(":")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.ring",
        "--addr",
        f"{host}:{port}",
        "--count",
        "100",
        "--warmup",
        "0",
        "--duration",
        "10",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(ring.__file__).parents[1],
    )
    said, wrong = await process.communicate()
    assert load.parse(said.decode())["stored"] == 100, wrong.decode()


async def test_a_paced_load_keeps_its_rate(floor_address: str) -> None:
    result = await loadgen.run(options(addr=floor_address, rate=500, warmup=0.1, duration=0.5))
    assert 0 < int(str(result["tps"])) < 5000  # unpaced it is far more
    assert result["errors"] == 0 and result["p50_us"]


async def test_requests_that_are_refused_are_errors(
    floor_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The floor has 1,024 queues: its lane leaves other sends, and nobody else serves them.
    monkeypatch.setattr(ring, "END_S", 0.1)
    refused = options(addr=floor_address, queues=2000, topics=1, conns=1, count=2000, duration=10)
    result = await ring.run(refused)
    assert (result["stored"], result["errors"]) == (1024, 976)
    assert "not served" in str(result["first_error"])


def test_a_mark_is_counted_once_wherever_it_is_cut() -> None:
    text = b'{"code":0,"x":1}{"code":10}{"code":0,}'
    for cut in range(len(text)):
        answers, good = ring.Mark(ring.ANSWER), ring.Mark(ring.GOOD)
        parts = text[:cut], text[cut:]
        assert sum(map(answers.seen, parts)) == 3
        assert sum(map(good.seen, parts)) == 2
