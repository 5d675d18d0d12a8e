"""Condensers of installed packages, by entry point, and unknown types."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from broker.contract.condenser_specs import (
    CondenserPipelineSpec,
    NoOpCondenserSpec,
    OtherCondenserSpec,
    handles_requests,
)
from broker.contract.events import AgentSpec
from broker.runtime.errors import UsageError
from controller_worker.memory.condensers.model_free import NoOpCondenser
from controller_worker.memory.condensers.registry import create_condenser
from tests.entry_points import install_package

MODULE = """
class Forgetful:
    def __init__(self, spec):
        self.settings = spec.settings
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condensers = {"forgetful": "Forgetful", "lost": "Nobody", "noop": "Forgetful"}
    install_package(tmp_path, monkeypatch, "condensers_of_a_package", MODULE, {"deckhands.condensers": condensers})


def test_a_condenser_of_a_package_is_found_by_its_type() -> None:
    made = create_condenser(OtherCondenserSpec(type="forgetful", settings={"keep": 3}))
    assert made.settings == {"keep": 3}  # type: ignore[attr-defined]


def test_a_package_cannot_replace_a_built_in_condenser() -> None:
    assert isinstance(create_condenser(NoOpCondenserSpec()), NoOpCondenser)


def test_a_package_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(UsageError, match=r"The condenser 'lost' cannot be loaded: AttributeError: .*Nobody"):
        create_condenser(OtherCondenserSpec(type="lost"))


def test_an_unknown_type_is_answered_with_all_there_are() -> None:
    with pytest.raises(UsageError, match="There is no condenser of the type 'nosuch'") as raised:
        create_condenser(OtherCondenserSpec(type="nosuch"))
    assert raised.value.remedy == (
        "Known types: amortized, browser_output_masking, conversation_window, forgetful, llm, llm_attention, lost, noop, "
        "observation_masking, pipeline, recent, structured."
    )


def test_specification_without_its_own_class_survives_the_wire() -> None:
    fields = {"type": "forgetful", "settings": {"keep": [1, None]}, "answers_requests": True}
    agent = AgentSpec.model_validate({"condenser": {"type": "pipeline", "condensers": [{"type": "noop"}, fields]}})
    assert agent.condenser == CondenserPipelineSpec(condensers=(NoOpCondenserSpec(), OtherCondenserSpec(**fields)))
    assert agent.model_dump(mode="json")["condenser"]["condensers"] == [{"type": "noop"}, fields]
    assert AgentSpec.model_validate_json(agent.model_dump_json()) == agent
    assert handles_requests(agent.condenser)


@pytest.mark.parametrize(
    "condenser",
    [{}, {"settings": {}}, {"type": ""}, {"type": 3}, {"type": "a b"}, {"type": "llm", "max_size": 1}, "noop", 1],
)
def test_invalid_specification_is_refused(condenser: object) -> None:
    with pytest.raises(ValidationError):
        AgentSpec.model_validate({"condenser": condenser})
