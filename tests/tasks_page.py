"""docs/tasks.md, made of `TaskSpec`. `make docs` writes it, and a test compares it."""

from __future__ import annotations

from pydantic import AwareDatetime

from deckhands.cli.commands.submit import submit
from deckhands.client.tasks.spec import TaskSpec
from tests.class_reference import shown_default, shown_type, table
from tests.events_page import JSON_NAMES

NAMES = {**JSON_NAMES, AwareDatetime: "time"}
HEAD = ("field", "type", "default", "option of `submit`", "meaning")
OF_OTHER_NAMES = {
    "task": "the argument, `-t`, `-f`",
    "limits": "`--max-iterations`, `--max-budget`, `--max-tokens`, `--max-seconds`",
    "output": "`--output-schema`",
    "images": "`--picture`",
    "headless": "`--headless`, `--no-headless`",
}
INTRODUCTION = """# Tasks

A task is one `TaskSpec` in every interface. `make docs` writes this page from the class, and a test compares the two.

| way in | how it gives the fields |
|---|---|
| [command line](cli.md) | options of `run`, `submit`, `chat`, `acp` and `schedule add`; those of time belong to `submit` and `schedule add` |
| [Python](python.md) | keywords of `Client.submit`, `Conversation` and `AsyncConversation`, or a `TaskSpec` |
| [HTTP](serving.md) | the body of `POST /conversations`, `/runs/wait` and `/runs/stream`; the header `Idempotency-Key` is the key |
| [Celery](producing-work.md#celery-tasks) | keyword arguments of `deckhands.run` and `deckhands.submit`; the id of the task is the key |
| [inbox](producing-work.md#the-inbox-a-stream-for-any-language) | the JSON of `request`, with `id`, which is the key |
| [files of tasks](producing-work.md#files-of-tasks) | an object a line, or columns; with `id`, which is the key |
| [schedules](cli.md), `PUT /schedules/NAME` | the options of `submit`, or `request`; each tick is a new conversation |
| [A2A, MCP, OpenAI's API](serving.md#other-protocols), [AG-UI](protocols.md) | the fields of the protocol, and `metadata`, `options` or `deckhands` with the other fields |

[Features by way in](tasks.md#features-by-way-in) shows the unsupported features of each, and why. All have the same defaults and refuse an unknown field by its name. The worker that opens the workspace reads the files of the repository (`AGENTS.md`, [skills](agents.md#skills), [set-up scripts](workspaces.md#scripts-of-a-repository)).

Python also takes paths and bytes as `images`, a Pydantic model as `output`, a `timedelta` as `delay` or `expires`, an archive on your machine as `workspace`, and `tenancy=Tenancy(…)` for `tenant`, `experiment` and `priority`. `headless` is false by default in a `Conversation` and in `deckhands chat`, because a user is there.

As a schema: [task-request.json](schemas/task-request.json). A field can be [added in one place](adding-things.md#a-field-of-a-task).

"""


def tasks_page() -> str:
    options = {option.name: option.opts[-1] for option in submit.params}
    rows = [
        (
            f"`{name}`",
            shown_type(field.annotation, NAMES).replace("(#", "(events.md#").replace("table", "object"),
            shown_default(field, "true"),
            OF_OTHER_NAMES.get(name) or (f"`{options[name]}`" if name in options else ""),
            field.description or "",
        )
        for name, field in TaskSpec.model_fields.items()
    ]
    return INTRODUCTION + table(HEAD, rows) + "\n"
