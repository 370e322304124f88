"""`make bench`: the short form of `bench.java`, a few minutes.

Sends and pulls once, with a short warm-up: enough to see a ratio move, too little to judge a bar.
Ratios that differ from the last line of bench/trend.jsonl are named; --record adds a line there.
"""

from __future__ import annotations

import sys

from bench.brokers import CLIENT_CORE, JAVA_HEAP, RESULTS, ROOT, pin, pinned
from bench.java import main

__all__ = ["CLIENT_CORE", "JAVA_HEAP", "RESULTS", "ROOT", "pin", "pinned"]

SHORT = ("--rows", "sends,pulls", "--repetitions", "1", "--seconds", "1.5", "--warm", "6")

if __name__ == "__main__":
    main([*SHORT, *sys.argv[1:]], page=None)
