"""The columns of a message as Spark and Arrow know them, and batches made of them.

One table says what there is; both schemas follow from it, and a batch has exactly the type of
`arrow_schema`, which Spark compares with the declared one. Columns may be null to Spark but for
those that are `required`: Spark then looks for nulls nowhere, which is a part of its work per row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from cosmodrome.errors import ConfigError
from cosmodrome.speed.columnar import KINDS, Buffer

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS: tuple[str, ...] = tuple(KINDS)
CORRUPT = "_corrupt_record"  # why a record is damaged; the last column, offline only

_STRING = pa.string()
_TYPES: dict[str, pa.DataType] = {
    "topic": _STRING,
    "broker": _STRING,
    "queue_id": pa.int32(),
    "queue_offset": pa.int64(),
    "body": pa.binary(),
    "msg_id": _STRING,
    "offset_msg_id": _STRING,
    "tags": _STRING,
    "keys": _STRING,
    "properties": pa.map_(_STRING, _STRING),
    "born_time": pa.timestamp("us", tz="UTC"),
    "store_time": pa.timestamp("us", tz="UTC"),
    "born_host": _STRING,
    "flag": pa.int32(),
    "sys_flag": pa.int32(),
    "reconsume_times": pa.int32(),
    "commit_log_offset": pa.int64(),
    "store_size": pa.int32(),
}
assert tuple(_TYPES) == COLUMNS
# What every message of a broker has. A store that is read without one may have damaged records.
NEVER_NULL = frozenset(COLUMNS) - {"tags", "keys"}
NONE: frozenset[str] = frozenset()


def check_columns(names: Sequence[str]) -> tuple[str, ...]:
    """The names as given, in their order; ConfigError unless each is a column, and once only."""
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

    def timestamp() -> types.DataType:
        return types.TimestampType()

    def text_map() -> types.DataType:
        return types.MapType(types.StringType(), types.StringType())

    makers: dict[pa.DataType, Callable[[], types.DataType]] = {
        _STRING: types.StringType,
        pa.binary(): types.BinaryType,
        pa.int32(): types.IntegerType,
        pa.int64(): types.LongType,
        _TYPES["properties"]: text_map,
        _TYPES["born_time"]: timestamp,
    }
    fields = arrow_schema(tuple(columns), corrupt, required)
    return types.StructType(
        [types.StructField(f.name, makers[f.type](), f.nullable) for f in fields]
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
    wanted = arrow_schema(tuple(columns), corrupt, required)
    arrays = [_array(rows, _TYPES[name], buffers[name]) for name in columns]
    if corrupt:
        arrays.append(pa.nulls(rows, _STRING))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def corrupt_batch(
    reasons: Sequence[str], columns: Sequence[str], known: Mapping[str, Sequence[object]] = {}
) -> pa.RecordBatch:
    """One row per damaged record: null but for the reason and the columns that are `known`."""
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
