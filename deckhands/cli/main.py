"""The program `deckhands`: calls the command, and turns every error into a message and an exit code.

Holds: no traceback reaches the terminal unless DECKHANDS_DEBUG is set; `--help` imports no command.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from broker.runtime import DeckhandsError, UsageError
from deckhands.cli.command_group import CommandEntry, LazyCommandGroup, find_command
from deckhands.client import print_text

INTERRUPTED = 130
READING = "Read conversations"
STARTS_PROCESSES = frozenset({"replay", "prompt", "open"})
"""Commands of that section whose programs need the whole environment."""


@click.group(cls=LazyCommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="deckhands", message="%(prog)s %(version)s")
def cli() -> None:
    """Run AI agents as a message-queue cluster. Kill any process at any moment: the conversation continues."""
    from deckhands.settings import read_configuration_files

    for notice in read_configuration_files():
        print_text(notice, err=True)


def main() -> NoReturn:
    """Run the command line and exit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file or socket would get its descriptor
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  (for as long as we live)
    if sys.argv[1:] and (verb := find_command(sys.argv[1])):
        gc.disable()  # imports leave no garbage, and collections take a tenth of the import time
        _load(verb)
        gc.freeze()
        gc.enable()
    sys.exit(call(sys.argv[1:]))


def _load(verb: CommandEntry) -> None:
    """Import the module of a command.

    Meanwhile, Ctrl-C ends the process, because pydantic would report it as an error.
    """
    if verb.section == READING and verb.name not in STARTS_PROCESSES:
        from deckhands.settings import skip_pydantic_plugins

        skip_pydantic_plugins()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with suppress(ImportError):  # the call imports it again and reports the error
        import_module(verb.module)
    signal.signal(signal.SIGINT, before)


def call(arguments: Sequence[str], command: click.Command = cli, *, name: str = "deckhands") -> int:
    """Run a command, or another click command, with its arguments and return the exit code."""
    try:
        code = command.main(list(arguments), standalone_mode=False, prog_name=name)
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        print_text(text.getvalue().rstrip("\n"), err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except DeckhandsError as error:
        return _report_error(error)
    except Exception as error:  # noqa: BLE001  (the outermost edge)
        return _report_error(known) if (known := _of_home(error)) else _report_unexpected_error(error)
    return int(code or 0)


def _report_error(error: DeckhandsError) -> int:
    if _is_debugging():
        print_text(traceback.format_exc(), err=True)
    print_text(f"deckhands: {error.message}", err=True)
    if error.remedy:
        print_text(f"  {error.remedy}", err=True)
    return 2 if isinstance(error, UsageError) else 1


def _of_home(error: Exception) -> DeckhandsError | None:
    """Return the error to report if a file in the home directory is unusable; None for any other error."""
    from deckhands.settings import CliSettings

    with suppress(UsageError):
        home = CliSettings.from_env().home
        if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename.startswith(f"{home}/"):
            remedy = "Move it away, or set DECKHANDS_HOME to another directory."
            return DeckhandsError(f"{error.filename} cannot be used: {error.strerror}.", remedy=remedy)
    return None


def _report_unexpected_error(error: Exception) -> int:
    if _is_debugging():
        print_text(traceback.format_exc(), err=True)
        return 1
    first_line = (str(error).splitlines() or [""])[0]
    print_text(f"deckhands: unexpected error: {type(error).__name__}: {first_line}", err=True)
    if log := _log_of(traceback.format_exc()):
        print_text(f"  Please report it; the traceback is at the end of {log}.", err=True)
    return 1


def _is_debugging() -> bool:
    from deckhands.settings import CliSettings

    try:
        return CliSettings.from_env().debug
    except UsageError:
        return False


def _log_of(text: str) -> Path | None:
    """Append a traceback to the error log and return its path; None if it cannot be written."""
    from deckhands.settings import CliSettings

    try:
        log = CliSettings.from_env().home / "errors.log"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    except (OSError, DeckhandsError):
        return None
    return log
