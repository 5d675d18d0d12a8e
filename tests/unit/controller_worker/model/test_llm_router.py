"""The model that a router selects, and invalid selections."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from broker.contract.events import LLMSpec, ModelCallFailed
from broker.runtime.clock import SystemClock
from broker.testing.manual_clock import ManualClock
from controller_worker.model.model_call import ask_model
from controller_worker.model.models import Models
from controller_worker.model.router import MultimodalRouter, RandomRouter, RuleRouter, make_router
from controller_worker.providers.choices import RouterSpec, RouteRule
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.llm import Completion, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart
from tests.controller_parts import free_permit

REQUEST = ModelRequest((Message("user", (TextPart("hi"),)),), (), "c1", 0, "/w")
LONG = replace(REQUEST, messages=(Message("user", (TextPart("x" * 6_000),)),))
IMAGE = replace(REQUEST, messages=(Message("user", (ImagePart("data:image/png;base64,AAAA"),)),))


class OwnRouter:
    """An operator's: the small model first."""

    def select_llm(self, request: ModelRequest) -> str:
        return "small" if request.iteration == 0 else "nobody"


def test_multimodal_router_keeps_the_primary_after_images_and_overflow() -> None:
    router = MultimodalRouter("small", 500)
    assert [router.select_llm(each) for each in (REQUEST, IMAGE, REQUEST)] == ["small", "primary", "small"]
    assert [router.select_llm(each) for each in (LONG, REQUEST)] == ["primary", "primary"]
    assert router.select_llm(replace(REQUEST, conversation_id="c2")) == "small"
    assert MultimodalRouter("small", None).select_llm(LONG) == "small"


def test_multimodal_knows_the_limit_of_its_secondary() -> None:
    spec = RouterSpec(kind="multimodal", secondary="small")
    small = LLMConfig(model="unknown", max_input_tokens=500)
    assert make_router(spec, {"small": small}).select_llm(LONG) == "primary"
    assert make_router(spec, {"small": LLMConfig(model="gpt-4o")}).select_llm(LONG) == "small"


def test_the_first_rule_that_holds() -> None:
    router = RuleRouter(
        (
            RouteRule(use="seeing", images=True),
            RouteRule(use="cheap", service="condenser"),
            RouteRule(use="long", min_tokens=1_000, images=False),
        )
    )
    requests = (IMAGE, replace(LONG, service="condenser"), LONG, REQUEST)
    assert [router.select_llm(each) for each in requests] == ["seeing", "cheap", "long", "primary"]


def test_weights_are_shares_and_a_step_stays_with_its_model() -> None:
    router = RandomRouter({"primary": 3.0, "small": 1.0, "never": 0.0})
    steps = [replace(REQUEST, iteration=number) for number in range(2_000)]
    drawn = [router.select_llm(step) for step in steps]
    counts = Counter(drawn)
    assert counts["small"] == pytest.approx(500, abs=80)
    assert counts["never"] == 0
    assert drawn == [router.select_llm(step) for step in steps]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kind": "multimodal"}, "a router of the kind 'multimodal' needs 'secondary'"),
        ({"kind": "random", "weights": {"a": -1.0}}, "weights must be positive numbers"),
        ({"kind": "rules", "rules": [{"use": "a", "image": True}]}, "'image' is not part of it; did you mean 'images'"),
    ],
)
def test_invalid_routers_are_refused(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(LLMConfigError, match=complaint):
        LLMConfig.create(model="gpt-4o", router=fields)


@pytest.mark.parametrize("path", ["no_such_module:Router", "tests.unit:Missing", "builtins:len"])
def test_a_class_that_cannot_be_made(path: str) -> None:
    with pytest.raises(LLMConfigError, match=r"cannot be created: .* Name a class that takes no arguments\."):
        make_router(RouterSpec(kind="class", path=path), {})


def profiles(tmp_path: Path, router: str) -> Models:
    for name in ("big", "small"):
        turns = [{"text": f"I am {name}."}] * 3
        (tmp_path / f"{name}.json").write_text(json.dumps({"turns": turns}))
    path = tmp_path / "models.toml"
    path.write_text(
        f'[llm]\nmodel = "scripted/{tmp_path}/big.json"\nrouter = {router}\n'
        f'[llm.small]\nmodel = "scripted/{tmp_path}/small.json"\n'
    )
    return Models({"LLM_CONFIG": str(path)}, SystemClock(), is_open=True)


async def said(models: Models, request: ModelRequest) -> str:
    result = await ask_model(models, LLMSpec(), request, attempt=1, clock=ManualClock(), permit=free_permit())
    return result.text if isinstance(result, Completion) else f"{result.code}: {result.content}"


async def test_a_router_is_a_model_to_everybody_else(tmp_path: Path) -> None:
    models = profiles(tmp_path, '{kind = "rules", rules = [{use = "small", images = false}]}')
    assert [await said(models, each) for each in (REQUEST, IMAGE)] == ["I am small.", "I am big."]
    await models.aclose()


async def test_an_operators_own_router(tmp_path: Path) -> None:
    models = profiles(tmp_path, f'{{kind = "class", path = "{__name__}:OwnRouter", choices = ["small"]}}')
    assert await said(models, REQUEST) == "I am small."
    wrong = await said(models, replace(REQUEST, iteration=1))
    assert wrong == "llm_config: The router chose 'nobody', which it was not given. It may choose primary, small."


async def test_a_router_names_only_profiles(tmp_path: Path) -> None:
    models = profiles(tmp_path, '{kind = "random", weights = {smal = 1}}')
    result = await ask_model(models, LLMSpec(), REQUEST, attempt=1, clock=ManualClock(), permit=free_permit())
    assert isinstance(result, ModelCallFailed)
    assert result.content == "There is no model profile 'smal'. Did you mean 'small'?"
