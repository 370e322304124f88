"""Who each worker is, and that no worker's messages are left behind in silence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cosmodrome.cli.main import cosmo
from cosmodrome.cli.serve import servers, worker_servers
from cosmodrome.cli.serve.lifetime import Logs
from cosmodrome.cli.serve.workers import Ports, Seat, refuse_unserved, seats
from cosmodrome.cli.support import settings
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError

LOG_FILE = "0" * 20


def found(
    count: int, *, port: int = 10911, root: str = "/data", logs: str = "", taken: int = 0
) -> list[Seat]:
    return seats(
        BrokerOptions(listen_port=port),
        StoreOptions(store_path_root_dir=root, store_path_commit_log=logs),
        count,
        name="b",
        taken={taken: "the health port"},
    )


def test_the_first_worker_is_the_broker_without_workers() -> None:
    assert found(1) == [Seat(0, "b", 10911, "/data", "")]
    assert found(3) == [
        Seat(0, "b", 10911, "/data", ""),
        Seat(1, "b-1", 10921, "/data/worker-1", ""),
        Seat(2, "b-2", 10931, "/data/worker-2", ""),
    ]
    assert found(2)[1].pairs() == ("brokerName=b-1",)


def test_any_port_stays_any_port() -> None:
    assert [seat.port for seat in found(3, port=0)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ("/data/commitlog", "/data/worker-1/commitlog"),
        ("/data/logs/a/", "/data/worker-1/logs/a"),
        ("/fast/commitlog", "/fast/commitlog-worker-1"),
        ("/fast/commitlog/", "/fast/commitlog-worker-1"),
        ("/database/log", "/database/log-worker-1"),
    ],
)
def test_no_two_workers_write_one_log(logs: str, expected: str) -> None:
    first, second = found(2, logs=logs)
    assert first.log_directory == logs
    assert second.log_directory == expected
    assert second.pairs() == ("brokerName=b-1", f"storePathCommitLog={expected}")


def test_ports_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"listenPort is 65520.*65540.*lower"):
        found(3, port=65_520)
    assert found(2, port=65_520)
    for taken in (10_921, 10_919, 10_922):
        with pytest.raises(ConfigError, match=f"port {taken} is wanted by the health port.*b-1"):
            found(2, taken=taken)
    assert found(2, taken=10_920)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"ha_listen_port": 5}, "haListenPort"), ({"ha_master_address": "a:1"}, "haMasterAddress")],
)
def test_one_ha_port_or_master_cannot_be_that_of_all_workers(
    changes: dict[str, Any], key: str
) -> None:
    store = StoreOptions(store_path_root_dir="/data", **changes)
    assert seats(BrokerOptions(), store, 1, name="b")
    with pytest.raises(ConfigError, match=f"{key} is .* leave it out"):
        seats(BrokerOptions(), store, 2, name="b")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_up_as_a_slave_needs_the_name_servers_of_its_master(tmp_path: Path, workers: str) -> None:
    words = ["up", "--data", str(tmp_path), "--set", "brokerRole=SLAVE", "--set", "brokerId=1"]
    result = CliRunner().invoke(cosmo, [*words, "--workers", workers])
    assert result.exit_code != 0
    assert "namesrvAddr" in str(result.exception) + result.output


def test_a_name_must_leave_room() -> None:
    broker, store = BrokerOptions(), StoreOptions(store_path_root_dir="/d")
    with pytest.raises(ConfigError, match="room for a suffix"):
        seats(broker, store, 2, name="x" * 126)
    assert seats(broker, store, 1, name="x" * 126)


def test_picked_ports_are_apart_and_stay() -> None:
    ports = Ports("127.0.0.1")
    first = [ports.of(number, anew=False) for number in range(4)]
    taken = [port + offset for port in first for offset in (-2, 0, 1)]
    assert len(set(taken)) == len(taken)
    assert [ports.of(number, anew=False) for number in range(4)] == first
    assert ports.of(1, anew=True) != first[0]
    assert ports.of(0, anew=False) == first[0]


def log_file(directory: Path, *, content: bytes, at: int = 0) -> None:
    directory.mkdir(parents=True)
    with (directory / LOG_FILE).open("wb") as file:
        file.truncate(4 << 20)
        file.seek(at)
        file.write(content)


def refuse(root: Path, count: int, logs: str = "") -> None:
    refuse_unserved(
        StoreOptions(store_path_root_dir=str(root), store_path_commit_log=logs), count, RealDisk()
    )


@pytest.mark.parametrize("at", [0, 3 << 20])
def test_messages_of_a_worker_that_would_not_run_are_a_refusal(tmp_path: Path, at: int) -> None:
    log_file(tmp_path / "worker-2" / "commitlog", content=b"\1", at=at)
    refuse(tmp_path, 3)
    for count in (1, 2):
        with pytest.raises(ConfigError) as refusal:
            refuse(tmp_path, count)
        text = str(refusal.value)
        assert str(tmp_path / "worker-2") in text
        assert f"--workers {count} would not serve" in text
        assert "--workers 3 or more" in text
    os.rename(tmp_path / "worker-2", tmp_path / "worker-2.done")
    refuse(tmp_path, 1)


def test_stores_without_messages_are_no_reason(tmp_path: Path) -> None:
    refuse(tmp_path / "nothing", 1)
    log_file(tmp_path / "worker-1" / "commitlog", content=b"\0" * 8192)  # real zeros, no hole
    (tmp_path / "worker-2").mkdir()
    log_file(tmp_path / "worker-x" / "commitlog", content=b"\1")
    log_file(tmp_path / "commitlog", content=b"\1")
    refuse(tmp_path, 1)


def test_logs_on_another_disk_are_looked_at(tmp_path: Path) -> None:
    logs = tmp_path / "fast" / "log"
    (tmp_path / "data" / "worker-1").mkdir(parents=True)
    log_file(tmp_path / "fast" / "log-worker-1", content=b"\1")
    refuse(tmp_path / "data", 1)  # without the setting nobody knows of it
    with pytest.raises(ConfigError, match="worker 1"):
        refuse(tmp_path / "data", 1, str(logs))
    refuse(tmp_path / "data", 2, str(logs))


def test_every_way_to_start_refuses(tmp_path: Path) -> None:
    log_file(tmp_path / "worker-4" / "commitlog", content=b"\1")
    up = settings.for_up({}, data=str(tmp_path), namesrv_port=0, broker_port=0)
    broker = settings.for_broker({}, data=str(tmp_path), namesrv="127.0.0.1:1", port=0)
    with pytest.raises(ConfigError, match="worker 4"):
        servers.run_up(up, http_port=0, logs=Logs("info"))
    with pytest.raises(ConfigError, match="worker 4"):
        servers.run_broker(broker, http_port=None, logs=Logs("info"))
    with pytest.raises(ConfigError, match="worker 4"):
        worker_servers.run_up(up, 2, http_port=0, logs=Logs("info"))
    with pytest.raises(ConfigError, match="worker 4"):
        worker_servers.run_broker(broker, 2, http_port=None, logs=Logs("info"))
    assert not (tmp_path / "lock").exists()


def test_workers_read_the_sources_that_their_supervisor_read(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("brokerName=b\n")
    pairs = ["flushDiskType=ASYNC_FLUSH", "orderMessageEnable=true", "serverSocketBacklog=7"]
    up = settings.for_up({}, file=str(file), pairs=pairs)
    assert up.broker_words == (
        "-c",
        str(file),
        "--set",
        "flushDiskType=ASYNC_FLUSH",
        "--set",
        "serverSocketBacklog=7",
    )
    alone = settings.for_broker({}, pairs=["brokerName=b"])
    assert alone.broker_words == ("--set", "brokerName=b")


def test_print_config_lists_the_workers(tmp_path: Path) -> None:
    words = ["up", "-p", "--workers", "2", "--data", str(tmp_path), "--set", "brokerName=b"]
    result = CliRunner().invoke(cosmo, words)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("# worker")]
    assert lines == [
        f"# worker 0: listenPort=10911 storePathRootDir={tmp_path} brokerName=b",
        f"# worker 1: listenPort=10921 storePathRootDir={tmp_path}/worker-1 brokerName=b-1",
    ]
    assert "brokerName=b" in result.output.splitlines()


@pytest.mark.parametrize("count", ["0", "65", "x"])
def test_a_wrong_number_of_workers_is_wrong_usage(count: str) -> None:
    assert CliRunner().invoke(cosmo, ["up", "--workers", count]).exit_code == 2
