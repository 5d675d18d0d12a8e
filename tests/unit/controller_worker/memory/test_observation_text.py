"""How a model reads observations that hold more than a text."""

from __future__ import annotations

import pytest

from broker.contract.browser_events import BrowserOutputObservation, FileDownloadObservation
from broker.contract.events import Observation
from broker.contract.file_events import FileEditObservation
from broker.contract.observations import TRUNCATION_MARKER, MCPObservation
from broker.contract.recall import RecallObservation, RecallType
from broker.contract.session_events import IMAGE_PLACEHOLDER, IPythonRunCellObservation
from broker.contract.task_list import TaskTrackingObservation
from controller_worker.memory.observation_text import (
    NO_SCREENSHOT_NOTE,
    SCREENSHOT_NOTE,
    Content,
    is_image_url,
    render_observation,
)
from controller_worker.providers.messages.messages import NOT_SEEN, ImagePart, TextPart

SCREEN = "data:image/png;base64,iVBORw0KGgoA"
MARKS = "data:image/jpeg;base64,/9j/BBBB"


def content(
    event: Observation, *, max_chars: int = 30_000, sees_images: bool = True, shows_pages: bool = True
) -> Content:
    return render_observation(event, max_chars=max_chars, sees_images=sees_images, shows_pages=shows_pages)


def test_inline_images_of_a_cell_become_a_placeholder() -> None:
    cell = IPythonRunCellObservation(code="plot()", content=f"one\n![image](data:image/png;base64,{'A' * 99})\nthree")
    assert cell.agent_text == f"one\n{IMAGE_PLACEHOLDER}\nthree"


def test_images_of_a_cell() -> None:
    cell = IPythonRunCellObservation(code="plot()", content="done", image_urls=(SCREEN,))
    assert content(cell) == (TextPart("done"), ImagePart(SCREEN))
    assert content(cell, shows_pages=False) == content(cell)
    assert content(cell, sees_images=False) == (TextPart("done"), NOT_SEEN)


def test_unshowable_images_are_counted_for_vision_models() -> None:
    cell = IPythonRunCellObservation(code="plot()", content="done", image_urls=("", SCREEN, "file:///x"))
    assert content(cell) == (
        TextPart("done\n\nNote: 2 of 3 images cannot be shown."),
        ImagePart(SCREEN),
    )
    assert content(cell, sees_images=False) == (TextPart("done"), NOT_SEEN)


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest/meta-data/a.png", "https://a/b.png"])
def test_an_address_from_a_tool_is_never_passed_on(url: str) -> None:
    note = "\n\nNote: 1 of 1 images cannot be shown."
    observation = MCPObservation(content="done", name="look", arguments={}, image_urls=(url,))
    assert content(observation) == (TextPart("done" + note),)
    assert content(page(screenshot=url)) == (TextPart("tree" + NO_SCREENSHOT_NOTE),)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/gif;base64,R0lGODlh",
        "data:image/webp;base64,UklGRgAAAABXRUJQ",
        "http://a/b.png",
        "https://a/b.png",
    ],
)
def test_what_providers_take_is_shown(url: str) -> None:
    assert is_image_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,bm90cG5n",  # what it begins with is not a picture
        "data:image/png;base64,/9j/BBBB",  # it is a JPEG
        "data:image/bmp;base64,Qk06AAAA",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:image/png,iVBORw0KGgoA",
        "data:image/png;base64,iVBORw0KGgoA\n",
        "data:image/png;base64,iVBORw0KGgoA===",
        "data:image/png;base64,iVBORw0KGgoA<secret_hidden>",
        f"data:image/jpeg;base64,/9j/{'B' * 5 * 2**20}",
    ],
)
def test_content_that_providers_refuse_is_not_shown(url: str) -> None:
    assert not is_image_url(url)


def page(trigger: str = "browse_interactive", **fields: str) -> BrowserOutputObservation:
    return BrowserOutputObservation(url="https://a", trigger_by_action=trigger, content="tree", **fields)


def test_a_page_is_shown_with_marks_rather_than_without() -> None:
    assert content(page(screenshot=SCREEN, set_of_marks=MARKS)) == (
        TextPart("tree" + SCREENSHOT_NOTE),
        ImagePart(MARKS),
    )
    assert content(page(screenshot=SCREEN)) == (TextPart("tree" + SCREENSHOT_NOTE), ImagePart(SCREEN))


def test_page_without_usable_image_says_so_to_vision_models() -> None:
    assert content(page(screenshot="AAAA")) == (TextPart("tree" + NO_SCREENSHOT_NOTE),)
    assert content(page(screenshot="AAAA"), sees_images=False) == (TextPart("tree"),)


def test_page_picture_is_omitted_where_unwanted() -> None:
    shown = page(screenshot=SCREEN, set_of_marks=MARKS)
    assert content(shown, shows_pages=False) == content(shown, sees_images=False) == (TextPart("tree"),)


def test_a_page_that_was_only_opened_has_no_image() -> None:
    assert content(page("browse", screenshot=SCREEN)) == (TextPart("tree"),)


def test_an_edit_without_words_is_its_diff() -> None:
    edited = FileEditObservation(path="/a", prev_exist=True, diff="-x\n+y")
    assert edited.agent_text == "[The file /a was edited.]\n-x\n+y"
    assert FileEditObservation(path="/a", diff="+y").agent_text == "[The file /a was created.]\n+y"
    assert FileEditObservation(path="/a", content="ok", diff="+y").agent_text == "ok"


@pytest.mark.parametrize(
    "event",
    [
        MCPObservation(name="t", content="text"),
        FileDownloadObservation(file_path="/a", content="text"),
        TaskTrackingObservation(command="view", content="text"),
    ],
    ids=lambda event: event.kind,
)
def test_plain_texts(event: Observation) -> None:
    assert content(event) == (TextPart("text"),)


def test_a_recall_is_never_cut() -> None:
    recall = RecallObservation(recall_type=RecallType.WORKSPACE_CONTEXT, repo_instructions="x" * 100)
    (part,) = content(recall, max_chars=10)
    assert isinstance(part, TextPart)
    assert "x" * 100 in part.text
    assert content(MCPObservation(name="t", content="x" * 100), max_chars=10) == (
        TextPart("xxxxx" + TRUNCATION_MARKER + "xxxxx"),
    )


def test_what_is_known_of_a_workspace() -> None:
    recall = RecallObservation(
        recall_type=RecallType.WORKSPACE_CONTEXT,
        working_dir="/srv/project",
        repo_name="acme/shop",
        repo_directory="shop",
        repo_branch="main",
        date="2026-03-01",
        runtime_hosts={"localhost": 8080},
        custom_secrets_descriptions={"TOKEN": "of the shop"},
        repo_instructions="Use tabs.",
        additional_agent_instructions="Be brief.",
        conversation_instructions="Answer in French.",
    )
    assert recall.agent_text.splitlines() == [
        "The workspace is /srv/project.",
        "It holds the repository acme/shop in shop on branch main.",
        "Today is 2026-03-01 (UTC).",
        "Programs that listen on port 8080 are reached at http://localhost:8080.",
        "The secret $TOKEN is in the environment of commands that name it: of the shop.",
        "<repository_instructions>",
        "Use tabs.",
        "</repository_instructions>",
        "<instructions>",
        "Be brief.",
        "</instructions>",
        "<conversation_instructions>",
        "Answer in French.",
        "</conversation_instructions>",
    ]
