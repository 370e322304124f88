"""A full disk refuses messages and says why; nothing else stops, and it heals by itself."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from peers.node import CosmoNode
from tests.crash.test_crash_node import SETTINGS, Link, pull_all
from tests.faults.fault_kit import mounted, need
from tests.unit.store.store_kit import bodies, draft, put

from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.store import Store

RESUME_SECONDS = 60  # ten are promised; a busy machine may need more


def options(root: Path) -> StoreOptions:
    return StoreOptions(
        store_path_root_dir=str(root),
        mapped_file_size_commit_log=64 * 1024,
        mapped_file_size_consume_queue=400,
        max_hash_slot_num=100,
        max_index_num=200,
        flush_interval_consume_queue=20,
        disk_space_warning_level_ratio=100,
        commit_log_zeros_ahead=0,  # or there would be room already when the disk is full
    )


def fill(mount: Path) -> Path:
    ballast = mount / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


async def test_the_store_refuses_and_resumes(tmp_path: Path) -> None:
    need("mount", "umount")
    with mounted(tmp_path / "mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as mount:
        store = Store(options(mount / "store"), real_env())
        await store.start()
        sent = [b"%d " % at + bytes(700) for at in range(20)]
        for body in sent:
            await put(store, draft(body))
        ballast = fill(mount)
        refused: list[str] = []
        for at in range(60):
            body = b"full %d " % at + bytes(700)
            try:
                await put(store, draft(body))
            except StoreUnwritable as error:
                refused.append(str(error))
            else:
                sent.append(body)  # pages it had already
            assert bodies(store) == sent  # reads go on
        assert len(refused) > 40
        assert all("No space left on device" in text and "free" in text for text in refused)
        ballast.unlink()
        deadline = time.monotonic() + RESUME_SECONDS
        while True:
            body = b"after"
            try:
                await put(store, draft(body))
                sent.append(body)
                break
            except StoreUnwritable:
                assert time.monotonic() < deadline, "sends did not resume"
                await asyncio.sleep(0.05)
        for at in range(200):  # over several files, so that all of them can be made again
            sent.append(b"later %d " % at + bytes(700))
            await put(store, draft(sent[-1]))
        assert bodies(store) == sent
        await store.stop()
        assert not os.path.exists(mount / "store" / "abort")
        store = Store(options(mount / "store"), real_env())
        await store.start()
        assert bodies(store) == sent
        await store.stop()


async def test_clients_of_a_node_are_told(tmp_path: Path) -> None:
    need("mount", "umount")
    words = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    with mounted(tmp_path / "mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as mount:
        (tmp_path / "data").symlink_to(mount)  # its log file stays beside the link
        node = CosmoNode(tmp_path / "data", options=words)
        link = Link(node.broker_port)
        try:
            await asyncio.to_thread(node.start)
            await link.open()

            async def send() -> tuple[int, str | None]:
                fields = {
                    **dict.fromkeys(("sysFlag", "bornTimestamp", "flag", "queueId"), 0),
                    **dict.fromkeys(("producerGroup", "topic"), "CrashTopic"),
                    "defaultTopic": "TBW102",
                    "defaultTopicQueueNums": 1,
                }
                code, _, remark, _ = await link.call(10, fields, bytes(5000))
                return code, remark

            assert (await send())[0] == 0
            ballast = fill(mount)
            async with asyncio.timeout(RESUME_SECONDS + 5):
                while (answer := await send())[0] == 0:
                    await asyncio.sleep(0.02)
            assert answer[0] == 14, answer
            assert answer[1] and "No space left" in answer[1], answer
            stored = len(await pull_all(link, 0))
            assert stored >= 1
            ballast.unlink()
            started = time.monotonic()
            while (await send())[0] != 0:
                assert time.monotonic() < started + RESUME_SECONDS, "sends did not resume"
                await asyncio.sleep(0.05)
            assert len(await pull_all(link, 0)) > stored
        finally:
            link.close()
            node.stop()
