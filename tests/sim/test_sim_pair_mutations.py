"""Each rule of a pair can be broken, and the simulator finds it within so many seeds."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from tests.sim.sim_pair import run_pair

from cosmodrome import speed
from cosmodrome.replication import frames, intake, joining, links, master_link, source
from cosmodrome.store import store as store_module
from cosmodrome.store.commit_log import copy, flush, log, wait_line
from cosmodrome.store.commit_log.staging import Span

SEEDS_MAX = 200
Patch = pytest.MonkeyPatch


def begin_unchecked(self: Any, begin: frames.Begin) -> None:
    """A slave begins wherever its master says."""
    self._intake.begin_at(begin.begin)
    self.progress.target = self.progress.master_end = begin.end
    self._agreed(begin.begin)


def ack_before_sync(patch: Patch) -> None:
    """A slave reports what it has written."""

    def report(self: Any) -> None:
        end = self._store.log_end
        if end > self._reported and self.progress.begun:
            self._reported = end
            self._write(frames.ack(0, end))

    def wait_for_disk(self: Any) -> None:
        report(self)

    patch.setattr(master_link.MasterLink, "_report", report)
    patch.setattr(master_link.MasterLink, "_wait_for_disk", wait_for_disk)


def acks_outlive_links(patch: Patch) -> None:
    """What a slave said counts when its link is gone: sends wait for it, and nobody is there."""
    find_best = source.Source._find_best

    def rising(self: Any) -> None:
        best = max((link.acked_end for link in self._links), default=None)
        if best is not None and (self._best is None or best > self._best):
            find_best(self)

    patch.setattr(source.Source, "_find_best", rising)


def acked_end_never_falls(patch: Patch) -> None:
    """What a slave said counts when its link is gone: sends that wait for it are answered OK."""
    acknowledge = flush.Flush.acknowledge
    patch.setattr(
        flush.Flush,
        "acknowledge",
        lambda self, end: acknowledge(self, max(end, self.acked_end)),
    )


def first_report_unchecked(patch: Patch) -> None:
    """A slave that is ahead is taken at its word, and follows."""

    def join(who: frames.Who, *rest: Any) -> Any:
        found = joining.join(who, *rest)
        ahead = isinstance(found, frames.Refusal) and "ahead" in found.why
        return who.end if ahead else found

    patch.setattr(links, "join", join)
    patch.setattr(master_link.MasterLink, "_begin", begin_unchecked)


def torn_record_written(patch: Patch) -> None:
    """A slave writes whatever has come."""
    whole_spans = copy.whole_spans

    def all_spans(piece: memoryview, offset: int, file_end: int, *rest: Any) -> list[Span]:
        spans = whole_spans(piece, offset, file_end, *rest)
        at = spans[-1].end if spans else offset
        end = min(offset + len(piece), file_end)
        return [*spans, Span(at, end, 0, 0, (), b"")] if at < end else spans

    patch.setattr(log, "whole_spans", all_spans)


def fingerprint_ignored(patch: Patch) -> None:
    """Only offsets are compared."""
    patch.setattr(joining, "_compared", lambda who, log: who.end)


def crc_ignored(patch: Patch) -> None:
    """A slave believes bodies."""

    def gather(view: Any, base: int, start: int, stop: int, _: bool, *rest: Any) -> Any:
        return speed.gather(view, base, start, stop, False, *rest)

    def walk(*arguments: Any) -> Any:
        return speed.walk(*arguments)

    patch.setattr(copy, "speed", types.SimpleNamespace(gather=gather, walk=walk))


def nobody_waits_for_slaves(patch: Patch) -> None:
    """Sends are answered when this disk has them."""
    settle = wait_line.WaitLine.settle
    patch.setattr(
        wait_line.WaitLine,
        "settle",
        lambda self, durable_end, acked_end, now: settle(self, durable_end, 1 << 62, now),
    )


def late_links_are_live(patch: Patch) -> None:
    """A slave is waited for that is not there."""
    patch.setattr(source.Source, "available", lambda self, end: True)


def live_links_are_late(patch: Patch) -> None:
    """A slave that is there is not waited for."""
    patch.setattr(source.Source, "available", lambda self, end: False)


def rows_forgotten(patch: Patch) -> None:
    """Tables follow when a link begins, and never again."""
    patch.setattr(links.OwnStream, "_follows", lambda self, name: lambda rows: None)


def rows_before_the_log(patch: Patch) -> None:
    """Tables are taken over whether or not the log has what they speak of."""
    states = frames.states
    patch.setattr(
        frames, "states", lambda log_end, *rest, **whole: states(lambda: 0, *rest, **whole)
    )


def rows_older_than_they_are(patch: Patch) -> None:
    """Rows that changed while a link was paused are said to be as they were gathered."""
    states, send_rows = frames.states, links.OwnStream.send_rows

    def send(self: Any) -> None:
        at = self._ready_at  # 0 as long as whole tables are sent

        def made(log_end: Any, *rest: Any, **whole: Any) -> Any:
            return states((lambda: at) if at else log_end, *rest, **whole)

        patch.setattr(frames, "states", made)
        send_rows(self)

    patch.setattr(links.OwnStream, "send_rows", send)


def index_forgotten(patch: Patch) -> None:
    """A slave does not index what it takes."""
    whole_spans = copy.whole_spans

    def without_keys(*arguments: Any) -> list[Span]:
        spans = whole_spans(*arguments)
        for span in spans:
            span.keys = b""
        return spans

    patch.setattr(log, "whole_spans", without_keys)


def link_never_pauses(patch: Patch) -> None:
    """A slave that does not read costs all that is sent."""
    patch.setattr(links.Link, "pause_writing", lambda self: None)


def torn_record_unbounded(patch: Patch) -> None:
    """Everything is held, as if no record were ever whole."""

    def take(self: Any, run: frames.Run) -> int:
        self._hold([bytes(part) for part in run.parts], run.size)
        return 0

    patch.setattr(intake.Intake, "take", take)


def slaves_hold_nothing_back(patch: Patch) -> None:
    """Files expire that a linked slave still needs."""
    patch.setattr(source.Source, "needed_from", lambda self: None)


def slave_thrown_away(patch: Patch) -> None:
    """A slave that does not fit is begun anew, without a command."""

    def join(who: frames.Who, node: Any, log: Any, file_bytes: int) -> Any:
        found = joining.join(who, node, log, file_bytes)
        return log.log_end if isinstance(found, frames.Refusal) else found

    def begin_at(self: Any, offset: int) -> None:
        self._log.end = self._log.written_end = offset

    patch.setattr(links, "join", join)
    patch.setattr(store_module.Store, "begin_at", begin_at)
    patch.setattr(master_link.MasterLink, "_begin", begin_unchecked)


MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    ack_before_sync,
    acks_outlive_links,
    acked_end_never_falls,
    first_report_unchecked,
    torn_record_written,
    fingerprint_ignored,
    crc_ignored,
    nobody_waits_for_slaves,
    late_links_are_live,
    live_links_are_late,
    rows_forgotten,
    rows_before_the_log,
    rows_older_than_they_are,
    index_forgotten,
    link_never_pauses,
    torn_record_unbounded,
    slaves_hold_nothing_back,
    slave_thrown_away,
)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_found(
    mutate: Callable[[Patch], None], monkeypatch: Patch, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--pair-seed") is not None:
        pytest.skip("one seed is replayed")
    mutate(monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            run_pair(seed)
        except AssertionError as error:
            print(f"{mutate.__name__}: seed {seed}: {error}")
            return
    raise AssertionError(f"{mutate.__name__} was not found in {SEEDS_MAX} seeds")
