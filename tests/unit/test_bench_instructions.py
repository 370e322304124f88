"""The gate on instruction counts: what it compares, when it fails, when it stands aside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench import instructions
from bench.instructions import (
    CannotCount,
    Counter,
    callgrind_total,
    choose,
    compare,
    per_operation,
    perf_total,
    render,
    table_name,
)
from bench.operations import OPERATIONS, build

from cosmodrome.speed import lane


@pytest.mark.parametrize(
    ("counted", "verdict", "fails"),
    [
        (1000, "ok", False),
        (1010, "ok", False),
        (1011, "SLOWER", True),
        (990, "ok", False),
        (989, "faster: record it", False),
    ],
)
def test_more_than_one_percent_is_too_much(counted: int, verdict: str, fails: bool) -> None:
    [line] = compare({"send": 1000}, {"send": counted})
    assert (line.verdict(), line.fails()) == (verdict, fails)


def test_what_only_one_table_has_fails() -> None:
    lines = compare({"gone": 5, "send": 7}, {"send": 7, "new": 9})
    assert [(line.name, line.verdict()) for line in lines] == [
        ("send", "ok"),
        ("new", "not recorded"),
        ("gone", "no such operation"),
    ]
    assert [line.fails() for line in lines] == [False, True, True]


def test_the_table_shows_both_counts_and_the_change() -> None:
    text = render(compare({"send": 1000}, {"send": 1234}))
    assert text.splitlines()[1].split() == ["send", "1,000", "1,234", "+23.4%", "SLOWER"]


def test_a_disturbed_round_does_not_count() -> None:
    assert per_operation([3300, 3210, 9000], 10) == 321


def test_totals_are_read_from_what_the_counters_write() -> None:
    assert perf_total("# started on Mon\n\n12345,,instructions:u,1000,100.00,,\n") == 12345
    assert perf_total("<not supported>,,instructions:u,0,100.00,,\n") is None
    assert perf_total("") is None
    assert callgrind_total("version: 1\nevents: Ir\nsummary: 77\n\ntotals: 77\n") == 77
    with pytest.raises(CannotCount):
        callgrind_total("version: 1\n")


def counter(name: str, why_not: str | None = None, count: int = 100) -> Counter:
    def counted(names: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(names, count)

    return Counter(name, lambda: why_not, counted)


def test_a_counter_must_work_and_have_a_table() -> None:
    both = [counter("perf"), counter("valgrind")]
    tables: dict[str, dict[str, int]] = {table_name("valgrind"): {}}
    assert choose(both, tables).name == "valgrind"
    assert choose(both, None).name == "perf"  # to record, any will do
    assert choose(both, None, "valgrind").name == "valgrind"
    with pytest.raises(CannotCount, match="no counters here; no counts are recorded for valgrind"):
        choose([counter("perf", "no counters here"), counter("valgrind")], {})


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty table of counts, and a machine with the compiled core."""
    monkeypatch.setattr(instructions, "RECORDED", tmp_path / "counts.json")
    monkeypatch.setattr(lane, "HAS_LANE", True)
    return tmp_path / "counts.json"


def run(monkeypatch: pytest.MonkeyPatch, one: Counter, *words: str) -> int:
    monkeypatch.setattr(instructions, "COUNTERS", (one,))
    monkeypatch.setattr("sys.argv", ["instructions", *words])
    return instructions.main()


def test_the_gate_fails_only_when_it_is_slower(
    gate: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, counter("valgrind")) == 0
    assert "skipped: no counts are recorded" in capsys.readouterr().err
    assert run(monkeypatch, counter("valgrind"), "--record") == 0
    assert json.loads(gate.read_text())[table_name("valgrind")] == dict.fromkeys(OPERATIONS, 100)
    assert run(monkeypatch, counter("valgrind", count=101)) == 0
    assert run(monkeypatch, counter("valgrind", count=102)) == 1
    assert "SLOWER" in capsys.readouterr().out
    assert run(monkeypatch, counter("valgrind", "it is not installed")) == 0
    assert "skipped: it is not installed" in capsys.readouterr().err


def test_some_are_recorded_without_losing_the_others(
    gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(OPERATIONS))
    run(monkeypatch, counter("valgrind"), "--record")
    assert run(monkeypatch, counter("valgrind", count=300), name) == 1
    assert run(monkeypatch, counter("valgrind", count=300), name, "--record") == 0
    found = json.loads(gate.read_text())[table_name("valgrind")]
    assert found == {**dict.fromkeys(OPERATIONS, 100), name: 300}


def test_the_smaller_of_two_counts_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []

    def count(names: list[str]) -> dict[str, int]:
        orders.append(list(names))
        return {name: 100 + at for at, name in enumerate(names)}

    monkeypatch.setattr(instructions, "_count_in_order", count)
    assert instructions.count_by_valgrind(["a", "b", "c"]) == {"a": 100, "b": 101, "c": 100}
    assert orders == [["a", "b", "c"], ["c", "b", "a"]]


def test_recorded_counts_are_of_operations_that_exist() -> None:
    for name, counts in json.loads((instructions.RECORDED).read_text()).items():
        assert counts.keys() == OPERATIONS.keys(), name


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_runs(name: str) -> None:
    with build[name]() as work:
        work(3)
