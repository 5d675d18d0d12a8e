"""How a model reads observations that hold more than a text."""

from typing import Any

import pytest

from broker.contract.browser_events import BrowserOutputObservation, FileDownloadObservation
from broker.contract.events import Observation
from broker.contract.file_events import FileEditObservation
from broker.contract.observations import TRUNCATION_MARKER, MCPObservation
from broker.contract.recall import RecallObservation, RecallType
from broker.contract.session_events import IMAGE_PLACEHOLDER, IPythonRunCellObservation
from broker.contract.task_list import TaskTrackingObservation
from controller_worker.memory.turn import (
    NO_SCREENSHOT_NOTE,
    SCREENSHOT_NOTE,
    Content,
    is_image_url,
    render_observation,
)
from controller_worker.providers.messages.messages import NOT_SEEN, TextPart

SCREEN = "data:image/png;base64,iVBORw0KGgoA"
MARKS = "data:image/jpeg;base64,/9j/BBBB"


def content(
    event: Observation, *, max_chars: int = 30_000, sees_images: bool = True, shows_pages: bool = True
) -> Content:
    return render_observation(event, max_chars=max_chars, sees_images=sees_images, shows_pages=shows_pages)


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest/meta-data/a.png", "https://a/b.png"])
def test_an_address_from_a_tool_is_never_passed_on(url: str) -> None:
    note = "\n\nNote: 1 of 1 images cannot be shown."
    observation = MCPObservation(content="done", name="look", arguments={}, image_urls=(url,))
    assert content(observation) == (TextPart("done" + note),)
    assert content(page(screenshot=url)) == (TextPart("tree" + NO_SCREENSHOT_NOTE),)


def page(trigger: str = "browse_interactive", **fields: str) -> BrowserOutputObservation:
    return BrowserOutputObservation(url="https://a", trigger_by_action=trigger, content="tree", **fields)


def plot(*urls: str) -> IPythonRunCellObservation:
    return IPythonRunCellObservation(code="plot()", content="done", image_urls=urls)


@pytest.mark.parametrize(
    ("event", "options", "shown"),
    [
        (plot(SCREEN), {}, ["done", SCREEN]),
        (plot(SCREEN), {"shows_pages": False}, ["done", SCREEN]),
        (plot(SCREEN), {"sees_images": False}, ["done", NOT_SEEN.text]),
        (plot("", SCREEN, "file:///x"), {}, ["done\n\nNote: 2 of 3 images cannot be shown.", SCREEN]),
        (plot("", SCREEN, "file:///x"), {"sees_images": False}, ["done", NOT_SEEN.text]),
        (page(screenshot=SCREEN, set_of_marks=MARKS), {}, ["tree" + SCREENSHOT_NOTE, MARKS]),
        (page(screenshot=SCREEN), {}, ["tree" + SCREENSHOT_NOTE, SCREEN]),
        (page(screenshot="AAAA"), {}, ["tree" + NO_SCREENSHOT_NOTE]),
        (page(screenshot="AAAA"), {"sees_images": False}, ["tree"]),
        (page(screenshot=SCREEN), {"shows_pages": False}, ["tree"]),
        (page(screenshot=SCREEN), {"sees_images": False}, ["tree"]),
        (page("browse", screenshot=SCREEN), {}, ["tree"]),  # it was only opened
        (MCPObservation(name="t", content="text"), {}, ["text"]),
        (FileDownloadObservation(file_path="/a", content="text"), {}, ["text"]),
        (TaskTrackingObservation(command="view", content="text"), {}, ["text"]),
    ],
)
def test_content(event: Observation, options: dict[str, bool], shown: list[str]) -> None:
    assert [part.text if isinstance(part, TextPart) else part.url for part in content(event, **options)] == shown


@pytest.mark.parametrize(
    ("url", "is_taken"),
    [
        ("data:image/gif;base64,R0lGODlh", True),
        ("data:image/webp;base64,UklGRgAAAABXRUJQ", True),
        ("http://a/b.png", True),
        ("https://a/b.png", True),
        ("data:image/png;base64,bm90cG5n", False),  # what it begins with is not a picture
        ("data:image/png;base64,/9j/BBBB", False),  # it is a JPEG
        ("data:image/bmp;base64,Qk06AAAA", False),
        ("data:image/svg+xml;base64,PHN2Zz4=", False),
        ("data:image/png,iVBORw0KGgoA", False),
        ("data:image/png;base64,iVBORw0KGgoA\n", False),
        ("data:image/png;base64,iVBORw0KGgoA===", False),
        ("data:image/png;base64,iVBORw0KGgoA<secret_hidden>", False),
        (f"data:image/jpeg;base64,/9j/{'B' * 5 * 2**20}", False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_only_images_that_providers_take_are_shown(url: str, is_taken: bool) -> None:
    assert is_image_url(url) is is_taken


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            IPythonRunCellObservation(code="", content=f"one\n![image](data:image/png;base64,{'A' * 99})\nthree"),
            f"one\n{IMAGE_PLACEHOLDER}\nthree",
        ),
        (FileEditObservation(path="/a", prev_exist=True, diff="-x\n+y"), "[The file /a was edited.]\n-x\n+y"),
        (FileEditObservation(path="/a", diff="+y"), "[The file /a was created.]\n+y"),
        (FileEditObservation(path="/a", content="ok", diff="+y"), "ok"),
    ],
    ids=["inline image becomes a placeholder", "diff of an edit", "diff of a new file", "words of an edit"],
)
def test_text_for_the_agent(event: Any, text: str) -> None:
    assert event.agent_text == text


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
