"""Live sessions beside the shell: IPython cells (OpenHands 3.2, 3.3, 10.5) and turns of an ACP agent.

An ACP agent is a program in the workspace's sandbox that speaks the Agent Client Protocol. Its turn is a chain of
actions: the first action sends the prompt, each further one lets the agent continue. Each observation is one report:
it ends with a finished tool call, a permission request, or the end of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from broker.contract.actions import RiskyAction
from broker.contract.events import Action, EventValue, JsonObject, Observation, TokenUsage, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.contract.task_list import TaskItem
from broker.contract.tool_arguments import parse_risk, parse_seconds, require_text
from broker.contract.tool_specs import SECURITY_RISK, ToolSpec

IMAGE_PLACEHOLDER = "![image](data:image/png;base64, ...) already displayed to user"

_INLINE_IMAGE = re.compile(r"^.*!\[image\]\(data:image/png;base64,.*$", re.MULTILINE)

EXECUTE_IPYTHON_CELL = ToolSpec(
    name="execute_ipython_cell",
    description=(
        "Run a cell of Python code in the conversation's IPython kernel. Variables and imports live from cell to "
        "cell; magics such as %pip and %timeit work, and packages that bash installs with pip can be imported; "
        "pictures are shown. The kernel follows the shell's directory. A cell is interrupted after 120 seconds, or "
        "after `timeout`. A cell that is just `%restart` gives a new kernel."
    ),
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The code."},
            "timeout": {"type": "number", "description": "Seconds after which the cell is interrupted. Default 120."},
            "security_risk": SECURITY_RISK,
        },
        "required": ["code", "security_risk"],
    },
)


class IPythonRunCellAction(RiskyAction):
    """Run a cell in the conversation's IPython kernel."""

    kind: Literal["action.run_ipython"] = "action.run_ipython"
    tool_spec: ClassVar[ToolSpec] = EXECUTE_IPYTHON_CELL
    enabled_by: ClassVar[str] = "enable_jupyter"
    code: str
    include_extra: bool = True
    kernel_init_code: str = ""

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`."""
        return cls(
            code=require_text(arguments, "code", EXECUTE_IPYTHON_CELL.name),
            # Differs: the original's tool has no such argument, so a long cell could not be run.
            timeout=parse_seconds(arguments, "timeout"),
            security_risk=parse_risk(arguments),
        )

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.thought), Paragraph(self.code, "action", ">>> "))

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        return (Paragraph(self.code, "action", "  "),)


class IPythonRunCellObservation(Observation):
    """The output of a cell."""

    kind: Literal["observation.run_ipython"] = "observation.run_ipython"
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    code: str
    image_urls: tuple[str, ...] | None = None

    @property
    def agent_text(self) -> str:
        """See `Observation.agent_text`."""
        return _INLINE_IMAGE.sub(IMAGE_PLACEHOLDER, self.content)


class AcpDiff(EventValue):
    """A file change reported by the agent; `old_text` is None for a new file."""

    path: str
    old_text: str | None = None
    new_text: str = ""

    @property
    def shown(self) -> str:
        """The removed and added lines."""
        removed = [f"- {line}" for line in (self.old_text or "").splitlines()]
        return "\n".join([self.path, *removed, *(f"+ {line}" for line in self.new_text.splitlines())])


class AcpCall(EventValue):
    """A tool call reported by an ACP agent. The agent has run the tool itself, in the sandbox.

    Attributes:
        tool_kind: `read`, `edit`, `delete`, `move`, `search`, `execute`, `think`, `fetch` or `other`.
        status: `pending`, `in_progress`, `completed` or `failed`.
        arguments: the arguments of its tool; empty if not reported.
        text: the output.
        paths: the files involved.
    """

    title: str = ""
    tool_kind: str = "other"
    status: str = "pending"
    arguments: JsonObject = Field(default_factory=dict)
    text: str = ""
    diffs: tuple[AcpDiff, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line of the call if it names one, else empty."""
        command = self.arguments.get("command")
        if isinstance(command, list):
            command = " ".join(map(str, command))
        return command if isinstance(command, str) else ""

    @property
    def shown(self) -> str:
        """A description of the call for users."""
        title = self.title or self.tool_kind
        lines = [title, f"$ {self.command}" if self.command and self.command != title else ""]
        return "\n".join([*filter(None, lines), *(diff.shown for diff in self.diffs)])


class AcpOption(EventValue):
    """A possible answer to a permission request; `option_kind` is `allow_once`, `reject_once` or another."""

    id: str
    name: str = ""
    option_kind: str = ""


class AcpPermission(EventValue):
    """A permission request of an ACP agent.

    Attributes:
        number: the request's number, counted by the program that runs the agent.
    """

    number: int
    call: AcpCall = AcpCall()
    options: tuple[AcpOption, ...] = ()

    def option(self, *kinds: str) -> str:
        """Return the id of the first option of the given kinds, in order of preference; empty if there is none."""
        found = [option.id for kind in kinds for option in self.options if option.option_kind == kind]
        return found[0] if found else ""


class AcpTurnAction(RiskyAction):
    """Prompt an ACP agent, or let it continue until its next report.

    No confirmation is needed, because the agent requests permissions itself.

    Attributes:
        command: the command line that starts it.
        prompt: the prompt; empty to continue its turn.
        session_id: the session to continue; empty for a new one.
        permission: the permission request to refuse; 0 for none.
        option_id: the option that refuses it; empty to cancel the request.
        timeout: the longest silence in seconds.
    """

    answered_by: ClassVar[tuple[str, ...]] = ("observation.acp",)

    kind: Literal["action.acp_turn"] = "action.acp_turn"
    is_shown_to_users: ClassVar[bool] = False
    command: str
    prompt: str = ""
    session_id: str = ""
    permission: int = 0
    option_id: str = ""

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return "Prompting the ACP agent" if self.prompt else "The ACP agent continues"


class AcpPermissionAction(RiskyAction):
    """Grant an ACP agent's permission request, and let the agent continue until its next report.

    Attributes:
        call: the call to permit.
        refusal_id: the option used if the user refuses; empty to cancel the request.

    For the other fields, see `AcpTurnAction`.
    """

    answered_by: ClassVar[tuple[str, ...]] = ("observation.acp",)

    kind: Literal["action.acp_permission"] = "action.acp_permission"
    command: str
    session_id: str = ""
    permission: int
    option_id: str = ""
    refusal_id: str = ""
    call: AcpCall = AcpCall()

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Allowing the ACP agent: {self.call.title or self.call.tool_kind}"

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        return (Paragraph(self.call.shown, "action", "  "),)


class AcpObservation(Observation):
    """A report of an ACP agent: its output since the previous report.

    Attributes:
        content: the agent's message.
        state: `working`; `permission`: it requests a permission; `ended`: its turn has ended; `lost`: its session
            cannot be continued; `failed`: it has exited, hangs, or violates the protocol.
        session_id: its session; empty if there is none that can be continued.
        thoughts: its thoughts.
        plan: its plan, if that has changed.
        call: a tool call that has ended.
        stop_reason: the protocol's stop reason of the turn.
        code: the class of a failure, see `controller_worker.providers.errors`.
        reason: a description of a failure or a loss.
        usage: tokens of the turn that has ended, as counted by the agent.
        cost_usd: the session's cost so far, as counted by the agent; None if not reported.
        agent: its name and version.
        ignored: the number of its messages that could not be parsed.
    """

    kind: Literal["observation.acp"] = "observation.acp"
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    state: Literal["working", "permission", "ended", "lost", "failed"]
    session_id: str = ""
    thoughts: str = ""
    plan: tuple[TaskItem, ...] | None = None
    call: AcpCall | None = None
    permission: AcpPermission | None = None
    stop_reason: str = ""
    code: str = ""
    reason: str = ""
    usage: TokenUsage = TokenUsage()
    cost_usd: float | None = None
    agent: str = ""
    ignored: int = 0

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        subject = self.call.title if self.call is not None else self.reason
        return f"The ACP agent reports ({self.state})" + (f": {subject}" if subject else "")

    @property
    def agent_text(self) -> str:
        """See `Observation.agent_text`."""
        done = f"{self.call.shown}\n[{self.call.status}]\n{self.call.text}" if self.call is not None else ""
        return "\n".join(filter(None, (self.content, done, self.reason))) or f"[{self.state}]"

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`; the agent's message is a separate event."""
        shown = [Paragraph(self.thoughts, "detail")]
        if self.call is not None:
            failed = "failed" if self.call.status == "failed" else ""
            shown += [Paragraph(self.call.shown, "action"), Paragraph(self.call.text, "detail", "  ")]
            shown += [Paragraph(failed, "problem", "  ")]
        return (*shown, Paragraph(self.reason, "problem", "  ! "))
