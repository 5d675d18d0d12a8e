"""The sections condenser, mcp and model_routing: what the workers get, and what is refused."""

from __future__ import annotations

import re
import tomllib

import pytest

from broker.contract.condenser_specs import (
    AmortizedForgettingCondenserSpec,
    LLMSummarizingCondenserSpec,
    NoOpCondenserSpec,
    RecentEventsCondenserSpec,
)
from broker.contract.llm_spec import LLMSpec
from broker.runtime.errors import UsageError
from controller_worker.providers.profiles import Profiles
from deckhands.interop.headless.config_file import read_config
from deckhands.interop.headless.worker_files import CONDENSERS, WorkerFiles, render_models, to_condenser
from tests.openhands_template import uncomment
from tool_worker.tools.mcp.config import read_servers

CHEAP = "[llm]\nmodel = 'a'\napi_key = 'k'\n[llm.cheap]\nmodel = 'openai/b'\napi_key = ''\n"
ROUTED = "[llm]\nmodel = 'a'\n[llm.secondary_model]\nmodel = 'kimi-k2'\nfor_routing = true\n"
MULTIMODAL = "[model_routing]\nrouter_name = 'multimodal_router'\n"


def read(tmp_path, text: str):
    path = tmp_path / "my.toml"
    path.write_text(text)
    return read_config(path, {}, tmp_path)


def write(tmp_path, text: str, *, has_network: bool = False, **env: str) -> dict[str, str]:
    config = read(tmp_path, text)
    return WorkerFiles.of(config, env, has_network=has_network).write(tmp_path)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", None),
        ("[condenser]\ntype = 'noop'", NoOpCondenserSpec()),
        ("[condenser]\nkeep_first = 2\ntype = 'recent'", RecentEventsCondenserSpec(keep_first=2)),
        ("[condenser]\ntype = 'amortized'\nmax_size = 9", AmortizedForgettingCondenserSpec(max_size=9)),
        ("[condenser]\ntype = 'llm'\nllm_config = 'llm'", LLMSummarizingCondenserSpec()),
        (
            f"{CHEAP}[condenser]\ntype = 'llm'\nllm_config = 'cheap'\nmax_size = 50",
            LLMSummarizingCondenserSpec(max_size=50, llm=LLMSpec(model="cheap")),
        ),
    ],
)
def test_the_condenser_of_the_section(tmp_path, text, spec):
    assert to_condenser(read(tmp_path, text)) == spec


@pytest.mark.parametrize("kind", CONDENSERS)
def test_every_condenser_can_be_named(tmp_path, kind):
    condenser = to_condenser(read(tmp_path, f"[condenser]\ntype = '{kind}'"))
    assert condenser.model_dump()["type"] == kind


def test_the_model_of_the_condenser_is_a_profile(tmp_path):
    variables = write(tmp_path, f"{CHEAP}[llm.unused]\nmodel = 'c'\n[condenser]\ntype = 'llm'\nllm_config = 'cheap'\n")
    profiles = Profiles.from_env(variables)
    assert profiles.names == ("cheap",)
    assert profiles.load_profile("cheap").model == "openai/b"
    assert profiles.load_profile("cheap").api_key is None


def test_the_router_chooses_the_secondary_model(tmp_path):
    variables = write(tmp_path, ROUTED + MULTIMODAL)
    profiles = Profiles.from_env(variables | {"LLM_MODEL": "a"})
    router = profiles.load_config().router
    assert (router.kind, router.secondary) == ("multimodal", "secondary_model")
    assert profiles.load_profile("secondary_model").model == "kimi-k2"


def test_values_of_a_section_survive_the_file():
    fields = {"model": 'a"\\b\x7f\né', "seed": 1, "temperature": 0.5, "drop_params": True, "base_url": ""}
    nested = {"completion_kwargs": {"extra body": {"list": [1, "two", False]}}}
    found = tomllib.loads(render_models({"a.b": fields | nested}))["llm"]["a.b"]
    assert found == {name: value for name, value in (fields | nested).items() if value != ""}


