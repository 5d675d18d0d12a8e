"""Verbs are found without being imported, each gets its options as one value, and all are on their page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import click
import pytest

from deckhands.cli.command_group import GENERATED, SECTIONS, CommandEntry, find_command, find_commands, parse_commands
from deckhands.cli.field_options import WITHOUT, WRITTEN
from deckhands.client.tasks.spec import TaskSpec

NEW_VERB = '''"""`deckhands hello`: greet."""

SECTION = "Start a conversation"
SUMMARIES = {
    "hello": "Greet.",
    "good-bye": "Leave {politely}.",
}

OTHER = {"a": 1}
'''


def commands_below(command: click.Command) -> Iterator[click.Command]:
    """Yield the command, or the commands of a group."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from commands_below(inner)
    else:
        yield command


COMMANDS = [
    pytest.param(command, id=f"{verb.name}-{command.name}")
    for verb in find_commands().values()
    for command in commands_below(verb.command())
]


WITHOUT_AUTHOR = {
    "reads": {
        *("budget ls", "budget report", "budget show", "dead ls", "dead show", "diff", "doctor", "encryption ls"),
        *("eval compare", "eval logs", "eval status", "inbox ls", "key ls", "logs", "ls", "open", "prompt", "replay"),
        *("results", "rollouts ls", "rollouts show", "schedule ls", "show", "skills check", "skills ls", "tenants"),
        *("top", "verify", "wait", "webhook deliveries", "webhook ls", "why"),
    },
    "writes files or text on this machine alone": {
        *("eval export", "eval report", "completion", "export", "rollouts export", "skills add", "skills rm"),
    },
    "starts conversations, whose first event names the task": {
        *("acp", "chat", "demo", "eval attach", "eval fork", "eval run", "import", "rollouts attach", "rollouts run"),
        *("run", "submit"),
    },
    "is a process of the cluster, or prepares its store": {
        *("beat", "chaos", "controller", "ingress", "jobs", "metrics", "rollouts engine", "serve"),
        *("setup", "tools", "up", "upgrade"),
    },
}
"""The verbs that take no `--by` and no `--reason`, by the reason."""


def named_commands() -> Iterator[tuple[str, click.Command]]:
    def walk(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from walk(inner, *names, name)
        else:
            yield " ".join(names), command

    for name, verb in find_commands().items():
        yield from walk(verb.command(), name)


def test_every_verb_that_acts_takes_an_author_and_a_reason() -> None:
    found = {name: {option for one in verb.params for option in one.opts} for name, verb in named_commands()}
    both = {name for name, options in found.items() if {"--by", "--reason"} <= options}
    either = {name for name, options in found.items() if {"--by", "--reason"} & options}
    without = {name for names in WITHOUT_AUTHOR.values() for name in names}
    assert either == both
    assert found.keys() - both == without
    assert sum(map(len, WITHOUT_AUTHOR.values())) == len(without)


def test_declarations_of_a_module_are_found_in_its_text() -> None:
    assert parse_commands("deckhands.verbs.hello", NEW_VERB) == [
        CommandEntry("hello", "deckhands.verbs.hello", "Start a conversation", "Greet."),
        CommandEntry("good-bye", "deckhands.verbs.hello", "Start a conversation", "Leave {politely}."),
    ]
    assert parse_commands("deckhands.cli.options", '"""No verbs."""\n') == []


@pytest.mark.parametrize("verb", find_commands().values(), ids=find_commands())
def test_text_and_import_agree(verb: CommandEntry) -> None:
    module = import_module(verb.module)
    assert module.SUMMARIES[verb.name] == verb.summary
    assert verb.section == module.SECTION
    assert verb.section in SECTIONS
    assert verb.command().name == verb.name


def test_one_verb_is_found_like_all() -> None:
    assert {name: find_command(name) for name in find_commands()} == find_commands()
    assert [find_command(name) for name in ("", "nobody", "SECTION", "\udcff")] == [None] * 4


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parameter_is_a_field_of_the_verbs_options(command: click.Command) -> None:
    assert command.callback is not None
    if not any(one.expose_value for one in command.params):
        assert not signature(command.callback).parameters
        return
    (parameter,) = signature(command.callback).parameters
    options = get_type_hints(command.callback)[parameter]
    assert is_dataclass(options)
    known = {field.name for field in fields(options)}
    given = {one.name for one in command.params if one.expose_value}  # the others keep their values themselves
    generated = TaskSpec.model_fields.keys() - WRITTEN - WITHOUT if GENERATED in known else set()
    assert known - {GENERATED} | generated == given


def test_help_imports_no_verb() -> None:
    program = (
        "import sys\nfrom deckhands.cli.main import call\ncall(['--help'])\n"
        "print(sorted(name for name in sys.modules if name.startswith(('deckhands.cli.', 'deckhands.verbs.')) or name == 'pydantic'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['deckhands.cli.command_group', 'deckhands.cli.main']"


WRITING = {
    *("broker.log.event_log", "broker.secrets.masking", "broker.store.embedded", "deckhands.client.archive.archive"),
    *("deckhands.client.client", "deckhands.client.trajectories", "deckhands.client.verification"),
}
"""Modules that serve writers, archives and rollouts."""


HEAVY = [
    ("ls", {"pydantic", "redis", "opentelemetry", "celery", "litellm", "yaml", "fsspec", "broker.contract.codec"}),
    ("show abc", {"redis", "opentelemetry", "celery", "litellm", "yaml", "fsspec", "ctypes", "tomllib", *WRITING}),
    ("logs abc", {"redis", "celery", "ctypes", "tomllib", "deckhands.client.watcher", *WRITING}),
    ("why abc", {"redis", "celery", "ctypes", "tomllib", *WRITING}),
    ("dead ls", {"redis", "opentelemetry", "celery", "litellm", "fsspec", "pydantic_settings"}),
]
"""Verbs that read, and what none of them may import; each runs behind those above it, in one program."""


def test_verb_that_reads_does_without_heavy_modules(tmp_path: Path) -> None:
    program = (
        f"import sys\nfrom deckhands.cli.main import main\nfor verb, heavy in {HEAVY}:\n    sys.argv[1:] = verb.split()\n"
        "    try:\n        main()\n    except SystemExit:\n        print(verb, sorted(heavy & sys.modules.keys()))"
    )
    environment = {"PATH": "/usr/bin:/bin", "DECKHANDS_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    found = [line for line in done.stdout.splitlines() if line.endswith("]")]
    assert found == [f"{verb} []" for verb, _ in HEAVY], done.stdout


PAGE = (Path(__file__).parents[4] / "docs" / "cli.md").read_text()


def test_every_verb_is_on_the_page() -> None:
    assert [verb for verb in find_commands() if not re.search(rf"`(deckhands )?{verb}\b", PAGE)] == []
