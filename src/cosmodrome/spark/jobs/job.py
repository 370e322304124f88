"""What the jobs have in common: flags, the session made when it is first needed, orderly ends.

    @job("count")
    @click.argument("topic")
    def command(job: JobContext, topic: str) -> None:
        '''Count the messages of TOPIC.'''
        click.echo(count(job.spark, topic, job.source_options()))

`command` is then a `click.Command` with the session flags (--master, --conf, --archive-env,
--delta) and, unless `cluster=False`, those of the connection (-n, --access-key, --tls, ...).
Spark is imported and started by the first use of `job.spark` and stopped at the end. What Spark
or a task raises becomes one `CosmodromeError` that says what is wrong. Ctrl-C and SIGTERM end a
job with 130; a job that asks `stop_requests` ends in its own time, with 0.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cosmodrome.client.options import NAMESRV_DEFAULT, name_servers
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.wire.message import join_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_FOUND = 6  # problems were found; the store tools use it too
EXIT_INTERRUPTED = 130
EXTRA_FIX = "pip install 'cosmodrome[spark]'"
LINES_MAX = 12  # of an error of Spark
# The tree that follows Spark's words on a query it does not understand: its root, then branches.
_PLAN = re.compile(r"\n[^\n]*\n *(?:\+-|:-) ")


class JobFailed(CosmodromeError):
    """Spark or one of its tasks failed; the text is the part that says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionFlags:
    """How Spark is to be run."""

    master: str | None = None
    conf: tuple[tuple[str, str], ...] = ()
    archive_env: str | None = None
    delta: bool | None = None  # None: where its jars are


class JobContext:
    """What the callback of a job gets as its first argument."""

    def __init__(
        self,
        name: str,
        flags: SessionFlags,
        connection: dict[str, str],
        *,
        namesrv: str | None = None,
        find_name_servers: Callable[[str | None], str] | None = None,
    ) -> None:
        self.name = name
        self.flags = flags
        self._connection = connection
        self._namesrv = namesrv
        self._find = find_name_servers or _from_environment
        self._spark: SparkSession | None = None

    @property
    def namesrv(self) -> str:
        """The name servers: -n, else the environment, the context in use, this machine."""
        return self._find(self._namesrv)

    @property
    def has_namesrv(self) -> bool:
        """Whether -n was given, for jobs that can do without a cluster."""
        return self._namesrv is not None

    def source_options(self) -> dict[str, str]:
        """The options of format("rocketmq") that say where the cluster is and who asks."""
        return {"namesrv": self.namesrv, **self._connection}

    @property
    def spark(self) -> SparkSession:
        """The session; the first use starts it."""
        if self._spark is None:
            from cosmodrome.spark.runtime.session import session

            self.note("starting Spark …")
            self._spark = session(
                f"cosmo pipeline {self.name}",
                master=self.flags.master,
                conf=dict(self.flags.conf),
                delta=self.flags.delta,
                archive_env=self.flags.archive_env,
            )
            self.clear_note()
        return self._spark

    def close(self) -> None:
        """Stop the session if there is one."""
        if self._spark is not None:
            from cosmodrome.spark.runtime.session import stop

            spark, self._spark = self._spark, None
            stop(spark)

    def say(self, text: str) -> None:
        """Print a line for the user, on stderr."""
        self.clear_note()
        click.echo(text, err=True)

    def note(self, text: str) -> None:
        """Show a status line that replaces the one before; only when stderr is a terminal."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)

    def clear_note(self) -> None:
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", nl=False, err=True)


@contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """While entered, SIGINT and SIGTERM are only counted; calling the value returns how many came.

    The third one interrupts as usual, for a batch that does not end.
    """
    count = 0
    numbers = (signal.SIGINT, signal.SIGTERM)

    def asked(_number: int, _frame: object) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield lambda: count
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def job(name: str, *, cluster: bool = True) -> Callable[[Callable[..., None]], click.Command]:
    """Makes the `command` of a job from its callback, which gets a JobContext first."""

    def make(callback: Callable[..., None]) -> click.Command:
        @functools.wraps(callback)
        def run(**values: Any) -> None:
            context = _context(name, values)
            _require_extra()
            with _orderly(context):
                callback(context, **values)

        # What a job has of its own comes first in its help; click keeps the list from the end.
        common: Any = lambda: None  # noqa: E731
        for option in reversed((*(_CONNECTION if cluster else ()), *_SESSION)):
            common = option(common)
        own = getattr(run, "__click_params__", [])
        run.__click_params__ = [*common.__click_params__, *own]  # type: ignore[attr-defined]
        return click.command(name)(run)

    return make


def explain(error: BaseException) -> str:
    """The part of an error of Spark that names the cause.

    What Python raised in a task or while planning is the last line of a traceback inside of Spark's
    text. It says more than the rest; an error of ours is shown without its class name.
    """
    text = str(error).split("\n\nJVM stacktrace")[0].strip()
    raised = _last_raised(text)
    if raised is None:
        text = _PLAN.split(text)[0].rstrip("; \n")
        return "\n".join(text.splitlines()[:LINES_MAX]) or type(error).__name__
    name, words = raised
    return words if name.startswith("cosmodrome.") and words else f"{name}: {words}"


def _belongs(line: str) -> bool:
    """Whether a line behind the first of an exception still belongs to it, not to Spark's text."""
    return bool(line.strip()) and not line.startswith(("\t", "at ", " SQLSTATE: "))


