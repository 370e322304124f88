"""The job `check` finds exactly what was planted, and nothing in what is whole."""

from __future__ import annotations

import datetime
import importlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.unit.spark.log_kit import Sent, flip, make_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs import check as check_module
from cosmodrome.spark.jobs.check import check, report_lines
from cosmodrome.spark.lake import checking
from cosmodrome.spark.lake.checking import Report, Scan, examine
from cosmodrome.spark.read.rows import schema

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

# queue offset, milliseconds after START, log offset, id
Planted = tuple[int, int, int, str]


def scanned(spark: SparkSession, rows: list[Planted], topic: str = "T", **scan: Any) -> Scan:
    values = [
        (topic, "b", 0, offset, unique, START + datetime.timedelta(milliseconds=ms), log)
        for offset, ms, log, unique in rows
    ]
    return Scan("planted", spark.createDataFrame(values, schema(checking.COLUMNS)), **scan)


def texts(report: Report, kind: str) -> list[str]:
    return [finding.sentence for finding in report.findings if finding.code == kind]


def test_planted_problems_are_found(spark: SparkSession) -> None:
    rows: list[Planted] = [
        (3, 0, 0, "a"),
        (4, 10, 100, "b"),
        (4, 10, 150, "c"),  # twice
        (7, 20, 200, "d"),  # 5 and 6 are missing
        (8, 5000, 300, "e"),
        (9, 2000, 400, "f"),  # 3 s back
        (10, 1500, 350, "a"),  # half a second back, lies before; its id is known
        (12, 6000, 500, "g"),
    ]
    bounds = {("T", "b", 0): (1, 14), ("T", "b", 1): (0, 2), ("T", "b", 2): (5, 5)}
    report = examine(scanned(spark, rows, bounds=bounds))
    assert report.counts == {
        "gap": 5,
        "duplicate offset": 1,
        "duplicate id": 1,
        "time order": 1,
        "log order": 1,
        "corrupt": 0,
    }
    assert texts(report, "gap") == [
        "offsets 1 to 2 are missing (2)",
        "offsets 5 to 6 are missing (2)",
        "offset 11 is missing",
        "offset 13 is missing",
        "offsets 0 to 1 are missing (2)",
    ]
    assert texts(report, "duplicate offset") == [
        "offset 4 is there twice, at log offsets 100 and 150"
    ]
    assert texts(report, "time order") == ["stored 3000 ms before the message at offset 8"]
    assert texts(report, "log order") == ["lies at log offset 350, the message at offset 9 at 400"]
    assert texts(report, "duplicate id") == [
        "id a is there 2 times, the last in queue 0 at offset 10"
    ]
    whole, empty = report.queues
    assert (whole.first, whole.last, whole.messages, whole.missing) == (3, 12, 8, 6)
    assert (empty.queue_id, empty.first, empty.messages, empty.missing) == (1, None, 0, 2)
    assert not report.ok
    lines = list(report_lines(report))
    assert "GAP T b queue 0 at 12: offset 11 is missing\n" in lines
    assert lines[-1].startswith("planted: 8 messages in 2 queues: 5 × gap; ")


def test_lists_are_bounded_and_counts_are_not(spark: SparkSession) -> None:
    rows: list[Planted] = [(2 * n, 0, n, f"id{n % 4}") for n in range(12)]
    report = examine(scanned(spark, rows), limit=3)
    assert report.counts["gap"] == 11
    assert report.counts["duplicate id"] == 8
    assert len(texts(report, "gap")) == 3
    assert len(texts(report, "duplicate id")) == 3
    assert examine(scanned(spark, rows, topic="%RETRY%g", gaps=False)).ok


def test_a_store_with_damage(spark: SparkSession, tmp_path: Path) -> None:
    stored = make_log(tmp_path / "commitlog", [Sent(body=b"x" * 30) for _ in range(20)])
    whole = check(spark, store=str(tmp_path))
    assert whole.ok
    assert (whole.messages, whole.queues[0].last) == (20, 19)
    flip(stored[4].path, stored[4].position + 5)
    report = check(spark, store=str(tmp_path), topics=["T"])
    assert report.counts["corrupt"] == 1
    (text,) = texts(report, "corrupt")
    assert text.startswith(f"{stored[4].path} at {stored[4].position}: unknown magic")
    assert texts(report, "gap") == ["offset 4 is missing"]


def test_a_live_topic_and_its_archive(
    spark: SparkSession, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmodrome.spark.jobs.archive import archive

    topic = lab.topic(queues=2)
    lab.send(topic, ["a", "b", "c"], queue=0)
    lab.send(topic, ["d"], queue=1)
    live = check(spark, topics=[topic], options={"namesrv": lab.namesrv})
    assert live.ok, live.findings
    assert [(queue.first, queue.last) for queue in live.queues] == [(0, 2), (0, 0)]

    path = tmp_path / "lake"
    archive(spark, [topic], str(path), namesrv=lab.namesrv, once=True, format="parquet")
    assert check(spark, archive=str(path)).ok
    with pytest.raises(ConfigError, match="holds no topic nowhere"):
        check(spark, archive=str(path), topics=["nowhere"])
    for file in path.glob("topic=*/date=*/batch=*/*.parquet"):
        shutil.copy(file, file.with_name(f"again-{file.name}"))
    spark.catalog.clearCache()

    sessions = importlib.import_module("cosmodrome.spark.runtime.session")
    monkeypatch.setattr(sessions, "session", lambda *_args, **_rest: spark)
    monkeypatch.setattr(sessions, "stop", lambda _spark: None)
    ran = CliRunner().invoke(check_module.command, ["--archive", str(path), "-o", "json"])
    assert ran.exit_code == 6, ran.output
    document = json.loads(ran.stdout)
    assert document["counts"]["duplicate offset"] == 4
    assert document["counts"]["duplicate id"] == 4
    assert document["counts"]["gap"] == 0
    twice = document["findings"][0]
    assert list(twice) == ["kind", "topic", "broker", "queue_id", "queue_offset", "what"]
    assert (twice["kind"], twice["topic"], twice["queue_id"]) == ("duplicate offset", topic, 0)
    ran = CliRunner().invoke(check_module.command, [topic, "-n", lab.namesrv])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.endswith("4 messages in 2 queues: no problems\n")


def test_one_place_at_a_time(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="check one source"):
        check(spark, archive="a", store="b")
    with pytest.raises(ConfigError, match="which topic"):
        check(spark, options={"namesrv": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match="exclude each other"):
        check(spark, store="b", topics=["a"], pattern="a")
