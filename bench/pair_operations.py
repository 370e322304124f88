"""Work of a master and of its slave that is counted in instructions, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from cosmodrome import speed
from cosmodrome.env.base import Done, SegmentFile
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.replication import frames
from cosmodrome.replication.links import Link
from cosmodrome.replication.master_link import Greeting, MasterLink
from cosmodrome.replication.source import Source
from cosmodrome.sim.env import SimClock
from cosmodrome.sim.loop import JumpLoop
from cosmodrome.store.store import Store
from cosmodrome.wire.message import pack_host

MasterRole = Literal["ASYNC_MASTER", "SYNC_MASTER"]

FILE_BYTES = 64 << 20
QUEUES = 8
AHEAD = 256  # reads that are made before anything is counted
SETTLE = 128  # reads of 16 records, until buffers have found their sizes
HOST = pack_host("10.1.2.3", 40_123)
STORE_MS = 1_700_000_000_123


class Wire(asyncio.Transport):
    """Forgets what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.1.2.3", 40_123)})
        self.written_bytes = 0

    def write(self, data: Any) -> None:
        self.written_bytes += len(data)

    def writelines(self, parts: Any) -> None:
        self.written_bytes += sum(map(len, parts))

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


async def at_once(work: Callable[[], Any]) -> Any:
    """What else goes to a thread; its turn would come by chance."""
    return work()


def introduction(end: int) -> frames.Who:
    return frames.Who(
        version=frames.VERSION,
        broker="b",
        cluster="DefaultCluster",
        id=1,
        incarnation="1",
        epoch=0,
        first=0,
        end=end,
        file_bytes=FILE_BYTES,
        fingerprint=None,
        from_first=True,
    )


class LinkedSlave:
    """A slave as its master sees it: it has whatever was sent to it."""

    def __init__(self, source: Source) -> None:
        self._link = Link(source)
        self._link.connection_made(Wire())
        self._link.data_received(frames.number(frames.HELLO))
        self._link.data_received(frames.who(introduction(0)))
        assert self._link.joined, "the slave was refused"

    def report(self) -> None:
        end = self._link.sent_end
        if end > self._link.acked_end:
            self._link.data_received(frames.ack(0, end))


# --- a slave ---------------------------------------------------------------------------------


class _Syncer:
    """The bell of the sync thread rings when it is told to."""

    def __init__(self) -> None:
        self._done: Done | None = None

    def begin(self, files: Sequence[SegmentFile], failed: Callable[[], None], done: Done) -> None:
        self._done = done

    def ring(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(None)

    def close(self) -> None:
        pass


def _reads(count: int) -> Iterator[bytes]:
    """The log as a master sends it: records of 1 KiB, at first SETTLE times 16, then `count`."""
    at = first = 0
    for size in itertools.chain(itertools.repeat(16, SETTLE), itertools.repeat(count)):
        data = bytearray()
        for number in range(first, first + size):
            properties = f"TAGS\1TagA\2UNIQ_KEY\0017F00000100002A9F{number:016X}"
            speed.encode_record(
                data,
                at + len(data),
                number // QUEUES,
                STORE_MS,
                b"Plain",
                number % QUEUES,
                0,
                0,
                STORE_MS,
                HOST,
                HOST,
                0,
                0,
                b"x" * 1024,
                properties.encode(),
            )
        yield frames.data_head(0, at, at, len(data)) + data
        at += len(data)
        first += size


def slave(count: int, *, synced: bool) -> Iterator[Callable[[int], object]]:
    """A read with `count` records arrives, is taken, dispatched and reported."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        runner = stack.enter_context(asyncio.Runner(loop_factory=JumpLoop))
        syncer, wire = _Syncer(), Wire()
        env = dataclasses.replace(
            real_env(),
            clock=SimClock(runner.get_loop()),
            offload=at_once,
            syncer=lambda: syncer,
        )
        store = Store(
            StoreOptions(
                store_path_root_dir=folder,
                broker_role="SLAVE",
                flush_disk_type="SYNC_FLUSH" if synced else "ASYNC_FLUSH",
                mapped_file_size_commit_log=FILE_BYTES,
                max_hash_slot_num=100_000,
                max_index_num=400_000,
            ),
            env,
        )
        reads = _reads(count)
        ahead = [next(reads) for _ in range(SETTLE + AHEAD)]
        link = runner.run(_linked(store, wire))
        stack.callback(lambda: runner.run(store.abandon()))
        made = itertools.chain(ahead, reads)

        async def feed(times: int) -> None:
            for data in itertools.islice(made, times):
                before = wire.written_bytes
                link.get_buffer(-1)[: len(data)] = data
                link.buffer_updated(len(data))
                if synced:
                    syncer.ring()
                assert wire.written_bytes > before, "the slave did not report"

        runner.run(feed(SETTLE))
        yield lambda times: runner.run(feed(times))


async def _linked(store: Store, wire: Wire) -> MasterLink:
    await store.start()
    who = introduction(0)
    link = MasterLink(store, Greeting(who=who), lambda state: None, lambda: None)
    link.connection_made(wire)
    begin = frames.Begin(version=frames.VERSION, epoch=0, first=0, end=0, begin=0)
    for data in (frames.number(frames.WELCOME), frames.begin(begin)):
        link.get_buffer(-1)[: len(data)] = data
        link.buffer_updated(len(data))
    assert link.progress.begun, link.ended
    return link
