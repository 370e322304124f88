"""What operator's commands share: exit codes, questions, repetition, lazy groups, completion."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from tests.unit.cli.operating_kit import cosmo, on_terminal

from cosmodrome import blocking
from cosmodrome.cli.main import BROKER_COMMANDS, COMMANDS, NAMESRV_COMMANDS
from cosmodrome.cli.main import cosmo as program
from cosmodrome.cli.support import operating
from cosmodrome.cli.support.exits import Failure, NotFound, PartlyDone, exit_code
from cosmodrome.cli.support.operating import confirm, similar
from cosmodrome.client.operate.fleet import NoBrokers, NotThere, PartlyFailed
from cosmodrome.client.send.failures import RequestTimedOut
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import ConfigError, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.wire.table import Reply


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded() as node:
        yield node


def partly(*failures: CosmodromeError, done: int) -> CosmodromeError:
    named = {str(number): failure for number, failure in enumerate(failures)}
    return PartlyFailed("IT", named, {f"d{number}": Reply() for number in range(done)})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 1),
        (Unreachable("x"), 3),
        (TimedOut("x"), 3),
        (RequestTimedOut("x"), 1),
        (NoBrokers("x"), 3),
        (NoRoute("x"), 4),
        (NotThere("x"), 4),
        (NotFound("x"), 4),
        (Refused(17, "no topic"), 4),
        (Refused(26, "no group"), 4),
        (Refused(1, "no"), 5),
        (Refused(16, "no permission"), 5),
        (PartlyDone("x"), 7),
        (partly(Unreachable("x"), done=1), 7),
        (partly(Unreachable("x"), TimedOut("x"), done=0), 3),
        (partly(Unreachable("x"), Refused(1, "x"), done=0), 1),
    ],
)
def test_exit_codes(error: CosmodromeError, code: int) -> None:
    assert exit_code(error) == code


def test_similar_names_are_offered() -> None:
    assert similar("Order", ["orders", "x"]) == "; did you mean orders?"
    assert similar("order", ["invoice"]) == ""


# --- questions -------------------------------------------------------------------------------


def test_nobody_to_ask_is_a_refusal_unless_yes() -> None:
    with pytest.raises(Failure) as caught:
        confirm("it goes away", yes=False)
    assert caught.value.exit_code == 2
    assert "it goes away" in caught.value.message and "--yes" in caught.value.message
    confirm("it goes away", yes=True)


@pytest.mark.parametrize(("answer", "expected"), [("y\n", 0), ("n\n", 1), ("\x03", 130)])
def test_a_terminal_is_asked(answer: str, expected: int, node: blocking.Node) -> None:
    cosmo(node.namesrv, "topic", "create", "Asked", "--if-not-exists")
    code, text = on_terminal(
        node.namesrv, "topic", "delete", "Asked", wait_for="Go on?", then=answer.encode()
    )
    assert code == expected, text
    assert cosmo(node.namesrv, "topic", "describe", "Asked").code == (0 if code else 4)


# --- repetition ------------------------------------------------------------------------------


def repeated(output: str, rounds: list[str | CosmodromeError]) -> str:
    """What `repeat` prints until the rounds are used up, on no terminal."""
    left = iter(rounds)

    async def once() -> None:
        step = next(left, None)
        if step is None:
            raise ConfigError("enough")
        if isinstance(step, CosmodromeError):
            raise step
        click.echo(step)

    @click.command()
    def command() -> None:
        asyncio.run(operating.repeat(once, 0.01, output))

    result = CliRunner().invoke(command)
    assert isinstance(result.exception, ConfigError)
    return result.stdout


def test_rounds_follow_each_other_where_there_is_no_terminal() -> None:
    assert repeated("table", ["a", "b"]) == "a\n\nb\n"
    assert repeated("jsonl", ["a", "b"]) == "a\nb\n"
    assert repeated("yaml", ["a", "b"]) == "a\n---\nb\n"


def test_a_cluster_that_is_away_is_waited_for() -> None:
    assert repeated("jsonl", ["a", Unreachable("gone"), "b"]) == "a\nb\n"


def test_other_errors_end_it() -> None:
    async def once() -> None:
        raise NotFound("not there")

    with pytest.raises(NotFound):
        asyncio.run(operating.repeat(once, 0.01, "table"))


def test_watch_prints_again_and_ctrl_c_ends_it_well(node: blocking.Node) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cosmodrome.cli", "topic", "list", "--watch=0.1", "-o", "jsonl"],
        env={**os.environ, "COSMO_NAMESRV": node.namesrv},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    cosmo(node.namesrv, "topic", "create", "Watched", "--if-not-exists")
    assert process.stdout is not None
    seen: list[str] = []
    while seen.count("Watched") < 3:
        seen.append(json.loads(process.stdout.readline())["topic"])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_a_terminal_is_redrawn(node: blocking.Node) -> None:
    cosmo(node.namesrv, "topic", "create", "Watched", "--if-not-exists")
    code, text = on_terminal(
        node.namesrv,
        "topic",
        "list",
        "--watch=0.1",
        wait_for=r"\x1b\[H\x1b\[2J.*Watched.*\x1b\[H\x1b\[2J",
        then=b"\x03",
    )
    assert code == 0
    assert "every 0.1 s, Ctrl-C ends" in text
    assert "Traceback" not in text


# --- groups that are loaded when used ----------------------------------------------------------

Homes = dict[str, tuple[str, str]]


@pytest.mark.parametrize("homes", [COMMANDS, BROKER_COMMANDS, NAMESRV_COMMANDS])
def test_every_registered_command_is_there(homes: Homes) -> None:
    import importlib

    for name, (home, text) in homes.items():
        module, _, attribute = home.partition(":")
        command = getattr(importlib.import_module(f"cosmodrome.cli.{module}"), attribute)
        assert isinstance(command, click.Command), name
        assert text.endswith(".") and len(text) < 75, name


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from walk(inner, (*path, name))
    yield path


def test_every_command_has_help() -> None:
    for path in walk(program, ()):
        done = CliRunner().invoke(program, [*path, "--help"])
        assert done.exit_code == 0, path
        assert len(done.stdout.splitlines()) > 4, path


def test_listing_commands_loads_none_of_them() -> None:
    code = (
        "import sys\n"
        "from cosmodrome.cli.main import main\n"
        "sys.argv = ['cosmo', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = [name for name in sys.modules if name.startswith('cosmodrome.')]\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    for words in (("--help",), ("broker", "--help")):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
        )
        loaded = set(eval(done.stderr))
        assert not {one for one in loaded if re.match(r"cosmodrome\.(client|broker|store)", one)}
        assert "asyncio" not in done.stderr


def test_a_wrong_word_is_answered_with_the_right_one() -> None:
    done = CliRunner().invoke(program, ["topc"])
    assert done.exit_code == 2 and "Did you mean 'topic'?" in done.stderr


# --- completion --------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    done = CliRunner().invoke(program, ["completion", shell])
    assert done.exit_code == 0
    assert "_COSMO_COMPLETE" in done.stdout and "cosmo" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "begun", "expected"),
    [
        ((), "to", {"top", "topic"}),
        (("topic",), "de", {"describe", "delete"}),
        (("topic", "list", "-o"), "js", {"json", "jsonl"}),
        (("broker",), "c", {"config"}),
        (("topic", "list"), "--wa", {"--watch"}),
    ],
)
def test_words_are_completed(words: tuple[str, ...], begun: str, expected: set[str]) -> None:
    maker = BashComplete(program, {}, "cosmo", "_COSMO_COMPLETE")
    assert {item.value for item in maker.get_completions([*words], begun)} == expected


def test_names_are_completed_with_those_that_exist(
    node: blocking.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    cosmo(node.namesrv, "topic", "create", "Completed", "--if-not-exists")
    maker = BashComplete(program, {}, "cosmo", "_COSMO_COMPLETE")

    def offered(*words: str, begun: str) -> list[str]:
        return [item.value for item in maker.get_completions([*words], begun)]

    assert offered("topic", "route", "-n", node.namesrv, begun="Comp") == ["Completed"]
    monkeypatch.setenv("COSMO_NAMESRV", node.namesrv)
    assert offered("topic", "route", begun="Comp") == ["Completed"]
    assert "TOOLS_CONSUMER" in offered("client", "stack", begun="TOOLS")
    monkeypatch.setenv("COSMO_NAMESRV", "127.0.0.1:1")
    assert offered("topic", "route", begun="Comp") == []


def test_the_program_answers_the_shell() -> None:
    environment = {
        **os.environ,
        "_COSMO_COMPLETE": "bash_complete",
        "COMP_WORDS": "cosmo topic rou",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "cosmodrome.cli"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "plain,route\n"
