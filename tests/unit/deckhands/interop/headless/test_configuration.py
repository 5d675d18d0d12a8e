"""OpenHands' configuration: precedence of keys, notices about each, and the resulting agents and workers."""

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
from broker.contract.specs import AgentSpec, SdkSpec
from broker.runtime.errors import UsageError
from broker.tools.mcp_config import read_servers
from controller_worker.providers.config import UNSUPPORTED, LLMConfig
from controller_worker.providers.profiles import Profiles
from deckhands.cli.headless import OF_AGENT
from deckhands.interop.headless.config_file import read_config
from deckhands.interop.headless.config_keys import (
    LLM_KEYS,
    SECTIONS_WITHOUT_EFFECT,
    SUPPORTED,
    UNSUPPORTED_KEYS,
    WITHOUT_EFFECT,
)
from deckhands.interop.headless.sdk_choice import VARIABLES_OF, with_sdk_choice
from deckhands.interop.headless.worker_files import CONDENSERS, WorkerFiles, render_models, to_condenser
from tests.openhands_template import TEMPLATE, uncomment
from tests.source_code import ROOT

PAGE = (ROOT / "docs" / "parity.md").read_text()


def read(tmp_path, text: str, **env: str):
    path = tmp_path / "my.toml"
    path.write_text(text)
    return read_config(path, env, tmp_path)


def notices(config) -> list[str]:
    return [notice.partition(": ")[2] for notice in config.notices]


def test_the_environment_wins_over_the_file(tmp_path):
    config = read(tmp_path, "[core]\nmax_iterations = 3\nruntime = 'docker'\n", MAX_ITERATIONS="4", ENABLE_BROWSER="1")
    assert config.get("core", "max_iterations") == 4
    assert config.get("core", "runtime") == "docker"
    assert config.get("core", "enable_browser") is True


def test_the_model_of_the_file_the_environment_and_a_profile(tmp_path):
    text = "[llm]\nmodel = 'a'\napi_key = 'k1'\ntemperature = 0.5\n[llm.spare]\nmodel = 'b'\ndrop_params = false\n"
    config = read(tmp_path, text)
    env = {"LLM_API_KEY": "k2", "LITELLM_API_BASE": "http://proxy"}
    base = config.environment(env, None)
    named = {name: base[name] for name in ("LLM_MODEL", "LLM_API_KEY", "LLM_BASE_URL", "LLM_TEMPERATURE")}
    assert named == {"LLM_MODEL": "a", "LLM_API_KEY": "k2", "LLM_BASE_URL": "http://proxy", "LLM_TEMPERATURE": "0.5"}
    spare = config.environment({**env, "LLM_SEED": "1", "LITELLM_MODEL": "c"}, "spare")
    settings = {name: text for name, text in spare.items() if name.startswith(("LLM_", "LITELLM_M"))}
    assert settings == {"LLM_MODEL": "b", "LLM_API_KEY": "k1", "LLM_TEMPERATURE": "0.5", "LLM_DROP_PARAMS": "false"}
    assert "LLM_MODEL" not in config.environment({"LITELLM_MODEL": "c"}, None)
    assert str(tmp_path / "my.toml") in base["DECKHANDS_CONFIG_FILES"]
    with pytest.raises(UsageError, match=r"no section \[llm.spar\] .*Did you mean spare"):
        config.environment(env, "spar")


def test_variables_of_shells_and_the_name_for_git(tmp_path):
    text = "[core]\ngit_user_name = 'ann'\n[sandbox.runtime_startup_env_vars]\nCI = '1'\n"
    env = read(tmp_path, text).environment({}, None)
    assert (env["DECKHANDS_GIT_USER_NAME"], env["SANDBOX_ENV_CI"]) == ("ann", "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[core]\nmax_iteration = 3", "max_iteration is not known. Did you mean max_iterations?"),
        ("[core]\nprefer_sdk_agents = true", "Did you mean [agent] prefer_sdk_agents?"),
        ("[agent]\nfallback_to_legacy = 'no'", "fallback_to_legacy is 'no'."),
        ("[llm]\nmodl = 'x'", "modl is not known. Did you mean model?"),
        ("[llm.spare]\nmodl = 'x'", "modl is not known. Did you mean model?"),
        ("[cores]\nx = 1", "is not known. Did you mean core?"),
        ("[sandbox]\nvolumes = '/:/x'", "volumes is not supported."),
        ("[sandbox]\nenable_gpu = true", "enable_gpu is not supported."),
        ("[model_routing]\nrouter = 'x'", "[model_routing] router is not known. Did you mean router_name?"),
        ("[mcp]\nsse_servers = 'http://u:secret@h'", "[mcp] sse_servers is not a list."),
        ("max_iterations = 3", "[max_iterations] is no section."),
        ("[core]\nmax_iterations = true", "max_iterations is True."),
        ("[core]\nmax_iterations = 1.5", "max_iterations is 1.5."),
        ("[agent]\nenable_cmd = 'yes'", "enable_cmd is 'yes'."),
        ("[agent]\ndisabled_microagents = 'a'", "disabled_microagents is 'a'."),
        ("[core", "cannot be read"),
    ],
)
def test_invalid_configuration_is_named(tmp_path, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "text"), [("MAX_ITERATIONS", "many"), ("ENABLE_BROWSER", "yes"), ("MAX_BUDGET_PER_TASK", "1$")]
)
def test_a_variable_that_cannot_be_used_is_named(tmp_path, name, text):
    with pytest.raises(UsageError, match=f"{name} is "):
        read_config(None, {name: text}, tmp_path)


