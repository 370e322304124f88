"""Many small directories of a Parquet archive become one, and no crash loses or doubles a row.

Each topic and date is merged on its own, in steps whose traces show how far it came:

    1. ID.json      the plan: which directories, what they become
    2. ID.data/     the merged rows, where no reader looks
    3. ID.ready     from here on the merged rows count (merged.json names the merge before that)
    4. remove the old directories
    5. move ID.data into their place
    6. remove ID.ready, then ID.json

`finish_interrupted` does what is left: with ID.ready steps 4 to 6, without it the merged rows are
forgotten. Between 4 and 5 a reader that does not call it sees rows missing, never doubled. Only
batches below the newest complete one are merged, because only those are never written again.

Delta keeps its own log, so there this is one OPTIMIZE.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from cosmodrome.errors import StoreCorrupt, StoreError
from cosmodrome.spark.lake.layout import (
    BATCH,
    DATE,
    DELTA,
    OURS,
    Lake,
    exact_timestamps,
    lake_schema,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLDER = f"{OURS}/compaction"
LARGE_BYTES = 128 << 20  # a directory of this size stays as it is
DATES_WATCHED = 3  # of each topic, while a stream runs: older ones get no new batches

_PLAN, _DATA, _READY = ".json", ".data", ".ready"
_PARTITION = f"{BATCH}="
_NEWEST = f"{OURS}/merged.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
    """One topic and date: `inputs` become `output`, all of them names below `folder`."""

    id: str
    folder: str
    inputs: tuple[str, ...]
    output: str

    @property
    def data(self) -> str:
        return f"{FOLDER}/{self.id}{_DATA}"


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    merges: int = 0
    directories: int = 0  # that were replaced
    rows: int = 0


class Compaction:
    """`before` is called with the name of every step; tests stop there."""

    def __init__(
        self,
        lake: Lake,
        *,
        value: StructType | None = None,
        compression: str = "zstd",
        before: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._lake = lake
        self._files = lake.files
        self._value = value
        self._compression = compression
        self._before = before

    def run(self, newest: int, *, more_than: int, everything: bool = False) -> Merged:
        """Merge where there are more than `more_than` small directories; keep batch `newest`."""
        if self._lake.info.lake == DELTA:
            return self._optimize() if everything else Merged()
        done = Merged()
        for merge in self._plans(newest, more_than, everything):
            rows = self._merge(merge)
            done = Merged(done.merges + 1, done.directories + len(merge.inputs), done.rows + rows)
        return done

    def finish_interrupted(self) -> int:
        """Finish or forget the merges that a crash interrupted; returns how many there were."""
        names = {entry.name for entry in self._files.list(FOLDER)}
        ids = sorted({name.partition(".")[0] for name in names})
        for id_ in ids:
            if f"{id_}{_READY}" in names:
                self._swap(self._read(f"{FOLDER}/{id_}{_READY}"))
            else:
                self._files.remove(f"{FOLDER}/{id_}{_DATA}")
                self._files.remove(f"{FOLDER}/{id_}{_PLAN}")
                self._files.remove(f"{FOLDER}/{id_}{_PLAN}.tmp")
                self._files.remove(f"{FOLDER}/{id_}{_READY}.tmp")
        return len(ids)

    def pending(self) -> bool:
        """Whether a swap is under way, so that the listing of rows is not complete."""
        return any(entry.name.endswith(_READY) for entry in self._files.list(FOLDER))

    def newest(self) -> str:
        """The last merge that began to replace rows; a listing is whole while it stays the same."""
        document = self._files.read_json(_NEWEST)
        return str(document["id"]) if document is not None else ""

    def _plans(self, newest: int, more_than: int, everything: bool) -> Iterator[Merge]:
        for topic in self._partitions("", "topic="):
            dates = self._partitions(topic, f"{DATE}=")
            for date in dates if everything else dates[-DATES_WATCHED:]:
                folder = f"{topic}/{date}"
                numbers = [int(n.removeprefix(_PARTITION)) for n in self._batches(folder)]
                complete = [number for number in numbers if number < newest]
                if len(complete) < 2 or len(complete) <= more_than:
                    continue
                small = [n for n in complete if self._is_small(f"{folder}/{_PARTITION}{n}")]
                if len(small) >= 2 and len(small) > more_than:
                    serial = min([0, *numbers]) - 1
                    yield Merge(
                        id=f"{newest}-{-serial}-{abs(hash_of(folder)):08x}",
                        folder=folder,
                        inputs=tuple(f"{_PARTITION}{n}" for n in sorted(small)),
                        output=f"{_PARTITION}{serial}",
                    )

    def _partitions(self, folder: str, prefix: str) -> list[str]:
        return [e.name for e in self._files.list(folder) if e.is_dir and e.name.startswith(prefix)]

    def _batches(self, folder: str) -> list[str]:
        return self._partitions(folder, _PARTITION)

    def _is_small(self, folder: str) -> bool:
        return self._files.size_bytes(folder) < LARGE_BYTES

    def _merge(self, merge: Merge) -> int:
        self._before("plan")
        self._write(merge, _PLAN)
        self._before("data")
        rows = self._merge_rows(merge)
        self._before("newest")
        self._files.write_json(_NEWEST, {"id": merge.id})
        self._before("ready")
        self._write(merge, _READY)
        self._swap(merge)
        return rows

    def _merge_rows(self, merge: Merge) -> int:
        spark = self._lake.spark
        paths = [self._files.path(f"{merge.folder}/{name}") for name in merge.inputs]
        size = sum(self._files.size_bytes(f"{merge.folder}/{name}") for name in merge.inputs)
        found: DataFrame = spark.read.schema(self._data_schema()).parquet(*paths)
        with exact_timestamps(spark):
            (
                found.coalesce(max(1, -(-size // LARGE_BYTES)))
                .sortWithinPartitions("broker", "queue_id", "queue_offset")
                .write.mode("overwrite")
                .option("compression", self._compression)
                .parquet(self._files.path(merge.data))
            )
        merged = spark.read.schema(self._data_schema()).parquet(self._files.path(merge.data))
        written, expected = merged.count(), found.count()
        if written != expected:
            raise StoreError(
                f"{merge.folder}: {expected} rows to merge became {written}; nothing was replaced"
            )
        return written

    def _swap(self, merge: Merge) -> None:
        for name in merge.inputs:
            self._before(f"remove {name}")
            self._files.remove(f"{merge.folder}/{name}")
        if self._files.exists(merge.data):
            self._before("move")
            target = f"{merge.folder}/{merge.output}"
            # There only where a move is a copy, and that one was interrupted.
            self._files.remove(target)
            self._files.move(merge.data, target)
        elif not self._files.exists(f"{merge.folder}/{merge.output}"):
            raise StoreCorrupt(
                f"{self._files.path(merge.data)} is gone, and it held the only rows of"
                f" {merge.folder}; restore it from a copy"
            )
        self._before("forget")
        self._files.remove(f"{FOLDER}/{merge.id}{_READY}")
        self._before("end")
        self._files.remove(f"{FOLDER}/{merge.id}{_PLAN}")

    def _write(self, merge: Merge, ending: str) -> None:
        self._files.write_json(f"{FOLDER}/{merge.id}{ending}", dataclasses.asdict(merge))

    def _read(self, name: str) -> Merge:
        document: Any = self._files.read_json(name)
        try:
            return Merge(
                id=document["id"],
                folder=document["folder"],
                inputs=tuple(document["inputs"]),
                output=document["output"],
            )
        except (TypeError, KeyError):
            raise StoreCorrupt(f"{self._files.path(name)} is damaged") from None

    def _data_schema(self) -> StructType:
        partitions = {"topic", DATE, BATCH}
        return StructType([f for f in lake_schema(self._value) if f.name not in partitions])

    def _optimize(self) -> Merged:
        if self._files.exists("_delta_log"):
            self._lake.spark.sql(f"OPTIMIZE delta.`{self._files.root}`")
            return Merged(merges=1)
        return Merged()


def hash_of(text: str) -> int:
    """A number for a name that is the same in every process."""
    number = 0
    for char in text:
        number = (number * 31 + ord(char)) & 0xFFFFFFFF
    return number
