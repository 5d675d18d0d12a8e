"""What a controller worker reads from the environment."""

from __future__ import annotations

import pytest

from broker.runtime.errors import UsageError
from controller_worker.settings import controller_settings


def test_nothing_set():
    settings = controller_settings({})
    assert (settings.variables.max_conversations, settings.variables.idle_seconds, settings.variables.hooks) == (
        2_000,
        30.0,
        "",
    )


def test_everything_set():
    environment = {"DECKHANDS_MAX_CONVERSATIONS": "5", "DECKHANDS_IDLE_SECONDS": " 2.5 ", "LLM_MODEL": "acme/large"}
    settings = controller_settings(environment | {"DECKHANDS_POOLS": "bash", "DECKHANDS_CONCURRENCY": "?"})
    assert (settings.variables.max_conversations, settings.variables.idle_seconds) == (5, 2.5)
    assert settings.model_env["LLM_MODEL"] == "acme/large"


@pytest.mark.parametrize(
    ("name", "text"), [("MAX_CONVERSATIONS", "0"), ("MAX_CONVERSATIONS", "many"), ("IDLE_SECONDS", "nan")]
)
def test_a_value_that_cannot_be_used_is_named(name, text):
    with pytest.raises(UsageError, match=f"DECKHANDS_{name} is '?{text}'?. It must be"):
        controller_settings({f"DECKHANDS_{name}": text})
