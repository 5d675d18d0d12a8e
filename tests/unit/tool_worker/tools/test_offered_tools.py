"""Custom tools and Celery tasks as tools: their descriptions, their calls, and repetition after a worker's death."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu.exceptions import EncodeError, OperationalError

from broker.celery.dispatch import TaskSender
from broker.contract.actions import ToolCallAction
from broker.contract.events import Observation
from broker.contract.observations import ErrorObservation, OutcomeUnknownObservation, ToolCallObservation
from broker.contract.session_events import IPythonRunCellObservation
from broker.contract.tool_specs import OutcomePolicy
from broker.coordination.action_streams import ActionClaimed, ActionReclaimed
from broker.runtime.errors import UsageError
from broker.secrets.masking import Masker
from broker.tools.celery_tool import celery_tool
from broker.tools.custom_tools import ToolContext, ToolFailed, custom_tool
from tests import example_tools
from tests.entry_points import install_package
from tests.example_celery import app as shop
from tests.example_celery import refund_tool
from tool_worker.tools.offered import MAX_ANSWER_CHARS, MAX_IMAGES, OfferedTools, load_tools

NAMES = [f"tests.example_tools:{name}" for name in ("add", "wait_for_ever", "render", "fail", "PlaceOrder")]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    monkeypatch.setenv("EXAMPLE_TOOLS_TRACE", str(path))
    return path


@pytest.fixture
def offered() -> OfferedTools:
    return load_tools(NAMES, ["gpu"])


async def call(
    offered: OfferedTools, name: str, *, reclaimed: bool = False, fingerprint: str = "", **arguments: Any
) -> Observation:
    action = ToolCallAction(id=7, name=name, arguments=arguments, fingerprint=fingerprint)
    claim = ActionReclaimed(2, "t0") if reclaimed else ActionClaimed(1)
    return await offered.call(action, claim, "conversation-1")


def test_a_function_speaks_for_itself() -> None:
    tool = custom_tool(example_tools.add)
    assert tool.offer.key == tool.offer.name == "add"
    assert tool.offer.description == "Add two numbers."
    assert tool.offer.outcome is OutcomePolicy.AT_MOST_ONCE
    assert tool.offer.parameters == {
        "type": "object",
        "properties": {
            "first": {"title": "First", "type": "integer"},
            "second": {"title": "Second", "type": "integer", "default": 1, "description": "What is added."},
        },
        "required": ["first"],
    }


def test_a_class_speaks_by_its_action() -> None:
    offer = example_tools.PlaceOrder.offer  # type: ignore[attr-defined]
    assert (offer.name, offer.description, offer.outcome) == ("place_order", "Place an order, once.", "checkable")
    assert offer.parameters["required"] == ["item"]
    assert offer.parameters["properties"]["count"]["minimum"] == 1


def test_the_context_is_no_argument() -> None:
    assert list(example_tools.render.offer.parameters["properties"]) == ["scene"]


def test_another_text_or_schema_has_another_fingerprint() -> None:
    offer = custom_tool(example_tools.add).offer
    assert offer.fingerprint == custom_tool(example_tools.add).offer.fingerprint
    assert offer.fingerprint != offer.model_copy(update={"description": "Add."}).fingerprint
    assert offer.fingerprint == offer.model_copy(update={"pool": "gpu"}).fingerprint


def test_invalid_tool_is_refused() -> None:
    def untyped(value):
        """Take anything."""

    def silent(value: int) -> int:
        return value

    def checked(value: int) -> int:
        """Be checked."""
        return value

    with pytest.raises(UsageError, match="parameter value of untyped has no type"):
        custom_tool(untyped)
    with pytest.raises(UsageError, match="silent has no docstring"):
        custom_tool(silent)
    with pytest.raises(UsageError, match="has no method check"):
        custom_tool(outcome="checkable")(checked)
    with pytest.raises(UsageError, match="class int cannot be a tool"):
        custom_tool(int)
    with pytest.raises(UsageError, match="String should match pattern"):
        custom_tool(name="a b")(checked)


def test_tools_of_other_pools_are_left_out() -> None:
    assert [offer.name for offer in load_tools(NAMES, ["bash"]).offers] == [
        *("add", "wait_for_ever", "fail", "place_order")
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tests.nowhere:add", "ModuleNotFoundError: No module named 'tests.nowhere'"),
        ("tests.example_tools:gone", "AttributeError: module 'tests.example_tools' has no attribute 'gone'"),
        ("tests.example_tools", "AttributeError: module 'tests.example_tools' has no attribute ''"),
        (":x", "ValueError: Empty module name"),
        ("os:sep", "'/' is not a tool. Name a function or a class."),
    ],
)
def test_unloadable_named_tool_is_reported_and_blocks_none(name: str, reason: str) -> None:
    offered = load_tools([name, *NAMES], [])
    (failure,) = offered.failures
    assert (failure.source, failure.reason, failure.server) == (name, reason, "")
    assert "correct DECKHANDS_TOOLS" in failure.remedy
    assert "add" in [offer.name for offer in offered.offers]


@pytest.mark.parametrize(
    "statement", ["raise SystemExit('no {}')", "def", "1 / 0 # {}", "raise Exception('{}\\x1b[2J')"]
)
def test_import_failure_of_a_module_is_its_own(statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2-hunter2"
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"broken_{abs(hash(statement))}"
    (tmp_path / f"{name}.py").write_text(statement.format(secret))
    (failure,) = load_tools([f"{name}:x"], [], masker=Masker([secret])).failures
    assert secret not in failure.reason
    assert failure.reason.isprintable()
    assert "Error" in failure.reason or "<secret_hidden>" in failure.reason


@pytest.mark.parametrize("statement", ["Conversation()", "asyncio.run(Client.connect('redis://h'))"])
def test_missing_main_guard_is_named(statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"unguarded_{abs(hash(statement))}"
    (tmp_path / f"{name}.py").write_text(f"import asyncio\nfrom deckhands import Client, Conversation\n{statement}\n")
    (failure,) = load_tools([f"{name}:x"], []).failures
    assert failure.reason.startswith(f"The module {name} works with conversations")
    assert 'under `if __name__ == "__main__":`' in failure.reason


async def test_text_is_read_as_text_and_value_as_data(offered: OfferedTools, trace: Path) -> None:
    assert await call(offered, "add", first=2) == ToolCallObservation(content="3", name="add", outputs={"result": 3})
    rendered = await call(offered, "render", scene="sea")
    assert isinstance(rendered, ToolCallObservation)
    assert rendered.content == "rendered sea"
    assert rendered.outputs == {"content": "rendered sea", "key": "conversation-1-7"}
    ordered = await call(offered, "place_order", item="lamp", count=2)
    assert isinstance(ordered, ToolCallObservation)
    assert (ordered.content, ordered.outputs["number"]) == ("Ordered 2 lamp.", "conversation-1-7")


async def test_arguments_that_do_not_fit_never_reach_the_tool(offered: OfferedTools, trace: Path) -> None:
    answer = await call(offered, "place_order", item="lamp", count=0)
    assert answer == ErrorObservation(
        content="Invalid argument 'count' in tool call place_order: Input should be greater than or equal to 1. "
        "Call it again with arguments that fit its schema.",
        error_id="tool_failed",
    )
    assert not trace.exists()


async def test_every_outcome_of_a_tool_is_an_answer(offered: OfferedTools) -> None:
    expected = await call(offered, "fail", is_expected=True)
    assert expected.content == "The moon is in the way. Wait for it to set."
    broken = await call(offered, "fail", is_expected=False)
    assert broken.content == "The tool fail failed: RuntimeError: broken"
    late = await call(offered, "wait_for_ever")
    assert late.content == "The tool wait_for_ever did not answer within 0.2 seconds."
    missing = await call(offered, "teleport")
    assert missing.content.startswith("This worker has no tool 'teleport'.")


async def test_a_tool_that_was_changed_is_not_called(offered: OfferedTools, trace: Path) -> None:
    answer = await call(offered, "render", scene="sea", fingerprint="another")
    assert isinstance(answer, ErrorObservation)
    assert answer.error_id == "tool_changed"
    assert not trace.exists()


async def test_after_a_crash_the_outcome_policy_decides(offered: OfferedTools, trace: Path) -> None:
    assert isinstance(await call(offered, "render", reclaimed=True, scene="sea"), OutcomeUnknownObservation)
    assert not trace.exists()
    again = await call(offered, "wait_for_ever", reclaimed=True)
    assert isinstance(again, ErrorObservation)  # run again
    assert again.error_id == "tool_timeout"
    first = await call(offered, "place_order", reclaimed=True, item="lamp")
    assert first.content == "Ordered 1 lamp."
    second = await call(offered, "place_order", reclaimed=True, item="lamp")
    assert second.content == "Had been ordered."
    assert trace.read_text() == "conversation-1-7 lamp\n"


def pour(length: int, is_data: bool) -> Any:
    """Return a lot."""
    text = "ab" * (length // 2)
    return {"content": text, "more": 1} if is_data else text


async def test_long_answer_keeps_its_head_and_tail() -> None:
    offered = OfferedTools([custom_tool(pour)])
    whole = await call(offered, "pour", length=2 * MAX_ANSWER_CHARS // 3, is_data=True)
    assert isinstance(whole, ToolCallObservation)
    assert (len(whole.content), whole.outputs["more"]) == (2 * MAX_ANSWER_CHARS // 3, 1)
    for is_data in (False, True):
        cut = await call(offered, "pour", length=50 * MAX_ANSWER_CHARS, is_data=is_data)
        assert isinstance(cut, ToolCallObservation)
        assert len(cut.content) <= MAX_ANSWER_CHARS + 100
        assert cut.content.startswith("ab")
        assert "truncated" in cut.content
        assert cut.outputs == {}


def draw(count: int, chars: int) -> Any:
    """Return pictures."""
    url = "data:image/png;base64," + "A" * chars
    return IPythonRunCellObservation(content="drawn", code="", image_urls=(url,) * count)


@pytest.mark.parametrize(("count", "chars", "kept"), [(12, 100, MAX_IMAGES), (3, 5 * 2**20, 1), (2, 100, 2)])
async def test_images_beyond_the_bound_are_left_out(count: int, chars: int, kept: int) -> None:
    found = await call(OfferedTools([custom_tool(draw)]), "draw", count=count, chars=chars)
    assert isinstance(found, IPythonRunCellObservation)
    assert found.image_urls is not None
    assert len(found.image_urls) == kept
    assert found.content == ("drawn" if count == kept else f"drawn\n[{count - kept} of {count} images are left out.]")


def fail(length: int, is_expected: bool) -> Any:
    """Fail at length."""
    raise (ToolFailed if is_expected else ValueError)("x" * length)


@pytest.mark.parametrize("is_expected", [True, False])
async def test_long_errors_are_cut(is_expected: bool) -> None:
    found = await call(OfferedTools([custom_tool(fail)]), "fail", length=3 * MAX_ANSWER_CHARS, is_expected=is_expected)
    assert isinstance(found, ErrorObservation)
    assert len(found.content) <= MAX_ANSWER_CHARS + 100


async def test_blocking_functions_have_their_own_threads() -> None:
    together = threading.Barrier(40 + 1)

    def meet() -> str:
        """Wait for the others."""
        together.wait(timeout=30)
        return "met"

    offered = OfferedTools([custom_tool(meet)])
    calls = asyncio.gather(*(call(offered, "meet") for _ in range(40)))
    assert (await asyncio.to_thread(together.wait, 30)) in range(41)
    assert [answer.content for answer in await calls] == ["met"] * 40


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(3)])
async def test_tool_that_exits_ends_only_its_call(error: BaseException) -> None:
    def leave() -> None:
        """Leave."""
        raise error

    async def leave_later() -> None:
        """Leave, too."""
        leave()

    offered = OfferedTools([custom_tool(leave), custom_tool(leave_later)])
    for name in ("leave", "leave_later"):
        answer = await call(offered, name)
        assert isinstance(answer, ErrorObservation)
        assert answer.content.startswith(f"The tool {name} failed: ")


def test_installed_tools_are_found_and_broken_ones_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = "def stock(item: str) -> str:\n    '''Tell.'''\n    return item\n"
    tools = {"deckhands.tools": {"stock": "stock", "lost": "nothing"}}
    install_package(tmp_path, monkeypatch, "tools_of_a_package", source, tools)
    assert [offer.key for offer in load_tools([], []).offers] == ["stock"]
    assert "the entry point lost of deckhands.tools provides no tool" in caplog.text


SCHEMA = {"type": "object", "properties": {"order": {"type": "integer"}}}


def test_the_model_is_told_of_its_arguments() -> None:
    assert (refund_tool.offer.name, refund_tool.offer.outcome) == ("refund", OutcomePolicy.CHECKABLE)
    assert sorted(refund_tool.offer.parameters["properties"]) == ["amount", "order"]
    by_schema = celery_tool("shop.pay", SCHEMA, "Pay.", broker_url="memory://", backend_url="cache+memory://")
    assert by_schema.offer.parameters == SCHEMA
    assert by_schema.parse_arguments({"anything": 1}) == {"anything": 1}


def test_it_must_be_said_where_it_runs() -> None:
    with pytest.raises(UsageError, match=r"No application is given for the task shop\.pay"):
        celery_tool("shop.pay", SCHEMA, "Pay.", broker_url="memory://")


async def test_unreadable_result_ends_the_call_at_once() -> None:
    context = ToolContext("c", 1)
    task_id = f"deckhands-{context.idempotency_key}"
    shop.backend.client.set(shop.backend.get_key_for_task(task_id), b"no JSON")
    for call in (refund_tool.run, refund_tool.check):
        assert call is not None
        with pytest.raises(ToolFailed, match=r"The result of the task .* cannot be read"):
            await asyncio.wait_for(call({"order": 1}, context), 10)  # its own limit is 30 s


@pytest.mark.parametrize(
    ("recorded", "is_unsure"),
    [
        (redis.BusyLoadingError("Valkey is loading the dataset in memory"), True),
        (OperationalError("the broker is away"), True),
        (EncodeError("Object of type Refund is not JSON serializable"), True),
        (FileNotFoundError("no such order"), False),
    ],
)
async def test_task_whose_result_was_not_stored_is_unknown(recorded: Exception, is_unsure: bool) -> None:
    """Celery's worker records its own errors of storing a result as the failure of a task that ran."""
    context = ToolContext("c", 2)
    shop.backend.mark_as_failure(f"deckhands-{context.idempotency_key}", recorded)
    assert refund_tool.check is not None
    for call in (refund_tool.run, refund_tool.check):
        if is_unsure:
            found = await call({"order": 1}, context)
            assert isinstance(found, OutcomeUnknownObservation)
            assert str(recorded) in found.content
        else:
            with pytest.raises(ToolFailed, match="no such order"):
                await call({"order": 1}, context)


