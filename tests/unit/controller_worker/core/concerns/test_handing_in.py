"""An output that a finish has to bring: it fits, it is corrected, it never fits."""

import json
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction
from broker.contract.events import AgentSpec, ModelReply, ModelToolCall
from broker.contract.observations import AgentStateChangedObservation, ErrorObservation, FinishRefusedObservation
from broker.contract.specs import GoalSpec, OutputSpec
from broker.tools.output_schema import find_violations
from controller_worker.agents.finish_tool import make_finish_tool
from controller_worker.agents.registry import create_agent
from controller_worker.core.effects import CallModel, Rest
from controller_worker.loop.delegates import make_delegate_spec
from controller_worker.providers.messages.messages import TextPart
from tests.controller_parts import Core, bash, call, check_replay, messages_of, started
from tests.scenarios import play, scenarios

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"total": {"type": "integer"}, "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}}},
    "required": ["total"],
    "$defs": {"Part": {"type": "object", "properties": {"inner": {"$ref": "#"}, "part": {"$ref": "#/$defs/Part"}}}},
}


def core_with(max_corrections: int = 2, **options: Any) -> Core:
    return started(agent=AgentSpec(output=OutputSpec(json_schema=SCHEMA, max_corrections=max_corrections), **options))


def handing_in(output: Any, call_id: str = "f1") -> ModelToolCall:
    return call("finish", json.dumps({"message": "done", "output": output}), call_id)


@pytest.mark.parametrize("output", [{"total": 3}, '{"total": 3}'], ids=["object", "text"])
def test_an_output_that_fits_is_in_the_finish(output: Any) -> None:
    core = core_with()
    assert core.reply(handing_in(output)) == Rest()
    done = core.event(-2, AgentFinishAction)
    assert (done.outputs, done.final_thought) == ({"total": 3}, "done")
    assert core.states() == ["running", "finished"]


def test_without_a_schema_an_output_is_nothing() -> None:
    core = started()
    core.reply(handing_in({"total": 3}))
    assert core.events[-2].outputs == {}  # type: ignore[attr-defined]


@scenarios(
    {
        "an output that is no object is an invalid call": ({}, "list -> model 2, no json -> model 3"),
        "a finish without an output is refused": ({}, "finish -> model 2"),
        "a message restarts the count": ({"max_corrections": 1}, "empty, say, empty -> model 3"),
        "other calls of the turn run before the correction": ({}, "bash and empty -> tools 8, ran 8 -> model 2"),
        "the check of a goal comes after the output": (
            {"goal": GoalSpec(check="make test")},
            "empty -> model 2, output -> tools 12",
        ),
    }
)
def test_finish_with_an_output(scenario: tuple[dict[str, Any], str]) -> None:
    options, script = scenario
    outputs = {"list": [1], "no json": "{'total'", "empty": {}, "output": {"total": 1}}
    steps = {name: lambda core, output=output: core.reply(handing_in(output)) for name, output in outputs.items()}
    beside = {"bash and empty": lambda core: core.reply(bash(), handing_in({}))}
    core = play(core_with(**options), script, **steps, **beside)
    check_replay(core)
    if script.startswith("list"):
        assert [type(event) for event in core.events[-3::2]] == [ErrorObservation, ErrorObservation]
    elif script.startswith("finish"):
        assert "- /: 'total' is missing" in core.events[-1].content  # type: ignore[attr-defined]


def test_misfit_output_is_refused_with_problems_and_correctable() -> None:
    core = core_with()
    assert core.reply(handing_in({"total": "3"})) == CallModel(2, 1)
    refused = core.event(-1, FinishRefusedObservation)
    assert refused.reason == "output"
    assert "- /total: has to be of the type integer" in refused.content
    assert core.states() == ["running"]
    last = messages_of(core.events)[-1].content[0]
    assert isinstance(last, TextPart)
    assert last.text.strip() == refused.content
    assert core.reply(handing_in({"total": 3}, "f2")) == Rest()
    assert core.states() == ["running", "finished"]


def test_one_correction_too_many_is_an_error() -> None:
    core = core_with(max_corrections=1)
    core.reply(handing_in({}))
    assert core.reply(handing_in({"total": None})) == Rest()
    last = core.event(-1, AgentStateChangedObservation)
    assert (last.agent_state.value, last.code) == ("error", "output_not_valid")
    assert core.state.acceptance.corrections == 2


def test_tool_states_the_output_schema_with_resolved_references() -> None:
    spec = OutputSpec(json_schema=SCHEMA)
    tool = make_finish_tool(spec)
    assert tool.parameters["required"] == ["message", "output"]
    good = {"message": "m", "output": {"total": 1, "parts": [{"part": {"inner": {"total": 2}}}]}}
    bad = {"message": "m", "output": {"total": 1, "parts": [{"part": {"inner": {"total": "2"}}}]}}
    assert find_violations(good, tool.parameters) == []
    assert find_violations(bad, tool.parameters) == ["/output/parts/0/part/inner/total: has to be of the type integer"]
    assert make_finish_tool(None) is AgentFinishAction.tool_spec
    for name in ("CodeActAgent", "LocAgent", "ReadOnlyAgent"):
        agent = create_agent(AgentSpec(name=name, output=spec))
        assert tool in agent.tools
        done = agent.events_of(ModelReply(id=1, tool_calls=(handing_in({"total": 3}),)))[0]
        assert isinstance(done, AgentFinishAction)
        assert done.outputs == {"total": 3}


def test_a_delegate_that_is_not_described_hands_in_words() -> None:
    assert make_delegate_spec(AgentSpec(output=OutputSpec(json_schema=SCHEMA)), "CodeActAgent").output is None
