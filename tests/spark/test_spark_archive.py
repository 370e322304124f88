"""Topics into a lake and back: exactly once, over crashes, merges and growing schemas."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as arrow_dataset
import pytest

from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, CosmodromeError, DirectoryInUse, StoreCorrupt

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Lab

    from cosmodrome.spark.lake.layout import Lake

pytest.importorskip("pyspark")


class Cut(Exception):
    """Stands for a crash."""


def cut_at(step: str) -> Callable[[str], None]:
    def before(name: str) -> None:
        if name.startswith(step):
            raise Cut(step)

    return before


def plain_rows(path: Path) -> list[dict[str, Any]]:
    """What any reader of Parquet sees, without Spark and without us."""
    columns = ["topic", "queue_id", "queue_offset"]
    found = arrow_dataset.dataset(path, format="parquet", partitioning="hive")
    rows: list[dict[str, Any]] = found.to_table(columns=columns).to_pylist()
    return rows


def positions(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted((row["queue_id"], row["queue_offset"]) for row in rows)


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def frame(spark: SparkSession, first: int, count: int) -> DataFrame:
    from cosmodrome.spark.read import rows

    stored = datetime.datetime(2026, 1, 2, 23, 59, 50, tzinfo=datetime.UTC)
    made = []
    for number in range(first, first + count):
        row: dict[str, Any] = dict.fromkeys(rows.COLUMNS)
        row.update(topic="007", broker="b", queue_id=0, queue_offset=number, body=b"x")
        row["store_time"] = stored + datetime.timedelta(seconds=number)
        made.append(tuple(row[name] for name in rows.COLUMNS))
    return spark.createDataFrame(made, rows.schema()).coalesce(1)


def new_lake(spark: SparkSession, path: Path, **values: Any) -> Lake:
    from cosmodrome.spark.lake.layout import PARQUET, ArchiveInfo, Lake

    info = ArchiveInfo(id="x", lake=PARQUET, subject={}, filters={}, **values)
    return Lake.create(spark, str(path), info)


def archiver(lake: Lake, **values: Any) -> Any:
    from cosmodrome.spark.lake.archiving import Archiver
    from cosmodrome.spark.lake.layout import LOCK
    from cosmodrome.spark.lake.lock import LakeLock

    env = real_env()
    return Archiver(lake, LakeLock(lake.files, LOCK, env), env, **values)


def test_archive_twice_table_and_progress(spark: SparkSession, lab: Lab, tmp_path: Path) -> None:
    from cosmodrome.spark.cluster import Cluster
    from cosmodrome.spark.jobs.archive import archive
    from cosmodrome.spark.lake.layout import Lake
    from cosmodrome.spark.lake.table import create_view, table
    from cosmodrome.spark.read.options import Connection

    topic = lab.topic(queues=2)
    path = tmp_path / "lake"
    lab.send(topic, numbers(30), tags="a", keys="k", properties={"p": "1"})
    lab.send(topic, numbers(20), queue=1)
    seen: list[Any] = []
    first = archive(
        spark, topic, str(path), namesrv=lab.namesrv, once=True, group="g-arch", watch=seen.append
    )
    assert (first.rows, first.total, first.batch) == (50, 50, 0)
    lab.send(topic, numbers(5, start=30))
    # Made before the second run, read after it: the seam stays where it was.
    early = table(spark, topic, archive=str(path), namesrv=lab.namesrv)
    second = archive(spark, [topic], str(path), namesrv=lab.namesrv, once=True, group="g-arch")
    assert (second.rows, second.total, second.batch, second.lag) == (5, 55, 1, 0)
    expected = [(0, n) for n in range(35)] + [(1, n) for n in range(20)]
    assert positions(plain_rows(path)) == expected

    lab.send(topic, [b"late"], queue=1)
    expected = sorted([*expected, (1, 20)])
    now = table(spark, topic, archive=str(path), namesrv=lab.namesrv)
    for one in (early, now):
        assert (
            sorted(tuple(r) for r in one.select("queue_id", "queue_offset").collect()) == expected
        )
    assert now.columns == [*lab.read(spark, topic).columns, "date"]
    row = now.where("queue_id = 0 and queue_offset = 3").first()
    assert row is not None
    assert (bytes(row.body), row.tags, row.keys, row.properties["p"]) == (b"3", "a", "k", "1")
    assert row.date == row.store_time.date()

    alone = create_view(spark, f"arch {topic}", topic, archive=str(path))
    counted = spark.sql(f"SELECT count(*) FROM `arch {topic}`").first()
    assert counted is not None and counted[0] == 55
    moment = row.store_time.replace(tzinfo=datetime.UTC)
    later = table(spark, topic, archive=str(path), namesrv=lab.namesrv, since=moment)
    before = table(spark, topic, archive=str(path), until=moment)
    assert later.count() + before.count() == 56
    assert alone.where("date = '2001-01-01'").count() == 0

    with Cluster(Connection(namesrv=lab.namesrv)) as cluster:
        shown = cluster.committed("g-arch", list(cluster.queues([topic])))
    assert sorted(shown.values()) == [20, 35]
    progress = Lake.open(spark, str(path)).progress()
    assert progress is not None and sorted(progress.ends.values()) == [20, 35]
    # Another topic has no rows here, and its live part begins at its first message.
    other = lab.topic()
    lab.send(other, numbers(3))
    assert table(spark, other, archive=str(path), namesrv=lab.namesrv).count() == 3


def test_a_run_that_fails_between_rows_and_progress_is_repeated(
    spark: SparkSession, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmodrome.spark.jobs.archive import archive
    from cosmodrome.spark.lake.layout import Lake

    topic, path = lab.topic(queues=1), tmp_path / "lake"
    lab.send(topic, numbers(10))

    def crash(self: Lake, progress: object) -> None:
        raise Cut("record")

    def run() -> Any:
        return archive(spark, topic, str(path), namesrv=lab.namesrv, once=True, rows_per_batch=6)

    with monkeypatch.context() as patched:
        patched.setattr(Lake, "record", crash)
        with pytest.raises(Exception, match="record"):
            run()
    assert len(plain_rows(path)) == 6
    lab.send(topic, numbers(5))
    assert run().total == 15
    assert positions(plain_rows(path)) == [(0, n) for n in range(15)]
    # A checkpoint that is not this archive's would double rows.
    shutil.rmtree(path / "_cosmodrome" / "checkpoint")
    with pytest.raises(ConfigError, match="checkpoint of this archive is missing"):
        run()


@pytest.mark.parametrize("step", ["rows", "progress", "done"])
def test_a_batch_cut_at_any_step_is_there_once(
    spark: SparkSession, tmp_path: Path, step: str
) -> None:
    lake = new_lake(spark, tmp_path / "lake")
    archiver(lake)(frame(spark, 0, 4), 0)
    (tmp_path / "lake" / ".spark-staging-left").mkdir()
    with pytest.raises(Cut):
        archiver(lake, before=cut_at(step))(frame(spark, 4, 4), 1)
    again = archiver(lake)
    again.recover()
    again(frame(spark, 4, 4), 1)
    assert positions(plain_rows(tmp_path / "lake")) == [(0, n) for n in range(8)]
    assert again.progress.rows == 8 and list(again.progress.ends.values()) == [8]
    assert not (tmp_path / "lake" / ".spark-staging-left").exists()
    with pytest.raises(StoreCorrupt, match="older than the archive"):
        again(frame(spark, 0, 4), 0)


STEPS = ["plan", "data", "newest", "ready", "remove batch=0", "remove batch=1", "move", "forget"]


def test_a_merge_cut_at_any_step_keeps_every_row(spark: SparkSession, tmp_path: Path) -> None:
    from cosmodrome.spark.lake.layout import Lake
    from cosmodrome.spark.lake.table import table

    pattern = tmp_path / "pattern"
    lake = new_lake(spark, pattern)
    for batch in range(3):
        archiver(lake)(frame(spark, batch * 4, 4), batch)
    expected = [(0, n) for n in range(12)]
    for step in [*STEPS, "end"]:
        path = tmp_path / step.replace(" ", "-")
        shutil.copytree(pattern, path)
        lake = Lake.open(spark, str(path))
        with pytest.raises(Cut):
            archiver(lake, before=cut_at(step)).compact(everything=True)
        rows = positions(plain_rows(path))
        assert len(rows) == len(set(rows)), step
        if step == "remove batch=1":  # the table finishes what a dead writer began
            assert table(spark, "007", archive=str(path)).count() == 12
        archiver(lake).recover()
        assert positions(plain_rows(path)) == expected, step
        assert not list((path / "_cosmodrome").glob("compaction/*")), step
    dates = path / "topic=007" / "date=2026-01-02"
    # The newest batch may be written again, so it stays.
    assert sorted(entry.name for entry in dates.iterdir()) == ["batch=-1", "batch=2"]
    assert table(spark, "007", archive=str(path)).where("topic = '007'").count() == 12
    archiver(lake)(frame(spark, 12, 4), 3)
    assert archiver(lake).compact(everything=True).directories == 2
    assert positions(plain_rows(path)) == [(0, n) for n in range(16)]
    assert sorted(entry.name for entry in dates.iterdir()) == ["batch=-2"]


def test_small_batches_are_merged_while_it_runs(spark: SparkSession, tmp_path: Path) -> None:
    writer = archiver(new_lake(spark, tmp_path / "lake"), compact_after=2)
    for batch in range(4):
        writer(frame(spark, 100 + batch * 4, 4), batch)
    assert writer.merged.directories == 3
    assert len(plain_rows(tmp_path / "lake")) == 16


def test_json_bodies_grow_a_schema(spark: SparkSession, lab: Lab, tmp_path: Path) -> None:
    from cosmodrome.spark import json_values
    from cosmodrome.spark.jobs.archive import archive, compact_archive
    from cosmodrome.spark.lake.layout import Lake
    from cosmodrome.spark.lake.table import table

    topic, path = lab.topic(queues=1), tmp_path / "lake"

    def run() -> Any:
        return archive(spark, topic, str(path), namesrv=lab.namesrv, once=True, json=True)

    lab.send(topic, ['{"id": 1, "who": {"name": "a"}}', "no json", "[1]"])
    run()
    lab.send(topic, ['{"id": 2, "who": {"age": 3}, "more": [1]}'])
    run()
    schema = json_values.load(Lake.open(spark, str(path)))
    assert (schema.version, schema.exact) == (2, True)
    lab.send(topic, ['{"id": "x9", "ID": 5, "bad name": 1}'])
    run()
    lab.send(topic, ['{"id": 7}'])  # live only
    schema = json_values.load(Lake.open(spark, str(path)))
    assert schema.stored.simpleString() == (
        "struct<id:bigint,who:struct<name:string,age:bigint>,more:array<bigint>>"
    )
    assert schema.whole["id"].dataType.simpleString() == "string" and not schema.exact

    plain = spark.read.option("mergeSchema", "true").parquet(str(path)).orderBy("queue_offset")
    ids = [row[0] for row in plain.select("value.id").collect()]
    assert ids == [1, None, None, 2, None]
    found = table(spark, topic, archive=str(path), namesrv=lab.namesrv).orderBy("queue_offset")
    rows = [row.asDict(recursive=True) for row in found.select("body", "value").collect()]
    assert [row["value"] and row["value"]["id"] for row in rows] == [
        "1",
        None,
        None,
        "2",
        "x9",
        "7",
    ]
    assert rows[1]["value"] is None and bytes(rows[1]["body"]) == b"no json"
    assert rows[3]["value"]["more"] == [1] and rows[3]["value"]["who"]["age"] == 3
    assert compact_archive(spark, str(path)) == 2
    assert table(spark, topic, archive=str(path)).count() == 5


def test_what_expired_before_it_was_archived_is_an_error(
    spark: SparkSession, lab: Lab, tmp_path: Path
) -> None:
    from cosmodrome.spark.jobs.archive import archive
    from cosmodrome.spark.lake.table import table
    from cosmodrome.spark.read.plan import DataLoss

    topic, path = lab.topic(queues=1), tmp_path / "lake"
    lab.send(topic, numbers(4))
    archive(spark, topic, str(path), namesrv=lab.namesrv, once=True)
    name = max((path / "_cosmodrome" / "progress").iterdir())
    progress = json.loads(name.read_text())
    progress["ends"][topic][lab.broker]["0"] = 99
    name.write_text(json.dumps(progress))
    with pytest.raises(DataLoss, match=rf"{topic} at {lab.broker}, queue 0: wanted offset 99"):
        table(spark, topic, archive=str(path), namesrv=lab.namesrv)
    loose = {"failOnDataLoss": "false"}
    assert table(spark, topic, archive=str(path), namesrv=lab.namesrv, options=loose).count() == 4


def test_replay_goes_on_where_it_was_cut(
    spark: SparkSession, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmodrome.spark.jobs.archive import archive
    from cosmodrome.spark.jobs.replay import replay
    from cosmodrome.spark.lake.replaying import ReplayState

    source, target, path = lab.topic(queues=2), lab.topic(queues=2), str(tmp_path / "lake")
    for queue in (0, 1):
        lab.send(source, numbers(20, start=queue * 100), queue=queue, tags="t", keys="k")
    lab.send(source, [b"left out"], tags="no")
    archive(spark, source, path, namesrv=lab.namesrv, once=True)

    def run(**values: Any) -> Any:
        return replay(
            spark,
            path,
            source,
            target,
            namesrv=lab.namesrv,
            where="tags = 't'",
            slice_rows=16,
            **values,
        )

    planned = run(dry_run=True)
    assert (planned.rows_total, len(planned.sample)) == (40, 5)
    assert sum(rows for _, _, rows in planned.queues) == 40
    assert lab.read(spark, target).count() == 0
    with pytest.raises(ConfigError, match="no such replay"):
        run(resume=True)

    record = ReplayState.record

    def crash(self: ReplayState, slices: int, rows: int) -> None:
        if slices == 2:
            raise Cut("sent, and not written down")
        record(self, slices, rows)

    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(ReplayState, "record", crash)
        run()
    with pytest.raises(ConfigError, match="1 of"):
        run()
    done = run(resume=True, rate=1_000)
    assert done.finished and done.rows == 40
    assert lab.read(spark, target).count() > 40
    found = lab.read(spark, target, dedupe="true").orderBy("queue_id", "queue_offset").collect()
    bodies = [int(bytes(row.body)) for row in found]
    assert sorted(bodies) == [*range(20), *range(100, 120)]
    assert [n for n in bodies if n < 100] == list(range(20))
    assert [n for n in bodies if n >= 100] == list(range(100, 120))
    assert {(row.tags, row.keys) for row in found} == {("t", "k")}


def test_what_cannot_be_done_is_said(spark: SparkSession, lab: Lab, tmp_path: Path) -> None:
    from cosmodrome.spark.jobs.archive import archive
    from cosmodrome.spark.lake.layout import LOCK, Lake
    from cosmodrome.spark.lake.lock import LakeLock
    from cosmodrome.spark.lake.table import table

    path = tmp_path / "lake"
    lake = new_lake(spark, path)
    lock = LakeLock(lake.files, LOCK, real_env())
    lock.acquire("a test")

    def run(**values: Any) -> None:
        archive(spark, values.pop("topics", "t"), str(path), namesrv=lab.namesrv, **values)

    with pytest.raises(DirectoryInUse, match=r"written by a test \(process"):
        run()
    lock.release()
    for values, words in (
        ({"format": "delta"}, "parquet archive"),
        ({"json": True}, "without parsed JSON"),
        ({"tags": "a"}, "keep it, or use another path"),
        ({"topics": ()}, "name the topics"),
        ({"pattern": "x"}, "not both"),
        ({"rows_per_batch": 0}, "1 or more"),
    ):
        with pytest.raises(CosmodromeError, match=words):
            run(**values)
    with pytest.raises(ConfigError, match="is not an archive"):
        Lake.open(spark, str(tmp_path / "nothing"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="choose an empty directory"):
        new_lake(spark, tmp_path / "full")
    with pytest.raises(ConfigError, match="give archive"):
        table(spark, "t")
    with pytest.raises(ConfigError, match="decided by the table"):
        table(spark, "t", archive=str(path), options={"startingoffsets": "latest"})
    assert table(spark, "t", archive=str(path)).count() == 0


def test_a_small_file_is_replaced_by_a_file_context(spark: SparkSession, tmp_path: Path) -> None:
    """As on HDFS, where a plain rename does not replace what is there."""
    from cosmodrome.spark.lake.files import LakeFiles

    session: Any = spark
    files: Any = LakeFiles(spark, str(tmp_path))
    assert files._context is None  # not needed on a local file system
    conf = session._jsparkSession.sessionState().newHadoopConf()
    files._context = files._file_context(files._path(""), conf)
    for text in ("one", "two"):
        files.write("a/b", text)
        assert files.read("a/b") == text
    assert [entry.name for entry in files.list("a")] == ["b"]
    odd = session._jvm.org.apache.hadoop.fs.Path("odd://host/x")
    assert files._file_context(odd, conf) is None
