"""An installation without extras, as a tool host or a client has it: working commands, and errors of the others."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributions import needed_by
from tests.integration.command_line import environment
from tests.model_server.running_server import RunningModelServer
from tests.turns import bash

pytest_plugins = ("tests.model_server.fixtures",)

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("flower", "litellm", "openai", "tiktoken", "tokenizers", "tornado")
SCRIPT = {"turns": [bash("echo slim > made.txt")]}


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds what `pip install deckhands` would bring, by links, and nothing else."""
    folder = tmp_path_factory.mktemp("slim")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / Path(sys.executable).name
    told = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    )
    target = Path(told.stdout.strip())
    for name, found in needed_by("deckhands").items():
        for file in (found.files or ()) if name != "deckhands" else ():
            top = target / file.parts[0]
            if file.parts[0] != ".." and not top.exists():
                top.symlink_to(Path(str(found.locate_file(file.parts[0]))))
    (target / "deckhands.pth").write_text(f"{ROOT}\n")
    return python


def _run(python: Path, *arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = environment(home, **variables)
    command = [str(python), "-P", "-m", "deckhands", *arguments]
    return subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=120)


def test_the_models_libraries_and_flower_are_extras(slim: Path) -> None:
    asked = f"import importlib.util as u; print([name for name in {LEFT_OUT!r} if u.find_spec(name)])"
    done = subprocess.run([slim, "-P", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_whole_run_needs_none_of_them(slim: Path, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    model = f"scripted/{tmp_path}/script.json"
    done = _run(slim, "run", "-t", "Write.", "-w", str(workspace), "--model", model, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert (workspace / "made.txt").read_text() == "slim\n"


@pytest.mark.parametrize("model", ["anthropic/claude-sonnet-4-5", "my-model"])
def test_plain_installation_calls_a_real_model(
    slim: Path, tmp_path: Path, model: str, model_server: Callable[..., RunningModelServer]
) -> None:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    server = model_server("--script", str(tmp_path / "script.json"))
    address = server.url if model.startswith("anthropic") else f"{server.url}/v1"
    arguments = ("run", "-t", "Write.", "-w", str(workspace), "--model", model)
    done = _run(slim, *arguments, home=tmp_path / "home", LLM_API_KEY="k", LLM_BASE_URL=address)
    assert done.returncode == 0, done.stderr
    assert (workspace / "made.txt").read_text() == "slim\n"


def test_model_that_needs_litellm_names_the_extra(slim: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    arguments = ("run", "-t", "Think.", "-w", str(workspace), "--model", "mistral/large")
    done = _run(slim, *arguments, home=tmp_path / "home", LLM_API_KEY="k")
    assert done.returncode == 2
    assert "has no 'litellm'" in done.stderr
    assert "pip install 'deckhands[litellm]'" in done.stderr
