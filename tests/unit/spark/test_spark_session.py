"""The session and Delta Lake as far as no JVM is needed: what would be set."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pyspark = pytest.importorskip("pyspark")

from cosmodrome.errors import ConfigError  # noqa: E402
from cosmodrome.spark.jobs.jars import by_hand, fetch  # noqa: E402
from cosmodrome.spark.runtime import delta  # noqa: E402
from cosmodrome.spark.runtime.python import end_daemons, unzipped_python  # noqa: E402

session = importlib.import_module("cosmodrome.spark.runtime.session")


def test_an_old_pyspark_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    with pytest.raises(ConfigError, match=r"4\.1\.4 is too old.*pip install 'pyspark>=4\.2'"):
        session.session()
    monkeypatch.setattr(pyspark, "__version__", "4.2.0.dev1")
    assert session.check_version() == "4.2.0.dev1"


@pytest.mark.parametrize(
    ("master", "local", "cores"),
    [("local", True, 1), ("local[3]", True, 3), ("local[2,4]", True, 2), ("yarn", False, 1)],
)
def test_masters(master: str, local: bool, cores: int) -> None:
    assert session.is_local(master) is local
    assert session._cores(master) == cores
    assert session.is_local("local-cluster[1,1,1024]") is False


def test_a_local_session_listens_on_loopback_only() -> None:
    settings = session._local("local[2]")
    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"
    assert settings["spark.ui.enabled"] == "false"
    assert settings["spark.sql.shuffle.partitions"] == "2"


def test_arrow_in_java_does_not_check_each_value_again() -> None:
    settings = session._common()
    for name in ("spark.driver.extraJavaOptions", "spark.executor.defaultJavaOptions"):
        options = settings[name].split()
        assert "-Darrow.enable_unsafe_memory_access=true" in options
        assert "-Darrow.enable_null_check_for_get=false" in options
    assert f"-Dlog4j2.configurationFile=file:{session.LOGGING}" in (
        settings["spark.driver.extraJavaOptions"].split()
    )


def test_what_never_repeats_gets_no_dictionary() -> None:
    settings = session._common()
    for name in ("queue_offset", "msg_id", "properties.key_value.value"):
        assert settings[f"spark.hadoop.parquet.enable.dictionary#{name}"] == "false"
    assert not [name for name in settings if name.endswith(("#topic", "#body", "#tags"))]
    assert settings["spark.sql.parquet.outputTimestampType"] == "TIMESTAMP_MICROS"


def test_workers_of_a_local_session_run_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "python2")
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    session._set_environment("local[2]", None, {})
    program = os.environ["PYSPARK_PYTHON"]
    assert _output(program, "-c", "import sys; print(sys.executable)") == sys.executable
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == program
    assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
    session._set_environment("local[2]", None, {"spark.pyspark.python": "/opt/python"})
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"


def _output(*words: str, **environ: str) -> str:
    variables = {**os.environ, **environ}
    return subprocess.run(
        words, env=variables, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_workers_leave_the_zip_file_of_pyspark_alone(tmp_path: Path) -> None:
    home = session._spark_home()
    program = unzipped_python(home)
    assert program != sys.executable
    others = [str(tmp_path / "with a blank"), "/*", str(tmp_path / "own.zip")]
    zips = [f"{home}/python/lib/pyspark.zip", f"{home}/python/lib/py4j-1-src.zip"]
    path = os.pathsep.join([zips[0], *others, zips[1]])
    code = "import json, sys; print(json.dumps([sys.path, sys.argv[1:]]))"
    found, words = json.loads(_output(program, "-c", code, "a b", "$c", PYTHONPATH=path))
    assert words == ["a b", "$c"]
    assert [each for each in found if each in {*others, *zips}] == others
    assert "python/lib" not in _output(program, "-c", "import pyspark; print(pyspark.__file__)")
    assert _output(program, "-c", "print(1)", PYTHONPATH="") == "1"


def test_another_spark_keeps_its_own_pyspark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unzipped_python(str(tmp_path)) == sys.executable
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # nothing can be made there
    assert unzipped_python(session._spark_home()) == sys.executable


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc of Linux")
def test_daemons_of_a_java_process_end_and_nothing_else() -> None:
    code = (
        "import subprocess, sys\n"
        "wait = [sys.executable, '-c', 'import sys; sys.stdin.read()', *sys.argv[1:2]]\n"
        "made = [subprocess.Popen([*wait, name], stdin=subprocess.PIPE)"
        " for name in ('pyspark.daemon', 'pyspark.daemons')]\n"
        "print(made[0].pid, flush=True)\n"
        "print(made[0].wait(), made[1].poll(), flush=True)\n"
    )
    java = subprocess.Popen(
        [sys.executable, "-c", code, "-m"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert java.stdout is not None and java.stdin is not None
    with java:
        child = int(java.stdout.readline())
        cmdline = Path(f"/proc/{child}/cmdline")
        while b"pyspark.daemon" not in cmdline.read_bytes():  # forked, not yet the program
            pass
        end_daemons(java.pid)
        assert java.stdout.readline().split() == [str(-signal.SIGTERM), "None"]
    end_daemons(java.pid)  # it is gone


def test_a_packed_environment_is_for_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "env.tar.gz"
    with pytest.raises(ConfigError, match="venv-pack"):
        session._shipped("spark://host:7077", str(archive))
    archive.write_bytes(b"")
    assert session._shipped("yarn", str(archive)) == {"spark.archives": f"{archive}#env"}
    assert session._shipped("yarn", "hdfs://a/env.tgz") == {
        "spark.archives": "hdfs://a/env.tgz#env"
    }
    with pytest.raises(ConfigError, match="executors of a cluster"):
        session._shipped("local[2]", str(archive))
    monkeypatch.setenv("PYSPARK_PYTHON", "x")
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "x")
    session._set_environment("yarn", str(archive), {})
    assert os.environ["PYSPARK_PYTHON"] == "./env/bin/python"


def jar(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(tmp_path), **more}


def test_jars_must_be_made_for_this_spark(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "cosmodrome" / "jars"
    jar(cache, "delta-spark_4.2_2.13-4.4.0.jar", "delta-storage-4.4.0.jar", "other-1.0.jar")
    jar(cache, "delta-spark_4.2_2.13-4.10.0.jar", "delta-storage-4.10.0.jar")
    found = delta.find_jars("4.2.1", environ(tmp_path))
    assert [os.path.basename(path) for path in found.paths] == [
        "delta-spark_4.2_2.13-4.10.0.jar",
        "delta-storage-4.10.0.jar",
    ]
    missing = delta.find_jars("4.3.0", environ(tmp_path))
    assert not missing.paths
    assert "for another Spark" in missing.why and "pyspark~=4.2.0" in missing.why
    assert "cosmo pipeline jars" in delta.find_jars("4.2.0", environ(tmp_path / "empty")).why


def test_jars_are_found_in_spark_and_in_a_maven_repository(tmp_path: Path) -> None:
    group = tmp_path / ".m2" / "repository" / "io" / "delta"
    jar(group / "delta-spark_4.2_2.13" / "4.4.0", "delta-spark_4.2_2.13-4.4.0.jar")
    assert not delta.find_jars("4.2.1", environ(tmp_path)).paths  # its storage jar is missing
    jar(group / "delta-storage" / "4.4.0", "delta-storage-4.4.0.jar")
    assert len(delta.find_jars("4.2.1", environ(tmp_path)).paths) == 2
    jar(tmp_path / "spark" / "jars", "delta-spark_4.2_2.13-4.3.0.jar", "spark-core.jar")
    in_spark = delta.find_jars("4.2.1", environ(tmp_path), spark_home=str(tmp_path / "spark"))
    assert [os.path.basename(path) for path in in_spark.paths] == ["delta-spark_4.2_2.13-4.3.0.jar"]


def test_named_jars_win_and_are_checked(tmp_path: Path) -> None:
    jar(tmp_path / "mine", "delta-spark_4.3_2.13-5.0.jar", "delta-storage-5.0.jar")
    values = environ(tmp_path, COSMODROME_DELTA_JARS=str(tmp_path / "mine"))
    assert len(delta.find_jars("4.3.0", values).paths) == 2
    assert "is for Spark 4.3, this is 4.2" in delta.find_jars("4.2.0", values).why
    values["COSMODROME_DELTA_JARS"] = str(tmp_path / "nowhere")
    assert "does not exist" in delta.find_jars("4.3.0", values).why
    values["COSMODROME_DELTA_JARS"] = str(tmp_path / "mine" / "delta-storage-5.0.jar")
    assert "names no delta-spark" in delta.find_jars("4.3.0", values).why


def test_delta_joins_the_jars_and_extensions_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar(tmp_path, "delta-spark_4.2_2.13-4.4.0.jar")
    monkeypatch.setenv("COSMODROME_DELTA_JARS", str(tmp_path))
    values = {"spark.jars": "a.jar", "spark.sql.extensions": "my.Extension"}
    made = session._delta("4.2.1", None, values)
    assert made["spark.jars"] == f"a.jar,{tmp_path}/delta-spark_4.2_2.13-4.4.0.jar"
    assert made["spark.sql.extensions"] == f"my.Extension,{delta.EXTENSION}"
    assert session._delta("4.2.1", False, values) == {}
    assert session._delta("4.3.0", None, values) == {}
    with pytest.raises(ConfigError, match=r"is for Spark 4\.2, this is 4\.3"):
        session._delta("4.3.0", True, values)


def test_jars_are_fetched_one_by_one_and_tried_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def maven(words: list[str]) -> tuple[int, str]:
        artifact = next(word for word in words if word.startswith("-Dartifact="))
        asked.append(artifact)
        if len(asked) == 1:
            return 1, "the registry hiccups"
        _group, name, release = artifact.partition("=")[2].split(":")
        jar(tmp_path, f"{name}-{release}.jar")
        return 0, ""

    paths = fetch("4.2", str(tmp_path), maven)
    assert len(asked) == len(paths) + 1 and all(os.path.exists(path) for path in paths)
    fetch("4.2", str(tmp_path), maven)
    assert len(asked) == len(paths) + 1
    with pytest.raises(ConfigError, match="hiccups"):
        fetch("4.2", str(tmp_path / "other"), lambda words: (1, "hiccups"))
    with pytest.raises(ConfigError, match=r"no release of Delta Lake for Spark 4\.3"):
        fetch("4.3", str(tmp_path), maven)
    assert "io.delta:delta-storage:" in by_hand("4.2", "/x")
