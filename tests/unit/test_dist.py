"""`make dist` notices what an sdist or a wheel lacks; it tries the rest for real."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from tools import dist

FILES = {"cosmodrome/py.typed", "cosmodrome/speed/native.py", "cosmodrome/speed/native.pyx"}
SDIST = {f"src/{name}" for name in FILES} | {"LICENSE", "README.md", "setup.py"}
COMPILED = "cosmodrome/speed/native.cpython-311-x86_64-linux-gnu.so"
WHEEL = FILES | {COMPILED, "cosmodrome-0.1.0.dist-info/licenses/LICENSE"}


def test_what_is_complete_passes() -> None:
    assert dist.wrong_in_sdist(FILES, SDIST) == []
    assert dist.wrong_in_wheel(FILES, WHEEL) == []


def test_every_kind_of_source_is_looked_for() -> None:
    suffixes = {Path(name).suffix for name in dist.package_files()}
    assert suffixes == dist.SOURCE_SUFFIXES


@pytest.mark.parametrize("name", sorted(SDIST))
def test_an_sdist_without_a_file_is_refused(name: str) -> None:
    assert dist.wrong_in_sdist(FILES, SDIST - {name}) == [f"the sdist misses {name}"]


@pytest.mark.parametrize("name", ["build/native.c", COMPILED, "tests/unit/test_dist.py"])
def test_an_sdist_with_too_much_is_refused(name: str) -> None:
    assert dist.wrong_in_sdist(FILES, SDIST | {name}) == [f"the sdist has {name}"]


@pytest.mark.parametrize("name", sorted(WHEEL))
def test_a_wheel_without_a_file_is_refused(name: str) -> None:
    (wrong,) = dist.wrong_in_wheel(FILES, WHEEL - {name})
    assert "LICENSE" in wrong or "cosmodrome/" in wrong


def test_without_a_compiler_there_is_no_way_to_one(tmp_path: Path) -> None:
    env = dist.environment(tmp_path, compiler=False)
    assert (env["PATH"], env["CC"]) == (str(tmp_path / "bin"), "/bin/false")
    assert "CC" not in dist.environment(tmp_path, compiler=True)


def test_an_sdist_has_no_times_owners_or_order_of_its_own(tmp_path: Path) -> None:
    packed = []
    for name, order, mtime in (("a", "xy", 5), ("b", "yx", 7_000)):
        path = tmp_path / name
        with tarfile.open(path, "w:gz") as out:
            for letter in order:
                item = tarfile.TarInfo(f"p/{letter}")
                item.size, item.mtime, item.uname, item.uid = 1, mtime, name, mtime
                out.addfile(item, io.BytesIO(letter.encode()))
        dist.normalise(path)
        packed.append(path.read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(tmp_path / "a") as again:
        contents = {item.name: again.extractfile(item).read() for item in again.getmembers()}
    assert contents == {"p/x": b"x", "p/y": b"y"}
