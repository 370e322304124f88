"""Memory in Spark's Python processes: keep what is freed, and do not collect what stays.

A batch has some megabytes. By default the C library returns them to the system and asks for them
again with every batch, and the system clears each page anew. That took half of the time of a scan
(bench/RESULTS.md).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of glibc's mallopt
_WORKER_PROGRAM = "pyspark.daemon"  # which forks the workers
_KEPT_BYTES = 128 << 20
_PAD_BYTES = 32 << 20
_LARGEST_BYTES = 32 << 20  # the library takes no larger value


@functools.cache
def keep_freed_memory() -> bool:
    """Once per process; False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {
        _MMAP_THRESHOLD: _LARGEST_BYTES,
        _TRIM_THRESHOLD: _KEPT_BYTES,
        _TOP_PAD: _PAD_BYTES,
    }
    taken = [mallopt(name, value) for name, value in settings.items()]
    return all(taken)


@functools.cache
def freeze_worker() -> bool:
    """Once per process: leave what is loaded out of garbage collections. False in other processes.

    Spark collects garbage after every task of a Python worker, and walks each time through some
    hundred thousand objects of imported modules, which are never garbage.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(main, "name", None) != _WORKER_PROGRAM:
        return False
    gc.freeze()
    return True
