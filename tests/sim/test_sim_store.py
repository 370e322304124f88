"""The store keeps its word on a simulated disk, whatever moment power or process end at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sim.sim_run import run_seed

from cosmodrome.store import index as index_module
from cosmodrome.store import upkeep as upkeep_module

GROUPS = 20
BUSY_SEEDS = 40
BUSY_SLOTS = 4000  # a table of four pages


def run_all(seeds: list[int], *, index_slots: int = 0) -> tuple[int, int]:
    promised = checks = 0
    for seed in seeds:
        try:
            run = run_seed(seed, index_slots=index_slots)
        except BaseException as error:
            error.add_note(f"replay: make sim SEED={seed}")
            raise
        promised += run.history.promised
        checks += run.history.checks
    return promised, checks


@pytest.mark.parametrize("group", range(GROUPS))
def test_what_was_promised_survives(group: int, pytestconfig: pytest.Config) -> None:
    one = pytestconfig.getoption("--sim-seed")
    if one is not None:
        if group:
            pytest.skip("one seed is replayed")
        run_all([one])
        return
    seeds = list(range(group, pytestconfig.getoption("--sim-seeds"), GROUPS))
    promised, checks = run_all(seeds)
    # A simulation that does nothing would find nothing.
    assert promised > 20 * len(seeds) and checks > 2 * len(seeds)


@pytest.mark.parametrize("wait_seconds", [0.0, 0.03])
def test_a_busy_index_survives(
    wait_seconds: float, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lives with an index that is always a table, written by pages, now and then."""
    if pytestconfig.getoption("--sim-seed") is not None:
        pytest.skip("one seed is replayed")
    monkeypatch.setattr(index_module, "TABLE_KEYS_MIN", 0)
    monkeypatch.setattr(upkeep_module, "BUSY_INDEX_SECONDS", wait_seconds)
    page_batches = 0
    changed_pages = index_module.IndexFile._changed_pages

    def watched(file: index_module.IndexFile, table: bytearray) -> Iterator[tuple[int, memoryview]]:
        nonlocal page_batches
        page_batches += 1
        return changed_pages(file, table)

    monkeypatch.setattr(index_module.IndexFile, "_changed_pages", watched)
    first = 5000 if wait_seconds else 6000
    seeds = list(range(first, first + BUSY_SEEDS))
    promised, checks = run_all(seeds, index_slots=BUSY_SLOTS)
    assert promised > 20 * len(seeds) and checks > 2 * len(seeds)
    assert page_batches > 2 * len(seeds)


def test_a_seed_runs_the_same_way_every_time() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first.disk.files() == second.disk.files()
    assert first.disk.steps == second.disk.steps > 100
