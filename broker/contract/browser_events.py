"""The browser of a workspace: actions that open pages and act in them, and their results (OpenHands 3.2, 3.3, 10.6)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from broker.contract.actions import RiskyAction
from broker.contract.events import JsonObject, Observation, WorkspaceUse
from broker.contract.kinds import Paragraph
from broker.contract.tool_specs import SECURITY_RISK, ToolSpec

BROWSER = ToolSpec(
    name="browser",
    description=(
        "Act in the conversation's web browser. `code` has one action per line, written as a call; values are numbers, "
        "or plain text in quotes. Every result shows the page as an accessibility tree, in which [bid] names an "
        "element; use bids from the latest result only. Downloads, PDF files too, go to the workspace.\n\n"
        "goto(url): http://, https:// or file://\n"
        "go_back(), go_forward()\n"
        "noop(wait_ms=1000): wait\n"
        "scroll(delta_x, delta_y): pixels; down and right are positive\n"
        "fill(bid, value): replace a field's text\n"
        "select_option(bid, options): one or a list, by value or label\n"
        "click(bid, button='left', modifiers=[]), dblclick: the same\n"
        "hover(bid), focus(bid), clear(bid)\n"
        "press(bid, key_comb): 'Enter', 'ControlOrMeta+a'\n"
        "drag_and_drop(from_bid, to_bid)\n"
        "upload_file(bid, file): one path or a list, in the workspace\n"
        "new_tab(), tab_close(), tab_focus(index)\n"
        "answer_dialogs(accept, text=''): accept or dismiss dialogs from now on; by default they are dismissed\n"
        "console(): all console messages; errors and failed requests are shown anyway"
    ),
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "The actions, such as goto('http://localhost:8000')."},
            "security_risk": SECURITY_RISK,
        },
        "required": ["code", "security_risk"],
    },
)


class BrowseURLAction(RiskyAction):
    """Open a page."""

    answered_by: ClassVar[tuple[str, ...]] = ("observation.browse", "observation.download")

    kind: Literal["action.browse"] = "action.browse"
    url: str
    return_axtree: bool = False

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(self.thought), Paragraph(f"Opening {self.url}", "action"))


class BrowseInteractiveAction(RiskyAction):
    """Act in the browser."""

    answered_by: ClassVar[tuple[str, ...]] = ("observation.browse", "observation.download")

    kind: Literal["action.browse_interactive"] = "action.browse_interactive"
    argument: ClassVar[tuple[str, str]] = ("code", "browser_actions")
    tool_spec: ClassVar[ToolSpec] = BROWSER
    enabled_by: ClassVar[str] = "enable_browsing"
    sentence_template: ClassVar[str] = "In the browser: {browser_actions}"
    browser_actions: str
    browsergym_send_msg_to_user: str = ""
    return_axtree: bool = False

    @property
    def confirmation_paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Action.confirmation_paragraphs`."""
        return (Paragraph(self.browser_actions, "action", "  "),)


class BrowserOutputObservation(Observation):
    """The browser's state after an action."""

    kind: Literal["observation.browse"] = "observation.browse"
    # A click may start a download.
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    url: str
    trigger_by_action: str
    screenshot: str = ""
    screenshot_path: str | None = None
    set_of_marks: str = ""
    error: bool = False
    goal_image_urls: tuple[str, ...] = ()
    open_pages_urls: tuple[str, ...] = ()
    active_page_index: int = -1
    dom_object: JsonObject = Field(default_factory=dict)
    axtree_object: JsonObject = Field(default_factory=dict)
    extra_element_properties: JsonObject = Field(default_factory=dict)
    last_browser_action: str = ""
    last_browser_action_error: str = ""
    focused_element_bid: str = ""
    filter_visible_only: bool = False

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        failure = f" ({self.last_browser_action_error})" if self.error else ""
        return f"The browser shows {self.url}{failure}"


class FileDownloadObservation(Observation):
    """A file that the browser downloaded."""

    kind: Literal["observation.download"] = "observation.download"
    workspace_use: ClassVar[WorkspaceUse] = WorkspaceUse.CHANGED
    sentence_template: ClassVar[str] = "Downloaded to {file_path}"
    file_path: str
