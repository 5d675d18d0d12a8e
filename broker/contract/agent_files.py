"""Agents in Markdown files, which a conversation's agent can delegate tasks to (OpenHands' SDK, Claude Code).

A file is YAML front matter and the agent's instructions. Used fields: `name`, `description`, `tools` and
`disallowedTools` (names of this system, of OpenHands or of Claude Code), `model`, `permission_mode`,
`max_iteration_per_run` and `max_budget_per_run`.

Holds: the agent of a file has at most the rights and the limits of its parent. A file can take tools away, ask for more
confirmations and lower limits; it cannot add a tool, drop a confirmation or choose a model that the operator does not
offer to the tenant by name.
Untrusted: an author of the repository, or the agent itself, may write any of these files.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from broker.contract.markdown import describe_text, read_files, split_front_matter
from broker.contract.plain_json import replace_surrogates
from broker.contract.policies import ConfirmationPolicy
from broker.contract.specs import AgentSpec, Limits, LLMSpec
from broker.contract.tool_specs import ToolOffer

AGENT_FOLDERS = (".claude/agents", ".openhands/agents", ".agents/agents")
"""Below a workspace and a user's home directory. A file of a later folder replaces one of the same name."""
MAX_AGENT_FILES = 32
MAX_INSTRUCTION_CHARS = 16_000
"""The limit of a file's instructions, which become part of a conversation's first event. It is never shortened."""
MAX_TOOLS = 100
PARENTS_MODEL = frozenset({"inherit", "sonnet", "opus", "haiku"})
"""Names of models that mean the parent's: Claude Code's short names are those of no provider."""
READ_ONLY = "ReadOnlyAgent"
_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FLAGS = {
    "enable_cmd": ("executebash", "bash", "terminal"),
    "enable_editor": ("strreplaceeditor", "edit", "write", "multiedit", "notebookedit", "fileeditor"),
    "enable_patch": ("applypatch",),
    "enable_search": ("grep", "glob", "ls"),
    "enable_plan_mode": ("tasktracker", "todowrite"),
    "enable_jupyter": ("executeipythoncell",),
    "enable_browsing": ("browser", "browsertoolset"),
}
"""The options of a specification, and the names of their tools as `_normalize` returns them."""
_CHANGING = ("enable_cmd", "enable_editor", "enable_patch", "enable_jupyter", "enable_browsing")
_MODES = {"always_confirm": "always", "confirm_risky": "risky", "never_confirm": "", "": ""}


@dataclass(frozen=True, slots=True)
class AgentFile:
    """An agent that a file defines.

    Attributes:
        description: the work to delegate to it, on one line.
        tools: None: its parent's.
        without: tools that it does not get.
        model: empty for its parent's.
        mode: of confirmations, `always` or `risky`; empty for its parent's.
        max_iterations, max_budget_usd: None: its share of its parent's limits.
    """

    name: str
    description: str
    instructions: str
    tools: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    model: str = ""
    mode: str = ""
    max_iterations: int | None = None
    max_budget_usd: float | None = None

    def make_spec(self, parent: AgentSpec, *, model: str | None) -> AgentSpec:
        """Return the specification of this agent as a delegate of `parent`.

        Args:
            model: the model to use; None for the parent's.
        """
        kept = {flag: getattr(parent, flag) and self._has(*names) for flag, names in _FLAGS.items()}
        offers = tuple(offer for offer in parent.tools if self._has(*_list_names(offer)))
        # It can only read, as its parent can: with a tool that cannot write.
        is_reader = self._has("read", "view") and not offers and not any(kept[flag] for flag in _CHANGING)
        is_reader = is_reader and parent.name == AgentSpec().name and (parent.enable_editor or parent.enable_cmd)
        return parent.model_copy(
            update={
                **kept,
                "name": READ_ONLY if is_reader else parent.name,
                "llm": parent.llm if model is None else LLMSpec(model=model),
                "tools": offers,
                "confirmation": _tighten(parent.confirmation, self.mode),
                "system_prompt_suffix": "\n\n".join(filter(None, (parent.system_prompt_suffix, self.instructions))),
                "enable_delegation": False,
                "enable_delegate_control": False,
                "enable_browsing_delegate": False,
                "delegates": {},
                **dict.fromkeys(("goal", "output", "memory", "plan")),
            }
        )

    def _has(self, *names: str) -> bool:
        """Return whether the agent has a tool with one of these names."""
        return self.without.isdisjoint(names) and (self.tools is None or not self.tools.isdisjoint(names))

    def limit(self, limits: Limits) -> Limits:
        """Return the limits of a delegate, lowered to those of the file."""
        iterations, budget = limits.max_iterations, limits.max_budget_usd
        if self.max_iterations is not None:
            iterations = min(iterations, self.max_iterations)
        if self.max_budget_usd is not None:
            budget = self.max_budget_usd if budget is None else min(budget, self.max_budget_usd)
        return limits.model_copy(update={"max_iterations": iterations, "max_budget_usd": budget})


def is_agent_file(path: str) -> bool:
    """Return whether a file, given by its path below a workspace or home directory, defines an agent."""
    above, _, name = path.rpartition("/")
    return above in AGENT_FOLDERS and name.lower().endswith(".md") and name.lower() != "readme.md"


