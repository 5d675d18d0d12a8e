"""`deckhands secret` and `submit --secret`: given to commands, shown to nobody."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from broker.secrets import Secrets, secret_key
from broker.settings import BrokerSettings
from broker.store import open_store
from tests.integration.command_line import deckhands, environment
from tests.stores import RealServer, emptied

TOKEN = "ghp_0123456789abcdef"


@pytest.fixture
def env(tmp_path: Path, valkey_server: RealServer) -> dict[str, str]:
    url = asyncio.run(emptied(valkey_server.url))
    return environment(tmp_path / "home", DECKHANDS_URL=url, LLM_MODEL="scripted/none", API_TOKEN=TOKEN)


async def given(env: dict[str, str], conversation_id: str, command: str) -> dict[str, str]:
    """Return what a tool worker with the same home would give to a command."""
    store = await open_store(env["DECKHANDS_URL"])
    try:
        key = partial(secret_key, BrokerSettings(home=Path(env["DECKHANDS_HOME"])))
        return await Secrets(store, key).wanted_by(conversation_id, command)
    finally:
        await store.aclose()


def test_a_task_with_a_secret_from_the_environment(env: dict[str, str]) -> None:
    done = deckhands("submit", "-t", "Use the API", "--secret", "API_TOKEN", env=env)
    assert done.code == 0
    conversation_id = done.out.strip()
    assert asyncio.run(given(env, conversation_id, "curl $API_TOKEN")) == {"API_TOKEN": TOKEN}
    assert deckhands("secret", conversation_id, env=env).out == "API_TOKEN\n"
    assert TOKEN not in deckhands("export", conversation_id, env=env).out


def test_secrets_are_added_replaced_listed_and_removed(env: dict[str, str]) -> None:
    conversation_id = deckhands("submit", "-t", "Use the API", env=env).out.strip()
    assert deckhands("secret", conversation_id, "--json", env=env).json == [{"names": []}]
    assert deckhands("secret", conversation_id, "PASSWORD", env=env, stdin="hunter2-hunter2\n").code == 0
    assert deckhands("secret", conversation_id, "API_TOKEN", "--from-env", env=env).code == 0
    assert deckhands("secret", conversation_id, "--json", env=env).json == [{"names": ["API_TOKEN", "PASSWORD"]}]
    assert asyncio.run(given(env, conversation_id, "$PASSWORD")) == {"PASSWORD": "hunter2-hunter2"}
    assert deckhands("secret", conversation_id, "PASSWORD", "--remove", env=env).code == 0
    assert asyncio.run(given(env, conversation_id, "$PASSWORD")) == {}


def test_what_cannot_be_kept(env: dict[str, str]) -> None:
    conversation_id = deckhands("submit", "-t", "Use the API", env=env).out.strip()
    short = deckhands("secret", conversation_id, "PIN", env=env, stdin="4711\n")
    assert short.code == 2
    assert "The value of the secret PIN has 4 characters." in short.err
    missing = deckhands("submit", "-t", "Use the API", "--secret", "NOT_SET", env=env)
    assert missing.code == 2
    assert "The environment variable NOT_SET is not set." in missing.err
