"""The command `deckhands`: finds the verb, and turns every error into a message and an exit code.

Holds: no traceback reaches the terminal unless DECKHANDS_DEBUG is set; `--help` loads no verb.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import NoReturn

import click

from broker.runtime.errors import DeckhandsError, UsageError
from deckhands.reading.terminal import print_text

VERBS = {
    "run": ("deckhands.cli.run", "Run one task on a directory, with a private store and workers."),
    "demo": ("deckhands.cli.demo", "Twenty agents at once, while their workers are killed. Needs no model."),
    "submit": ("deckhands.cli.submit", "Queue a task on a running cluster."),
    "ls": ("deckhands.cli.reading", "List conversations and runs."),
    "show": ("deckhands.cli.reading", "Show what came of a conversation."),
    "logs": ("deckhands.cli.reading", "Show the events of a conversation; -f follows it."),
    "export": ("deckhands.cli.reading", "Write the events of a conversation, one JSON object a line."),
    "import": ("deckhands.cli.trajectory", "Bring a recorded conversation onto the cluster."),
    "fork": ("deckhands.cli.fork", "Go on from any event of a conversation, otherwise than it did."),
    "replay": ("deckhands.cli.replay", "Decide a recorded conversation anew, offline, and compare."),
    "message": ("deckhands.cli.control", "Say something to the agent; it goes on."),
    "pause": ("deckhands.cli.control", "Pause a conversation: nothing new is begun."),
    "resume": ("deckhands.cli.control", "Go on with a conversation that was paused or stopped."),
    "recover": ("deckhands.cli.control", "Get an agent out of a loop."),
    "confirm": ("deckhands.cli.confirming", "Let the action run that a conversation asks about."),
    "reject": ("deckhands.cli.confirming", "Refuse the action that a conversation asks about."),
    "cp": ("deckhands.cli.carrying", "Copy files into a workspace or out of it."),
    "checkpoint": ("deckhands.cli.carrying", "Save a workspace now."),
    "diff": ("deckhands.cli.carrying", "Show what was changed in a workspace, as a patch."),
    "cancel": ("deckhands.cli.control", "Stop a conversation: what runs is ended."),
    "close": ("deckhands.cli.control", "Close a conversation that is over; its workspace goes after a week."),
    "budget": ("deckhands.cli.budget", "Budgets: what tenants and experiments may spend, and have spent."),
    "up": ("deckhands.cli.serve", "Keep a cluster up on this machine, for other terminals to use."),
    "secret": ("deckhands.cli.secret", "Give commands a secret that nobody can read; list or remove it."),
    "notes": ("deckhands.cli.notes", "What agents have written down for later conversations."),
    "doctor": ("deckhands.cli.doctor", "Say what this machine can do, and whether the store serves."),
    "controller": ("deckhands.cli.serve", "Run one controller worker against DECKHANDS_URL."),
    "tools": ("deckhands.cli.serve", "Run one tool worker against DECKHANDS_URL."),
}
"""verb → its module, and what it does in one line; each module has a command named after the verb."""

INTERRUPTED = 130


class Verbs(click.Group):
    """The verbs, each loaded when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        """Return the verbs in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load a verb."""
        if cmd_name not in VERBS:
            return None
        module = import_module(VERBS[cmd_name][0])
        command: click.Command = getattr(module, f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that is meant, or name the nearest one."""
        if args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "`deckhands --help` lists the verbs."
            raise click.UsageError(f"No such verb: {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the verbs without loading them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="deckhands", message="%(prog)s %(version)s")
def cli() -> None:
    """AI agents as a message-queue cluster: kill any process at any moment, the conversation goes on."""
    from deckhands.settings import read_configuration_files

    for notice in read_configuration_files():
        print_text(notice, err=True)


def main() -> NoReturn:
    """Run the command line and exit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file or socket would take its place
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  (for as long as we live)
    if sys.argv[1:] and sys.argv[1] in VERBS:
        _load(sys.argv[1])
    sys.exit(call(sys.argv[1:]))


def _load(verb: str) -> None:
    """Import the module of a verb; Ctrl-C ends us at once meanwhile, because pydantic takes it for an error of ours."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(ImportError):  # tried again, and told, when the verb is called
        import_module(VERBS[verb][0])
    signal.signal(signal.SIGINT, before)


def call(arguments: Sequence[str]) -> int:
    """Run a verb with its arguments and return the exit code."""
    try:
        code = cli.main(list(arguments), standalone_mode=False, prog_name="deckhands")
    except click.ClickException as error:
        told = io.StringIO()
        error.show(told)
        print_text(told.getvalue().rstrip("\n"), err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except DeckhandsError as error:
        return _expected(error)
    except Exception as error:  # noqa: BLE001  (the outermost edge)
        return _expected(known) if (known := _of_home(error)) else _unexpected(error)
    return int(code or 0)


def _expected(error: DeckhandsError) -> int:
    if _is_debugging():
        print_text(traceback.format_exc(), err=True)
    print_text(f"deckhands: {error.message}", err=True)
    if error.remedy:
        print_text(f"  {error.remedy}", err=True)
    return 2 if isinstance(error, UsageError) else 1


def _of_home(error: Exception) -> DeckhandsError | None:
    """Return the error of a file in the home that is not of the kind it should be, or not ours; None for any other."""
    from deckhands.settings import FaceSettings

    with suppress(UsageError):
        home = FaceSettings.from_env().home
        if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename.startswith(f"{home}/"):
            remedy = "Move it away, or choose another home by DECKHANDS_HOME."
            return DeckhandsError(f"{error.filename} cannot be used: {error.strerror}.", remedy=remedy)
    return None


def _unexpected(error: Exception) -> int:
    if _is_debugging():
        print_text(traceback.format_exc(), err=True)
        return 1
    first_line = (str(error).splitlines() or [""])[0]
    print_text(f"deckhands: unexpected error: {type(error).__name__}: {first_line}", err=True)
    if log := _log_of(traceback.format_exc()):
        print_text(f"  Please report it; the traceback is at the end of {log}.", err=True)
    return 1


def _is_debugging() -> bool:
    from deckhands.settings import FaceSettings

    try:
        return FaceSettings.from_env().debug
    except UsageError:
        return False


def _log_of(text: str) -> Path | None:
    """Append a traceback to the log of errors and return its path; None if it cannot be written."""
    from deckhands.settings import FaceSettings

    try:
        log = FaceSettings.from_env().home / "errors.log"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except (OSError, DeckhandsError):
        return None
    return log
