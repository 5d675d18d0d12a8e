"""OpenHands' configuration: which key wins, what is said about each key, and that no key leaks."""

from __future__ import annotations

import re

import pytest

from broker.contract.specs import AgentSpec
from broker.runtime.errors import UsageError
from controller_worker.providers.config import UNSUPPORTED, LLMConfig
from deckhands.cli.headless import OF_AGENT
from deckhands.interop.headless.config_file import read_config
from deckhands.interop.headless.config_keys import (
    LLM_KEYS,
    SECTIONS_WITHOUT_EFFECT,
    SUPPORTED,
    UNSUPPORTED_KEYS,
    WITHOUT_EFFECT,
)
from deckhands.interop.headless.sdk_choice import VARIABLES_OF
from tests.openhands_template import TEMPLATE, uncomment
from tests.source_code import ROOT

PAGE = (ROOT / "docs" / "migrating-from-openhands.md").read_text()


def read(tmp_path, text: str, **env: str):
    path = tmp_path / "my.toml"
    path.write_text(text)
    return read_config(path, env, tmp_path)


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
def test_what_cannot_be_used_is_named(tmp_path, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "text"), [("MAX_ITERATIONS", "many"), ("ENABLE_BROWSER", "yes"), ("MAX_BUDGET_PER_TASK", "1$")]
)
def test_a_variable_that_cannot_be_used_is_named(tmp_path, name, text):
    with pytest.raises(UsageError, match=f"{name} is "):
        read_config(None, {name: text}, tmp_path)


def test_a_key_without_effect_is_named_and_the_run_begins(tmp_path):
    config = read(tmp_path, "[core]\nfile_store = 'memory'\n[llm]\ncorrect_num = 5\n")
    assert [notice.partition(": ")[2] for notice in config.notices] == [
        "[core] file_store has no effect: the log is always kept, see DECKHANDS_HOME.",
        "[llm] correct_num has no effect: there is no editor that asks a model.",
    ]


def notices(config) -> list[str]:
    return [notice.partition(": ")[2] for notice in config.notices]


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