def _last_raised(text: str) -> tuple[str, str] | None:
    """Class and text of the exception that the last traceback ends with."""
    lines = text.rpartition("Traceback (most recent call last):\n")
    if not lines[1]:
        return None
    following = lines[2].splitlines()
    for at, line in enumerate(following):
        match = re.fullmatch(r"([A-Za-z_][\w.]*)(?:: (.*))?", line)
        if match is not None:
            more = itertools.takewhile(_belongs, following[at + 1 :])
            return match[1], "\n".join([match[2] or "", *more][:LINES_MAX])
    return None


_SESSION: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--master",
        metavar="URL",
        envvar="COSMO_SPARK_MASTER",
        help="Where Spark runs: local[N], spark://HOST:PORT, yarn, k8s://URL.  [default: local[*]]",
    ),
    click.option(
        "--conf",
        "conf",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any Spark setting; may be repeated.",
    ),
    click.option(
        "--archive-env",
        metavar="FILE.tar.gz",
        help="A packed virtual environment (venv-pack) for the executors of a cluster.",
    ),
    click.option(
        "--delta/--no-delta", default=None, help="Load Delta Lake.  [default: where its jars are]"
    ),
)

_CONNECTION: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "-n",
        "--namesrv",
        metavar="HOST:PORT[;HOST:PORT]",
        help=f"Name servers.  [default: COSMO_NAMESRV, the context in use, or {NAMESRV_DEFAULT}]",
    ),
    click.option("--access-key", envvar="COSMO_ACCESS_KEY", help="Sign requests with this key."),
    click.option(
        "--secret-key",
        envvar="COSMO_SECRET_KEY",
        help="The secret of the access key; better set as COSMO_SECRET_KEY.",
    ),
    click.option(
        "--security-token",
        envvar="COSMO_SECURITY_TOKEN",
        help="A security token that goes with the keys.",
    ),
    click.option("--tls", is_flag=True, help="Use TLS."),
    click.option("--tls-ca", metavar="FILE", help="Certificates to trust."),
    click.option("--tls-cert", metavar="FILE", help="Our certificate."),
    click.option("--tls-key", metavar="FILE", help="Its key."),
    click.option("--tls-no-verify", is_flag=True, help="Trust any certificate."),
    click.option("--namespace", help="Namespace of the topics and groups."),
)

# Flag of the command line → option of the source.
_OPTION_NAMES = {
    "access_key": "accessKey",
    "secret_key": "secretKey",
    "security_token": "securityToken",
    "tls_ca": "tlsCa",
    "tls_cert": "tlsCert",
    "tls_key": "tlsKey",
    "namespace": "namespace",
}


def _context(name: str, values: dict[str, Any]) -> JobContext:
    """Takes the common flags out of `values`."""
    flags = SessionFlags(
        master=values.pop("master"),
        conf=tuple(_pair(text) for text in values.pop("conf")),
        archive_env=values.pop("archive_env"),
        delta=values.pop("delta"),
    )
    connection = {
        option: value
        for flag, option in _OPTION_NAMES.items()
        if (value := values.pop(flag, None)) is not None
    }
    if values.pop("tls", False) or any(option.startswith("tls") for option in connection):
        connection["tls"] = "true"
    if values.pop("tls_no_verify", False):
        connection.update(tls="true", tlsVerify="false")
    found = click.get_current_context().obj
    return JobContext(
        name,
        flags,
        connection,
        namesrv=values.pop("namesrv", None),
        find_name_servers=found if callable(found) else None,
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--conf {text!r}: write KEY=VALUE")
    return key.strip(), value.strip()


def _from_environment(namesrv: str | None) -> str:
    if namesrv is not None:
        name_servers(namesrv)
        return namesrv
    return ";".join(join_address(host, port) for host, port in name_servers(None))


def _require_extra() -> None:
    for module in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; {EXTRA_FIX}")


@contextmanager
def _orderly(context: JobContext) -> Iterator[None]:
    """Stops the session however the job ends, and turns errors of Spark into JobFailed."""

    def asked(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    from cosmodrome.spark.runtime.session import quiet_spark

    before = signal.signal(signal.SIGTERM, asked)
    try:
        with quiet_spark():
            yield
    except KeyboardInterrupt:
        context.clear_note()
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        context.clear_note()
        if type(error).__module__.split(".")[0] in ("pyspark", "py4j"):
            raise JobFailed(explain(error)) from error
        raise
    finally:
        context.close()
        signal.signal(signal.SIGTERM, before)


__all__ = [
    "EXIT_FOUND",
    "JobContext",
    "JobFailed",
    "SessionFlags",
    "explain",
    "job",
    "stop_requests",
]
