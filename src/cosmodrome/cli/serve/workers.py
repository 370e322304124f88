"""Which broker each worker of `--workers N` is: its name, port and directories.

Worker 0 is the broker that runs without `--workers`: same name, port and store, so that going
from one worker to many moves nothing. Worker K is NAME-K, listens on the port + 10 K and keeps
its store in ROOT/worker-K. A worker's store is its own: nothing else ever reads it. Therefore a
store with messages whose worker is not among those asked for is a refusal, never an omission.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cosmodrome.env.base import Disk
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.errors import ConfigError
from cosmodrome.transport.ports import BROKER_NAME_MAX, HA_OFFSET, VIP_OFFSET, free_base_port

PORT_STRIDE = 10  # a broker also takes its port - 2 and its port + 1
PORT_MAX = 65_535
SCAN_BYTES = 1 << 20
_PICKS_MAX = 50
_DIRECTORY = re.compile(r"worker-([1-9][0-9]{0,8})\Z")


class Seat(NamedTuple):
    """What makes one worker different from the others."""

    number: int
    name: str
    port: int  # 0: any
    root: str
    log_directory: str  # "" where the store has its log below its root

    def pairs(self) -> tuple[str, ...]:
        """As settings; port and root have flags of their own."""
        log = (f"storePathCommitLog={self.log_directory}",) if self.log_directory else ()
        return (f"brokerName={self.name}", *log)


def seats(
    broker: BrokerOptions,
    store: StoreOptions,
    count: int,
    *,
    name: str,
    taken: Mapping[int, str] | None = None,
) -> list[Seat]:
    """The workers; `name` is the broker's, and `taken` says who else wants which port."""
    _check_replication(store, count)
    longest = f"{name}-{count - 1}"
    if count > 1 and len(longest) > BROKER_NAME_MAX:
        raise ConfigError(
            f"brokerName is {name[:64]!r}; with --workers {count} it must leave room for a suffix"
            f" like that of {longest[-8:]!r} within {BROKER_NAME_MAX} characters"
        )
    found = [_seat(broker, store, name, number) for number in range(count)]
    if not broker.listen_port:
        return found
    if found[-1].port + HA_OFFSET > PORT_MAX:
        raise ConfigError(
            f"listenPort is {broker.listen_port}; the last of {count} workers would need port"
            f" {found[-1].port}, and the largest is {PORT_MAX - HA_OFFSET}: use a lower one"
        )
    for seat in found:
        for port in (seat.port, seat.port + VIP_OFFSET, seat.port + HA_OFFSET):
            if port in (taken or {}):
                raise ConfigError(
                    f"port {port} is wanted by {(taken or {})[port]} and by worker"
                    f" {seat.number} ({seat.name}); the workers use {broker.listen_port} and every"
                    f" {PORT_STRIDE}th port above it, two below and one above each: move one of"
                    " them"
                )
    return found


def _check_replication(store: StoreOptions, count: int) -> None:
    """Each worker has slaves, or a master, of its own."""
    for key, value in (
        ("haListenPort", store.ha_listen_port),
        ("haMasterAddress", store.ha_master_address),
    ):
        if count > 1 and value:
            raise ConfigError(
                f"{key} is {value}, which cannot be the same for {count} workers; leave it out:"
                f" each has its port {HA_OFFSET:+d}, and name servers say where masters are"
            )


def refuse_unserved(store: StoreOptions, count: int, disk: Disk) -> None:
    """ConfigError when messages lie in the store of a worker that would not run."""
    for number, root, logs in _stores_of_workers(store, disk):
        if number < count or not _holds_messages(logs, disk):
            continue
        raise ConfigError(
            f"{root} holds messages of worker {number}, which --workers {count} would not serve:"
            f" start with --workers {number + 1} or more. To have fewer workers, let consumers"
            " finish what it has, stop, and move that directory away; until its messages expire"
            f" it can also be served alone (cosmo broker run --data {root} with the brokerName and"
            " port of that worker) or read by `cosmo store export`"
        )


class Ports:
    """Ports for workers that may have any: kept over restarts, so that clients find them again."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._picked: dict[int, int] = {}

    def of(self, number: int, *, anew: bool) -> int:
        """The port of a worker; `anew` when the last one was of no use."""
        if anew:
            self._picked.pop(number, None)
        if number not in self._picked:
            self._picked[number] = self._pick()
        return self._picked[number]

    def _pick(self) -> int:
        # Two brokers started at once could pick neighbours; here one hand picks for all.
        span = HA_OFFSET - VIP_OFFSET
        for _ in range(_PICKS_MAX):
            port = free_base_port(self._host)
            if all(abs(port - other) > span for other in self._picked.values()):
                return port
        raise ConfigError(
            f"found no free ports for {len(self._picked) + 1} workers on {self._host!r}; set"
            " listenPort"
        )


def _seat(broker: BrokerOptions, store: StoreOptions, name: str, number: int) -> Seat:
    root, logs = store.store_path_root_dir, store.store_path_commit_log
    if number == 0:
        return Seat(0, name, broker.listen_port, root, logs)
    port = broker.listen_port + PORT_STRIDE * number if broker.listen_port else 0
    log_directory = _logs_of(root, logs, number) if logs else ""
    return Seat(number, f"{name}-{number}", port, _root_of(root, number), log_directory)


def _root_of(root: str, number: int) -> str:
    return os.path.join(root, f"worker-{number}")


def _logs_of(root: str, logs: str, number: int) -> str:
    """Below the root the log moves with it. Elsewhere it stays on its disk, beside the first."""
    inside = os.path.relpath(os.path.abspath(logs), os.path.abspath(root))
    if inside.split(os.sep)[0] not in (os.pardir, os.curdir):
        return os.path.join(_root_of(root, number), inside)
    return f"{logs.rstrip(os.sep)}-worker-{number}"


def _stores_of_workers(store: StoreOptions, disk: Disk) -> Iterator[tuple[int, str, str]]:
    """Number, root and log directory of every worker but the first that ever ran here."""
    root, logs = store.store_path_root_dir, store.store_path_commit_log
    for name in disk.list(root):
        match = _DIRECTORY.match(name)
        if match is not None:
            number = int(match[1])
            own = os.path.join(root, name)
            elsewhere = _logs_of(root, logs, number) if logs else ""
            yield number, own, elsewhere
            if elsewhere != os.path.join(own, "commitlog"):
                yield number, own, os.path.join(own, "commitlog")


def _holds_messages(logs: str, disk: Disk) -> bool:
    """Whether a commit log has anything but zeros, as a file that was only made has."""
    from cosmodrome.store.offline.directory import data_end, segment_offsets, segment_path

    for offset in segment_offsets(disk, logs) if logs else ():
        path = segment_path(logs, offset)
        end = data_end(disk, path)
        file = disk.open_segment(path, read_only=True)
        try:
            for begin in range(0, end, SCAN_BYTES):
                if any(bytes(file.view[begin : min(end, begin + SCAN_BYTES)]).lstrip(b"\0")[:1]):
                    return True
        finally:
            file.close()
    return False
