"""Topics and store directories as Spark tables: `spark.read.format("rocketmq")` and the jobs.

Names are imported when they are used: asking for one needs `pip install 'cosmodrome[spark]'`,
importing this package does not.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES: dict[str, str] = {
    "register": "source",
    "RocketMQSource": "source",
    "CosmodromeSource": "source",
    "session": "session",
    "table": "table",
    "infer_json_schema": "bodies",
    "json_bodies": "bodies",
}

__all__ = list(_HOMES)


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
