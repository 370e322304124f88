"""Stores looked at and mended without a broker: clean ones, and every kind of damage."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.goldens import Golden, each_golden
from tests.unit.store.store_kit import HandClock, bodies, draft, faulty_env, put, small

from cosmodrome.env.real import RealDisk, real_env
from cosmodrome.errors import ConfigError, DirectoryInUse, StoreCorrupt, StoreError
from cosmodrome.findings import Finding
from cosmodrome.layout import CHECKPOINT, INDEX_HEADER, QUEUE_ENTRY
from cosmodrome.store.offline import directory
from cosmodrome.store.store import Store
from cosmodrome.wire import fastjson

DELAYS = directory.DelayLevels("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")
COUNT = 96  # messages of `filled`: several files of each kind


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stopped store that tests copy."""
    TEMPLATE[:] = [tmp_path_factory.mktemp("offline") / "store"]
    asyncio.run(made(TEMPLATE[0]))
    return TEMPLATE[0]


TEMPLATE: list[Path] = []


def filled(root: Path) -> None:
    shutil.copytree(TEMPLATE[0], root, dirs_exist_ok=True)


async def made(root: Path, *, stop: bool = True, **changes: Any) -> Store:
    """A store of two topics; every third message has keys, every fourth a tag."""
    clock = HandClock()
    store = Store(small(root, **changes), faulty_env(clock=clock))
    await store.start()
    stored = None
    for number in range(COUNT):
        clock.at_ms += 700
        message = draft(
            f"body {number}".encode() * 5,
            topic="A" if number % 3 else "B",
            queue_id=number % 2,
            keys=f"k{number} shared" if number % 3 == 0 else None,
            tags="red" if number % 4 == 0 else None,
        )
        stored = store.append(message)
    assert stored is not None
    await store.durable(stored.end)
    if stop:
        await store.stop()
    return store


def checked(root: Path, **choices: Any) -> directory.Report:
    hints = choices.pop("hints", None)
    read_only = choices.get("read_only", False)
    with directory.opened(str(root), RealDisk(), hints, read_only=read_only) as files:
        return directory.check(files, read_json=json.loads, delays=DELAYS, **choices)


def problems(root: Path, **choices: Any) -> list[Finding]:
    report = checked(root, **choices)
    assert report.findings.problem_count >= len(report.findings.problems)
    return report.findings.problems


def one_problem(root: Path, **choices: Any) -> Finding:
    found = problems(root, **choices)
    assert len(found) == 1, found
    assert found[0].remedy
    return found[0]


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def log_file(root: Path, number: int = 0) -> Path:
    return sorted((root / "commitlog").iterdir())[number]


def queue_file(root: Path, queue: str = "A/0", number: int = 0) -> Path:
    return sorted((root / "consumequeue" / queue).iterdir())[number]


def index_file(root: Path, number: int = 0) -> Path:
    return sorted((root / "index").iterdir())[number]


def offsets(root: Path) -> list[int]:
    with directory.opened(str(root), RealDisk(), read_only=True) as files:
        return [record.log_offset for record in directory.records(files, directory.Selection())]


def mended(root: Path, cut_at: int | None = None, hints: directory.Hints | None = None) -> Any:
    with directory.opened(str(root), RealDisk(), hints) as files:
        plan = directory.plan_repair(files, json.loads, cut_at)
        options = directory.store_options(files, index=True)
        copies = directory.run_plan(files, plan, 1_700_000_000_000)
    return plan, options, Path(copies)


# --- clean stores --------------------------------------------------------------------------------
def test_a_clean_store_is_clean_and_its_geometry_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    report = checked(tmp_path)
    assert report.ok and report.clean_stop
    assert report.findings.notes == []
    assert report.messages == report.queue_entries == COUNT
    assert report.log_file_bytes == 4096 and report.log_files > 2
    assert (report.index_slots, report.index_entries_max) == (7, 10)
    assert report.index_entries == 2 * COUNT // 3
    assert (report.topics, report.queues) == (2, 4)
    assert report.last_ms - report.first_ms == 700 * (COUNT - 1)
    assert report.max_offset == offsets(tmp_path)[-1] + report_size(tmp_path)


