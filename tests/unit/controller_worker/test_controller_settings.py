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
READ = "from controller_worker.settings import load_controller_settings; print(bool(load_controller_settings().variables.any_model))"


def read_by_a_worker(path: Path, any_model: str, url: str) -> str:
    environment = {**os.environ, "DECKHANDS_URL": url, "DECKHANDS_ANY_MODEL": any_model}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


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
            if is_own:
                assert read_by_a_worker(path, str(path), f"unix://:password@{path}") == "True"
                assert refused in read_by_a_worker(path, "1", f"unix://{path}")
                assert refused in read_by_a_worker(path, str(path), "redis://127.0.0.1:6379/0")
            else:
                assert refused in read_by_a_worker(path, str(path), f"unix://{path}")
        finally:
            os.killpg(store.pid, signal.SIGKILL)
