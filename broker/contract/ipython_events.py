"""Cells in the conversation's IPython kernel (OpenHands 3.2, 3.3, 10.5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from broker.contract.actions import RiskyAction
from broker.contract.events import Action, Observation, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.specs.tool_arguments import required_text, risk_in, seconds_in
from broker.specs.tool_schemas import SECURITY_RISK
from broker.specs.tool_specs import ToolSpec

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
            code=required_text(arguments, "code", EXECUTE_IPYTHON_CELL.name),
            # Differs: the original's tool has no such argument, and a long cell could not be run.
            timeout=seconds_in(arguments, "timeout"),
            security_risk=risk_in(arguments),
        )

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.thought), Paragraph(self.code, "cyan", ">>> "))

    @property
    def asked(self) -> tuple[Paragraph, ...]:
        """See `Action.asked`."""
        return (Paragraph(self.code, "cyan", "  "),)


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
