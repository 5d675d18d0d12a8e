"""Which features each way in has, and the section of docs/tasks.md that is made of this table.

Holds: a field of `TaskSpec` belongs to a feature or to `NOT_FEATURES`; tests/end_to_end/test_ways_in.py tries each cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.class_reference import table


@dataclass(frozen=True)
class Way:
    """A way in.

    Attributes:
        place: where the documentation describes it.
        takes: how it takes the fields of a task.
    """

    name: str
    title: str
    place: str
    takes: str


@dataclass(frozen=True)
class Feature:
    """A feature of a task.

    Attributes:
        fields: the fields of `TaskSpec` that give it; none for a feature of a repository or a worker.
    """

    name: str
    title: str
    place: str
    fields: tuple[str, ...] = ()


WAYS = (
    Way("run", "CLI `run`", "cli.md", "options"),
    Way("submit", "CLI `submit`", "cli.md", "options"),
    Way("files", "task files", "producing-work.md#files-of-tasks", "fields of a line"),
    Way("embedded", "Python, embedded", "python.md", "keywords of `Conversation`"),
    Way("store", "Python with a store", "python.md", "keywords of `Client.submit`"),
    Way("remote", "Python over HTTP", "python.md", "keywords of `Conversation`"),
    Way("http", "HTTP", "serving.md", "fields of the body"),
    Way("celery", "Celery", "producing-work.md#celery-tasks", "keyword arguments of the task"),
    Way("inbox", "inbox", "producing-work.md#the-inbox-a-stream-for-any-language", "fields of `request`"),
    Way("schedule", "schedule", "producing-work.md#schedules", "fields of `request`, or options"),
    Way("eval", "evaluation", "evaluation.md", "options, and fields of a row"),
    Way("a2a", "A2A", "serving.md#agents-for-other-agents-a2a", "`metadata`"),
    Way("mcp", "MCP", "serving.md#agents-as-tools-mcp", "arguments, and `options`"),
    Way("openai", "OpenAI", "serving.md#openais-chat-completions", "the fields of that API, and `deckhands`"),
    Way("ag-ui", "AG-UI", "protocols.md", "`forwardedProps.deckhands`"),
    Way("acp", "ACP", "serving.md#editors-acp", "options of `deckhands acp`"),
)

REPOSITORY = (
    Feature("workspace", "workspace", "workspaces.md", ("workspace",)),
    Feature("skills", "repository skills", "agents.md#skills"),
    Feature("task_skills", "skills of the task", "agents.md#skills-of-a-task", ("skills",)),
    Feature("agents_md", "`AGENTS.md`", "agents.md#skills"),
    Feature("agent_files", "agents in files", "agents.md#agents-in-files"),
    Feature("setup", "`setup.sh`", "workspaces.md#scripts-of-a-repository"),
    Feature("hooks", "hooks", "security.md#hooks"),
)
AGENT = (
    Feature("agent", "agent", "agents.md", ("agent",)),
    Feature("model", "model", "models.md", ("model",)),
    Feature("images", "images", "tasks.md", ("images",)),
    Feature("tools", "tools", "tools.md", ("tools",)),
    Feature("mcp_servers", "MCP servers", "tools.md#servers-of-a-task", ("mcp_servers",)),
    Feature("secrets", "secrets", "security.md#secrets", ("secrets",)),
    Feature("limits", "limits", "quotas.md#limits-and-errors", ("limits",)),
    Feature("confirmation", "confirmation", "security.md", ("agent",)),
    Feature("output", "structured output", "python.md", ("output",)),
    Feature("delegates", "delegates", "agents.md#delegates", ("agent",)),
    Feature("check", "check of the result", "long-work.md#goals-a-finish-that-is-checked", ("agent",)),
    Feature("headless", "whether a person is there", "tasks.md", ("headless",)),
)
CONVERSATION = (
    Feature("labels", "labels", "producing-work.md#labels", ("labels",)),
    Feature("title", "title", "tasks.md", ("title",)),
    Feature("tenant", "tenant", "quotas.md", ("tenant",)),
    Feature("experiment", "experiment", "quotas.md", ("experiment",)),
    Feature("priority", "priority", "quotas.md", ("priority",)),
    Feature("delay", "delay", "producing-work.md#when-it-begins", ("delay", "not_before")),
    Feature("expiry", "expiry", "producing-work.md#when-it-begins", ("expires",)),
    Feature("key", "idempotency key", "tasks.md", ("idempotency_key",)),
    Feature("acks", "when a write counts", "deployment.md#when-a-write-counts", ("acks",)),
    Feature("rollout", "exact tokens", "rollouts.md", ("rollout",)),
    Feature("pinned", "version of its workers", "deployment.md#pin-a-conversation", ("pinned_version",)),
    Feature("messages", "messages at work", "producing-work.md#messages-while-the-agent-works", ("double_texting",)),
)
TABLES: Mapping[str, tuple[Feature, ...]] = {
    "Repository and operator": REPOSITORY,
    "The agent": AGENT,
    "The conversation": CONVERSATION,
}
FEATURES = (*REPOSITORY, *AGENT, *CONVERSATION)
NOT_FEATURES: Mapping[str, str] = {
    "task": "every way in takes a task",
    "traceparent": "programs that trace set it, by the header of their protocol where it has one",
}

AT_ONCE = "A user waits for it, so it starts at once."
NAMED = "A `Conversation` submits its task once, however often it tries; `conversation_id` finds it again."
SCORED = "An evaluation scores the work after the attempt, by the instance and not by the task."
ALONE = "An attempt runs without a user, so that it can be compared with others."
OF_AN_EVALUATION = "The evaluation sets it, and finds its conversations by it."
QUEUED = "An attempt starts when the evaluation has a place for it."
MISSING: Mapping[tuple[str, str], str] = {
    ("run", "delay"): AT_ONCE,
    ("run", "expiry"): AT_ONCE,
    ("run", "key"): "`run --resume` continues a run; `submit` is for a task that must be submitted once.",
    ("run", "messages"): "No other program sends messages to a run, whose store is its own.",
    ("embedded", "key"): NAMED,
    ("remote", "key"): NAMED,
    ("schedule", "key"): "Each tick is a new conversation; its key is the name of the schedule and the time.",
    ("eval", "skills"): "Instructions in the files of an instance are read only if it has a `setup`: they are not a "
    "part of the task.",
    ("eval", "task_skills"): "Attempts read their instance alone, so that they can be compared with others.",
    ("eval", "agent_files"): "Attempts do not delegate, see *delegates*.",
    ("eval", "agents_md"): "Instructions in the files of an instance are read only if it has a `setup`: they are not "
    "a part of the task.",
    ("eval", "tools"): "Attempts have the tools of their agent, on every cluster the same.",
    ("eval", "mcp_servers"): "Attempts have the tools of their agent, on every cluster the same.",
    ("eval", "secrets"): "An attempt has no secrets: its log is a result that others read.",
    ("eval", "confirmation"): ALONE,
    ("eval", "output"): SCORED,
    ("eval", "delegates"): "Attempts have an agent by its name; give a registered one its delegates.",
    ("eval", "check"): SCORED,
    ("eval", "headless"): ALONE,
    ("eval", "labels"): OF_AN_EVALUATION,
    ("eval", "title"): OF_AN_EVALUATION,
    ("eval", "experiment"): OF_AN_EVALUATION,
    ("eval", "priority"): "Attempts are always `batch`.",
    ("eval", "delay"): QUEUED,
    ("eval", "expiry"): QUEUED,
    ("eval", "acks"): "An attempt can be repeated; set DECKHANDS_ACKS for its whole cluster.",
    ("eval", "pinned"): "Attempts are compared with one another; run them on workers of one version.",
    ("eval", "rollout"): "`deckhands rollouts` collects trajectories: attempts with tokens, in groups.",
    ("eval", "messages"): ALONE,
    ("ag-ui", "key"): "A thread is created once, by its `threadId`, and a run starts once, by its `runId`.",
    ("acp", "delay"): AT_ONCE,
    ("acp", "expiry"): AT_ONCE,
    ("acp", "key"): "The id of a session is that of its conversation; the editor loads it again by it.",
    ("acp", "messages"): "A prompt waits for the end of the turn before it, by the protocol.",
}
"""Why a way in lacks a feature."""

INTRODUCTION = """## Features by way in

