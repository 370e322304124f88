"""The jobs of `cosmo pipeline`, one module each, with their lines in `cosmo pipeline --help`.

A job `NAME` is a module of this package that has `command`, made with `job.job`, beside a plain
function for programs that do not go through the command line. Importing the module must not
import pyspark, so that its `--help` is quick and works without it. A new job is a module and a
line here.
"""

from __future__ import annotations

JOBS: dict[str, str] = {
    "archive": "Keep topics in a lake: Delta or Parquet, exactly once.",
    "check": "Find gaps, duplicates, disorder and damage in a topic, archive or store.",
    "jars": "Fetch the jars of Delta Lake once, through Maven.",
    "query": "SQL over topics, an archive or a store directory.",
    "replay": "Send what an archive holds to a topic again.",
}