async def test_missing_backend_is_asked_again_until_the_limit() -> None:
    away = "redis://127.0.0.1:1/0"
    pay = celery_tool("shop.pay", SCHEMA, "Pay.", broker_url=away, backend_url=away, timeout_seconds=0.5)
    with pytest.raises(ToolFailed, match=r"could not be reached within 0\.5 seconds"):
        await pay.run({"order": 1}, ToolContext("c", 1))


@pytest.mark.parametrize("name", ["tests.nowhere:app", "tests.example_celery:nothing", "tests.example_celery:Refund"])
def test_an_application_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"(no|not a) Celery application"):
        TaskSender(app=name)


def test_an_application_without_results_is_refused() -> None:
    with pytest.raises(UsageError, match="without a result backend"):
        TaskSender(broker_url="memory://")


@pytest.mark.parametrize(
    "body", ["", "try:\n    app['x']\nexcept Exception as error:\n    raise RuntimeError('no') from error\n"]
)
def test_a_variable_that_is_not_passed_is_named(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = "import os\n"
    reads += "app = os.environ['SHOP_BROKER']\n" if not body else body.replace("app['x']", "os.environ['SHOP_BROKER']")
    module = f"shop_{len(body)}"
    (tmp_path / f"{module}.py").write_text(reads)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="reads the environment variable SHOP_BROKER") as refused:
        TaskSender(app=f"{module}:app")
    assert "DECKHANDS_PASS_ENV=SHOP_BROKER" in refused.value.remedy
    (failure,) = load_tools([f"{module}:app"], []).failures
    assert (failure.reason, failure.remedy) == (
        "It reads the environment variable SHOP_BROKER, which this worker lacks.",
        refused.value.remedy,
    )


def test_invalid_variable_name_stays_an_error_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_keys.py").write_text("app = {}['SHOP_BROKER']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError):
        TaskSender(app="shop_keys:app")
