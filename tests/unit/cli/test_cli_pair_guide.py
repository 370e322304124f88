"""The files and commands of "Run a pair", as they stand in the guide."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cosmodrome.access.account_table import Accounts
from cosmodrome.access.gate import Gate
from cosmodrome.cli.main import cosmo
from cosmodrome.cli.support import settings
from cosmodrome.env.options import AccessOptions, BrokerOptions, NameServerOptions
from cosmodrome.env.real import real_env
from cosmodrome.wire import properties_text
from cosmodrome.wire.commands.broker import GetBrokerHaStatus, GetBrokerRuntimeInfo
from cosmodrome.wire.commands.route import RegisterBroker
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Command

GUIDE = Path(__file__).parents[3] / "docs" / "operating-pairs.md"
SET_UP = GUIDE.read_text().partition("## Set it up\n")[2].partition("\n## ")[0]
FILES = dict(
    re.findall(
        r"^`(\w+\.conf)`(?:(?!^```).)*^```properties\n(.*?)^```", SET_UP, re.DOTALL | re.MULTILINE
    )
)
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", SET_UP, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
PAIR = [properties_text.loads(FILES[name].encode()) for name in ("master.conf", "slave.conf")]
MACHINES = [one["brokerIP1"] for one in PAIR]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gate_of(name: str, host: str) -> Gate:
    """Of the server that has this file, for somebody who is not on its machine."""
    if name == "namesrv.conf":
        nameserver = settings.for_nameserver({}, file=name, host=host).nameserver
        assert nameserver is not None
        options: AccessOptions = nameserver.get(NameServerOptions)
    else:
        broker = settings.for_broker({}, file=name, host=host).broker
        assert broker is not None
        options = broker.get(BrokerOptions)
    accounts = Accounts("none.yml", real_env())
    return Gate("server", options, accounts, lambda host: False, lambda log_offset: None)


@pytest.mark.parametrize("machine", MACHINES)
def test_each_machine_may_do_what_a_pair_needs(folder: Path, machine: str) -> None:
    def ask(gate: Gate, command: Command[Any]) -> None:
        frame = Frame(code=command.request_code, opaque=1)
        gate.check(type(command), command, frame, (machine, 1))

    assert len(set(MACHINES)) == 2
    gate = gate_of("namesrv.conf", "0.0.0.0")
    assert gate.protected
    register = RegisterBroker(
        broker_name="b", broker_addr="x:1", cluster_name="c", ha_server_addr="x:2", broker_id=0
    )
    ask(gate, register)
    for name in ("master.conf", "slave.conf"):  # each may be the master after a promotion
        gate = gate_of(name, "0.0.0.0")
        assert gate.denies_peer(machine, "", b"", "") == ""
        ask(gate, GetBrokerRuntimeInfo())
        ask(gate, GetBrokerHaStatus())


def test_both_files_are_of_one_pair(folder: Path) -> None:
    own = {"brokerId", "brokerRole", "brokerIP1"}
    assert {key for key in PAIR[0] if PAIR[0][key] != PAIR[1].get(key)} == own
    assert PAIR[0].keys() == PAIR[1].keys()


def test_the_commands_start_what_the_files_say(folder: Path) -> None:
    started = [shlex.split(line)[1:] for line in COMMANDS if " run " in line]
    assert [words[0] for words in started] == ["namesrv", "broker", "broker"]
    for words in started:
        done = CliRunner().invoke(cosmo, [*words, "--print-config"])
        assert done.exit_code == 0, done.output
        assert f"peerAddresses={','.join(MACHINES)}" in done.output
    asked = [shlex.split(line) for line in COMMANDS if " run " not in line]
    assert {words[1] for words in asked} == {"cluster", "doctor"}
    assert {words[words.index("-n") + 1] for words in asked} == {PAIR[0]["namesrvAddr"]}