def test_the_template_of_openhands_is_taken_as_it_is(tmp_path):
    config = read(tmp_path, TEMPLATE)
    config.select_agent("CodeActAgent", {"CodeActAgent"})
    assert notices(config) == [
        "[llm.draft_editor] correct_num has no effect: there is no editor that asks a model.",
        "[agent] enable_llm_editor has no effect: there is no editor that asks a model.",
        "[agent.RepoExplorerAgent] is left out: there is no agent of this name.",
        "[agent.CustomAgent] is left out: there is no agent of this name.",
    ]
    variables = config.environment({}, None)
    assert variables["LLM_MODEL"] == "claude-sonnet-4-5-20250929"
    assert "LLM_API_KEY" not in variables
    assert (config.get("agent", "enable_jupyter"), config.get("condenser", "type")) == (True, "noop")


def test_the_template_with_every_key_is_taken(tmp_path):
    config = read(tmp_path, uncomment())
    config.select_agent("CodeActAgent", {"CodeActAgent"})
    assert config.get("core", "max_budget_per_task") == 0
    assert config.for_routing == {"secondary_model"}
    variables = config.environment({}, config.get("agent", "llm_config"))
    assert LLMConfig.from_env(variables).model == "gpt-4o"
    assert LLMConfig.from_env(config.environment({}, None)).timeout is None
    named = " ".join(notices(config))
    assert "[kubernetes] has no effect" in named
    for name in ("replay_trajectory_path", "browsergym_eval_env", "enable_gpu", "docker_runtime_kwargs", "jwt_secret"):
        assert name not in named  # empty


def test_the_section_of_the_agent_wins_over_agent(tmp_path):
    text = "[agent]\nenable_cmd = true\nenable_think = true\nenable_editor = true\n"
    text += "[agent.CodeActAgent]\nenable_cmd = false\nenable_think = false\n[agent.Other]\nenable_editor = false\n"
    config = read(tmp_path, text, AGENT_ENABLE_THINK="true")
    config.select_agent("CodeActAgent", {"CodeActAgent", "Other"})
    assert [config.get("agent", f"enable_{name}") for name in ("cmd", "think", "editor")] == [False, True, True]
    assert config.notices == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enable_cmd = 'no'", "[agent.CodeActAgent] enable_cmd is 'no'."),
        ("enable_cmdd = true", "[agent.CodeActAgent] enable_cmdd is not known. Did you mean enable_cmd?"),
        ("classpath = 'a.B'", "[agent.CodeActAgent] classpath is not supported."),
    ],
)
def test_a_bad_key_of_a_known_agent_is_named(tmp_path, text, message):
    config = read(tmp_path, f"[agent.CodeActAgent]\n{text}\n")
    with pytest.raises(UsageError, match=re.escape(message)):
        config.select_agent("DummyAgent", {"CodeActAgent", "DummyAgent"})


def test_file_possibly_written_by_a_stranger_is_not_read(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "config.toml").write_text("[llm]\nbase_url = 'http://evil'\n")
    config = read_config(None, {}, tmp_path)
    assert config.llm == {}
    assert "is not read: it lies in the repository" in config.notices[0]
    assert read_config(tmp_path / "config.toml", {}, tmp_path).llm == {"base_url": "http://evil"}


def test_keys_do_not_show(tmp_path):
    config = read(tmp_path, "[llm]\napi_key = 'sk-1'\n[llm.spare]\napi_key = 'sk-2'\n")
    assert "sk-" not in repr(config)


