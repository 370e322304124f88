"""The columns of a message as Spark and Arrow know them, and batches made of them.

One table (`speed.arrow.KINDS`) says which columns there are and in what order. The types of
Arrow and Spark follow from it here, and the columns that the sink takes follow from those. A batch
has exactly the type of `arrow_schema`, which Spark compares with the declared one. Spark is told
that columns may be null, except those that are `required`: it does not look for nulls in them,
which is a part of its work per row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from cosmodrome.errors import ConfigError
from cosmodrome.speed.arrow import KINDS, Buffer

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS: tuple[str, ...] = tuple(KINDS)
CORRUPT = "_corrupt_record"  # why a record is damaged; the last column, offline only

_STRING = pa.string()
_MAP = pa.map_(_STRING, _STRING)
_TIME = pa.timestamp("us", tz="UTC")
# Arrow's type for what a `ColumnBuilder` makes, except where the bytes mean something else.
_BY_KIND = {"text": _STRING, "i": pa.int32(), "q": pa.int64(), "map": _MAP}
_BY_NAME = {"body": pa.binary(), "born_time": _TIME, "store_time": _TIME}
_TYPES: dict[str, pa.DataType] = {
    name: _BY_NAME.get(name, _BY_KIND[kind]) for name, kind in KINDS.items()
}
# Spark's name for a type of Arrow.
_SPARK_NAMES: dict[pa.DataType, str] = {
    _STRING: "string",
    pa.binary(): "binary",
    pa.int32(): "int",
    pa.int64(): "bigint",
    _MAP: "map<string,string>",
    _TIME: "timestamp",
}
SPARK_TYPES: dict[str, str] = {name: _SPARK_NAMES[kind] for name, kind in _TYPES.items()}
# Every message of a broker has these. A store directory may hold damaged records without them.
NEVER_NULL = frozenset(COLUMNS) - {"tags", "keys"}
NONE: frozenset[str] = frozenset()


def check_columns(names: Sequence[str]) -> tuple[str, ...]:
    """The names in their order; ConfigError unless each is a column and stands there once."""
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise ConfigError(f"no column is called {', '.join(unknown)}; there are {_all()}")
    if not names:
        raise ConfigError(f"no column is named; there are {_all()}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)}: a column is named once only")
    return tuple(names)


def _all() -> str:
    return ", ".join(COLUMNS)


@functools.lru_cache(maxsize=64)
def arrow_schema(
    columns: tuple[str, ...] = COLUMNS, corrupt: bool = False, required: frozenset[str] = NONE
) -> pa.Schema:
    """What a batch of these columns looks like; with `corrupt` the reason of damage is last."""
    fields = [
        pa.field(name, _TYPES[name], nullable=name not in required)
        for name in check_columns(columns)
    ]
    return pa.schema([*fields, pa.field(CORRUPT, _STRING)] if corrupt else fields)


def schema(
    columns: Sequence[str] = COLUMNS, *, corrupt: bool = False, required: frozenset[str] = NONE
) -> StructType:
    """The same for Spark."""
    from pyspark.sql import types

    makers: dict[str, Callable[[], types.DataType]] = {
        "string": types.StringType,
        "binary": types.BinaryType,
        "int": types.IntegerType,
        "bigint": types.LongType,
        "map<string,string>": lambda: types.MapType(types.StringType(), types.StringType()),
        "timestamp": types.TimestampType,
    }
    fields = arrow_schema(tuple(columns), corrupt, required)
    return types.StructType(
        [types.StructField(f.name, makers[_SPARK_NAMES[f.type]](), f.nullable) for f in fields]
    )


def batch(
    rows: int,
    buffers: Mapping[str, tuple[Buffer | None, ...]],
    columns: Sequence[str],
    *,
    corrupt: bool = False,
    required: frozenset[str] = NONE,
) -> pa.RecordBatch:
    """The rows that a `ColumnBuilder` gave, without a copy of its buffers."""
    expected = arrow_schema(tuple(columns), corrupt, required)
    arrays = [_array(rows, _TYPES[name], buffers[name]) for name in columns]
    if corrupt:
        arrays.append(pa.nulls(rows, _STRING))
    return pa.RecordBatch.from_arrays(arrays, schema=expected)


def corrupt_batch(
    reasons: Sequence[str], columns: Sequence[str], known: Mapping[str, Sequence[object]] = {}
) -> pa.RecordBatch:
    """One row per damaged record: all null except the reason and the `known` columns."""
    arrays = [
        pa.array(known[name], _TYPES[name])
        if name in known
        else pa.nulls(len(reasons), _TYPES[name])
        for name in columns
    ]
    return pa.RecordBatch.from_arrays(
        [*arrays, pa.array(reasons, _STRING)], schema=arrow_schema(tuple(columns), corrupt=True)
    )


def _array(rows: int, kind: pa.DataType, buffers: tuple[Buffer | None, ...]) -> pa.Array:
    ready = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    if not pa.types.is_map(kind):
        ready = ready if len(ready) == 3 else [None, *ready]
        return pa.Array.from_buffers(kind, rows, ready)
    offsets, names_at, names, values_at, values = ready
    assert names_at is not None
    pairs = names_at.size // 4 - 1
    entries = pa.StructArray.from_arrays(
        [
            pa.Array.from_buffers(_STRING, pairs, [None, names_at, names]),
            pa.Array.from_buffers(_STRING, pairs, [None, values_at, values]),
        ],
        fields=[kind.key_field, kind.item_field],
    )
    return pa.Array.from_buffers(kind, rows, [None, offsets], children=[entries])
