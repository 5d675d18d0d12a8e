"""`deckhands secret` and `submit --secret`: commands get the values, and no output shows them."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from broker.runtime.settings import BrokerSettings
from broker.secrets.masking import MASK
from broker.secrets.secrets import Secrets, load_secret_key
from broker.store.store import open_store
from tests.integration.command_line import deckhands, environment, run_command
from tests.stores import RealServer, emptied
from tests.turns import script

TOKEN = "ghp_0123456789abcdef"


@pytest.fixture
def env(tmp_path: Path, valkey_server: RealServer) -> dict[str, str]:
    url = asyncio.run(emptied(valkey_server.url))
    return environment(tmp_path / "home", DECKHANDS_URL=url, LLM_MODEL="scripted/none", API_TOKEN=TOKEN)


async def given(env: dict[str, str], conversation_id: str, command: str) -> dict[str, str]:
    """Return the values that a tool worker with the same home would give to a command."""
    store = await open_store(env["DECKHANDS_URL"])
    try:
        key = partial(load_secret_key, BrokerSettings(home=Path(env["DECKHANDS_HOME"])))
        return await Secrets(store, key).find_named(conversation_id, command)
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
    again = deckhands("secret", conversation_id, "PASSWORD", "--remove", env=env)
    assert (again.code, again.out) == (2, "")
    told = f"deckhands: The conversation {conversation_id} has no secret 'PASSWORD'.\n  It has API_TOKEN.\n"
    assert again.err == told


def test_invalid_secret_is_refused(env: dict[str, str]) -> None:
    conversation_id = deckhands("submit", "-t", "Use the API", env=env).out.strip()
    short = deckhands("secret", conversation_id, "PIN", env=env, stdin="4711\n")
    assert short.code == 2
    assert "The value of the secret PIN has 4 characters." in short.err
    missing = deckhands("submit", "-t", "Use the API", "--secret", "NOT_SET", env=env)
    assert missing.code == 2
    assert "The environment variable NOT_SET is not set." in missing.err


def test_without_the_key_nobody_speaks_but_everybody_may_stop(env: dict[str, str], tmp_path: Path) -> None:
    conversation_id = deckhands("submit", "-t", "Use it", "--secret", "API_TOKEN", env=env).out.strip()
    stranger = env | {"DECKHANDS_HOME": str(tmp_path / "elsewhere")}
    done = deckhands("message", conversation_id, "hello", env=stranger)
    assert done.code == 1
    assert "There are secrets, and no key for them." in done.err
    assert deckhands("pause", conversation_id, env=stranger).code == 0
    assert deckhands("cancel", conversation_id, "--no-wait", env=stranger).code == 0
    assert not (tmp_path / "elsewhere" / "secret.key").exists()


def test_a_value_on_the_command_line(env: dict[str, str]) -> None:
    done = deckhands("submit", "-t", "Use it", "--secret", "PAIR=user=pass-word", "--secret", "API_TOKEN", env=env)
    assert asyncio.run(given(env, done.out.strip(), "$PAIR $API_TOKEN")) == {
        "PAIR": "user=pass-word",
        "API_TOKEN": TOKEN,
    }
    for wrong in ("1X=some-value-here", "X=k9w2", "X="):
        refused = deckhands("submit", "-t", "Use it", "--secret", wrong, env=env)
        assert refused.code == 2
        assert wrong.partition("=")[2] not in refused.err or wrong == "X="


def test_a_run_whose_worker_looks_the_secret_up(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "held").write_text(TOKEN + "\n")
    sources = tmp_path / "sources.toml"
    sources.write_text(f'[held]\nfile = "{tmp_path}/{{path}}"\n[absent]\ncommand = ["/bin/false"]\n')
    env = environment(tmp_path / "home", DECKHANDS_SECRET_SOURCES=str(sources))
    steps = ['echo "it is $API_TOKEN"; printf %s "$API_TOKEN" | wc -c', "echo $OTHER > never"]
    model = script(tmp_path / "m.json", *map(run_command, steps))
    done = deckhands(
        *("run", "-t", f"Use {TOKEN[:5]}", "-w", tmp_path / "w", "--sandbox", "none", "--model", model, "--json"),
        *("--secret", "OTHER@absent", "--secret", "API_TOKEN@held:held"),
        env=env,
    )
    assert done.code == 0, done
    assert TOKEN not in done.out + done.err
    (output,) = (event for event in done.json if event.get("kind") == "observation.run")
    assert output["content"].split() == ["it", "is", MASK, str(len(TOKEN))]
    (refused,) = (event for event in done.json if event.get("kind") == "observation.error")
    assert "The secret OTHER cannot be looked up, so nothing was run" in refused["content"]
    assert "the program of the source absent ended with code 1" in refused["content"]
    kept = [file for file in (tmp_path / "home").rglob("*") if file.is_file()]
    assert any("appendonly" in str(file) for file in kept)
    journals = [file for file in kept if "host" in file.parts or file.name == "journal"]
    assert [file for file in kept if file not in journals and TOKEN.encode() in file.read_bytes()] == []