def test_the_tables_are_those_of_what_they_name():
    assert set(LLMConfig.model_fields) >= LLM_KEYS
    assert WITHOUT_EFFECT["llm"] == dict(UNSUPPORTED)
    assert set(AgentSpec.model_fields) >= set(OF_AGENT)
    assert set(SUPPORTED["agent"]) == {*OF_AGENT, *VARIABLES_OF, "enable_mcp", "llm_config"}
    for section, keys in SUPPORTED.items():
        assert not set(keys) & (set(WITHOUT_EFFECT[section]) | set(UNSUPPORTED_KEYS[section]))
    assert not set(SECTIONS_WITHOUT_EFFECT) & {*SUPPORTED, "llm"}


@pytest.mark.parametrize("section", [*SUPPORTED, "llm"])
def test_the_page_lists_the_keys(section):
    (row,) = re.findall(rf"^\| `\[{section}\]`[^|]*\| (.*) \|$", PAGE, re.MULTILINE)
    known = LLM_KEYS if section == "llm" else set(SUPPORTED[section])
    assert re.findall(r"`(\w+)`", row) == sorted(known)


CHEAP = "[llm]\nmodel = 'a'\napi_key = 'k'\n[llm.cheap]\nmodel = 'openai/b'\napi_key = ''\n"
ROUTED = "[llm]\nmodel = 'a'\n[llm.secondary_model]\nmodel = 'kimi-k2'\nfor_routing = true\n"
MULTIMODAL = "[model_routing]\nrouter_name = 'multimodal_router'\n"


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


KEYS = "prefer_sdk_agents = true\nfallback_to_legacy = false\ntimeout_seconds = 300\n"
CHOSEN = ("CodeActAgentSDK", SdkSpec(fallback_to_legacy=False, timeout_seconds=300.0))
LEGACY = ("CodeActAgent", None)


def choose(tmp_path, keys: str = "", *, name: str = "CodeActAgent", **env: str) -> tuple[str, SdkSpec | None]:
    found = with_sdk_choice(AgentSpec(name=name), read(tmp_path, f"[agent]\n{keys}", **env), env)
    return found.name, found.sdk


def test_keys_choose_the_sdk_agent_and_its_settings(tmp_path):
    assert choose(tmp_path, KEYS) == CHOSEN
    assert choose(tmp_path, KEYS, name="BrowsingAgent") == ("BrowsingAgentSDK", CHOSEN[1])
    assert choose(tmp_path, KEYS, name="LocAgent")[0] == "LocAgent"
    assert choose(tmp_path) == LEGACY


def test_the_variables_have_the_names_of_the_keys(tmp_path):
    named = {"AGENT_PREFER_SDK_AGENTS": "true", "AGENT_FALLBACK_TO_LEGACY": "0", "AGENT_TIMEOUT_SECONDS": "300"}
    assert choose(tmp_path, **named) == CHOSEN
    assert choose(tmp_path, KEYS, AGENT_PREFER_SDK_AGENTS="false")[0] == "CodeActAgent"


def test_our_variables_win_over_the_keys(tmp_path):
    assert choose(tmp_path, KEYS, OPENHANDS_USE_SDK_AGENTS="0")[0] == "CodeActAgent"
    assert choose(tmp_path, KEYS, DECKHANDS_PREFER_SDK_AGENTS="0")[0] == "CodeActAgent"
    theirs = {"DECKHANDS_SDK_TIMEOUT_SECONDS": "9", "DECKHANDS_FALLBACK_TO_LEGACY": "1"}
    assert choose(tmp_path, KEYS, **theirs) == (CHOSEN[0], SdkSpec(fallback_to_legacy=True, timeout_seconds=9.0))
    # That the SDK is preferred says a variable, so the submission chooses; how it runs says the file.
    assert choose(tmp_path, "timeout_seconds = 5", OPENHANDS_USE_SDK_AGENTS="1") == (
        "CodeActAgent",
        SdkSpec(timeout_seconds=5.0),
    )


@pytest.mark.parametrize(
    ("keys", "env", "message"),
    [
        ("timeout_seconds = 0", {}, "timeout_seconds is 0."),
        ("timeout_seconds = inf", {}, "timeout_seconds is inf."),
        ("", {"AGENT_TIMEOUT_SECONDS": "long"}, "AGENT_TIMEOUT_SECONDS is 'long'."),
        ("", {"AGENT_PREFER_SDK_AGENTS": "maybe"}, "AGENT_PREFER_SDK_AGENTS is 'maybe'."),
        (KEYS, {"OPENHANDS_USE_SDK_AGENTS": "maybe"}, "OPENHANDS_USE_SDK_AGENTS is 'maybe'."),
    ],
)
def test_unusable_sdk_choice_is_named(tmp_path, keys, env, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        choose(tmp_path, keys, **env)
    assert caught.value.remedy
