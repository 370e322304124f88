"""A broker in a process of its own, with a disk as slow and limits as low as a test wants them.

Words: FOLDER SYNC_DELAY_MS IDLE_S HELD_MIB. Prints its port.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from cosmodrome.broker.app import build_broker
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import MappedSegment, real_env


async def serve(folder: str, delay_ms: int, idle_s: int, held_mib: int) -> None:
    sync = MappedSegment.sync

    def slow_sync(self: MappedSegment) -> None:
        time.sleep(delay_ms / 1000)
        sync(self)

    if delay_ms:
        MappedSegment.sync = slow_sync  # type: ignore[method-assign]
    broker = build_broker(
        BrokerOptions(broker_name="flooded", listen_port=0),
        StoreOptions(store_path_root_dir=folder, mapped_file_size_commit_log=64 << 20),
        SocketOptions(
            server_channel_max_idle_time_seconds=idle_s, server_held_bytes_max=held_mib << 20
        ),
        real_env(),
    )
    await broker.start()
    sys.stdout.write(f"{broker.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    asyncio.run(serve(sys.argv[1], *map(int, sys.argv[2:])))
