"""The store keeps its word on a simulated disk, whatever moment power or process end at."""

from __future__ import annotations

import pytest
from sim_run import run_seed

GROUPS = 20


def run_all(seeds: list[int]) -> tuple[int, int]:
    promised = checks = 0
    for seed in seeds:
        try:
            run = run_seed(seed)
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


def test_a_seed_runs_the_same_way_every_time() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first.disk.files() == second.disk.files()
    assert first.disk.steps == second.disk.steps > 100
