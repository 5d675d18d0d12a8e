"""`deckhands completion`: the script for shell completion of commands, options and ids of conversations."""

from __future__ import annotations

from dataclasses import dataclass

import click
from click.shell_completion import get_completion_class

from deckhands.cli.command_group import with_options
from deckhands.client import print_text

SECTION = "Operate a cluster"
SUMMARIES = {"completion": "Print a completion script for bash, zsh or fish."}

PROGRAM = "deckhands"
VARIABLE = "_DECKHANDS_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """The argument of `completion`."""

    shell: str


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@with_options(CompletionOptions)
def completion(options: CompletionOptions) -> None:
    """Print a script for a shell: it then completes commands, options and the ids of conversations.

    bash: add `source <(deckhands completion bash)` to ~/.bashrc. zsh: the same with zsh, in ~/.zshrc, after compinit.
    fish: `deckhands completion fish > ~/.config/fish/completions/deckhands.fish`.
    """
    print_text(script_for(options.shell), end="")


def script_for(shell: str) -> str:
    """Return click's script for a shell, changed so that errors during completion are never shown."""
    kind = get_completion_class(shell)
    assert kind is not None
    complete = kind(click.Command(PROGRAM), {}, PROGRAM, VARIABLE)
    text = complete.source_template % complete.source_vars()
    ends = (f"{shell}_complete $1)", f"{shell}_complete {PROGRAM})", f"(commandline -t) {PROGRAM})")
    for end in ends:  # the calls of bash, zsh and fish
        text = text.replace(end, f"{end[:-1]} 2>/dev/null)")
    return text
