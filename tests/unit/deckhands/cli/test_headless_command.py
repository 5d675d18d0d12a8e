"""Refusals of the headless command before anything starts, and their exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deckhands.cli.headless import headless
from deckhands.cli.main import call


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("DECKHANDS_", "LLM_", "LITELLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LLM_MODEL", "openai/none")
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "message"),
    [
        ([], {}, 2, "No workspace is named."),
        (["-d", "a/b"], {}, 2, "does not exist"),
        (["-d", "/etc"], {}, 2, "/etc"),
        (["-d", "/etc/deckhands-none"], {}, 2, "/etc/deckhands-none"),
        (["-d", "w", "-n", "../x"], {}, 2, "The run cannot be called '../x'."),
        (["-d", "w", "-i", "0"], {}, 2, "0 is not in the range"),
        (["-d", "w", "-b", "inf"], {}, 2, "inf is not a finite number."),
        (["-d", "w", "--timeout", "inf"], {}, 2, "inf is not a finite number."),
        (["-d", "w", "-c", "Nobody"], {}, 2, "Nobody"),
        (["-d", "w", "-l", "spare"], {}, 2, "There is no section [llm.spare]"),
        (["-d", "w", "--selected-repo", "x"], {}, 2, "No such option"),
        (["-d", "w", "-f", "none.txt"], {}, 2, "The file none.txt cannot be read"),
        (["-d", "w"], {"LLM_MODEL": ""}, 2, "No model is configured."),
        (["-d", "w"], {"RUNTIME": "modal"}, 2, "RUNTIME is 'modal'."),
        (["-d", "w"], {"RUNTIME": "docker"}, 2, "RUNTIME is docker, and no image is named."),
        (["-d", "w"], {"OPENHANDS_USE_SDK_AGENTS": "maybe"}, 2, "OPENHANDS_USE_SDK_AGENTS is 'maybe'."),
        (["-d", "w"], {"SECURITY_SECURITY_ANALYZER": "invariant"}, 2, "security_analyzer is 'invariant'."),
        (["-d", "w", "--permit", "/tmp"], {}, 9, "The permitted folder '/tmp' is not a path below the workspace."),
        (["-d", "w", "--permit", "out", "--permit", "../x"], {}, 9, "The permitted folder '../x' is not"),
        (["-d", "w", "--permit", "."], {}, 9, "The permitted folder is '.'"),
        (["-d", "w"], {"SAVE_TRAJECTORY_PATH": "."}, 9, "is not inside the workspace"),
        (["-d", "w"], {"SAVE_TRAJECTORY_PATH": "/proc/none/t.json"}, 2, "/proc/none/t.json cannot be written"),
    ],
)
def test_invalid_calls_are_refused(place, monkeypatch, capsys, arguments, variables, code, message):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    task = [] if "-f" in arguments else ["-t", "Do it."]
    assert call([*task, *arguments], headless, name="headless") == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert not (place / "w" / "README.md").exists()
    assert not Path("/etc/deckhands-none").exists()


def test_a_workspace_with_the_configuration_that_was_read_is_refused(place, capsys):
    (place / "config.toml").write_text("[llm]\napi_key = 'sk-1'\n")
    assert call(["-t", "Do it.", "-d", "."], headless, name="headless") == 2
    shown = capsys.readouterr().err
    assert "config.toml" in shown
    assert "sk-1" not in shown


def test_a_link_in_the_workspace_is_refused_before_a_run(place, tmp_path, capsys):
    (place / "w").mkdir()
    (place / "w" / "logs").symlink_to(tmp_path)
    assert call(["-t", "Do it.", "-d", "w"], headless, name="headless") == 9
    assert "a part of it is a link" in capsys.readouterr().err
