"""The tables of docs/metrics.md, made from the tables of the code: `python -m tools.metric_docs`.

What stands between the marks of a table is written again; everything else is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cosmodrome.broker.operate import metric_table
from cosmodrome.cli.serve import worker_metrics
from cosmodrome.nameserver import metrics as nameserver_metrics
from cosmodrome.transport.http import exposition, process_metrics
from cosmodrome.transport.http.exposition import Metric

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"


def tables() -> dict[str, str]:
    ours = [row for row in metric_table.TABLE if row.name.startswith("cosmodrome_")]
    upstream = [row for row in metric_table.TABLE if row not in ours]
    return {
        "rocketmq": _table(upstream),
        "cosmodrome": _table(ours),
        "nameserver": _table(nameserver_metrics.TABLE),
        "process": _table(
            (*process_metrics.TABLE, *exposition.TABLE, *worker_metrics.TABLE),
        ),
        "unserved": _unserved(),
    }


def render(text: str) -> str:
    for name, table in tables().items():
        begin, end = f"<!-- table {name}: made by `make docs` -->\n", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        old = pattern.findall(text)
        assert len(old) == 1, f"docs/metrics.md has no place for {name}"
        text = text.replace(old[0], begin + table + end)
    return text


def _table(rows: Sequence[Metric]) -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for row in rows:
        labels = ", ".join(row.labels) or "—"
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"


def _unserved() -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in metric_table.UNSERVED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    for name, (label, reason) in metric_table.LEFT_OUT.items():
        by_reason.setdefault(reason, []).append(f"`{name}`: label {label}")
    lines = ["| not exported | why |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
