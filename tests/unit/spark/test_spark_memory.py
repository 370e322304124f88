"""Freed memory stays with the process that will want it again."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

import pytest

from cosmodrome.spark.runtime.memory import freeze_worker, keep_freed_memory

FAULTS = """
import resource, sys
from cosmodrome.spark.runtime.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    parts = [bytearray(4 << 20) for _ in range(4)]
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    words = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt"
)
def test_pages_are_not_cleared_again_and_again() -> None:
    assert keep_freed_memory() is keep_freed_memory()
    page = resource.getpagesize()
    assert faults("kept") < 3 * (16 << 20) // page < faults("as it is")


SETTLED = """
import gc, sys, types
from cosmodrome.spark.runtime.memory import freeze_worker
sys.modules["__main__"].__spec__ = types.SimpleNamespace(name=sys.argv[1])
print(freeze_worker(), gc.get_freeze_count() > 1000)
"""


def test_what_is_loaded_is_left_out_of_collections_in_workers_only() -> None:
    def printed(program: str) -> str:
        words = [sys.executable, "-c", SETTLED, program]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    assert printed("pyspark.daemon") == "True True"
    assert printed("notebook") == "False False"
    assert freeze_worker() is False
