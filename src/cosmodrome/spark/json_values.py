"""JSON bodies as a struct column whose schema grows with what arrives.

Two schemas are kept. The *stored* one only ever gains fields: a field keeps the type it was first
written with, because files of different types under one name cannot be read together; a value
that does not fit is null there. The *whole* one says what all bodies together need: where types
contradict each other the field is a string. As long as both agree the stored column is read;
afterwards `lake/table.py` parses the bodies, which are always kept, with the whole one.
Bodies that are not JSON objects have a null value.

Fields are bounded, so that a map with ids as keys does not grow into millions of columns.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from cosmodrome.errors import StoreCorrupt
from cosmodrome.spark.lake.layout import OURS, Lake

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

log = logging.getLogger(__name__)

FIELDS_MAX = 1_000
DEPTH_MAX = 16
VERSIONS_KEPT = 100
Choose = Callable[[DataType, DataType], DataType]
_FILE = f"{OURS}/schema.json"
# Delta takes no such names, and other readers of Parquet stumble over them.
_BAD_CHARACTERS = frozenset(" ,;{}()\n\t=")


@dataclasses.dataclass(frozen=True, slots=True)
class ValueSchema:
    """One version; both are empty until the first JSON object arrived."""

    version: int = 0
    stored: StructType = dataclasses.field(default_factory=StructType)
    whole: StructType = dataclasses.field(default_factory=StructType)

    @property
    def exact(self) -> bool:
        """Whether the stored column says everything."""
        return self.stored == self.whole

    @property
    def column(self) -> StructType | None:
        """The type of the stored column, if there is one."""
        return self.stored if self.stored.fields else None

    def widened(self, found: StructType) -> ValueSchema:
        """With the fields of another schema; the same object when nothing is new."""
        stored = _joined(self.stored, found, _first)
        whole = _joined(self.whole, found, _holding_both)
        if stored == self.stored and whole == self.whole:
            return self
        if _fields(stored) > FIELDS_MAX or _fields(whole) > FIELDS_MAX:
            log.warning("event=json-fields-full most=%d new fields are left out", FIELDS_MAX)
            return self
        return ValueSchema(self.version + 1, stored, whole)


def load(lake: Lake) -> ValueSchema:
    document = lake.files.read_json(_FILE)
    if document is None:
        return ValueSchema()
    try:
        newest = document["versions"][-1]
        return ValueSchema(
            int(newest["version"]),
            StructType.fromJson(newest["stored"]),
            StructType.fromJson(newest["whole"]),
        )
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise StoreCorrupt(f"{lake.files.path(_FILE)} is damaged: {error!r}") from None


def save(lake: Lake, schema: ValueSchema, batch: int) -> None:
    """Written before the first rows that have it, so no file has fields that it lacks."""
    document = lake.files.read_json(_FILE) or {"versions": []}
    document["versions"].append(
        {
            "version": schema.version,
            "batch": batch,
            "stored": schema.stored.jsonValue(),
            "whole": schema.whole.jsonValue(),
        }
    )
    document["versions"] = document["versions"][-VERSIONS_KEPT:]
    lake.files.write_json(_FILE, document)


def infer(frame: DataFrame) -> StructType:
    """The schema of the JSON objects among the bodies, by Spark's own rules."""
    spark: Any = frame.sparkSession
    bodies: Any = frame.select(F.col("body").cast("string").alias("value"))
    texts = getattr(bodies._jdf, "as")(spark._jvm.org.apache.spark.sql.Encoders.STRING())
    found = (
        spark._jsparkSession.read()
        .option("mode", "DROPMALFORMED")
        .option("dropFieldIfAllNull", "true")
        .json(texts)
        .schema()
        .json()
    )
    return _cleaned(StructType.fromJson(json.loads(found)), 0)


def parsed(schema: StructType) -> Column:
    """The body as a struct; null where it is not a JSON object."""
    text = F.col("body").cast("string")
    is_object = F.get_json_object(text, "$").startswith("{")
    return F.when(is_object, F.from_json(text, schema))


def _cleaned(found: StructType, depth: int) -> StructType:
    """Without names that no table can have. Names that differ in case only become one field: to
    Spark they are the same."""
    fields: dict[str, StructField] = {}
    for field in found.fields:
        name = field.name
        if not name or _BAD_CHARACTERS & set(name):
            log.warning("event=json-field-left-out name=%r", name[:80])
            continue
        kind = _cleaned_type(field.dataType, depth + 1)
        if kind is None:
            continue
        same = fields.get(name.lower())
        if same is not None:
            kind = _joined_type(same.dataType, kind, _holding_both)
        fields[name.lower()] = StructField(same.name if same is not None else name, kind)
    return StructType(list(fields.values()))


def _cleaned_type(kind: DataType, depth: int) -> DataType | None:
    if depth > DEPTH_MAX:
        return StringType()
    if isinstance(kind, StructType):
        inner = _cleaned(kind, depth)
        return inner if inner.fields else None
    if isinstance(kind, ArrayType):
        element = _cleaned_type(kind.elementType, depth + 1)
        return ArrayType(element) if element is not None else None
    return kind


def _joined(known: StructType, found: StructType, choose: Choose) -> StructType:
    """`known` with the new fields of `found`; `choose` decides where types differ."""
    new = {field.name.lower(): field for field in found.fields}
    fields = []
    for field in known.fields:
        other = new.pop(field.name.lower(), None)
        kind = field.dataType
        if other is not None:
            kind = _joined_type(kind, other.dataType, choose)
        fields.append(StructField(field.name, kind))
    return StructType([*fields, *new.values()])


def _joined_type(known: DataType, found: DataType, choose: Choose) -> DataType:
    if isinstance(known, StructType) and isinstance(found, StructType):
        return _joined(known, found, choose)
    if isinstance(known, ArrayType) and isinstance(found, ArrayType):
        return ArrayType(_joined_type(known.elementType, found.elementType, choose))
    return known if known == found else choose(known, found)


def _first(known: DataType, found: DataType) -> DataType:
    return known


def _holding_both(known: DataType, found: DataType) -> DataType:
    if {type(known), type(found)} == {LongType, DoubleType}:
        return DoubleType()
    return StringType()


def _fields(schema: StructType) -> int:
    return sum(_leaves(field.dataType) for field in schema.fields)


def _leaves(kind: DataType) -> int:
    if isinstance(kind, StructType):
        return _fields(kind)
    return _leaves(kind.elementType) if isinstance(kind, ArrayType) else 1
