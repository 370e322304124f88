"""A disk that fails to sync: nothing is acknowledged from then on, and a restart heals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.fault_kit import need, unmount
from tests.unit.store.store_kit import bodies, draft, put, small

from cosmodrome.env.real import real_env
from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.store import Store

# An interpreter that has mfusepy, when this one does not.
PYTHON = os.environ.get("FUSE_PYTHON", sys.executable)
SCRIPT = Path(__file__).with_name("failing_fs.py")


@contextlib.contextmanager
def failing_fs(root: Path, mount: Path) -> Iterator[Path]:
    """Yields the mark that makes syncing fail while it exists."""
    need("fusermount3", "umount")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    if subprocess.run([PYTHON, "-c", "import mfusepy"], capture_output=True).returncode:
        pytest.skip("mfusepy cannot be imported; install it or name a python in FUSE_PYTHON")
    root.mkdir()
    mount.mkdir()
    server = subprocess.Popen([PYTHON, str(SCRIPT), str(root), str(mount)])
    try:
        deadline = time.monotonic() + 60
        while not os.path.ismount(mount):
            assert server.poll() is None and time.monotonic() < deadline, "it was not mounted"
            time.sleep(0.02)
        try:
            yield root.with_name(root.name + ".failing")
        finally:
            unmount(mount)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        server.kill()
        server.wait()


@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_a_failed_sync_is_final_until_a_restart(tmp_path: Path, mode: str) -> None:
    settings = {"flush_disk_type": mode, "flush_interval_commit_log": 20}
    root = tmp_path / "mount" / "store"
    with failing_fs(tmp_path / "real", tmp_path / "mount") as mark:
        store = Store(small(root, **settings), real_env())
        await store.start()
        sent = [b"%d " % at + bytes(200) for at in range(30)]
        for body in sent:
            await put(store, draft(body))
        mark.touch()
        refused = ""
        for at in range(400):
            body = b"after %d" % at
            try:
                await put(store, draft(body))
            except StoreUnwritable as error:
                refused = str(error)
                break
            sent.append(body)
            assert mode == "ASYNC_FLUSH", "acknowledged without a sync"
            await asyncio.sleep(0.005)
        assert "Input/output error" in refused and "restart" in refused
        assert store.why_unwritable == refused
        with pytest.raises(StoreUnwritable):
            await put(store, draft(b"more"))
        assert bodies(store) == sent  # reads go on, of what was acknowledged
        await store.stop()
        assert (root / "abort").exists()
        mark.unlink()

        store = Store(small(root, **settings), real_env())
        await store.start()
        found = bodies(store)
        assert found[: len(sent)] == sent
        await put(store, draft(b"healed"))
        assert bodies(store) == [*found, b"healed"]
        await store.stop()
        assert not (root / "abort").exists()