def test_the_servers_become_a_file_of_the_tool_worker(tmp_path):
    variables = write(tmp_path, uncomment(), has_network=True)
    servers = {server.name: server for server in read_servers(tmp_path / "mcp.json", {})}
    assert variables["DECKHANDS_MCP"] == str(tmp_path / "mcp.json")
    assert list(servers) == ["sse_1", "sse_2", "shttp_1", "shttp_2", "fetch"]
    assert (servers["sse_2"].type, servers["sse_2"].headers) == ("sse", {"Authorization": "Bearer your-api-key"})
    assert (servers["shttp_2"].type, servers["shttp_2"].timeout) == ("http", 180)
    fetch = servers["fetch"]
    assert (fetch.command, fetch.args, fetch.env, fetch.network) == ("uvx", ("mcp-server-fetch",), {"DEBUG": "true"}, 1)


def test_variables_win_over_the_sections(tmp_path):
    text = ROUTED + MULTIMODAL + "[mcp]\nsse_servers = ['http://h/sse']\n"
    config = read(tmp_path, text)
    taken = {"LLM_ROUTER": "{}", "DECKHANDS_MCP": "mine.json"}
    files = WorkerFiles.of(config, taken, has_network=False)
    assert (files.write(tmp_path), files.servers) == ({}, {})
    assert [re.sub(r".*: (\[.*)", r"\1", notice) for notice in config.notices] == [
        "[mcp] has no effect: DECKHANDS_MCP is set.",
        "[model_routing] has no effect: LLM_ROUTER is set.",
    ]


def test_an_agent_without_mcp_gets_no_servers(tmp_path):
    assert write(tmp_path, "[agent]\nenable_mcp = false\n[mcp]\nsse_servers = ['http://h/sse']\n") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[condenser]\ntype = 'agentcache'", "[condenser] type is 'agentcache'."),
        ("[condenser]\ntype = 'noop'\nmax_size = 3", "[condenser] max_size has no meaning for the type noop."),
        ("[condenser]\ntype = 'llm'\nmax_size = 1", "[condenser] max_size cannot be used"),
        (f"{CHEAP}[condenser]\ntype = 'llm'\nllm_config = 'cheep'", "no section [llm.cheep] in the configuration. Did"),
        ("[llm.x]\nseed = 1\n[condenser]\ntype = 'llm'\nllm_config = 'x'", "[llm.x] names no model."),
        ("[model_routing]\nrouter_name = 'x'", "[model_routing] router_name is 'x'."),
        (MULTIMODAL, "needs a section [llm.secondary_model] with for_routing = true"),
        ("[mcp]\nsse_servers = ['ftp://secret']", "Entry 1 of [mcp] sse_servers: url cannot be used."),
        ("[mcp]\nshttp_servers = [{url = 'http://h', timeout = 0}]", ": timeout cannot be used"),
        ("[mcp]\nstdio_servers = [{name = 'a b', command = 'c'}]", ": name cannot be used"),
        ("[mcp]\nstdio_servers = [{name = 'a', command = 'c d'}]", ": command cannot be used"),
        ("[mcp]\nstdio_servers = [{name = 'a', command = 'c', args = 'd'}]", ": args cannot be used"),
        ("[mcp]\nsse_servers = [{url = 'http://h', secret = 1}]", "sse_servers has the unknown key secret."),
        ("[mcp]\nstdio_servers = ['secret']", "Entry 1 of [mcp] stdio_servers is a text."),
        ("[mcp]\nstdio_servers = [{name = 'a'}]", "Entry 1 of [mcp] stdio_servers has no command."),
        ("[mcp]\nsse_servers = ['http://h', 'http://h']", "two servers with the same url"),
        ("[mcp]\nstdio_servers = [{name = 'a', command = 'b'}, {name = 'a', command = 'c'}]", "two servers called a"),
    ],
)
def test_unusable_sections_are_named(tmp_path, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        write(tmp_path, text)
    assert caught.value.remedy
    assert "secret" not in caught.value.message.replace("unknown key secret", "")


def test_sections_that_nothing_names_write_no_file(tmp_path):
    assert write(tmp_path, CHEAP) == {}
