"""The settings of a controller worker from the environment."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from controller_worker.settings import load_controller_settings


def test_everything_set():
    environment = {"DECKHANDS_MAX_CONVERSATIONS": "5", "DECKHANDS_IDLE_SECONDS": " 2.5 ", "LLM_MODEL": "acme/large"}
    settings = load_controller_settings(environment | {"DECKHANDS_POOLS": "bash", "DECKHANDS_CONCURRENCY": "?"})
    assert (settings.variables.max_conversations, settings.variables.idle_seconds) == (5, 2.5)
    assert settings.model_env["LLM_MODEL"] == "acme/large"


@pytest.mark.parametrize(
    ("name", "text"), [("MAX_CONVERSATIONS", "0"), ("MAX_CONVERSATIONS", "many"), ("IDLE_SECONDS", "nan")]
)
def test_a_value_that_cannot_be_used_is_named(name, text):
    with pytest.raises(UsageError, match=f"DECKHANDS_{name} is '?{text}'?. It must be"):
        load_controller_settings({f"DECKHANDS_{name}": text})


LISTEN = """
import signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
signal.pause()
"""
READ = """
import os, sys
from controller_worker.settings import load_controller_settings
for any_model, url in zip(sys.argv[1::2], sys.argv[2::2]):
    environment = {**os.environ, "DECKHANDS_URL": url, "DECKHANDS_ANY_MODEL": any_model}
    try:
        print(bool(load_controller_settings(environment).variables.any_model))
    except Exception as error:
        print(error)
"""


def read_by_a_worker(*settings: str) -> list[str]:
    """Return what a worker makes of DECKHANDS_ANY_MODEL and DECKHANDS_URL, for each pair of them."""
    done = subprocess.run([sys.executable, "-c", READ, *settings], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("is_own", [True, False])
def test_any_model_needs_the_store_of_the_workers_own_program(tmp_path: Path, is_own: bool) -> None:
    """A store that another program has started may have other clients, whatever its address looks like."""
    path = tmp_path / "store"
    command = [sys.executable, "-c", LISTEN, str(path)]
    if not is_own:
        command = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as store:
        try:
            assert store.stdout is not None
            assert store.stdout.readline() == b"ready\n"
            refused = "the store at DECKHANDS_URL is not one that `run`, `demo` or an evaluation has started"
            url = f"unix://{path}"
            if is_own:
                others = ("1", url, str(path), "redis://127.0.0.1:6379/0")
                allowed, *refusals = read_by_a_worker(str(path), f"unix://:password@{path}", *others)
                assert (allowed, len(refusals)) == ("True", 2)
            else:
                refusals = read_by_a_worker(str(path), url)
            assert all(refused in each for each in refusals), refusals
        finally:
            os.killpg(store.pid, signal.SIGKILL)