Each way in gives the same task. These tables show which features of a task a way in has, and why it lacks one. They are written from tests/ways_in.py; tests/end_to_end/test_ways_in.py submits a task by each way with each feature and looks for the effect, and tries that a way in refuses what it lacks.

"""


def ways_in_section() -> str:
    """Return the section."""
    notes = list(dict.fromkeys(MISSING.values()))
    ways = table(
        ("way in", "takes the fields of a task as"), [(f"[{way.title}]({way.place})", way.takes) for way in WAYS]
    )
    tables = [f"### {title}\n\n{_table_of(features, notes)}" for title, features in TABLES.items()]
    reasons = "\n".join(f"{number}. {why}" for number, why in enumerate(notes, 1))
    return INTRODUCTION + "\n\n".join((ways, *tables, f"### Why it is missing\n\n{reasons}")) + "\n"


def _table_of(features: tuple[Feature, ...], notes: list[str]) -> str:
    rows = [[f"{way.title}", *(_cell(way, feature, notes) for feature in features)] for way in WAYS]
    return table(["way in", *(f"[{feature.title}]({feature.place})" for feature in features)], rows)


def _cell(way: Way, feature: Feature, notes: list[str]) -> str:
    why = MISSING.get((way.name, feature.name))
    return "yes" if why is None else f"[{notes.index(why) + 1}](#why-it-is-missing)"
