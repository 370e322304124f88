"""SQL over topics: a table name that Spark does not know is looked up as a topic.

Spark itself says which name it could not resolve, so subqueries, common table expressions and
quoting are its business. This module only makes a view of that name and runs the SQL again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cosmodrome.errors import ConfigError
from cosmodrome.spark.option_values import require_name
from cosmodrome.wire.names import check_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMES_MAX = 64  # of one statement; also bounds the loop
STORE_VIEW = "store"
ARCHIVE_VIEW = "archive"
JSON_COLUMN = "value"
_NOT_FOUND = "TABLE_OR_VIEW_NOT_FOUND"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """Where tables are found: a store directory, an archive, a cluster, or the last two as one.

    `cluster` has the options of the source that reach it. In a store or an archive the tables
    `store` and `archive` hold all topics at once.
    """

    cluster: Mapping[str, str] = dataclasses.field(default_factory=dict)
    archive: str | None = None
    store: str | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # view → topic
    json_bodies: bool = False  # add a column `value` with the parsed bodies

    def __post_init__(self) -> None:
        if self.store is not None and (self.archive is not None or self.cluster):
            raise ConfigError("a store directory is read alone, without archive or cluster")
        if self.store is None and self.archive is None and not self.cluster:
            raise ConfigError("nothing to read: give a cluster, an archive or a store directory")

    def table(self, spark: SparkSession, name: str) -> DataFrame:
        """The rows behind a name of the statement."""
        found = self._all(spark, name) if name not in self.names else None
        if found is None:
            found = self._topic(spark, self.names.get(name, name))
        if self.json_bodies and JSON_COLUMN not in found.columns:  # an archive may have parsed them
            from cosmodrome.spark.bodies import json_bodies

            found = json_bodies(found, column=JSON_COLUMN)
        return found

    def _all(self, spark: SparkSession, name: str) -> DataFrame | None:
        if self.store is not None and name.lower() == STORE_VIEW:
            return spark.read.format("rocketmq").option("storePath", self.store).load()
        if self.archive is not None and name.lower() == ARCHIVE_VIEW:
            from cosmodrome.spark.lake.layout import Lake

            progress = Lake.open(spark, self.archive).progress()
            if progress is None:
                raise ConfigError(f"the archive {self.archive} holds no messages yet")
            return self._archived(spark, sorted({queue.topic for queue in progress.ends}))
        return None

    def _topic(self, spark: SparkSession, topic: str) -> DataFrame:
        require_name(check_topic, topic, f"table {topic}: no topic has such a name")
        if self.archive is not None:
            return self._archived(spark, topic)
        reader = spark.read.format("rocketmq").options(**self.cluster)
        if self.store is not None:
            reader = reader.option("storePath", self.store)
        return reader.option("subscribe", topic).load()

    def _archived(self, spark: SparkSession, topics: str | Sequence[str]) -> DataFrame:
        from cosmodrome.spark.lake.table import table

        others = {name: value for name, value in self.cluster.items() if name != "namesrv"}
        return table(
            spark,
            topics,
            archive=self.archive,
            namesrv=self.cluster.get("namesrv"),
            options=others,
        )


def run_sql(
    spark: SparkSession, sql: str, find: Callable[[SparkSession, str], DataFrame]
) -> DataFrame:
    """The result of a statement; `find` gives the rows for each name that Spark does not know.

    The views exist only while the statement is analysed, which puts their rows into its plan:
    the next statement may find other rows under the same names.
    """
    from pyspark.errors import AnalysisException

    from cosmodrome.spark.runtime.session import quiet_spark

    made: list[str] = []
    try:
        while True:
            try:
                with quiet_spark():  # a missing name is not an error here
                    return spark.sql(sql)
            except AnalysisException as error:
                name = missing_name(error.getCondition(), error.getMessageParameters())
                if name is None or name in made:
                    raise
            if len(made) == NAMES_MAX:
                raise ConfigError(f"a statement may name {NAMES_MAX} topics, not more")
            frame = find(spark, name)
            made.append(name)
            frame.createOrReplaceTempView(quoted(name))
    finally:
        for name in made:
            spark.sql(f"DROP VIEW IF EXISTS {quoted(name)}")


def missing_name(condition: str | None, parameters: Mapping[str, str] | None) -> str | None:
    """The table name that Spark did not find; None for other errors and names of several parts."""
    if condition is None or not condition.startswith(_NOT_FOUND):
        return None
    relation = (parameters or {}).get("relationName", "")
    parts = re.findall(r"`((?:[^`]|``)+)`", relation) or relation.split(".")
    return parts[0].replace("``", "`") if len(parts) == 1 and parts[0] else None


def quoted(name: str) -> str:
    """A name as one SQL identifier."""
    escaped = name.replace("`", "``")
    return f"`{escaped}`"
