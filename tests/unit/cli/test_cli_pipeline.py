"""`cosmo pipeline` and what its jobs share, without Spark."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cosmodrome.cli.main import cosmo
from cosmodrome.cli.pipeline import pipeline
from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs import JOBS
from cosmodrome.spark.jobs.job import JobContext, JobFailed, SessionFlags, explain, job
from cosmodrome.spark.jobs.job import stop_requests as stop_requests_of_job

needs_spark = pytest.mark.skipif(
    importlib.util.find_spec("pyspark") is None, reason="pyspark is not installed"
)


def test_every_job_has_help_that_needs_no_spark() -> None:
    script = (
        "import sys\n"
        "sys.modules['pyspark'] = sys.modules['pyarrow'] = None\n"  # importing them fails
        "from click.testing import CliRunner\n"
        "from cosmodrome.cli.main import cosmo\n"
        "for name in sys.argv[1:]:\n"
        "    done = CliRunner().invoke(cosmo, ['pipeline', name, '--help'])\n"
        "    assert done.exit_code == 0, (name, done.output, done.exception)\n"
        "    assert 'Usage: cosmo pipeline' in done.output, done.output\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *JOBS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_the_list_of_jobs() -> None:
    done = CliRunner().invoke(cosmo, ["pipeline", "--help"])
    assert done.exit_code == 0
    for name, says in JOBS.items():
        assert name in done.output and says.split()[0] in done.output
    wrong = CliRunner().invoke(cosmo, ["pipeline", "archiv"])
    assert wrong.exit_code == 2 and "No such command 'archiv'" in wrong.output


def run(callback: Callable[..., None], *words: str, **more: Any) -> click.testing.Result:
    made = job("probe", **more)(callback)
    return CliRunner().invoke(made, list(words), obj=lambda given: given or "context:9876")


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run(lambda context: None)
    assert isinstance(done.exception, ConfigError)
    assert "pip install 'cosmodrome[spark]'" in str(done.exception)


@needs_spark
def test_flags_become_options_of_the_source() -> None:
    seen: list[JobContext] = []
    done = run(
        seen.append,
        "-n",
        "a:1;b:2",
        "--access-key",
        "ak",
        "--secret-key",
        "sk",
        "--tls-ca",
        "ca.pem",
        "--tls-no-verify",
        "--namespace",
        "ns",
        "--conf",
        "spark.a=b=c",
        "--no-delta",
        "--master",
        "local[3]",
        "--archive-env",
        "env.tgz",
    )
    assert done.exit_code == 0, done.exception
    (context,) = seen
    assert context.has_namesrv
    assert context.source_options() == {
        "namesrv": "a:1;b:2",
        "accessKey": "ak",
        "secretKey": "sk",
        "tls": "true",
        "tlsCa": "ca.pem",
        "tlsVerify": "false",
        "namespace": "ns",
    }
    assert context.flags == SessionFlags(
        master="local[3]", conf=(("spark.a", "b=c"),), archive_env="env.tgz", delta=False
    )


@needs_spark
def test_without_flags_the_context_in_use_is_asked() -> None:
    seen: list[JobContext] = []
    assert run(seen.append).exit_code == 0
    assert seen[0].source_options() == {"namesrv": "context:9876"}
    assert not seen[0].has_namesrv and seen[0].flags == SessionFlags()
    local = CliRunner().invoke(job("p", cluster=False)(seen.append), ["-n", "x:1"])
    assert local.exit_code == 2 and "No such option" in local.output


@needs_spark
def test_a_setting_without_value_is_refused() -> None:
    done = run(lambda context: None, "--conf", "spark.a")
    assert isinstance(done.exception, ConfigError) and "KEY=VALUE" in str(done.exception)


@needs_spark
def test_ends_of_a_job() -> None:
    from pyspark.errors import AnalysisException

    def interrupted(_context: JobContext) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5)  # the handler runs here

    def refused(_context: JobContext) -> None:
        raise AnalysisException("no such column\n\nJVM stacktrace:\nlong")

    def broken(_context: JobContext) -> None:
        raise ZeroDivisionError

    before = signal.getsignal(signal.SIGTERM)
    assert run(interrupted).exit_code == 130
    assert signal.getsignal(signal.SIGTERM) is before
    done = run(refused)
    assert isinstance(done.exception, JobFailed) and str(done.exception) == "no such column"
    assert isinstance(run(broken).exception, ZeroDivisionError)


@needs_spark
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["archive", "/lake"], "name the topics to archive"),
        (["archive", "/lake", "-t", "a", "--pattern", "b"], "not both"),
        (["check"], "check what?"),
        (["replay", "/lake", "a", "bad topic"], "bad topic"),
        (["replay", "/lake", "a", "b", "--rate", "0"], "rate must be above 0"),
    ],
)
def test_mistakes_are_told_before_spark_starts(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobContext, "spark", property(lambda _self: pytest.fail("started")))
    ran = CliRunner().invoke(pipeline, words)
    assert isinstance(ran.exception, ConfigError), ran.output
    assert says in str(ran.exception)


def test_words_of_spark_are_cut_down_to_the_cause() -> None:
    ours = (
        "[PYTHON_DATA_SOURCE_ERROR] Failed to plan: Traceback (most recent call last):\n"
        '  File "source.py", line 1, in partitions\n    raise X\n'
        "cosmodrome.client.values.NoRoute: topic t has no route;\nmake it first\n\n"
        "\tat org.apache.spark.X"
    )
    assert explain(Exception(ours)) == "topic t has no route;\nmake it first"
    stated = ours.partition("make")[0] + " SQLSTATE: 38000\n\tat org"
    assert explain(Exception(stated)) == "topic t has no route;"
    chained = (
        "Traceback (most recent call last):\n  File\nKeyError: 1\n\nDuring handling:\n\n"
        "Traceback (most recent call last):\n  File\nValueError: two\n\tat java"
    )
    assert explain(Exception(chained)) == "ValueError: two"
    assert (
        explain(Exception("[PARSE] bad;\nline 1\n\nJVM stacktrace:\nx")) == "[PARSE] bad;\nline 1"
    )
    tree = "[UNRESOLVED] no `bodi`; line 1 pos 7;\n'Project ['bodi]\n+- View (`orders`, [body#1])\n"
    assert explain(Exception(tree)) == "[UNRESOLVED] no `bodi`; line 1 pos 7"
    assert explain(Exception("")) == "Exception"
    assert explain(Exception("\n".join("abcdefghijklmnop"))).count("\n") == 11


def test_the_third_request_to_stop_is_not_only_counted() -> None:
    with stop_requests_of_job() as stop:
        for wanted in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            assert stop() == wanted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_pipeline_uses_the_context_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COSMO_NAMESRV", "from-environment:9876")
    seen: list[str] = []
    probe = job("query")(lambda context, **_: seen.append(context.namesrv))
    monkeypatch.setattr("cosmodrome.spark.jobs.query.command", probe)
    monkeypatch.setattr("cosmodrome.spark.jobs.job._require_extra", lambda: None)
    done = CliRunner().invoke(pipeline, ["query"])
    assert done.exit_code == 0, done.exception
    assert seen == ["from-environment:9876"]
