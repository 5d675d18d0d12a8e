"""Both conversations have the same names and parameters, and refuse invalid values before anything starts."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import UsageError
from deckhands.client.client import Client
from deckhands.client.conversation.async_conversation import AsyncConversation
from deckhands.client.conversation.cluster_connection import build_environment
from deckhands.client.conversation.conversation import Conversation, Files
from deckhands.client.conversation.following import AsyncFiles
from deckhands.client.tasks.tasks import to_image_urls
from tests.example_tools import __name__ as example_module

OURS = {"is_threaded"}


def public(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")} - OURS - {"twin", "loop", "id"}


def parameters(found: Callable[..., Any]) -> list[tuple[str, str, object]]:
    all_of_them = inspect.signature(found).parameters.values()
    return [(one.name, str(one.kind), one.default) for one in all_of_them if one.name != "self"]


@pytest.mark.parametrize(("twin", "other"), [(AsyncConversation, Conversation), (AsyncFiles, Files)])
def test_both_have_the_same_names_and_parameters(twin: type, other: type) -> None:
    made = Conversation() if other is Conversation else Conversation().files
    assert public(twin) == public(other)
    for name in public(twin):
        if callable(getattr(twin, name)):
            assert parameters(getattr(twin, name)) == parameters(getattr(made, name)), name
            assert getattr(made, name).__name__ == name


@pytest.mark.parametrize("owner", [AsyncConversation, Conversation, AsyncFiles, Files, Client])
def test_help_shows_every_parameter(owner: type) -> None:
    shown = pydoc.render_doc(owner, renderer=pydoc.plaintext)
    assert "(...)" not in shown
    assert "**fields" not in shown.partition("Method resolution order")[0]
    for name in public(owner):
        if callable(getattr(owner, name)):
            assert parameters(getattr(owner, name)) == parameters(getattr(owner, name).__get__(object())), name


def test_both_are_made_of_the_same() -> None:
    assert parameters(AsyncConversation) == parameters(Conversation)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": "example.org"}, "The cluster 'example.org' is neither the address of a store nor of a server."),
        ({"cluster": "user:word@h"}, "The cluster 'h' is neither"),
        ({"cluster": 5}, "The cluster 5 is neither"),
        ({"cluster": "http://user:word@h"}, "The address of the server has a name and password, or no host."),
        ({"cluster": "https://"}, "The address of the server has"),
        ({"cluster": "https://[x"}, "The address of the server has"),
        ({"output": int}, "The argument output is <class 'int'>. Pass a Pydantic model."),
        ({"tools": "weather"}, "`tools` must be a list."),
        ({"tools": [5]}, "5 is not a tool."),
        ({"confirmation": "a b"}, "The confirmation policy 'a b' cannot be used."),
        ({"limits": 5}, "The argument limits is 5."),
        ({"agent": 5}, "The argument agent is 5."),
        (
            {"secrets": {"A": 1}},
            "The argument secrets is not a mapping of names to strings or SecretReference objects.",
        ),
        ({"conversation_id": "../x"}, ""),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Conversation(**arguments)
    assert str(raised.value).startswith(message)


PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 10


def test_pictures_are_paths_bytes_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    urls = to_image_urls([tmp_path / "a.png", PNG, "https://example.org/a.png"])
    assert urls[0] == urls[1]
    assert urls[0].startswith("data:image/png;base64,")
    assert urls[2] == "https://example.org/a.png"
    assert to_image_urls([]) is None


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (["/no/such.png"], "The picture /no/such.png cannot be read"),
        ([b"text"], "A picture is not a PNG"),
        ([PNG + b"\0" * 6_000_000], "A picture has more than"),
        ([PNG] * 21, "There are 21 pictures"),
        ([5], "5 is not a picture."),
        (["https://a b"], "The picture 'https://a b' is too long or no address."),
        ("a.png", "`images` must be a list."),
        ([PNG + b"\0" * 4_000_000] * 2, "The pictures have more than"),
    ],
)
def test_invalid_picture_is_named(images: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        to_image_urls(images)
    assert str(raised.value).startswith(message)


def test_a_tool_of_the_program_is_named_for_the_workers() -> None:
    import tests.example_tools as module
    from broker.tools.custom_tools import CustomTool

    tool = next(value for value in vars(module).values() if isinstance(value, CustomTool))
    found = build_environment([tool], {"PYTHONPATH": "/srv/code"})
    assert found["DECKHANDS_TOOLS"].startswith(f"{example_module}:")
    assert found["PYTHONPATH"].split(":") == [str(Path(module.__file__ or "").resolve().parents[1]), "/srv/code"]
