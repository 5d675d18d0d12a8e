"""Which names of models a task may give: each way in a specification, and names of many kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, LLMSpec
from broker.runtime.clock import SystemClock
from broker.specs.condenser_specs import CondenserPipelineSpec, LLMSummarizingCondenserSpec
from broker.specs.offered_models import ModelNotOffered, named_models
from broker.specs.policies import LoopPolicy
from broker.specs.specs import CriticSpec, GoalSpec, PlanSpec
from controller_worker.calls.models import Models
from controller_worker.llm.errors import LLMConfigError

TABLE = """
[llm]
model = "anthropic/claude-sonnet-4-5"
api_key = "canary"
[llm.theirs]
tenants = ["other"]
[llm.many]
model = "gemini/*"
api_key = "canary-2"
"""
NAMES = [
    *("llamafile/x", "oobabooga/http://127.0.0.1:9310/y", "custom/http://127.0.0.1/x", "ollama/llama3", "lm_studio/x"),
    *("xinference/x", "hosted_vllm/x", "vllm/x", "openai/gpt-5", "openhands/claude", "bedrock/x", "petals/x"),
    *("huggingface/https://10.0.0.1", "http://127.0.0.1:8080", "file:///etc/passwd", "unix:///run/x", "claude-opus-4"),
    *("anthropic/claude-sonnet-4-5 ", "ANTHROPIC/claude-sonnet-4-5", "anthropic/*", "*", "many", "theirs", "silent"),
    *("theirs#routed", "#routed", "#openai/gpt-5", "many#openai/x", "many#gemini/x", "#scripted//etc/shadow"),
    *("scripted//dev/ptmx", "scripted//dev/./ptmx", "replay//dev/zero", "scripted//etc/shadow", "replay/../../x"),
    *("gemini/", "gemini/../x", "gemini/x?key=1", "gemini/x#y", "gemini/\u0445", "gemini//x", "gemini/x\n"),
    *("gemini/" + "x" * 400, "x" * 100_000, "\ud800", "\u202eevil", "\0", " ", "a\nb"),
]


def models(folder: Path, **env: str) -> Models:
    path = folder / "models.toml"
    path.write_text(TABLE)
    return Models({"LLM_CONFIG": str(path), **env}, SystemClock())


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:40])
def test_an_unknown_name_is_refused_with_the_list(tmp_path: Path, name: str) -> None:
    offered = models(tmp_path)
    with pytest.raises(ModelNotOffered, match=r"Offered models: anthropic/claude-sonnet-4-5, gemini/\*\.") as caught:
        offered.choose(LLMSpec(model=name), "acme")
    assert "theirs" not in caught.value.remedy
    assert len(str(caught.value)) < 1_000
    assert not offered.table.offers(name, "acme")


def test_every_way_to_name_a_model_is_found() -> None:
    spec = AgentSpec(
        llm=LLMSpec(model="a"),
        condenser=CondenserPipelineSpec(condensers=(LLMSummarizingCondenserSpec(llm=LLMSpec(model="b")),)),
        goal=GoalSpec(critic=CriticSpec(llm=LLMSpec(model="c"))),
        plan=PlanSpec(llm=LLMSpec(model="d")),
        loop_policy=LoopPolicy(fallback_model="e"),
        delegates={"x": AgentSpec(llm=LLMSpec(model="f"))},
    )
    assert set(named_models(spec)) == set("abcdef")


async def test_scripts_lie_below_the_directory(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (scripts / "in.json").write_text("{}")
    (scripts / "link.json").symlink_to(tmp_path / "outside.json")
    (scripts / "device").symlink_to("/dev/zero")
    os.mkfifo(scripts / "pipe")
    offered = models(tmp_path, LLM_SCRIPTS_DIR=str(scripts))
    for name in ("in.json", f"{scripts}/in.json"):
        client, _ = await offered.of(offered.choose(LLMSpec(model=f"scripted/{name}"), "acme"))
        await client.aclose()
    refused = ("link.json", "device", "pipe", "../outside.json", f"{scripts}/../outside.json", "/dev/ptmx", ".", "\0")
    for name in refused:
        for prefix in ("scripted/", "replay/"):
            with pytest.raises(LLMConfigError):
                await offered.of(offered.choose(LLMSpec(model=prefix + name), "acme"))
