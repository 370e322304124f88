"""`cosmo doctor`, `check` and `bundle` against a node in this process and against none."""

from __future__ import annotations

import json
import re
import socket
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.operating_kit import FORMATS, cosmo, ghost, rows

from cosmodrome import blocking, speed
from cosmodrome.cli.diagnose import machine
from cosmodrome.cli.diagnose.check import nagios, prometheus
from cosmodrome.cli.support.masking import masked
from cosmodrome.client.operate.diagnosis import checkup
from cosmodrome.client.operate.diagnosis.checkup import Thresholds
from cosmodrome.client.operate.standing import GroupStanding, QueueStanding
from cosmodrome.client.values import Message, MessageQueue
from cosmodrome.env.base import DiskUsage
from cosmodrome.findings import Finding, Severity

NOWHERE = "127.0.0.1:1"
TIMEOUT = ("--timeout", "30")  # a busy machine answers late


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded() as node:
        with blocking.Producer(node.namesrv, group="p") as producer:
            for _ in range(4):
                producer.send(Message("Orders", b"a message's body"))
        done = cosmo(node.namesrv, "group", "create", "billing")
        assert done.code == 0, done.err
        moved = cosmo(
            node.namesrv, "group", "reset", "billing", "-t", "Orders", "--to", "earliest", "--yes"
        )
        assert moved.code == 0, moved.err
        yield node


@pytest.fixture(scope="module")
def namesrv(node: blocking.Node) -> str:
    return node.namesrv


# --- doctor ----------------------------------------------------------------------------------

find_java = machine.java


