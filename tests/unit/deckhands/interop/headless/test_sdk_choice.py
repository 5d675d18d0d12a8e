"""Headless runs of SDK agents, by the names that configurations of OpenHands have: keys, variables, who wins."""

from __future__ import annotations

import re

import pytest

from broker.contract.specs import AgentSpec, SdkSpec
from broker.runtime.errors import UsageError
from deckhands.interop.headless.config_file import read_config
from deckhands.interop.headless.sdk_choice import with_sdk_choice

KEYS = "prefer_sdk_agents = true\nfallback_to_legacy = false\ntimeout_seconds = 300\n"
CHOSEN = ("CodeActAgentSDK", SdkSpec(fallback_to_legacy=False, timeout_seconds=300.0))
LEGACY = ("CodeActAgent", None)


def choose(tmp_path, keys: str = "", *, name: str = "CodeActAgent", **env: str) -> tuple[str, SdkSpec | None]:
    path = tmp_path / "my.toml"
    path.write_text(f"[agent]\n{keys}")
    found = with_sdk_choice(AgentSpec(name=name), read_config(path, env, tmp_path), env)
    return found.name, found.sdk


def test_keys_choose_the_sdk_agent_and_its_settings(tmp_path):
    assert choose(tmp_path, KEYS) == CHOSEN
    assert choose(tmp_path, KEYS, name="BrowsingAgent") == ("BrowsingAgentSDK", CHOSEN[1])
    assert choose(tmp_path, KEYS, name="LocAgent")[0] == "LocAgent"
    assert choose(tmp_path) == LEGACY


def test_named_agent_takes_the_settings_of_its_loop(tmp_path):
    assert choose(tmp_path, "timeout_seconds = 5", name="ReadOnlyAgentSDK") == (
        "ReadOnlyAgentSDK",
        SdkSpec(timeout_seconds=5.0),
    )


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
def test_what_cannot_be_used_is_named(tmp_path, keys, env, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        choose(tmp_path, keys, **env)
    assert caught.value.remedy
