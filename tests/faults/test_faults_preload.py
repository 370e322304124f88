"""A `fdatasync` that fails or hangs, put in front of libc's: both twins of the syncer meet it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.unit.store.store_kit import bodies, small

from cosmodrome.env.real import real_env
from cosmodrome.store.store import Store

REPOSITORY = Path(__file__).parents[2]

SHIM = """
    #include <errno.h>
    #include <unistd.h>
    int fdatasync(int descriptor) {
        while (access("hanging", F_OK) == 0)
            usleep(1000);
        if (access("failing", F_OK) == 0) {
            errno = EIO;
            return -1;
        }
        return fsync(descriptor);
    }
"""

CHILD = """
    import asyncio, os, sys
    from pathlib import Path
    from cosmodrome.env.real import RealDisk, new_syncer, real_env
    from cosmodrome.errors import StoreUnwritable
    from cosmodrome.store.store import Store
    from tests.unit.store.store_kit import draft, put, small

    async def fails():
        store = Store(small(Path("store")), real_env())
        await store.start()
        await put(store, draft(b"kept"))
        Path("failing").touch()
        try:
            await put(store, draft(b"doubtful"))
        except StoreUnwritable as error:
            print(error)
        print("abort holds", Path("store/abort").read_bytes())
        Path("failing").unlink()
        sys.stdout.flush()  # the exit below does not
        os._exit(0)

    async def hangs():
        # No store: its other threads sync too, and an executor's are waited for at exit.
        file = RealDisk().create_segment("0", 4096)
        syncer = new_syncer()
        Path("hanging").touch()
        syncer.begin([file], lambda: print("failed"), lambda error: print("done"))
        await asyncio.sleep(0.1)
        print("left")

    asyncio.run(globals()[sys.argv[1]]())
    print("ended")
"""


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    source, built = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True, timeout=60)
    return built


def run(shim: Path, what: str, *, pure: bool) -> str:
    """What a child said that has the shim in front of its libc."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), what],
        env={
            **os.environ,
            "LD_PRELOAD": str(shim),
            "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
            "COSMODROME_PURE": "1" if pure else "",
        },
        cwd=shim.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("pure", [False, True])
async def test_an_injected_failure_is_final_and_leaves_its_mark(shim: Path, pure: bool) -> None:
    said = run(shim, "fails", pure=pure)
    assert "syncing the commit log failed (Input/output error)" in said
    assert r"abort holds b'\x01'" in said
    root = shim.parent / "store"
    store = Store(small(root), real_env())
    await store.start()
    assert bodies(store)[0] == b"kept"
    await store.stop()


@pytest.mark.parametrize("pure", [False, True])
def test_a_sync_that_hangs_does_not_keep_the_process(shim: Path, pure: bool) -> None:
    assert run(shim, "hangs", pure=pure).split() == ["left", "ended"]
