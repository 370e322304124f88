"""A broker in a process of its own, with a disk as slow and limits as low as a test wants them.

Words: FOLDER SYNC_DELAY_MS IDLE_S HELD_MIB. Prints its port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time

from cosmodrome.broker.app import build_broker
from cosmodrome.env import real
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import LoopSyncer, PythonSyncThread, real_env


async def serve(folder: str, delay_ms: int, idle_s: int, held_mib: int) -> None:
    env = real_env()
    if delay_ms:
        sync_data = real.sync_data

        def slow_sync(descriptor: int) -> None:
            time.sleep(delay_ms / 1000)
            sync_data(descriptor)

        real.sync_data = slow_sync
        env = dataclasses.replace(env, syncer=lambda: LoopSyncer(PythonSyncThread()))
    broker = build_broker(
        BrokerOptions(broker_name="flooded", listen_port=0),
        StoreOptions(store_path_root_dir=folder, mapped_file_size_commit_log=64 << 20),
        SocketOptions(
            server_channel_max_idle_time_seconds=idle_s, server_held_bytes_max=held_mib << 20
        ),
        env,
    )
    await broker.start()
    sys.stdout.write(f"{broker.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    asyncio.run(serve(sys.argv[1], *map(int, sys.argv[2:])))
