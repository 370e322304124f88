"""`cosmo store …` as an operator meets it: words, exit codes, what goes to stdout and stderr."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.goldens import Golden, each_golden
from tests.unit.store.store_kit import HandClock, draft, faulty_env, small

from cosmodrome.cli.main import cosmo
from cosmodrome.cli.offline import store_tools
from cosmodrome.cli.support.exits import EXIT_PROBLEMS
from cosmodrome.errors import CosmodromeError, DirectoryInUse, StoreError
from cosmodrome.layout import QUEUE_ENTRY, SYS_COMPRESSED, SYS_ZLIB
from cosmodrome.store.store import Store
from cosmodrome.wire.message import compress

COUNT = 60
FIRST_MS = 1_700_000_000_000
REPORT_KEYS = {
    "root",
    "ok",
    "readOnly",
    "cleanStop",
    "log",
    "queues",
    "index",
    "checkpoint",
    "problemCount",
    "problems",
    "noteCount",
    "notes",
}


async def made(root: Path) -> Store:
    clock = HandClock(FIRST_MS)
    store = Store(small(root), faulty_env(clock=clock))
    await store.start()
    for number in range(COUNT):
        body, sys_flag = f"text {number}, größer".encode(), 0
        if number == 1:
            body = b"\xff\xfe"
        elif number == 2:
            sys_flag = SYS_COMPRESSED | SYS_ZLIB
            body = compress(b"squeezed " * 20, sys_flag)
        stored = store.append(
            draft(body, topic="AB"[number % 2], keys=f"k{number} all", tags="t", sys_flag=sys_flag)
        )
        clock.at_ms += 1000
    await store.durable(stored.end)
    return store


async def made_and_stopped(root: Path) -> None:
    await (await made(root)).stop()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tools") / "store"
    asyncio.run(made_and_stopped(root))
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "store")
    return tmp_path / "store"


def run(*words: object, answer: str | None = None) -> Result:
    return CliRunner().invoke(cosmo, ["store", *map(str, words)], input=answer)


def rows(*words: object) -> list[dict[str, Any]]:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def log_file(root: Path, number: int = 0) -> Path:
    return sorted((root / "commitlog").iterdir())[number]


# --- check ---------------------------------------------------------------------------------------
def test_check_says_clean(root: Path) -> None:
    before = files_of(root)
    result = run("check", root)
    assert result.exit_code == 0
    assert "result   clean" in result.stdout
    assert f"{COUNT} messages" in result.stdout
    assert result.stderr == ""
    assert files_of(root) == before


def test_check_exits_with_six_and_says_what_to_do(root: Path) -> None:
    overwrite(next((root / "consumequeue" / "A" / "0").iterdir()), 20, QUEUE_ENTRY.pack(0, 9, 9))
    result = run("check", root)
    assert result.exit_code == EXIT_PROBLEMS == 6
    assert "1 problem\n" in result.stdout
    assert "consumequeue/A/0/00000000000000000000          20  entry 1 wrong" in result.stdout
    assert "cosmo store rebuild" in result.stdout


def test_check_as_json_keeps_its_schema(root: Path) -> None:
    overwrite(log_file(root), 90, b"\xff")
    result = run("check", root, "-o", "json")
    assert result.exit_code == 6
    report = json.loads(result.stdout)
    assert set(report) == REPORT_KEYS
    assert report["ok"] is False and report["cleanStop"] is True and report["readOnly"] is False
    assert set(report["log"]) == {
        "files",
        "fileBytes",
        "minOffset",
        "maxOffset",
        "messages",
        "firstStoreTimestamp",
        "lastStoreTimestamp",
    }
    assert set(report["queues"]) == {"topics", "queues", "files", "entries"}
    assert set(report["index"]) == {"files", "slots", "entriesMax", "entries"}
    assert set(report["checkpoint"]) == {"log", "queues", "index"}
    assert report["problemCount"] == len(report["problems"]) == 1
    problem = report["problems"][0]
    assert set(problem) == {"kind", "file", "position", "what", "next"}
    assert problem["kind"] == "log" and problem["position"] == 0


def test_check_lists_no_more_than_the_limit(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")
    result = run("check", root, "--limit", 1)
    assert result.exit_code == 6
    assert "… and 1 more; raise --limit" in result.stdout


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    result = run("check", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, StoreError)
    assert run("check").exit_code == 2


def test_an_error_is_one_line_on_stderr(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cosmodrome.cli", "store", "check", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cosmo: ") and done.stderr.count("\n") == 1


async def test_a_live_store_needs_read_only(tmp_path: Path) -> None:
    store = await made(tmp_path / "store")
    result = run("check", tmp_path / "store")
    assert result.exit_code == 1 and isinstance(result.exception, DirectoryInUse)
    for words in ("rebuild", "repair"):
        assert isinstance(run(words, tmp_path / "store", "-y").exception, DirectoryInUse)
    result = run("check", tmp_path / "store", "--read-only")
    assert result.exit_code == 0, result.output
    assert "read without the lock" in result.stdout
    assert len(rows("dump", tmp_path / "store")) == COUNT
    await store.stop()


def test_progress_needs_a_terminal(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = {"no_progress": False}
    store_tools._progress("checking", rest)(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    show = store_tools._progress("checking", rest)
    for done in (0, 0, 1, 2):
        show(done, 2)
    assert capsys.readouterr().err == "\rchecking   0 %\rchecking  50 %\rchecking 100 %\n"
    store_tools._progress("checking", {"no_progress": True})(1, 2)
    assert capsys.readouterr().err == ""


# --- dump and export -----------------------------------------------------------------------------
def test_dump_prints_messages(root: Path) -> None:
    found = rows("dump", root)
    assert len(found) == COUNT
    first = found[0]
    assert first["topic"] == "A" and first["queueOffset"] == 0 and first["commitLogOffset"] == 0
    assert first["body"] == "text 0, größer" and first["bodyEncoding"] == "text"
    assert first["keys"] == ["k0", "all"] and first["tags"] == "t"
    assert first["storeTimestamp"] == FIRST_MS
    assert first["properties"] == {"TAGS": "t", "KEYS": "k0 all"}
    assert first["storeHost"] == "127.0.0.1:10911"
    assert (found[1]["bodyEncoding"], found[1]["body"]) == ("base64", "//4=")
    assert found[2]["body"] == "squeezed " * 20
    assert found[1]["commitLogOffset"] == first["storeSize"]


def test_dump_can_choose(root: Path) -> None:
    everything = rows("dump", root)
    assert {row["topic"] for row in rows("dump", root, "--topic", "B", "--queue", 0)} == {"B"}
    assert rows("dump", root, "--queue", 3) == []
    start, end = everything[5]["commitLogOffset"], everything[50]["commitLogOffset"]
    assert rows("dump", root, "--from", start, "--to", end) == everything[5:50]
    assert rows("dump", root, "--limit", 2) == everything[:2]
    assert "body" not in rows("dump", root, "--limit", 1, "--no-body")[0]


def test_dump_prints_derived_files(root: Path) -> None:
    entries = rows("dump", root, "--queue-entries", "--topic", "B")
    assert [entry["queueOffset"] for entry in entries] == list(range(COUNT // 2))
    assert not any(entry["filler"] for entry in entries)
    index = rows("dump", root, "--index")
    assert len(index) == 2 * COUNT
    assert all(entry["slot"] == entry["keyHash"] % 7 for entry in index)
    assert run("dump", root, "--index", "--queue-entries").exit_code == 2
    assert run("dump", root, "--index", "--topic", "A").exit_code == 2


def test_damage_is_told_on_stderr_only(root: Path) -> None:
    overwrite(log_file(root), 90, b"\xff")
    result = run("dump", root)
    assert result.exit_code == 0
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == COUNT - 1
    assert "no good record at log offset 0" in result.stderr


def test_export_writes_lines(root: Path, tmp_path: Path) -> None:
    result = run("export", root, "--topic", "A")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == COUNT // 2
    assert result.stderr == f"{COUNT // 2} messages\n"
    target = tmp_path / "out.jsonl"
    assert run("export", root, "--output", target).exit_code == 0
    assert [json.loads(line) for line in target.read_text().splitlines()] == rows("dump", root)


def test_export_takes_times(root: Path) -> None:
    def count(*words: object) -> int:
        return len(run("export", root, *words).stdout.splitlines())

    assert count("--since", FIRST_MS + 1000, "--until", FIRST_MS + 3000) == 3
    assert count("--since", "2023-11-14T22:13:21+00:00") == COUNT - 1
    assert count("--until", "2023-11-14T22:13:21Z") == 2
    result = run("export", root, "--since", "yesterday")
    assert result.exit_code == 2 and "is no time" in result.stderr


def test_export_as_csv(root: Path) -> None:
    result = run("export", root, "-f", "csv")
    found = list(csv.DictReader(io.StringIO(result.stdout)))
    assert len(found) == COUNT
    assert found[0]["body"] == "text 0, größer" and found[0]["keys"] == "k0 all"
    assert json.loads(found[0]["properties"])["TAGS"] == "t"


# --- rebuild and repair --------------------------------------------------------------------------
def test_rebuild_asks_first(root: Path) -> None:
    before = files_of(root)
    assert run("rebuild", root, "--dry-run").exit_code == 0
    assert files_of(root) == before
    assert run("rebuild", root, answer="n\n").exit_code == 1
    assert files_of(root) == before
    shutil.rmtree(root / "consumequeue")
    result = run("rebuild", root, "--mapped-file-size-consume-queue", 100, answer="y\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() in ("", "y")
    after = files_of(root)
    queues = {name for name in before if name.startswith("consumequeue")}
    assert queues and all(after[name] == before[name] for name in queues)
    assert "maxHashSlotNum=7 maxIndexNum=10" in result.stderr
    assert run("check", root).exit_code == 0


def test_rebuild_refuses_a_damaged_log(root: Path) -> None:
    overwrite(log_file(root), 90, b"\xff")
    before = files_of(root)
    result = run("rebuild", root, "-y")
    assert result.exit_code == 1 and "repair" in str(result.exception)
    assert files_of(root) == before
    assert isinstance(
        run("rebuild", root, "--message-delay-level", "1x").exception, CosmodromeError
    )


def test_repair_tells_what_a_cut_costs(root: Path) -> None:
    offsets = [row["commitLogOffset"] for row in rows("dump", root)]
    overwrite(log_file(root), offsets[4] + 90, b"\xff")
    before = files_of(root)
    result = run("repair", root, "-y")
    assert result.exit_code == 6
    assert f"--cut-at {offsets[4]}" in result.stdout
    assert files_of(root) == before
    result = run("repair", root, "--cut-at", offsets[4], "--dry-run")
    assert result.exit_code == 0
    assert f"the log will end at offset {offsets[4]}; given up:" in result.stdout
    assert f"{COUNT // 2 - 3} messages of topic A" in result.stdout
    assert files_of(root) == before
    assert run("repair", root, "--cut-at", offsets[4], answer="n\n").exit_code == 1
    assert files_of(root) == before
    result = run("repair", root, "--cut-at", offsets[4], "-y")
    assert result.exit_code == 0, result.output
    assert "repair-" in result.stderr and "result   clean" in result.stderr
    assert len(rows("dump", root)) == 4
    kept = next(root.glob("repair-*"))
    assert (kept / "commitlog" / log_file(root).name).read_bytes() == before[
        f"commitlog/{log_file(root).name}"
    ]


def test_repair_mends_what_a_start_refuses(root: Path) -> None:
    with log_file(root, -1).open("r+b") as file:
        file.truncate(4090)
    config = root / "config"
    config.mkdir()
    (config / "topics.json").write_text("{{")
    (config / "topics.json.bak").write_text('{"topicConfigTable":{"A":{},"B":{}}}')
    assert run("check", root).exit_code == 6
    result = run("repair", root, "-y", "-o", "json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert set(plan) == {"steps", "endOffset", "lost", "lostUnread", "undecided"}
    assert plan["lost"] == {} and plan["lostUnread"] == 0
    assert {step["file"] for step in plan["steps"]} >= {"checkpoint", "config/topics.json"}
    assert len(rows("dump", root)) == COUNT
    assert run("check", root).exit_code == 0


def test_repair_of_a_good_store_does_nothing(root: Path) -> None:
    before = files_of(root)
    result = run("repair", root)
    assert result.exit_code == 0 and "nothing to repair" in result.stderr
    assert files_of(root) == before


@each_golden
def test_a_java_store_is_read_where_it_lies(golden: Golden) -> None:
    for name in ("store", "store-crash", "store-torn"):
        assert run("check", golden.path / name, "--read-only").exit_code == 0
    found = rows("dump", golden.path / "store")
    places = [(row["topic"], row["queueId"], row["queueOffset"], row["storeSize"]) for row in found]
    assert places == [
        (message["topic"], message["queueId"], message["queueOffset"], message["storeSize"])
        for message in golden.manifest("store")["commitlog_walk"]
    ]


# --- set-aside -----------------------------------------------------------------------------------
def test_set_aside_leaves_an_empty_store_and_the_accounts(root: Path) -> None:
    config, stays = root / "config", ("plain_acl.yml", "acl/a.yml", "brokerOverrides.properties")
    for name in (*stays, "topics.json", "consumerOffset.json", "consumerOffset.json.bak"):
        (config / name).parent.mkdir(parents=True, exist_ok=True)
        (config / name).write_text("{}")
    (root / "abort").touch()
    (root / "notes.txt").touch()  # not the store's
    before = files_of(root)
    result = run("set-aside", root, "--dry-run")
    assert result.exit_code == 0 and "commitlog -> " in result.stdout
    assert run("set-aside", root, answer="n\n").exit_code == 1
    assert files_of(root) == before
    result = run("set-aside", root, "-y")
    assert result.exit_code == 0, result.output
    (aside,) = root.glob("aside-*")
    kept = {f"config/{name}" for name in stays} | {"notes.txt"}
    assert {name for name in files_of(root) if not name.startswith("aside-")} == kept
    assert files_of(aside) == {name: data for name, data in before.items() if name not in kept}
    assert len(rows("dump", aside)) == COUNT  # it is a store still

    async def start_anew() -> None:
        store = Store(small(root), faulty_env())
        await store.start()
        assert store.log_end == 0 and not store.queues()
        await store.stop()

    asyncio.run(start_anew())


def test_set_aside_takes_a_log_that_is_elsewhere(root: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (root / "commitlog").rename(log)
    result = run("set-aside", root, "--store-path-commit-log", log, "-y")
    assert result.exit_code == 0, result.output
    assert not log.exists() and list(next(tmp_path.glob("log.aside-*")).iterdir())


async def test_set_aside_leaves_a_running_broker_alone(tmp_path: Path) -> None:
    store = await made(tmp_path / "store")
    before = files_of(tmp_path)
    result = run("set-aside", tmp_path / "store", "-y")
    assert isinstance(result.exception, DirectoryInUse)
    assert files_of(tmp_path) == before
    await store.stop()


def test_set_aside_refuses_what_it_could_not_move(root: Path, tmp_path: Path) -> None:
    (root / "index").rename(tmp_path / "index")
    (root / "index").symlink_to(tmp_path / "index")
    before = files_of(root)
    result = run("set-aside", root, "-y")
    assert isinstance(result.exception, StoreError) and "symbolic link" in str(result.exception)
    assert files_of(root) == before
