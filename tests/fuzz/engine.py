"""A small fuzzer: valid inputs are changed by a seeded chance and given to a target.

A target says of each input in one word how it ended ("read", "refused: no such code"). An input
with an end that was never seen joins the corpus, so the fuzzer works its way into a parser
without measuring coverage. Nothing but the seed decides what comes: time only says when to stop.

A target raises when a promise is broken: an undocumented exception, results that differ, too much
CPU. Too much memory is seen from outside, after many inputs. The input is saved first.
"""

from __future__ import annotations

import random
import re
import resource
import signal
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

INPUT_BYTES_MAX = 1 << 16
CORPUS_MAX = 2_000
CPU_S_MAX = 10.0  # for one input; thousands of times what it should take
MEMORY_MB_MAX = 512  # more than at the start of the target
EDGES = (0, 1, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0xFFFFFF, 0x7FFFFFFF, 0x80000000)
LENGTHS = (1, 2, 5, 20, 100)


class Broken(AssertionError):
    """A promise was broken by an input."""


class Target(ABC):
    """What is fuzzed."""

    name: str
    words: Sequence[bytes] = ()  # pieces of the language, put in at random

    @abstractmethod
    def corpus(self) -> Sequence[bytes]:
        """Valid inputs to begin with."""

    @abstractmethod
    def check(self, data: bytes, chance: random.Random) -> str:
        """Try one input; how it ended. The chance depends on nothing but the input."""

    def mutate(self, data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
        return dented(data, chance, self.words, others)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the target holds."""


@dataclass
class Result:
    name: str
    seed: int
    executions: int = 0
    seconds: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)
    memory_mb: float = 0.0
    fault: str = ""
    saved: Path | None = None

    def __str__(self) -> str:
        line = (
            f"{self.name:<10} seed {self.seed}: {self.executions} inputs in {self.seconds:.0f} s,"
            f" {len(self.ends)} ends, {self.memory_mb:.0f} MB"
        )
        if self.fault:
            line += f"\n  BROKEN: {self.fault}\n  input saved in {self.saved}"
            line += f"\n  again: make fuzz TARGET={self.name} INPUT={self.saved}"
        return line


def fuzz(
    target: Target,
    seed: int,
    *,
    seconds: float = 0.0,
    executions: int = 0,
    folder: Path,
) -> Result:
    """Until the time or the number is over, or something broke."""
    chance = random.Random(f"{target.name}-{seed}")
    corpus = list(target.corpus())
    result = Result(target.name, seed)
    began, memory = time.monotonic(), peak_mb()

    def enough() -> bool:
        result.seconds = time.monotonic() - began
        return result.executions >= executions if executions else result.seconds >= seconds

    for data in inputs(target, chance, corpus):
        if enough():
            break
        try:
            end = attempt(target, data)
            result.memory_mb = peak_mb()
            if result.memory_mb - memory > MEMORY_MB_MAX:
                raise Broken(f"memory grew by {result.memory_mb - memory:.0f} MB")
        except Exception as error:
            result.fault = f"{type(error).__name__}: {str(error)[:2000]}"
            result.saved = save(folder, target.name, data)
            break
        result.executions += 1
        if end not in result.ends and len(corpus) < CORPUS_MAX:
            corpus.append(data)
        result.ends[end] = result.ends.get(end, 0) + 1
    return result


def inputs(target: Target, chance: random.Random, corpus: Sequence[bytes]) -> Iterator[bytes]:
    """The corpus as it is, then changes of its members for ever."""
    yield from list(corpus)
    while True:
        data = chance.choice(corpus)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            data = target.mutate(data, chance, corpus)[:INPUT_BYTES_MAX]
        yield data


def attempt(target: Target, data: bytes) -> str:
    """One input, with a bound on its CPU. Also what replays a saved one."""
    with at_most(CPU_S_MAX):
        return target.check(data, random.Random(zlib.crc32(data)))


@contextmanager
def at_most(cpu_s: float) -> Iterator[None]:
    def stop(_signal: int, _frame: object) -> None:
        raise Broken(f"took more than {cpu_s} s of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def save(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{zlib.crc32(data):08x}"
    path.write_bytes(data)
    return path


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def dented(
    data: bytes, chance: random.Random, words: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    """One change: of bits, bytes, numbers, words, or with a piece of another input."""
    out = bytearray(data)
    at, length = chance.randrange(len(out) + 1), chance.choice(LENGTHS)
    kind = chance.randrange(9)
    if kind == 0 and at < len(out):
        out[at] ^= 1 << chance.randrange(8)
    elif kind == 1 and at < len(out):
        out[at] = chance.randrange(256)
    elif kind == 2:
        del out[at : at + length]
    elif kind == 3:
        width = chance.choice((2, 4))
        out[at : at + width] = struct.pack(">I", chance.choice(EDGES))[-width:]
    elif kind == 4:
        del out[at:]
    elif kind == 5:
        out[at:at] = out[at : at + length] * chance.choice((1, 2, 50))
    elif kind == 6:
        piece = chance.choice(others)
        begin = chance.randrange(len(piece) + 1)
        out[at : at + chance.choice((0, length))] = piece[begin : begin + 5 * length]
    elif words:
        out[at : at + chance.choice((0, 0, length))] = chance.choice(words)
    else:
        out[at:at] = chance.randbytes(length)
    return bytes(out)


def ending(error: Exception) -> str:
    """The kind of an error, without the numbers and names of this input."""
    text = re.sub(r"['\"].*['\"]|b'.*|[-+]?\d+|0x[0-9a-f]+", "#", str(error), flags=re.DOTALL)
    return f"{type(error).__name__}: {text[:60]}"


def outcome(
    call: Callable[[], object], documented: type[Exception] | tuple[type[Exception], ...]
) -> tuple[str, object]:
    """How a call ended, and its value; what is not documented is raised."""
    try:
        return "value", call()
    except documented as error:
        return ending(error), None
