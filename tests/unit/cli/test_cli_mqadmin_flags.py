"""`cosmo mqadmin …`: names, flags, help; nobody has to listen for this."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.unit.cli.operating_kit import cosmo

from cosmodrome.cli.main import cosmo as program
from cosmodrome.cli.mqadmin.call import find_call
from cosmodrome.cli.mqadmin.command import Moment, chosen_verb, filled
from cosmodrome.cli.mqadmin.document import render
from cosmodrome.cli.mqadmin.table import BY_NAME, ROWS, Row

# --- what the flags choose -------------------------------------------------------------------

TIME = "2026-11-15#08:00:00:250"
TIME_MS = int(datetime.datetime(2026, 11, 15, 8, 0, 0, 250_000).timestamp() * 1000)


@pytest.mark.parametrize(
    "words, shown",
    [
        ("topicList", "cosmo topic list --all"),
        ("topicList -c", "cosmo topic stats"),
        ("TOPICLIST", "cosmo topic list --all"),
        ("topicRoute --topic=Orders", "cosmo topic route Orders"),
        ("topicRoute -tOrders", "cosmo topic route Orders"),
        ("deleteTopic -t T1 -c C1", "cosmo topic delete T1 --cluster C1 --yes"),
        ("consumerProgress", "cosmo group list"),
        ("consumerProgress -g G1", "cosmo group lag G1"),
        ("consumerProgress -g G1 -s true", "cosmo group lag G1 --output wide"),
        ("consumerProgress -g G1 -s false", "cosmo group lag G1"),
        ("consumerStatus -g G1 -i me@1 -s", "cosmo client stack G1 me@1"),
        ("consumerStatus -g G1 -s", "cosmo client stack G1"),
        ("queryMsgById -i A1,B2", "cosmo msg get A1\ncosmo msg get B2"),
        ("queryMsgById -i A1 -s true", "cosmo msg resend A1 --yes"),
        (
            "queryMsgById -i A1 -g G1 -d me -s true",
            "cosmo msg resend A1 --group G1 --client me --yes",
        ),
        ("updateBrokerConfig -c C1 -k a -v b", "cosmo broker config set a=b --cluster C1"),
        ("updateOrderConf -m get -t T1", "cosmo namesrv kv get -- ORDER_TOPIC_CONFIG T1"),
        (
            "consumeMessage -t T1 -b B1 -i 2 -o 7 -c 5",
            "cosmo msg print T1 --broker B1 --queue 2 --from 7 --count 5",
        ),
        ("clusterList -i 3", "cosmo cluster status --watch=3"),
        ("updateKvConfig -s S -k K -v -x", "cosmo namesrv kv set -- S K -x"),
    ],
)
def test_the_verb_that_flags_choose(words: str, shown: str) -> None:
    assert _shown(words) == shown


def test_times_become_times_that_verbs_read() -> None:
    iso = datetime.datetime.fromtimestamp(TIME_MS / 1000).astimezone()
    expected = f"cosmo msg print T1 --from {iso.isoformat('T', 'milliseconds')} --count 100000"
    assert _shown(f"printMsg -t T1 -b {TIME}") == expected
    assert _shown(f"printMsg -t T1 -b {TIME_MS}") == expected
    assert (str(Moment(-1)), int(Moment(TIME_MS))) == ("latest", TIME_MS)


def _shown(words: str) -> str:
    done = cosmo("127.0.0.1:1", "mqadmin", "--show", *words.split())
    assert done.code == 0, done
    return done.out.strip()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_template_is_a_command_that_cosmo_takes(row: Row) -> None:
    samples = {flag.letter: "1" for flag in row.flags} | {"method": None}
    by_name = {"consumerGroup": "G1", "msgId": "A1"}
    by_name |= {"defaultTopicPerm": "PUB", "defaultGroupPerm": "SUB"}
    samples |= {flag.letter: by_name[flag.name] for flag in row.flags if flag.name in by_name}
    samples |= {"b": "127.0.0.1:1"} if "beginTimestamp" not in row.flags_text else {}
    for when, template in row.verbs:
        for values in (samples, {**samples, **dict.fromkeys(_optional(row, when, template))}):
            words = filled(template, values)
            assert not set("{}[]") & set("".join(words)), words
            _parsed(words)


def _optional(row: Row, when: str, template: str) -> set[str]:
    """Letters that may be missing when this template is chosen."""
    needed = set(re.sub(r"\[[^]]*\]", "", template)) | set(when)
    return {flag.letter for flag in row.flags if not flag.required and flag.letter not in needed}


def _parsed(words: list[str]) -> None:
    command: click.Command = program
    ctx = program.make_context("cosmo", list(words))
    rest = list(words)
    while isinstance(command, click.Group):
        _, found, rest = command.resolve_command(ctx, rest)
        assert found is not None, words
        command, name = found, found.name
        ctx = command.make_context(name, list(rest), parent=ctx)


@pytest.mark.parametrize("row", [row for row in ROWS if row.call], ids=lambda row: row.name)
def test_every_call_is_there(row: Row) -> None:
    assert callable(find_call(row.call))


def test_every_row_has_one_way() -> None:
    assert len(ROWS) == len(BY_NAME) == 56
    for row in ROWS:
        assert bool(row.instead) != bool(row.verbs or row.call), row.name
        letters = [flag.letter for flag in row.flags]
        assert len(set(letters)) == len(letters) and "n" not in letters and "h" not in letters
        assert set(row.unused) | set(row.one_of) | set(row.each) <= set(letters), row.name
        if row.verbs and not row.call:
            placed = {name for _, text in row.verbs for name in re.findall(r"\{(\w)\}", text)}
            asked = {word[0] for when, _ in row.verbs for word in when.split()}
            assert placed | asked | set(row.unused) == set(letters), row.name
    assert chosen_verb(BY_NAME["updateorderconf"], {"m": "put", "v": None, "t": "T"}) is None


# --- what is wrong is said -------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in ROWS if row.instead], ids=lambda row: row.name)
def test_what_is_not_done_here_says_what_to_use(row: Row) -> None:
    needed = [part for flag in row.flags if flag.required for part in (f"-{flag.letter}", "x")]
    done = cosmo("127.0.0.1:1", "mqadmin", row.name, *needed)
    assert (done.code, done.out) == (2, "")
    assert row.instead in done.err
    assert "cosmo" in row.instead


def test_no_cluster() -> None:
    for words in (("topicList",), ("cleanExpiredCQ",)):
        done = cosmo("127.0.0.1:1", "mqadmin", *words, "--timeout", "30")
        assert done.code == 3, done


# --- help and completion ---------------------------------------------------------------------


def test_help() -> None:
    listed = cosmo("127.0.0.1:1", "mqadmin", "--help").out
    assert all(re.search(rf"^  {row.name}\s", listed, re.MULTILINE) for row in ROWS)
    one = cosmo("127.0.0.1:1", "mqadmin", "help", "UPDATETOPIC").out
    assert one == cosmo("127.0.0.1:1", "mqadmin", "updateTopic", "-h").out
    assert "-w, --writeQueueNums" in one and "-n, --namesrvAddr" in one
    assert cosmo("127.0.0.1:1", "mqadmin", "help").out == listed
    unused = cosmo("127.0.0.1:1", "mqadmin", "topicRoute", "-h").out
    assert "Changes nothing: the output is always" in unused
    assert "cosmo topic route {t}" in unused
    assert "Not done here" in cosmo("127.0.0.1:1", "mqadmin", "startMonitoring", "-h").out


def test_completion() -> None:
    from cosmodrome.cli.mqadmin.command import mqadmin

    ctx = click.Context(mqadmin, info_name="mqadmin")
    offered = [item.value for item in mqadmin.shell_complete(ctx, "topicr")]
    assert offered == ["topicRoute"]
    assert "mqadmin" in [item.value for item in program.shell_complete(click.Context(program), "m")]


def test_the_program_starts_without_it() -> None:
    code = (
        "import sys; from cosmodrome.cli.main import cosmo\n"
        "cosmo(['--help'], standalone_mode=False)\n"
        "assert not [name for name in sys.modules if 'mqadmin' in name]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  mqadmin ", done.stdout, re.MULTILINE)


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "mqadmin.md"
    assert page.read_text() == render(), "run: make docs"
    assert all(f"| `{row.name}` |" in page.read_text() for row in ROWS)
