"""Which twin of a module runs: the compiled `native` where it can be imported, else `pure`.

`COSMODROME_PURE=1` forces the pure twins. Compiled modules use the compiled core, so none of them
runs without it. A package whose names exist twice imports those of its pure twin, which is what
type checkers see, and ends with `prefer_compiled(__name__, globals())`.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from types import ModuleType
from typing import Any

CORE = "cosmodrome.speed.core.native"


@functools.cache
def compiled(name: str) -> ModuleType | None:
    """The compiled module of this name; None where the pure twin has to do."""
    if os.environ.get("COSMODROME_PURE", "") not in ("", "0"):
        return None
    if name != CORE and compiled(CORE) is None:
        return None
    try:
        return import_module(name)
    except ImportError:
        return None


def prefer_compiled(package: str, names: dict[str, Any]) -> None:
    """Replace what a package exports (`__all__`) by what its `native` module has of it."""
    native = compiled(f"{package}.native")
    for name in names["__all__"] if native is not None else ():
        names[name] = getattr(native, name, names[name])


FLAVOUR = "pure" if compiled(CORE) is None else "native"
