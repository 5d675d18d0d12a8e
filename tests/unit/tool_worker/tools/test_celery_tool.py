"""A Celery task as a tool: what is asked of its declaration."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.celery.dispatch import TaskSender
from broker.contract.tool_specs import OutcomePolicy
from broker.runtime.errors import UsageError
from broker.tools.celery_tool import celery_tool
from tests.example_celery import refund_tool
from tool_worker.tools.offered import load_tools

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
