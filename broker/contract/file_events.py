"""Reading, writing and editing files (OpenHands sections 3.2, 3.3, 10.4): names, fields, defaults.

Two ways lead to a file: lines of it as they are, by number, and the string-replace editor that a model is offered.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from broker.contract.actions import RiskyAction
from broker.contract.events import Observation


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
    path: str
    start: int = 0
    end: int = -1
    impl_source: FileReadSource = FileReadSource.DEFAULT
    view_range: tuple[int, ...] | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Reading {self.path}"


class FileWriteAction(RiskyAction):
    """Write a file, or lines in the place of a range; a missing file is made, with its directories.

    Attributes:
        path: absolute, or relative to where the shell is.
        start, end: lines from 0, the end excluded; -1: the end of the file. The same twice: before that line.
    """

    kind: Literal["action.write"] = "action.write"
    path: str
    content: str
    start: int = 0
    end: int = -1

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"Writing {self.path}"


class FileEditAction(RiskyAction):
    """Edit a file with a command of the string-replace editor, or by a draft."""

    kind: Literal["action.edit"] = "action.edit"
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


class FileReadObservation(Observation):
    """The content of a file."""

    kind: Literal["observation.read"] = "observation.read"
    path: str
    impl_source: FileReadSource = FileReadSource.DEFAULT
    image_urls: tuple[str, ...] | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"I read the file {self.path}."


class FileWriteObservation(Observation):
    """A file was written."""

    kind: Literal["observation.write"] = "observation.write"
    path: str

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"I wrote the file {self.path}."


class FileEditObservation(Observation):
    """A file was edited, or could not be; the content says which."""

    kind: Literal["observation.edit"] = "observation.edit"
    path: str = ""
    prev_exist: bool = False
    old_content: str | None = None
    new_content: str | None = None
    impl_source: FileEditSource = FileEditSource.OH_ACI
    diff: str | None = None

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"I edited the file {self.path}."
