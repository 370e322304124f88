"""`cosmo completion bash|zsh|fish`: the script that completes `cosmo` commands in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_COSMO_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete commands, options and arguments.

    \b
    bash:  source <(cosmo completion bash)      in ~/.bashrc
    zsh:   source <(cosmo completion zsh)       in ~/.zshrc, after compinit
    fish:  cosmo completion fish > ~/.config/fish/completions/cosmo.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    program = ctx.find_root().command
    maker = kind(program, {}, "cosmo", VARIABLE)
    # Not `source()`: that of bash first starts a shell to ask for its version.
    click.echo(maker.source_template % maker.source_vars())
