"""Renders docs/mqadmin.md from the table: `python -m cosmodrome.cli.mqadmin_document`."""

from __future__ import annotations

import sys

from cosmodrome.cli.mqadmin_table import ROWS, Row

HEAD = """# mqadmin

Made from `src/cosmodrome/cli/mqadmin_table.py` by `make docs`.

RocketMQ's own `mqadmin` works against Cosmodrome unchanged: `make oracle` runs every command of
4.9.8 against a live node and looks at what it prints. Where there is no Java, `cosmo mqadmin` takes
the same names and flags:

    mqadmin       updateTopic -n 127.0.0.1:9876 -c DefaultCluster -t orders -r 8 -w 8
    cosmo mqadmin updateTopic -n 127.0.0.1:9876 -c DefaultCluster -t orders -r 8 -w 8

It does the same to the cluster and prints as `cosmo` prints: tables, or `--output json`, `jsonl`,
`csv`, `yaml`, `wide` (`-o` is upstream's, and means something else in nearly every command). As
upstream it asks no questions. Names of commands are found whatever their case. `-n` may be left
out: then the cluster is found as by every other command. Exit codes are those of `cosmo`: 0 done, 2
wrong usage, 3 the cluster cannot be reached, 4 what was named is not there, and so on; upstream
says 0 even after an error.

`cosmo mqadmin --show COMMAND …` prints the verb of `cosmo` instead of running it, which is the way
to leave these names behind. `cosmo mqadmin help COMMAND` has the flags.

## Commands

In a verb `{t}` is the value of `-t`; what is in brackets is left out unless its flag is given.
*Directly* means that no verb does just this, and `cosmo mqadmin` does it itself.

"""


def render() -> str:
    parts = [HEAD, "| mqadmin | what it does | verb |\n|---|---|---|\n"]
    for row in ROWS:
        if not row.instead:
            parts.append(f"| `{row.name}` | {row.does} | {_way(row)} |\n")
    parts.append("\n## Not done here\n\n| mqadmin | use instead |\n|---|---|\n")
    for row in ROWS:
        if row.instead:
            parts.append(f"| `{row.name}` | {row.instead} |\n")
    parts.append(
        "\n## Flags that change nothing\n\nThey are taken, so that scripts go on working.\n\n"
        "| mqadmin | flag | why |\n|---|---|---|\n"
    )
    for row in ROWS:
        for flag in row.flags:
            if flag.letter in row.unused:
                parts.append(
                    f"| `{row.name}` | `-{flag.letter}`, `--{flag.name}` |"
                    f" {row.unused[flag.letter]} |\n"
                )
    return "".join(parts)


def _way(row: Row) -> str:
    ways = []
    for when, template in row.verbs:
        said = " and ".join(f"`-{part.replace('=', ' ')}`" for part in when.split())
        ways.append(f"{f'with {said}: ' if said else ''}`cosmo {template}`")
    if row.call:
        ways.append("directly")
    return "<br>".join(ways)


if __name__ == "__main__":
    sys.stdout.write(render())
