"""`cosmo pipeline`: the jobs of the spark room by name, each imported when it is used.

Neither this nor the `--help` of a job needs pyspark; running one does, and says how to get it.
"""

from __future__ import annotations

import importlib

import click

from cosmodrome.cli.support.context import find_name_servers
from cosmodrome.spark.jobs import JOBS


class _Jobs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return None
        module = importlib.import_module(f"cosmodrome.spark.jobs.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Jobs"):
            formatter.write_dl([(name, JOBS[name]) for name in self.list_commands(ctx)])


@click.group("pipeline", cls=_Jobs, subcommand_metavar="JOB [ARGS]...")
@click.pass_context
def pipeline(ctx: click.Context) -> None:
    """Spark over topics: archive them, query them, replay them.

    Spark runs in this process unless --master names a cluster. Data goes to stdout, everything
    else to stderr. `cosmo pipeline JOB --help` has the flags; docs/pipeline.md is the guide.
    """
    ctx.obj = find_name_servers