@pytest.fixture(autouse=True)
def calm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No JVM is started to ask for its version, and a busy machine is not called slow."""
    monkeypatch.setattr(
        machine, "java", lambda _: Finding("java for spark", "here", Severity.OK, "17")
    )
    monkeypatch.setattr(checkup, "SLOW_MS", 60_000)


@pytest.mark.parametrize("form", FORMATS)
def test_doctor_in_every_form(form: str, namesrv: str) -> None:
    done = cosmo(namesrv, "doctor", "-o", form, *TIMEOUT)
    assert done.code in (0, 6), done.err
    assert "compiled core" in done.out and "advertised address" in done.out
    assert re.search(r"\d+ ok, \d+ to look at, \d+ failing", done.err)


def test_doctor_looks_at_the_cluster(node: blocking.Node, namesrv: str) -> None:
    done = cosmo(namesrv, "doctor", "-o", "json", *TIMEOUT)
    found = {(row["check"], row["subject"]): row for row in json.loads(done.out)}
    assert found["name server", namesrv]["status"] == "ok"
    assert "version 4.9.8" in found["name server", namesrv]["says"]
    assert "version 4.9.8" in found["broker", "embedded"]["says"]
    assert found["advertised address", "embedded"]["says"] == node.broker_address
    assert found["clock", "embedded"]["status"] == "ok"
    assert abs(found["clock", "embedded"]["figures"]["ahead_s"]) < 5
    assert found["disk", "embedded"]["figures"]["used_percent"] >= 0


def test_doctor_without_a_cluster() -> None:
    done = cosmo(NOWHERE, "doctor", "-o", "json", *TIMEOUT)
    assert done.code == 6
    failing = [row for row in json.loads(done.out) if row["status"] == "fail"]
    assert [row["check"] for row in failing if row["check"] == "name server"] == ["name server"]
    assert "cosmo up" in failing[-1]["next_step"]
    offline = cosmo(NOWHERE, "doctor", "--offline", "-o", "json")
    assert not {"name server", "port"} & {row["check"] for row in json.loads(offline.out)}


async def test_ports_say_who_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held, socket.socket() as free:
        held.bind(("127.0.0.1", 0))
        held.listen()
        free.bind(("127.0.0.1", 0))
        taken, unused, known, ours = (
            held.getsockname()[1],
            free.getsockname()[1],
            1,
            held.getsockname()[1],
        )

        async def looked(port: int, *, is_ours: bool) -> list[Finding]:
            monkeypatch.setattr(machine, "PORTS", {port: ("broker", "--broker-port")})

            async def answer(_: int) -> bool:
                return is_ours

            return await machine.ports({known: "broker b"}, answer)

        (check,) = await looked(taken, is_ours=False)
        assert (check.severity, "--broker-port" in check.remedy) == (Severity.WARNING, True)
        assert (await looked(ours, is_ours=True))[0].severity == Severity.OK
        assert "free" in (await looked(unused, is_ours=False))[0].sentence
        assert "broker b" in (await looked(known, is_ours=False))[0].sentence


@pytest.mark.parametrize(
    ("soft", "status"),
    [(100, Severity.ERROR), (1024, Severity.WARNING), (65_536, Severity.OK), (-1, Severity.OK)],
)
def test_limits_of_open_files(soft: int, status: str) -> None:
    assert machine.judge_files(soft, 1 << 20).severity == status


def test_memory_and_swap() -> None:
    text = "MemTotal: 8000000 kB\nMemAvailable: {} kB\nSwapTotal: {} kB\nSwapFree: {} kB\n"
    good = machine.judge_memory(text.format(4_000_000, 0, 0), 1 << 40, 60)
    assert [check.severity for check in good] == [Severity.OK, Severity.OK]
    tight = machine.judge_memory(text.format(100_000, 2_000_000, 500_000), 1 << 40, 60)
    assert [check.severity for check in tight] == [Severity.WARNING, Severity.WARNING]
    container = machine.judge_memory(text.format(4_000_000, 9, 9), 64 << 20, 60)
    assert [check.severity for check in container] == [Severity.WARNING, Severity.OK]


@pytest.mark.parametrize(
    ("used", "status"), [(10, Severity.OK), (80, Severity.WARNING), (95, Severity.ERROR)]
)
def test_disk_space(used: int, status: str) -> None:
    class Fake:
        def usage(self, path: str) -> DiskUsage:
            return DiskUsage(used_bytes=used, free_bytes=100 - used)

    assert machine.disk_space(Fake(), "here").severity == status  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "status"),
    [
        ("0.50", Severity.OK),
        ("0.80", Severity.WARNING),
        ("0.95", Severity.ERROR),
        ("-1", Severity.UNKNOWN),
        ("", Severity.UNKNOWN),
    ],
)
def test_disk_of_a_broker(ratio: str, status: str) -> None:
    assert checkup._disk("b", {"commitLogDiskRatio": ratio}, {}).severity == status


@pytest.mark.parametrize(
    ("apart_s", "status"),
    [
        (0, Severity.OK),
        (3, Severity.OK),
        (20, Severity.WARNING),
        (-20, Severity.WARNING),
        (600, Severity.ERROR),
    ],
)
def test_clock_of_a_broker(apart_s: int, status: str) -> None:
    runtime = {
        "bootTimestamp": str(1_000_000_000 + apart_s * 1000),
        "runtime": "[ 1 days, 0 hours, 0 minutes, 10 seconds ]",
    }
    check = checkup._clock("b", runtime, 1_000_000_000 + (86_400 + 10) * 1000)
    assert check.severity == status
    assert checkup._clock("b", {}, 0).severity == Severity.UNKNOWN


def test_the_compiled_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "FLAVOUR", "pure")
    core = next(check for check in machine.software() if check.code == "compiled core")
    assert core.severity == Severity.WARNING and core.remedy


def test_java(tmp_path: Path) -> None:
    found = find_java({"PATH": "", "HOME": str(tmp_path)})
    assert found.code == "java for spark" and found.severity in (Severity.OK, Severity.WARNING)


# --- check -----------------------------------------------------------------------------------


def test_check_is_content_with_a_healthy_cluster(namesrv: str) -> None:
    found = cosmo(namesrv, "check", "-o", "json", *TIMEOUT)
    names = {row["check"] for row in json.loads(found.out)}
    assert {"name server", "broker", "disk", "clock"} <= names


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ((), "warn"),  # it lags and nobody is there
        (("--lag-critical", "4"), "fail"),
        (("--lag-critical", "5", "--lag-warning", "5"), "warn"),
        (("--age-critical", "0"), "fail"),
    ],
)
def test_lag_against_thresholds(flags: tuple[str, ...], status: str, namesrv: str) -> None:
    done = cosmo(namesrv, "check", "-g", "billing", *flags, "-o", "json", *TIMEOUT)
    row = json.loads(done.out)[-1]
    assert (row["check"], row["status"]) == ("group", status)
    assert row["figures"]["lag"] == 4
    assert row["next_step"] == "cosmo group explain billing"
    if status == "fail":
        assert done.code == 6


def test_unknown_lag_is_no_good_news() -> None:
    queue = MessageQueue(topic="T", broker_name="b", queue_id=0)
    unknown = QueueStanding(queue, 0, 5, None, why="no offset")
    found = checkup.judge_group(GroupStanding("g", [unknown], None, 1, 0.0, {}), Thresholds())
    assert (found.severity, "no offset" in found.sentence) == (Severity.UNKNOWN, True)
    assert "lag" not in found.evidence


def test_check_for_nagios(namesrv: str) -> None:
    done = cosmo(namesrv, "check", "-o", "nagios", "--all-groups", "--lag-critical", "1", *TIMEOUT)
    assert done.code == 2
    assert done.out.startswith("COSMO CRITICAL - ")
    assert "'group_billing_lag'=4" in done.out.partition(" | ")[2]
    assert done.out.count("\n") == 1
    down = cosmo(NOWHERE, "check", "-o", "nagios", *TIMEOUT)
    assert down.code == 2 and "name server 127.0.0.1:1" in down.out


@pytest.mark.parametrize(
    ("status", "word"),
    [(Severity.OK, "OK"), (Severity.WARNING, "WARNING"), (Severity.UNKNOWN, "UNKNOWN")],
)
def test_nagios_words(status: Severity, word: str) -> None:
    text = nagios([Finding("disk", "b | a", status, "a|b\nc", evidence={"x": 1.0})])
    assert text.startswith(f"COSMO {word} - ")
    assert text.count("|") == 1 and "\n" not in text


def test_check_for_prometheus(namesrv: str) -> None:
    done = cosmo(namesrv, "check", "-g", "billing", "-o", "prometheus", *TIMEOUT)
    assert 'cosmo_check_status{check="broker",subject="embedded"} 0\n' in done.out
    assert 'cosmo_check_group_lag{check="group",subject="billing"} 4\n' in done.out
    for line in done.out.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+\{(\w+="[^"]*",?)+\} -?[\d.e+]+', line), line
    text = prometheus([Finding("x", 'a"b\\c\n', Severity.ERROR, "")])
    assert 'subject="a\\"b\\\\c\\n"' in text


def test_a_silent_broker_is_critical(namesrv: str) -> None:
    with ghost(namesrv):
        done = cosmo(namesrv, "check", "-o", "json", *TIMEOUT)
    found = {(row["check"], row["subject"]): row["status"] for row in json.loads(done.out)}
    assert (found["broker", "ghost"], found["broker", "embedded"]) == ("fail", "ok")
    assert done.code == 6


# --- bundle ----------------------------------------------------------------------------------


def test_a_bundle_has_what_support_needs_and_no_secrets(
    namesrv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSMO_SECRET_KEY", "hush-1")
    log = tmp_path / "broker.log"
    log.write_text('level=info secretKey=hush-2 topic=Orders {"password": "hush-3"}\n')
    path = tmp_path / "out.zip"
    done = cosmo(namesrv, "bundle", "-f", str(path), "--log", str(log), *TIMEOUT)
    assert done.code == 0, done.err
    assert done.out == f"{path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with zipfile.ZipFile(path) as archive:
        texts = {
            name.removeprefix("cosmo-bundle/"): archive.read(name).decode()
            for name in archive.namelist()
        }
    assert set(texts) >= {
        "manifest.json",
        "machine.json",
        "doctor.json",
        "cluster.json",
        "topics.json",
        "groups.json",
        "producers.json",
        "namesrv/config.json",
        "brokers/embedded-0/runtime.json",
        "brokers/embedded-0/config.json",
        "logs/1-broker.log",
    }
    everything = "".join(texts.values())
    assert not re.search(r"hush-\d", everything)
    assert "a message's body" not in everything
    assert "topic=Orders" in texts["logs/1-broker.log"]
    assert json.loads(texts["machine.json"])["environment"]["COSMO_SECRET_KEY"] == "***"
    groups = json.loads(texts["groups.json"])
    assert groups["billing"]["lag"] == 4
    assert json.loads(texts["manifest.json"])["not_answered"] == {}


def test_a_bundle_of_a_cluster_that_is_down(tmp_path: Path) -> None:
    path = tmp_path / "out.zip"
    done = cosmo(NOWHERE, "bundle", "-f", str(path), *TIMEOUT)
    assert done.code == 7
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("cosmo-bundle/manifest.json"))
    assert "cluster.json" in manifest["not_answered"]


def test_a_bundle_that_cannot_be_written(namesrv: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cosmo(namesrv, "bundle", "-f", str(tmp_path / "file" / "x.zip"), *TIMEOUT)
    assert done.code == 1 and "cannot be written" in done.err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"aclSecretKey": "x", "n": 1}, {"aclSecretKey": "***", "n": 1}),
        ({"a": [{"Password": "x"}]}, {"a": [{"Password": "***"}]}),
        ({"tokenEnable": False}, {"tokenEnable": False}),
        ({"tokens": {"a": "b"}}, {"tokens": {"a": "b"}}),
        ("http://me:pw@host/", "http://me:***@host/"),
        ("accessKey: abc, other=1", "accessKey: ***, other=1"),
        ("x-api-key='a b' y", "x-api-key=*** y"),
        ("plain text", "plain text"),
    ],
)
def test_masking(value: Any, expected: Any) -> None:
    assert masked(value) == expected


def test_rows_are_the_same_for_programs(namesrv: str) -> None:
    assert all(row["status"] in ("ok", "warn") for row in rows(namesrv, "check", *TIMEOUT))
