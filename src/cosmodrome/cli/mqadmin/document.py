"""Renders docs/mqadmin.md from the table: `python -m cosmodrome.cli.mqadmin.document`."""

from __future__ import annotations

import sys

from cosmodrome.cli.mqadmin.table import ROWS, Row

HEAD = """# mqadmin

Made from `src/cosmodrome/cli/mqadmin/table.py` by `make docs`.

RocketMQ's own `mqadmin` works with Cosmodrome unchanged: `make oracle` runs every command of 4.9.8
against a live node and checks what it prints. If you have no Java, use `cosmo mqadmin`. It takes
the same names and flags:

    mqadmin       updateTopic -n 127.0.0.1:9876 -c DefaultCluster -t orders -r 8 -w 8
    cosmo mqadmin updateTopic -n 127.0.0.1:9876 -c DefaultCluster -t orders -r 8 -w 8

- Both commands change the cluster in the same way.
- The output is a table. `--output` chooses another form: `wide`, `json`, `jsonl`, `csv` or `yaml`.
  There is no short `-o`, because `-o` is a flag of upstream that means something else in nearly
  every command.
- No command asks for confirmation. Upstream does not ask either.
- Upper and lower case make no difference in the name of a command.
- `-n` is optional. Without it, the cluster is found as for every other command of `cosmo`.
- The exit codes are those of `cosmo`: 0 done, 2 wrong usage, 3 the cluster cannot be reached,
  4 the topic, group or message does not exist, and so on. Upstream exits with 0 even after an
  error.

`cosmo mqadmin --show COMMAND …` prints the command of `cosmo` that does the same, and does not run
it. This helps you to change your scripts. `cosmo mqadmin help COMMAND` lists the flags.

## Commands

In the last column, `{t}` is the value of `-t`. A part in brackets is left out unless its flag is
given. *Directly* means that no command of `cosmo` does exactly this; `cosmo mqadmin` does it
itself.

"""


def render() -> str:
    parts = [HEAD, "| mqadmin | what it does | the same with `cosmo` |\n|---|---|---|\n"]
    for row in ROWS:
        if not row.instead:
            parts.append(f"| `{row.name}` | {row.does} | {_way(row)} |\n")
    parts.append("\n## Not available here\n\n| mqadmin | use instead |\n|---|---|\n")
    for row in ROWS:
        if row.instead:
            parts.append(f"| `{row.name}` | {row.instead} |\n")
    parts.append(
        "\n## Flags that change nothing\n\nThey are accepted, so that scripts keep working.\n\n"
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
        condition = " and ".join(f"`-{part.replace('=', ' ')}`" for part in when.split())
        ways.append(f"{f'with {condition}: ' if condition else ''}`cosmo {template}`")
    if row.call:
        ways.append("directly")
    return "<br>".join(ways)


if __name__ == "__main__":
    sys.stdout.write(render())
