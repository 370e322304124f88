"""Topics and store directories as Spark tables: `spark.read.format("rocketmq")` and the jobs.

Names are imported when they are used: asking for one needs `pip install 'cosmodrome[spark]'`,
importing this package does not.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmodrome.spark.bodies import infer_json_schema, json_bodies
    from cosmodrome.spark.lake.table import create_view, table
    from cosmodrome.spark.runtime.session import session
    from cosmodrome.spark.source import CosmodromeSource, RocketMQSource, register
    from cosmodrome.spark.write.row_messages import user_properties

_HOMES: dict[str, str] = {
    "register": "source",
    "RocketMQSource": "source",
    "CosmodromeSource": "source",
    "session": "runtime.session",
    "table": "lake.table",
    "create_view": "lake.table",
    "infer_json_schema": "bodies",
    "json_bodies": "bodies",
    "user_properties": "write.row_messages",
}

__all__ = [
    "CosmodromeSource",
    "RocketMQSource",
    "create_view",
    "infer_json_schema",
    "json_bodies",
    "register",
    "session",
    "table",
    "user_properties",
]


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Importing a module binds it here; it must not hide the function of the same name."""
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("pyspark", "pyarrow"):
            raise ModuleNotFoundError(
                f"{error.name} is not installed; pip install 'cosmodrome[spark]'", name=error.name
            ) from None
        raise