def report_size(root: Path) -> int:
    with directory.opened(str(root), RealDisk(), read_only=True) as files:
        return list(directory.records(files, directory.Selection()))[-1].size


async def test_an_empty_store_is_clean(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await store.stop()
    report = checked(tmp_path)
    assert report.ok and report.messages == 0


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    filled(tmp_path)
    seen: list[tuple[int, int]] = []
    checked(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 1
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a directory"):
        checked(tmp_path / "none")
    with pytest.raises(StoreError, match=r"no directory .*commitlog"):
        checked(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_log_elsewhere_is_found_when_it_is_named(tmp_path: Path) -> None:
    elsewhere = tmp_path / "fast"
    await made(tmp_path / "root", store_path_commit_log=str(elsewhere))
    report = checked(tmp_path / "root", hints=directory.Hints(log_directory=str(elsewhere)))
    assert report.ok and report.messages == COUNT


async def test_a_topic_that_was_deleted_and_made_again_is_clean(tmp_path: Path) -> None:
    store = await made(tmp_path, stop=False)
    store.delete_topic("A")
    await put(store, *[draft(b"new", topic="A", queue_id=0) for _ in range(3)])
    await store.stop()
    (tmp_path / "config").mkdir(exist_ok=True)
    (tmp_path / "config" / "topics.json").write_text('{"topicConfigTable": {"A": {}, "B": {}}}')
    report = checked(tmp_path)
    # Queue 1 of A was not made again; A is configured, so that its files are missing matters.
    assert [problem.subject for problem in report.findings.problems] == ["consumequeue/A/1"]
    assert any("begins anew at offset 0" in note.sentence for note in report.findings.notes)
    (tmp_path / "config" / "topics.json").write_text('{"topicConfigTable": {"B": {}}}')
    report = checked(tmp_path)
    assert report.ok
    assert any(note.remedy == "nothing if the topic was deleted" for note in report.findings.notes)


async def test_expired_messages_are_no_damage(tmp_path: Path) -> None:
    filled(tmp_path)
    log_file(tmp_path).unlink()
    report = checked(tmp_path)
    assert report.ok and report.findings.notes == []
    assert report.min_offset == 4096 and 0 < report.messages < COUNT
    seven = directory.Hints(queue_file_bytes=7 * 20)
    await rebuilt(tmp_path, seven)  # queues now begin with fillers
    again = checked(tmp_path)
    assert again.ok and again.findings.notes == []
    assert again.messages == again.queue_entries == report.messages
    with directory.opened(str(tmp_path), RealDisk(), read_only=True) as files:
        assert any(row.is_filler for row in directory.queue_rows(files, directory.Selection()))


# --- locks and live stores -----------------------------------------------------------------------
async def test_a_running_store_is_refused_unless_read_only(tmp_path: Path) -> None:
    store = await made(tmp_path, stop=False)
    with pytest.raises(DirectoryInUse, match="--read-only"):
        checked(tmp_path)
    report = checked(tmp_path, read_only=True)
    assert report.ok and not report.clean_stop
    assert report.messages == COUNT
    # Nothing derived has reached the disk yet; that is a note, not a problem.
    assert report.findings.note_count > 0
    assert all(
        "next start" in note.remedy for note in report.findings.notes if note.code == "queue"
    )
    await store.stop()
    assert checked(tmp_path).findings.note_count == 0


async def test_a_killed_store_has_notes_only_and_a_start_cures_them(tmp_path: Path) -> None:
    store = await made(tmp_path, stop=False)
    await store.abandon()
    report = checked(tmp_path)
    assert report.ok and not report.clean_stop and report.findings.note_count > 0
    with directory.opened(str(tmp_path), RealDisk()) as files:
        options = directory.store_options(files, index=True)
    assert options.mapped_file_size_commit_log == 4096
    again = Store(small(tmp_path), faulty_env())
    await again.start()
    await again.stop()
    assert checked(tmp_path).findings.note_count == 0


def test_missing_entries_that_the_checkpoint_vouches_for_are_a_problem(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    (tmp_path / "abort").touch()
    overwrite(queue_file(tmp_path, "A/0"), 0, bytes(20))
    found = one_problem(tmp_path)
    assert found.code == "queue" and "missing" in found.sentence


# --- damage of the log ---------------------------------------------------------------------------
def test_a_flipped_bit_in_a_body_is_found_with_what_lies_behind(tmp_path: Path) -> None:
    filled(tmp_path)
    places = offsets(tmp_path)
    overwrite(log_file(tmp_path), places[3] + 90, b"\xff")
    found = one_problem(tmp_path)
    assert found.code == "log"
    assert found.evidence["position"] == places[3]
    assert f"{COUNT - 4} good ones lie behind" in found.sentence
    assert f"--cut-at {places[3]}" in found.remedy


def test_a_damaged_last_record_of_a_clean_store_is_a_problem(tmp_path: Path) -> None:
    filled(tmp_path)
    last = offsets(tmp_path)[-1]
    overwrite(log_file(tmp_path, -1), last % 4096 + 90, b"\xff")
    found = problems(tmp_path)
    assert found[0].code == "log" and "the last record" in found[0].sentence
    assert {problem.code for problem in found} == {"log", "queue", "checkpoint"}


def test_a_lost_tail_is_seen_through_the_queues(tmp_path: Path) -> None:
    filled(tmp_path)
    last = offsets(tmp_path)[-1]
    overwrite(log_file(tmp_path, -1), last % 4096, bytes(200))
    found = problems(tmp_path)
    assert any(problem.code == "queue" and "no message" in problem.sentence for problem in found)


def test_a_missing_log_file_is_a_gap(tmp_path: Path) -> None:
    filled(tmp_path)
    log_file(tmp_path, 1).unlink()
    found = problems(tmp_path)
    assert any("does not continue the log" in problem.sentence for problem in found)
    assert any("good ones lie behind" in problem.sentence for problem in found)


def test_a_short_log_file_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    end = checked(tmp_path).max_offset % 4096
    assert end < 4000
    with log_file(tmp_path, -1).open("r+b") as file:
        file.truncate(4000)
    assert "4000 bytes instead of 4096" in one_problem(tmp_path).sentence


async def test_a_single_odd_file_was_cut(tmp_path: Path) -> None:
    store = Store(small(tmp_path, mapped_file_size_commit_log=65536), faulty_env())
    await store.start()
    await put(store, draft(b"x"))
    await store.stop()
    with log_file(tmp_path).open("r+b") as file:
        file.truncate(5000)
    assert "nobody configures" in one_problem(tmp_path).sentence
    size = directory.Hints(log_file_bytes=65536)
    assert "5000 bytes instead of 65536" in one_problem(tmp_path, hints=size).sentence


def test_a_jump_of_queue_offsets_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    place = offsets(tmp_path)[-1]
    at = place % 4096 + 20
    data = log_file(tmp_path, -1).read_bytes()
    number = int.from_bytes(data[at : at + 8], "big")
    overwrite(log_file(tmp_path, -1), at, (number + 2).to_bytes(8, "big"))
    assert any("lacks 2 of its messages" in problem.sentence for problem in problems(tmp_path))


# --- damage of derived data ----------------------------------------------------------------------
def test_a_wrong_entry_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    overwrite(queue_file(tmp_path), 20, QUEUE_ENTRY.pack(0, 50, 7))
    found = one_problem(tmp_path)
    assert found.code == "queue" and found.evidence["position"] == 20
    assert "(0, 50, 7)" in found.sentence
    assert "rebuild" in found.remedy


def test_a_wrong_tags_code_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    overwrite(queue_file(tmp_path), 12, (1).to_bytes(8, "big"))
    assert "entry 0 wrong" in one_problem(tmp_path).sentence


def test_neighbouring_faults_are_one_finding(tmp_path: Path) -> None:
    filled(tmp_path)
    overwrite(queue_file(tmp_path), 20, bytes(60))
    assert "3 entries from 1 on missing" in one_problem(tmp_path).sentence


def test_extra_entries_are_found(tmp_path: Path) -> None:
    filled(tmp_path)
    assert COUNT // 6 % 5 == 1  # the last file of this queue has room
    overwrite(queue_file(tmp_path, "B/0", -1), 20, QUEUE_ENTRY.pack(0, 123, 0))
    found = one_problem(tmp_path)
    assert "no message of the log claims" in found.sentence and found.evidence["position"] == 20


def test_a_missing_queue_file_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    queue_file(tmp_path, number=-1).unlink()
    assert "missing" in one_problem(tmp_path).sentence
    shutil.rmtree(tmp_path / "consumequeue" / "B")
    assert sum("there are no files" in problem.sentence for problem in problems(tmp_path)) == 2


def test_a_queue_file_of_another_length_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    with queue_file(tmp_path, number=-1).open("r+b") as file:
        file.truncate(90)
    assert any("does not fit its neighbours" in problem.sentence for problem in problems(tmp_path))


def test_a_key_that_no_chain_reaches_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    path = index_file(tmp_path)
    slots = INDEX_HEADER.size
    data = path.read_bytes()
    used = next(at for at in range(slots, slots + 28, 4) if any(data[at : at + 4]))
    overwrite(path, used, bytes(4))
    found = one_problem(tmp_path)
    assert (
        found.code == "index" and found.evidence["position"] == used and "slots" in found.sentence
    )


@pytest.mark.parametrize("field", [0, 4, 12, 16])
def test_any_wrong_field_of_an_index_entry_is_found(tmp_path: Path, field: int) -> None:
    filled(tmp_path)
    at = INDEX_HEADER.size + 7 * 4 + 3 * 20 + field
    width = 8 if field == 4 else 4
    overwrite(index_file(tmp_path), at, (77).to_bytes(width, "big"))
    found = problems(tmp_path)
    assert found and {problem.code for problem in found} == {"index"}
    assert any("entry 3" in problem.sentence for problem in found)


def test_a_missing_index_is_found_unless_none_is_wanted(tmp_path: Path) -> None:
    filled(tmp_path)
    shutil.rmtree(tmp_path / "index")
    found = one_problem(tmp_path)
    assert "there are no index files" in found.sentence and "--no-index" in found.remedy
    assert checked(tmp_path, index=False).ok


def test_a_lost_index_file_is_found(tmp_path: Path) -> None:
    filled(tmp_path)
    index_file(tmp_path, 1).unlink()
    assert "are not in the index" in one_problem(tmp_path).sentence


def test_an_index_file_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    filled(tmp_path)
    path = index_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    found = problems(tmp_path)
    assert any("no number of slots fits" in problem.sentence for problem in found)


# --- checkpoint and tables -----------------------------------------------------------------------
def test_a_checkpoint_that_claims_too_much_or_too_little(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / "checkpoint"
    path.write_bytes(CHECKPOINT.pack(1 << 50, 0, 0) + bytes(4072))
    found = one_problem(tmp_path)
    assert found.code == "checkpoint" and "vouches for the log" in found.sentence
    path.write_bytes(b"short")
    assert "5 bytes" in one_problem(tmp_path).sentence
    path.unlink()
    report = checked(tmp_path)
    assert report.ok and report.findings.note_count == 1


def test_damaged_tables_are_found(tmp_path: Path) -> None:
    filled(tmp_path)
    config = tmp_path / "config"
    config.mkdir()
    (config / "consumerOffset.json").write_text("{")
    (config / "topics.json.bak").write_text("")
    (config / "topics.json.tmp").write_text("{")
    report = checked(tmp_path)
    assert [finding.subject for finding in report.findings.problems] == [
        "config/consumerOffset.json"
    ]
    assert report.findings.note_count == 2


def test_the_list_is_bounded_and_the_count_is_not(tmp_path: Path) -> None:
    filled(tmp_path)
    for path in (tmp_path / "consumequeue").rglob("0*"):
        if path.is_file():
            overwrite(path, 0, QUEUE_ENTRY.pack(5, 5, 5))
    report = checked(tmp_path, limit=2)
    assert len(report.findings.problems) == 2
    assert report.findings.problem_count > 4


# --- reading -------------------------------------------------------------------------------------
def test_records_can_be_chosen(tmp_path: Path) -> None:
    filled(tmp_path)
    places = offsets(tmp_path)
    with directory.opened(str(tmp_path), RealDisk(), read_only=True) as files:

        def pick(**choices: Any) -> list[Any]:
            return list(directory.records(files, directory.Selection(**choices)))

        assert len(pick()) == COUNT
        assert {record.topic for record in pick(topic="B")} == {"B"}
        assert {record.queue_id for record in pick(queue_id=1)} == {1}
        part = pick(start=places[10], end=places[40])
        assert [record.log_offset for record in part] == places[10:40]
        first_ms = pick()[0].store_ms
        assert len(pick(since_ms=first_ms + 700, until_ms=first_ms + 1400)) == 2
        rows = list(directory.queue_rows(files, directory.Selection(topic="B", queue_id=0)))
        assert [row.queue_offset for row in rows] == list(range(len(rows)))
        assert len(rows) == COUNT // 6
        assert len(list(directory.all_index_entries(files))) == 2 * COUNT // 3


def test_reading_steps_over_damage_and_says_so(tmp_path: Path) -> None:
    filled(tmp_path)
    places = offsets(tmp_path)
    overwrite(log_file(tmp_path), places[3] + 4, b"\0")
    damage: list[tuple[int, int]] = []
    with directory.opened(str(tmp_path), RealDisk(), read_only=True) as files:
        found = directory.records(
            files, directory.Selection(), on_damage=lambda end, to: damage.append((end, to))
        )
        assert [record.log_offset for record in found] == places[:3] + places[4:]
    assert damage == [(places[3], places[4])]


# --- rebuilding ----------------------------------------------------------------------------------
async def rebuilt(root: Path, hints: directory.Hints | None = None) -> None:
    with directory.opened(str(root), RealDisk(), hints) as files:
        directory.prove_log(files)
        options = directory.store_options(files, index=True)
        directory.drop_derived(files, index=True)
    await directory.open_once(options, real_env())


async def test_a_rebuild_mends_queues_and_index(tmp_path: Path) -> None:
    filled(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "consumequeue").rglob("0000*")}
    log = [path.read_bytes() for path in sorted((tmp_path / "commitlog").iterdir())]
    overwrite(queue_file(tmp_path), 20, QUEUE_ENTRY.pack(0, 50, 7))
    index_file(tmp_path).unlink()
    assert not checked(tmp_path).ok
    await rebuilt(tmp_path)
    assert checked(tmp_path).ok
    assert {path: path.read_bytes() for path in before} == before
    assert [path.read_bytes() for path in sorted((tmp_path / "commitlog").iterdir())] == log


def test_a_rebuild_refuses_to_lose_what_lies_behind_damage(tmp_path: Path) -> None:
    filled(tmp_path)
    overwrite(log_file(tmp_path), 90, b"\xff")
    with (
        directory.opened(str(tmp_path), RealDisk()) as files,
        pytest.raises(StoreCorrupt) as caught,
    ):
        directory.prove_log(files)
    assert "repair" in str(caught.value)
    log_file(tmp_path, 1).unlink()
    with directory.opened(str(tmp_path), RealDisk()) as files, pytest.raises(StoreCorrupt):
        directory.prove_log(files)


async def test_queues_with_copies_are_accepted_and_not_rebuilt(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"INNER_MULTI_DISPATCH", properties="a\x01INNER_MULTI_DISPATCH"))
    await put(store, draft(b"x", properties="INNER_MULTI_DISPATCH\x01other,copies"))
    await store.stop()
    place = queue_file(tmp_path, "T/0").read_bytes()[20:40]
    copies = tmp_path / "consumequeue" / "copies" / "0"
    copies.mkdir(parents=True)
    (copies / f"{0:020d}").write_bytes(place + bytes(80))
    assert checked(tmp_path).ok
    with (
        directory.opened(str(tmp_path), RealDisk()) as files,
        pytest.raises(StoreError, match="only a Java broker builds"),
    ):
        directory.prove_log(files)
    (copies / f"{0:020d}").write_bytes(queue_file(tmp_path, "T/0").read_bytes()[:20] + bytes(80))
    assert "no message of the log claims" in one_problem(tmp_path).sentence


async def test_a_rebuild_that_is_killed_is_finished_by_the_next_start(tmp_path: Path) -> None:
    filled(tmp_path)
    with directory.opened(str(tmp_path), RealDisk()) as files:
        directory.drop_derived(files, index=True)
    assert (tmp_path / "abort").exists()
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    assert len(bodies(store, "B", 0)) == COUNT // 6
    await store.stop()
    assert checked(tmp_path).ok


# --- repairing -----------------------------------------------------------------------------------
def test_a_clean_store_needs_no_repair(tmp_path: Path) -> None:
    filled(tmp_path)
    with directory.opened(str(tmp_path), RealDisk()) as files:
        plan = directory.plan_repair(files, json.loads)
    assert not plan.steps and not plan.undecided and not plan.blocked


async def test_a_short_last_file_is_made_whole(tmp_path: Path) -> None:
    filled(tmp_path)
    path, last = log_file(tmp_path, -1), offsets(tmp_path)[-1]
    with path.open("r+b") as file:
        file.truncate(last % 4096 + 50)
    damaged = path.read_bytes()
    with pytest.raises(StoreCorrupt):
        await Store(small(tmp_path), faulty_env()).start()
    plan, options, copies = mended(tmp_path)
    assert plan.lost_unread == 1 and not plan.lost
    assert (copies / "commitlog" / path.name).read_bytes() == damaged
    assert copies.parent == tmp_path and copies.name.startswith("repair-2023")
    await directory.open_once(options, real_env())
    assert checked(tmp_path).ok
    assert len(offsets(tmp_path)) == COUNT - 1


async def test_a_long_file_is_cut_to_its_size(tmp_path: Path) -> None:
    filled(tmp_path)
    with log_file(tmp_path, 0).open("ab") as file:
        file.write(b"more")
    _, options, _ = mended(tmp_path)
    await directory.open_once(options, real_env())
    assert checked(tmp_path).ok and len(offsets(tmp_path)) == COUNT


async def test_damage_in_the_middle_waits_for_a_decision(tmp_path: Path) -> None:
    filled(tmp_path)
    places = offsets(tmp_path)
    overwrite(log_file(tmp_path), places[3] + 90, b"\xff")
    before = log_file(tmp_path).read_bytes()
    with directory.opened(str(tmp_path), RealDisk()) as files:
        plan = directory.plan_repair(files, json.loads)
        assert plan.blocked and not plan.lost
        with pytest.raises(StoreError, match="nothing was changed"):
            directory.run_plan(files, plan, 0)
    assert log_file(tmp_path).read_bytes() == before
    assert not list(tmp_path.glob("repair-*"))

    plan, options, copies = mended(tmp_path, cut_at=places[3])
    assert plan.end == places[3]
    assert plan.lost.total() == COUNT - 4 and plan.lost_unread == 1
    assert (copies / "commitlog" / log_file(tmp_path).name).read_bytes() == before
    assert len(list((tmp_path / "commitlog").iterdir())) == 1
    await directory.open_once(options, real_env())
    assert checked(tmp_path).ok
    assert offsets(tmp_path) == places[:3]


async def test_a_cut_at_a_good_record_gives_up_what_follows(tmp_path: Path) -> None:
    filled(tmp_path)
    places = offsets(tmp_path)
    first_of_second_file = next(place for place in places if place >= 4096)
    for cut in (places[-5], first_of_second_file, places[2], 0):
        plan, options, _ = mended(tmp_path, cut_at=cut)
        assert plan.lost_unread == 0
        await directory.open_once(options, real_env())
        assert offsets(tmp_path) == [place for place in places if place < cut]
        assert checked(tmp_path).ok


def test_a_cut_inside_a_record_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with directory.opened(str(tmp_path), RealDisk()) as files, pytest.raises(StoreError) as caught:
        directory.plan_repair(files, json.loads, offsets(tmp_path)[4] + 1)
    assert "no record begins there" in str(caught.value)


async def test_files_behind_a_gap_move_away_only_when_asked(tmp_path: Path) -> None:
    filled(tmp_path)
    places = offsets(tmp_path)
    log_file(tmp_path, 1).unlink()
    with directory.opened(str(tmp_path), RealDisk()) as files:
        assert directory.plan_repair(files, json.loads).blocked
    plan, options, copies = mended(tmp_path, cut_at=4096)
    assert plan.lost.total() == sum(place >= 8192 for place in places)
    assert len(list((copies / "commitlog").iterdir())) >= 1
    await directory.open_once(options, real_env())
    assert checked(tmp_path).ok
    assert offsets(tmp_path) == [place for place in places if place < 4096]


def test_a_wrong_size_given_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    with directory.opened(
        str(tmp_path), RealDisk(), directory.Hints(log_file_bytes=1 << 20)
    ) as files:
        assert directory.plan_repair(files, json.loads).blocked


async def test_derived_files_that_do_not_fit_are_built_again(tmp_path: Path) -> None:
    filled(tmp_path)
    with queue_file(tmp_path, number=-1).open("r+b") as file:
        file.truncate(90)
    path = index_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    plan, options, copies = mended(tmp_path)
    assert [step.what for step in plan.steps][1:] == ["move away", "move away"]
    assert plan.lost_unread == 0
    assert (copies / "index" / path.name).exists() and (copies / "checkpoint").exists()
    await directory.open_once(options, real_env())
    assert checked(tmp_path).ok


async def test_a_checkpoint_that_claims_too_much_is_reset(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "checkpoint").write_bytes(CHECKPOINT.pack(1 << 50, 0, 0) + bytes(4072))
    plan, options, _ = mended(tmp_path)
    assert [step.file for step in plan.steps] == ["checkpoint"]
    await directory.open_once(options, real_env())
    assert checked(tmp_path).ok


def test_tables_come_back_from_their_previous_generation(tmp_path: Path) -> None:
    filled(tmp_path)
    config = tmp_path / "config"
    config.mkdir()
    (config / "topics.json").write_text("{")
    (config / "topics.json.bak").write_text('{"topicConfigTable":{}}')
    (config / "consumerOffset.json").write_text("\0\0")
    (config / "topics.json.tmp").write_text("x")
    plan, _, copies = mended(tmp_path)
    assert json.loads((config / "topics.json").read_text()) == {"topicConfigTable": {}}
    assert (copies / "config" / "topics.json").read_text() == "{"
    assert not (config / "topics.json.tmp").exists()
    assert [finding.subject for finding in plan.undecided] == ["config/consumerOffset.json"]
    assert (config / "consumerOffset.json").read_bytes() == b"\0\0"


def test_two_repairs_in_one_second_keep_both_copies(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "config").mkdir()
    kept = []
    for text in ("one", "two"):
        (tmp_path / "config" / "a.json.tmp").write_text(text)
        kept.append(mended(tmp_path)[2])
    assert [(copies / "config" / "a.json.tmp").read_text() for copies in kept] == ["one", "two"]


# --- geometry ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("slots", "entries"), [(1, 2), (7, 10), (100, 400), (101, 3), (997, 64)])
async def test_slots_are_found_from_the_content(tmp_path: Path, slots: int, entries: int) -> None:
    await made(tmp_path, max_hash_slot_num=slots, max_index_num=entries)
    with directory.opened(str(tmp_path), RealDisk(), read_only=True) as files:
        assert {(file.slots, file.entries_max) for file in files.index_files()} == {
            (slots, entries)
        }
        assert files.index_geometry() == (slots, entries)
    assert checked(tmp_path).ok


async def test_one_key_at_offset_zero_is_enough(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"x", keys="only"))
    await store.stop()
    report = checked(tmp_path)
    assert report.ok and report.index_entries == 1
    report = checked(tmp_path, hints=directory.Hints(index_slots=7))
    assert report.ok and report.index_slots == 7


def test_a_bad_delay_level_is_refused() -> None:
    with pytest.raises(ConfigError):
        directory.DelayLevels("1x")


# --- stores of the Java broker -------------------------------------------------------------------
def copied(golden: Golden, name: str, tmp_path: Path) -> Path:
    golden.skip_without(name)
    root = tmp_path / name
    shutil.copytree(golden.path / name, root)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


def java_report(root: Path) -> directory.Report:
    with directory.opened(str(root), RealDisk()) as files:
        return directory.check(files, read_json=fastjson.loads, delays=DELAYS)


@each_golden
@pytest.mark.parametrize("name", ["store", "store-crash", "store-torn"])
def test_java_stores_are_in_order(tmp_path: Path, golden: Golden, name: str) -> None:
    report = java_report(copied(golden, name, tmp_path))
    facts = golden.manifest(name)
    assert report.findings.problems == []
    assert report.clean_stop == (name == "store")
    assert report.messages == len(facts.get("commitlog_walk") or facts["messages"])
    assert report.max_offset == facts["commitlog_walk_end"]
    assert report.log_file_bytes == golden.sizes["mapped_file_size_commit_log"]
    if name == "store-torn":
        assert {note.code for note in report.findings.notes} >= {"log", "queue"}
    else:
        assert name != "store" or report.findings.notes == []
        assert report.index_slots == golden.sizes["max_hash_slot_num"]
        assert report.index_entries_max == golden.sizes["max_index_num"]


@each_golden
async def test_a_java_store_is_rebuilt_byte_for_byte(tmp_path: Path, golden: Golden) -> None:
    root = copied(golden, "store", tmp_path)
    before = {path: path.read_bytes() for path in (root / "consumequeue").rglob("0000*")}
    entries = java_report(root).index_entries
    await rebuilt(root)
    assert {path: path.read_bytes() for path in (root / "consumequeue").rglob("0000*")} == before
    report = java_report(root)
    assert report.findings.problems == report.findings.notes == []
    assert report.index_entries == entries


# --- anything at all -----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(8))
def test_no_damage_breaks_the_tools(tmp_path: Path, seed: int) -> None:
    """Any bytes in any file: findings or a StoreError that explains, never another exception."""
    chance = random.Random(seed)
    for round_ in range(6):
        root = tmp_path / str(round_)
        filled(root)
        paths = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "lock")
        path = chance.choice(paths)
        data = bytearray(path.read_bytes())
        at = chance.randrange(max(1, len(data.rstrip(b"\0"))))
        how = chance.choice(["flip", "junk", "zero", "cut", "grow"])
        if how == "flip":
            data[at : at + 1] = bytes([data[at] ^ 1 << chance.randrange(8)]) if data else b""
        elif how in ("junk", "zero"):
            length = min(chance.randrange(1, 64), len(data) - at)
            data[at : at + length] = chance.randbytes(length) if how == "junk" else bytes(length)
        elif how == "cut":
            del data[at:]
        else:
            data += bytes(chance.randrange(1, 64))
        path.write_bytes(data)
        if chance.random() < 0.3:
            (root / "abort").touch()
        try:
            checked(root, read_only=chance.random() < 0.5)
            with directory.opened(str(root), RealDisk()) as files:
                for _ in directory.records(files, directory.Selection()):
                    pass
                for _ in directory.queue_rows(files, directory.Selection()):
                    pass
                for _ in directory.all_index_entries(files):
                    pass
                directory.plan_repair(files, json.loads)
        except StoreError as error:
            assert str(error)
