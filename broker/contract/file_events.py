"""Actions and observations for reading, writing and editing files (OpenHands 3.2, 3.3, 10.4: names, fields, defaults).

Two kinds of access exist: raw lines by number, and the string-replace editor that is offered to models.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import chain
from typing import Any, ClassVar, Literal

from broker.contract.actions import RiskyAction
from broker.contract.events import Action, Observation, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.contract.specs import EventValue
from broker.contract.tool_arguments import RISK, parse_risk, refuse_unknown, require_text
from broker.contract.tool_specs import SECURITY_RISK, OutcomePolicy, ToolSpec
from broker.runtime import format_count

NUMBERED_LINES_PREFIX = "Here's the result of running `cat -n` on "
"""The first words of the text in the editor's view of a file."""

EDITOR_ARGUMENTS = frozenset(
    {"file_text", "old_str", "new_str", "insert_line", "edits", "replace_all", "overwrite", "cell", "cell_type"}
)

STR_REPLACE_EDITOR = ToolSpec(
    name="str_replace_editor",
    description=(
        "View, create and edit text files. `view` shows a file with line numbers, or a directory two levels deep. "
        "`create` makes a new file and its directories. `str_replace` replaces `old_str`, which must occur "
        "exactly once, white space included, by `new_str`. `insert` puts `new_str` after line `insert_line`. "
        "`undo_edit` takes the last edit of the file back. Notebooks are shown by cells, PDFs by pages. Long "
        "output is cut."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": [
                    *("view", "create", "str_replace", "insert", "undo_edit"),
                    *("replace_cell", "insert_cell", "delete_cell"),
                ],
                "description": "What to do.",
            },
            "path": {"type": "string", "description": "Absolute path of the file or directory."},
            "file_text": {"type": "string", "description": "For `create`: the content of the new file."},
            "old_str": {"type": "string", "description": "For `str_replace`: the text to replace."},
            "new_str": {"type": "string", "description": "For `str_replace` and `insert`: the new text."},
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"old_str": {"type": "string"}, "new_str": {"type": "string"}},
                },
                "description": "For `str_replace`: several replacements, all or none.",
            },
            "replace_all": {"type": "boolean", "description": "For `str_replace`: every occurrence."},
            "overwrite": {"type": "boolean", "description": "For `create`: replace an existing file."},
            "insert_line": {"type": "integer", "description": "For `insert`: the line after which to insert; 0: top."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For `view`: first and last line (cell, page), from 1; -1 as last: to the end.",
            },
            # The arguments are explained where a notebook is shown, because few prompts need them.
            "cell": {"type": "integer"},
            "cell_type": {"type": "string"},
            "security_risk": SECURITY_RISK,
        },
        "required": ["command", "path", "security_risk"],
    },
)


APPLY_PATCH = ToolSpec(
    name="apply_patch",
    description=(
        "Change several files at once; all changes are made or none. `patch` is a unified diff, or has this form:\n"
        "*** Begin Patch\n*** Update File: src/a.py\n@@ class A:\n     kept line\n-old line\n+new line\n"
        "*** Add File: src/b.py\n+its lines\n*** Delete File: src/c.py\n*** End Patch\n"
        "Give about three unchanged lines around each change; `@@` with a line before them says which place is meant."
    ),
    parameters={
        "type": "object",
        "properties": {
            "patch": {"type": "string", "description": "The patch; its paths are relative to the shell's directory."},
            "security_risk": SECURITY_RISK,
        },
        "required": ["patch", "security_risk"],
    },
)


class FileReadSource(StrEnum):
    """The reader of a file."""

    OH_ACI = "oh_aci"
    DEFAULT = "default"


class FileEditSource(StrEnum):
    """The editor of a file."""

    LLM_BASED_EDIT = "llm_based_edit"
    OH_ACI = "oh_aci"


class TextEdit(EventValue):
    """One of several replacements. `replace_all` replaces all matches; without it, the match must be unique."""

    old_str: str
    new_str: str = ""
    replace_all: bool = False