def parse_agent_file(path: str, text: str) -> AgentFile:
    """Read an agent.

    Args:
        path: gives the name if the front matter does not.

    Raises:
        ValueError: the front matter is not YAML, or a field is invalid; says which.
    """
    head, content = split_front_matter(text)
    return make_agent_file({**head, "name": head.get("name") or PurePosixPath(path).stem}, content)


def make_agent_file(head: Mapping[str, Any], content: str) -> AgentFile:
    """Return the agent of a file's front matter and instructions, or of a definition that a client sends.

    Raises:
        ValueError: a field is invalid; says which.
    """
    instructions = replace_surrogates(content.strip())
    name = str(head.get("name"))
    if not _NAME.fullmatch(name):
        raise ValueError(f"`name` is {ascii(name)[:100]}; it may have 64 letters, digits, `_`, `.` and `-`")
    if len(instructions) > MAX_INSTRUCTION_CHARS:
        raise ValueError(
            f"the instructions have {len(instructions):,} characters; {MAX_INSTRUCTION_CHARS:,} are allowed"
        )
    mode = str(head.get("permission_mode") or "").strip().lower()
    if mode not in _MODES:
        raise ValueError(f"`permission_mode` is {ascii(mode)[:100]}; it may be {', '.join(filter(None, _MODES))}")
    model = str(head.get("model") or "").strip()
    return AgentFile(
        name=name,
        description=describe_text(head.get("description"), content),
        instructions=instructions,
        tools=_parse_tools(head, "tools"),
        without=_parse_tools(head, "disallowedTools") or frozenset(),
        model="" if model in PARENTS_MODEL else model,
        mode=_MODES[mode],
        max_iterations=_parse_limit(head, "max_iteration_per_run", int),
        max_budget_usd=_parse_limit(head, "max_budget_per_run", float),
    )


def render_delegates(delegates: Mapping[str, str]) -> str:
    """Return the text by which a model knows its delegates and their descriptions; empty without any."""
    described = ", ".join(f"{name} ({description})" if description else name for name, description in delegates.items())
    return f"With the tool `delegate` you can hand tasks to these agents: {described}." if described else ""


def load_agent_files(home: Path) -> tuple[AgentFile, ...]:
    """Return the agents that a user's own files define.

    A file that is unusable, or would exceed `MAX_INSTRUCTION_CHARS` in total, is left out with a warning.
    """
    found: dict[str, AgentFile] = {}
    for path, text in read_agent_files(home):
        try:
            agent = parse_agent_file(path, text)
        except ValueError as error:
            _log.warning("Left out of the agents in %s: %s: %s", home, path, error)
            continue
        others = [other for other in found.values() if other.name != agent.name]
        if sum(len(other.instructions) for other in (*others, agent)) > MAX_INSTRUCTION_CHARS:
            _log.warning(
                "The agent %s is left out: all together exceed %d characters", agent.name, MAX_INSTRUCTION_CHARS
            )
            continue
        found[agent.name] = agent
    return tuple(found.values())


def read_agent_files(top: Path) -> Iterator[tuple[str, str]]:
    """Yield the path below `top` and the text of each file that defines an agent."""
    for folder in AGENT_FOLDERS:
        paths = (path for path in sorted((top / folder).glob("*"))[:MAX_AGENT_FILES] if path.is_file())
        yield from read_files(top, (path for path in paths if is_agent_file(path.relative_to(top).as_posix())))


def _tighten(policy: ConfirmationPolicy, mode: str) -> ConfirmationPolicy:
    """Return the policy, tightened so that it also asks for the confirmations of the mode."""
    is_stricter = mode == "always" or (mode == "risky" and policy.mode == "never")
    return policy.model_copy(update={"mode": mode}) if is_stricter else policy


def _parse_tools(head: Mapping[str, Any], field: str) -> frozenset[str] | None:
    """Return the names of a list of tools, or of text with commas, without the arguments in parentheses."""
    value = head.get(field)
    if value is None:
        return None
    values: Iterable[Any] = re.sub(r"\([^()]*\)", "", value).split(",") if isinstance(value, str) else value
    if not isinstance(values, list):
        raise ValueError(f"`{field}` is neither a list nor text")  # noqa: TRY004  (callers collect ValueError)
    if len(values) > MAX_TOOLS:
        raise ValueError(f"`{field}` has {len(values)} names; {MAX_TOOLS} are allowed")
    return frozenset(_normalize(str(each).partition("(")[0]) for each in values)


def _list_names(offer: ToolOffer) -> tuple[str, ...]:
    """Return the names by which a file may refer to a tool.

    These are its own name and, for a tool of an MCP server, Claude Code's name for it.
    """
    return _normalize(offer.name), _normalize(f"mcp{offer.key}")


def _normalize(name: str) -> str:
    """Return a name without what differs between systems: `FileEditorTool` is `file_editor`, for example."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("tool")


def _parse_limit(head: Mapping[str, Any], field: str, kind: type[int | float]) -> Any:
    value = head.get(field)
    if value is None:
        return None
    try:
        limit = kind(str(value))
    except ValueError:
        limit = kind(0)
    if not 0 < limit < math.inf:
        raise ValueError(f"`{field}` is {ascii(value)[:100]}; it must be a number above 0")
    return limit
