"""The process itself, by the names that Prometheus' own clients use."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping

from cosmodrome.env.base import Env
from cosmodrome.transport.http.exposition import Metric, Sample, WalkItem

CPU = Metric("process_cpu_seconds_total", "counter", "CPU time of this process, user and system.")
MEMORY = Metric(
    "process_resident_memory_bytes",
    "gauge",
    "Resident memory of this process, including mapped log files.",
)
FILES = Metric("process_open_fds", "gauge", "Open files and connections of this process.")
FILES_MAX = Metric(
    "process_max_fds", "gauge", "Limit of open files and connections of this process."
)
STARTED = Metric(
    "process_start_time_seconds", "gauge", "Start time of this process, in seconds since 1970."
)
BUILD_INFO = Metric(
    "cosmodrome_build_info",
    "gauge",
    "Always 1; the labels name the version and the core.",
    ("version", "core"),
)
TABLE = (CPU, MEMORY, FILES, FILES_MAX, STARTED, BUILD_INFO)

_PAGE_BYTES = resource.getpagesize()


class ProcessMetrics:
    """Figures that this operating system does not offer are absent."""

    def __init__(
        self, labels: Callable[[], Mapping[str, str]], env: Env, *, version: str, core: str
    ) -> None:
        self._labels = labels
        self._build = (version, core)
        self._env = env
        self._started_s = env.clock.now_ms() / 1000
        self._memory_bytes: int | None = None
        self._files: int | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        return self._labels()

    async def prepare(self) -> None:
        """Thousands of descriptors take milliseconds to list."""
        self._memory_bytes, self._files = await self._env.offload(self._look)

    def walk(self) -> Iterator[WalkItem]:
        yield Sample(BUILD_INFO, self._build, 1)
        yield Sample(CPU, (), round(time.process_time(), 6))
        if self._memory_bytes is not None:
            yield Sample(MEMORY, (), self._memory_bytes)
        if self._files is not None:
            yield Sample(FILES, (), self._files)
        yield Sample(FILES_MAX, (), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        yield Sample(STARTED, (), self._started_s)

    def _look(self) -> tuple[int | None, int | None]:
        disk, pid = self._env.disk, os.getpid()
        try:
            memory_bytes = int(disk.read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return None, None
        return memory_bytes, len(disk.list(f"/proc/{pid}/fd"))
