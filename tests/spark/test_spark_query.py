"""The job `query` on a real Spark: names, places and forms."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs import output
from cosmodrome.spark.jobs.job import JobContext, JobFailed, explain
from cosmodrome.spark.jobs.query import command, query
from cosmodrome.spark.views import TableSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def cosmo_query(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`cosmo pipeline query` in the session of the tests, which it does not end."""
    monkeypatch.setattr(JobContext, "spark", spark)

    def run(*words: str) -> Result:
        return CliRunner().invoke(command, list(words))

    return run


def text(frame: DataFrame, form: str) -> str:
    pieces: list[str] = []
    output.write(frame, form, pieces.append)
    return "".join(pieces)


def test_names_of_topics_are_tables(spark: SparkSession, lab: Any) -> None:
    orders, others = lab.topic(), lab.topic()
    lab.send(orders, [f"order {number}" for number in range(5)], tags="new")
    lab.send(others, ["one"], queue=1)
    tables = TableSource(cluster={"namesrv": lab.namesrv}, names={"o": orders})
    # The names stand in a common table expression, a subquery and behind an alias of ours.
    sql = f"""
        WITH mine AS (SELECT * FROM `{orders}`)
        SELECT count(*) AS n, max(queue_offset) AS last, (SELECT count(*) FROM `{others}`) AS m,
               (SELECT min(tags) FROM o) AS tag
        FROM mine WHERE tags = 'new'
    """
    assert [tuple(row) for row in query(spark, sql, tables).collect()] == [(5, 4, 1, "new")]
    # The table source decides again the next time: nothing of another call is left to be found.
    tables = TableSource(cluster={"namesrv": lab.namesrv}, names={"o": others})
    assert [tuple(row) for row in query(spark, "SELECT body FROM o", tables).collect()] == [
        (b"one",)
    ]
    with pytest.raises(ConfigError, match="no topic has such a name"):
        query(spark, "SELECT * FROM `no topic`", tables)


def test_errors_name_the_cause(spark: SparkSession, lab: Any) -> None:
    tables = TableSource(cluster={"namesrv": lab.namesrv})
    with pytest.raises(Exception) as caught:
        query(spark, "SELECT * FROM db.orders", tables)
    assert "`db`.`orders`" in explain(caught.value)
    with pytest.raises(Exception) as caught:
        query(spark, "SELECT * FROM NoSuchTopic", tables).collect()
    text = explain(caught.value)
    assert "NoSuchTopic" in text and "Traceback" not in text and "\n" not in text


def test_forms_of_the_same_rows(spark: SparkSession, lab: Any) -> None:
    topic = lab.topic()
    lab.send(topic, ["plain, text", b"\xff\xfe"], keys="k")
    tables = TableSource(cluster={"namesrv": lab.namesrv})
    sql = f"SELECT queue_offset, body, keys, store_time, properties FROM `{topic}` ORDER BY 1"
    frame = query(spark, sql, tables)
    table = text(frame, "table").splitlines()
    assert table[0].split() == ["queue_offset", "body", "keys", "store_time", "properties"]
    assert "plain, text" in table[2] and "0xfffe" in table[3]

    rows = [json.loads(line) for line in text(frame, "jsonl").splitlines()]
    assert [row.get("body", row.get("body_base64")) for row in rows] == ["plain, text", "//4="]
    assert rows[0]["store_time"].endswith("Z") and rows[0]["properties"]["KEYS"] == "k"
    assert json.loads(text(frame, "json")) == rows
    cells = list(csv.DictReader(io.StringIO(text(frame, "csv"))))
    assert [cell["body"] for cell in cells] == ["plain, text", "//4="]
    assert cells[0]["store_time"] == rows[0]["store_time"]
    assert json.loads(text(frame.where("queue_offset > 9"), "json")) == []


def test_the_command_writes_to_stdout_and_files(
    cosmo_query: Any, spark: SparkSession, lab: Any, tmp_path: Path
) -> None:
    topic = lab.topic()
    lab.send(topic, [json.dumps({"id": number, "who": "me"}) for number in range(102)])
    sql = "SELECT value.id, value.who FROM t ORDER BY value.id"
    common = ("-n", lab.namesrv, "--topic", f"{topic}=t")
    done = cosmo_query(sql, *common, "--json-bodies")
    assert done.exit_code == 0, done.exception
    assert len(done.stdout.splitlines()) == 102  # the head and a hundred rows
    assert "the first 100 rows" in done.stderr
    done = cosmo_query("SELECT body FROM t", *common, "-o", "jsonl", "--limit", "3")
    assert len(done.stdout.splitlines()) == 3
    done = cosmo_query("SELECT body FROM t", *common, "-o", "csv", "--out", str(tmp_path / "x.csv"))
    assert "wrote 102 rows" in done.stderr and not done.stdout
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 103
    lake = str(tmp_path / "lake")
    assert isinstance(cosmo_query("SELECT 1", *common, "-o", "parquet").exception, ConfigError)
    assert cosmo_query("SELECT * FROM t", *common, "-o", "parquet", "--out", lake).exit_code == 0
    assert spark.read.parquet(lake).count() == 102
    again = cosmo_query("SELECT * FROM t", *common, "-o", "parquet", "--out", lake)
    assert isinstance(again.exception, JobFailed) and "already exists" in str(again.exception)


def test_a_store_directory_is_read_without_a_broker(cosmo_query: Any, lab: Any) -> None:
    topic = lab.topic()
    lab.send(topic, ["a", "b"])
    # The node runs on the directory; reading does not disturb it.
    sql = f"SELECT count(*) AS n FROM store WHERE topic = '{topic}'"
    done = cosmo_query(sql, "--store", lab.node.data, "-o", "csv")
    assert done.exit_code == 0, done.exception
    assert done.stdout == "n\n2\n"
    done = cosmo_query(f"SELECT body FROM `{topic}`", "--store", lab.node.data, "-o", "csv")
    assert done.stdout.splitlines() == ["body", "a", "b"]
    both = cosmo_query(sql, "--store", lab.node.data, "-n", lab.namesrv)
    assert isinstance(both.exception, ConfigError)