class FileReadAction(RiskyAction):
    """Read a file or a range of its lines.

    Attributes:
        path: for the default reader, relative to the shell's directory; for the editor's view, absolute.
        start, end: for the default reader: lines from 0, the end excluded; -1 for the end of the file.
        view_range: for the editor's view: the first and last line, from 1. Its presence selects that view.
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
    """Write a file or replace a range of its lines. A missing file is created with its directories.

    Attributes:
        path: absolute, or relative to the shell's directory.
        start, end: lines from 0, the end excluded; -1 for the end of the file. Equal values insert before that line.
    """

    kind: Literal["action.write"] = "action.write"
    sentence_template: ClassVar[str] = "Writing {path}"
    path: str
    content: str
    start: int = 0
    end: int = -1

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        where = "" if (self.start, self.end) == (0, -1) else f", lines [{self.start}, {self.end})"
        return (Paragraph(self.sentence + where, "action", "  "), Paragraph(self.content, "added", "  + "))


class FileEditAction(RiskyAction):
    """Edit a file with a command of the string-replace editor, or from a draft."""

    kind: Literal["action.edit"] = "action.edit"
    tool_spec: ClassVar[ToolSpec] = STR_REPLACE_EDITOR
    enabled_by: ClassVar[str] = "enable_editor"
    path: str
    command: str = ""
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | str | None = None
    # Unused fields are left out of the log, so that its bytes are the same as before the fields existed.
    edits: tuple[TextEdit, ...] | None = None
    replace_all: bool | None = None
    overwrite: bool | None = None
    cell: int | None = None
    cell_type: str | None = None
    content: str = ""
    start: int = 1
    end: int = -1
    impl_source: FileEditSource = FileEditSource.OH_ACI

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Editing {self.path} ({self.command or 'draft'})"

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Action:
        """See `Action.from_call`; the command `view` becomes a read action."""
        tool = STR_REPLACE_EDITOR.name
        command = require_text(arguments, "command", tool)
        path = require_text(arguments, "path", tool)
        if command == "view":
            return FileReadAction(
                path=path,
                impl_source=FileReadSource.OH_ACI,
                view_range=arguments.get("view_range"),
                security_risk=parse_risk(arguments),
            )
        refuse_unknown(arguments, sorted(EDITOR_ARGUMENTS | {"command", "path", "view_range", RISK}), tool)
        return cls(
            path=path,
            command=command,
            impl_source=FileEditSource.OH_ACI,
            security_risk=parse_risk(arguments),
            **{name: arguments[name] for name in EDITOR_ARGUMENTS & set(arguments)},
        )

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        where = "" if self.insert_line is None else f", after line {self.insert_line}"
        pairs = [(edit.old_str, edit.new_str) for edit in self.edits or ()]
        pairs = pairs or [(self.old_str or "", self.file_text or self.new_str or self.content)]
        changes = [(Paragraph(old, "removed", "  - "), Paragraph(new, "added", "  + ")) for old, new in pairs]
        everywhere = " everywhere" * bool(self.replace_all) + ", overwriting it" * bool(self.overwrite)
        return (Paragraph(self.sentence + where + everywhere, "action", "  "), *chain.from_iterable(changes))


class ApplyPatchAction(RiskyAction):
    """Apply a patch to several files; answered by `FileEditObservation`."""

    answered_by: ClassVar[tuple[str, ...]] = ("observation.edit",)

    kind: Literal["action.apply_patch"] = "action.apply_patch"
    outcome: ClassVar[OutcomePolicy] = OutcomePolicy.AT_MOST_ONCE
    tool_spec: ClassVar[ToolSpec] = APPLY_PATCH
    argument: ClassVar[tuple[str, str]] = ("patch", "patch")
    enabled_by: ClassVar[str] = "enable_patch"
    sentence_template: ClassVar[str] = "Applying a patch"
    patch: str

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        return (Paragraph(self.sentence, "action", "  "), Paragraph(self.patch, "added", "  "))


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
        is_view = self.impl_source == FileReadSource.OH_ACI
        if is_view and self.content.startswith("ERROR:"):
            return (Paragraph(self.content, "detail", "  "),)
        heads = int(is_view and self.content.startswith(NUMBERED_LINES_PREFIX))  # the first line describes the file
        return (Paragraph(format_count(len(self.content.splitlines()) - heads, "line"), "detail", "  "),)


class FileWriteObservation(Observation):
    """A file was written."""

    kind: Literal["observation.write"] = "observation.write"
    agent_template: ClassVar[str] = ""
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    sentence_template: ClassVar[str] = "I wrote the file {path}."
    path: str


class FileEditObservation(Observation):
    """A file was edited, or the edit failed; see the content."""

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
        return (Paragraph(self.diff or self.content, "detail", "  "),)
