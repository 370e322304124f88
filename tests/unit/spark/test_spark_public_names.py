"""What `cosmodrome.spark` offers: functions and classes, in whatever order things are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyspark")

import cosmodrome.spark as package


def test_the_list_and_the_homes_agree() -> None:
    assert sorted(package._HOMES) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize(
    "first",
    ["", "import cosmodrome.spark.runtime.session, cosmodrome.spark.lake.table", "import pyspark"],
)
def test_names_are_callable_also_where_a_module_has_the_same(first: str) -> None:
    """A module `session` beside the function must not take its place."""
    code = f"""{first}
from cosmodrome.spark import {", ".join(package.__all__)}
assert all(map(callable, ({", ".join(package.__all__)})))
import cosmodrome.spark.runtime.session
from cosmodrome.spark import session
assert callable(session), session
from cosmodrome.spark.runtime.session import is_local
assert is_local("local[2]")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_import_spark() -> None:
    code = "import cosmodrome.spark, sys; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
