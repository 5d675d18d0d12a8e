"""Reading, writing and editing files (OpenHands sections 3.2, 3.3, 10.4): names, fields, defaults.

Two ways lead to a file: lines of it as they are, by number, and the string-replace editor that a model is offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal

from broker.contract.actions import RiskyAction
from broker.contract.events import Action, Observation, WorkspaceUse
from broker.contract.paragraphs import Paragraph
from broker.specs.tool_arguments import RISK, refuse_unknown, required_text, risk_in
from broker.specs.tool_schemas import SECURITY_RISK
from broker.specs.tool_specs import OutcomePolicy, ToolSpec

EDITOR_ARGUMENTS = frozenset({"file_text", "old_str", "new_str", "insert_line"})

STR_REPLACE_EDITOR = ToolSpec(
    name="str_replace_editor",
    description=(
        "View, create and edit text files. `view` shows a file with line numbers, or a directory two levels deep. "
        "`create` makes a new file and refuses if there is one. `str_replace` replaces `old_str`, which must occur "
        "exactly once, white space included, by `new_str`. `insert` puts `new_str` after line `insert_line`. "
        "`undo_edit` takes the last edit of the file back. Long output is cut."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
                "description": "What to do.",
            },
            "path": {"type": "string", "description": "Absolute path of the file or directory."},
            "file_text": {"type": "string", "description": "For `create`: the content of the new file."},
            "old_str": {"type": "string", "description": "For `str_replace`: the text to replace."},
            "new_str": {"type": "string", "description": "For `str_replace` and `insert`: the new text."},
            "insert_line": {"type": "integer", "description": "For `insert`: the line after which to insert; 0: top."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For `view` of a file: first and last line, from 1; -1 as last: to the end.",
            },
            "security_risk": SECURITY_RISK,
        },
        "required": ["command", "path", "security_risk"],
    },
)


class FileReadSource(StrEnum):
    """Which reader reads a file."""

    OH_ACI = "oh_aci"
    DEFAULT = "default"


class FileEditSource(StrEnum):
    """Which editor makes an edit."""

    LLM_BASED_EDIT = "llm_based_edit"
    OH_ACI = "oh_aci"


class FileReadAction(RiskyAction):
    """Read a file, or a range of its lines.

    Attributes:
        path: for the default reader relative to where the shell is; absolute for the editor's view.
        start, end: lines from 0, the end excluded; -1: the end of the file. Of the default reader.
        view_range: first and last line from 1. Of the editor's view, which is used if it is given.
    """

    kind: Literal["action.read"] = "action.read"
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.IDEMPOTENT
    sentence_template: ClassVar[str] = "Reading {path}"
    user_template: ClassVar[str] = "User requested to read file: {path}"
    path: str
    start: int = 0
    end: int = -1
    impl_source: FileReadSource = FileReadSource.DEFAULT
    view_range: tuple[int, ...] | None = None


class FileWriteAction(RiskyAction):
    """Write a file, or lines in the place of a range; a missing file is made, with its directories.

    Attributes:
        path: absolute, or relative to where the shell is.
        start, end: lines from 0, the end excluded; -1: the end of the file. The same twice: before that line.
    """

    kind: Literal["action.write"] = "action.write"
    sentence_template: ClassVar[str] = "Writing {path}"
    path: str
    content: str
    start: int = 0
    end: int = -1

    @property
    def asked(self) -> tuple[Paragraph, ...]:
        """See `Action.asked`."""
        where = "" if (self.start, self.end) == (0, -1) else f", lines [{self.start}, {self.end})"
        return (Paragraph(self.sentence + where, "cyan", "  "), Paragraph(self.content, "green", "  + "))


class FileEditAction(RiskyAction):
    """Edit a file with a command of the string-replace editor, or by a draft."""

    kind: Literal["action.edit"] = "action.edit"
    tool_spec: ClassVar[ToolSpec] = STR_REPLACE_EDITOR
    enabled_by: ClassVar[str] = "enable_editor"
    path: str
    command: str = ""
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | str | None = None
    content: str = ""
    start: int = 1
    end: int = -1
    impl_source: FileEditSource = FileEditSource.OH_ACI

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Editing {self.path} ({self.command or 'draft'})"

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`; the command `view` reads."""
        tool = STR_REPLACE_EDITOR.name
        command = required_text(arguments, "command", tool)
        path = required_text(arguments, "path", tool)
        if command == "view":
            return FileReadAction(
                path=path,
                impl_source=FileReadSource.OH_ACI,
                view_range=arguments.get("view_range"),
                security_risk=risk_in(arguments),
            )
        refuse_unknown(arguments, sorted(EDITOR_ARGUMENTS | {"command", "path", "view_range", RISK}), tool)
        return cls(
            path=path,
            command=command,
            impl_source=FileEditSource.OH_ACI,
            security_risk=risk_in(arguments),
            **{name: arguments[name] for name in EDITOR_ARGUMENTS & set(arguments)},
        )

    @property
    def asked(self) -> tuple[Paragraph, ...]:
        """See `Action.asked`."""
        where = "" if self.insert_line is None else f", after line {self.insert_line}"
        return (
            Paragraph(self.sentence + where, "cyan", "  "),
            Paragraph(self.old_str or "", "red", "  - "),
            Paragraph(self.file_text or self.new_str or self.content, "green", "  + "),
        )


class FileReadObservation(Observation):
    """The content of a file."""

    kind: Literal["observation.read"] = "observation.read"
    is_cut: ClassVar[bool] = False
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.READ
    sentence_template: ClassVar[str] = "I read the file {path}."
    path: str
    impl_source: FileReadSource = FileReadSource.DEFAULT
    image_urls: tuple[str, ...] | None = None

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        count = len(self.content.splitlines())
        return (Paragraph(f"{count} line{'' if count == 1 else 's'}", "dim", "  "),)


class FileWriteObservation(Observation):
    """A file was written."""

    kind: Literal["observation.write"] = "observation.write"
    agent_template: ClassVar[str] = ""
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    sentence_template: ClassVar[str] = "I wrote the file {path}."
    path: str


class FileEditObservation(Observation):
    """A file was edited, or could not be; the content says which."""

    kind: Literal["observation.edit"] = "observation.edit"
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    sentence_template: ClassVar[str] = "I edited the file {path}."
    path: str = ""
    prev_exist: bool = False
    old_content: str | None = None
    new_content: str | None = None
    impl_source: FileEditSource = FileEditSource.OH_ACI
    diff: str | None = None

    @property
    def agent_text(self) -> str:
        """See `Observation.agent_text`."""
        if self.content or self.diff is None:
            return self.content
        return f"[The file {self.path} was {'edited' if self.prev_exist else 'created'}.]\n{self.diff}"

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.diff or self.content, "dim", "  "),)
