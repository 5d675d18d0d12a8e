"""The blocks of docs/rollouts.md, as a reader runs them: offline, with the stub engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deckhands.rollouts import RolloutSpec
from tests.integration.command_line import cluster, deckhands, environment, read_until, started
from tests.page_blocks import blocks_of
from tests.polling import unhurried

LIMIT_SECONDS = 240.0
ENGINE = "http://127.0.0.1:8000"
SHOW = "deckhands rollouts show second-run"


@contextmanager
def engine(command: str, home: Path) -> Iterator[str]:
    """Start the engine of the page on a free port, and yield its address."""
    words = command.strip().replace("8000", "0").split()
    assert words[0] == "deckhands"
    with started(*words[1:], env=environment(home)) as running:
        yield read_until(running, "listens on")[-1].split()[-1].rstrip(".")


def call(text: str, folder: Path, variables: dict[str, str], *, code: int = 0) -> str:
    """Run a block in a shell, and return its output."""
    done = subprocess.run(
        ["sh", "-ec", text],
        check=False,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == code, done
    return done.stdout


@pytest.mark.timeout(900)
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = [block for block in blocks_of("docs/rollouts.md") if not block.not_run]
    texts = {language: [one.text for one in blocks if one.language == language] for language in ("bash", "python")}
    serving, starting, training, reading, detaching = texts["bash"]
    program, updating, remote = texts["python"]
    specification, rewards, *_ = [block for block in blocks if block.language == "toml"]
    home = tmp_path / "home"
    exports = dict(word.split("=", 1) for word in starting.replace("export ", "").split() if "=" in word)
    with engine(serving, home) as address, cluster(home, **{**exports, "LLM_BASE_URL": f"{address}/v1"}):
        here = environment(home)
        here["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        program = program.replace(ENGINE, address)
        stopped = program.replace("group.ack()", "group.ack()\n            assert step < 2, 'stopped'")
        (tmp_path / "train.py").write_text(stopped)
        lines = call(training, tmp_path, here, code=1).splitlines()
        (tmp_path / "train.py").write_text(program)
        lines += call(training, tmp_path, here).splitlines()
        assert {line.split()[0] for line in lines} == {f"sum-{n}-r0" for n in range(4)}
        assert len(lines) == 16
        assert "first-run" in call(reading, tmp_path, here)
        (tmp_path / specification.file).write_text(specification.text)
        shown = call(detaching, tmp_path, here)
        assert "second-run: running" in shown, shown
        deadline = time.monotonic() + unhurried(60)
        while "second-run: aborted, version 0, has no driver" not in (shown := call(SHOW, tmp_path, here)):
            assert time.monotonic() < deadline, shown
        with started("serve", "--port", "0", env=here) as serving_http, started("rollouts", "attach", env=here):
            assert serving_http.stderr is not None
            ready = next(line for line in serving_http.stderr if "Serving at" in line)
            server = ready.partition("Serving at ")[2].split()[0].rstrip(",")
            scopes = ("--scope", "read", "--scope", "write", "--scope", "operate")
            key = deckhands("key", "add", "trainer", "--tenant", "acme", *scopes, env=here).out.split()[-1]
            (tmp_path / "remote.py").write_text(remote)
            variables = here | {"SERVER": server, "KEY": key}
            lines = call("python remote.py", tmp_path, variables).splitlines()
            assert lines[0].startswith("h-")
            assert lines[1].startswith("sum-1-r0 [")
    rows = [json.loads(line) for line in (tmp_path / "first-run.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    compile(updating, "docs/rollouts.md", "exec")
    fields = tomllib.loads(rewards.text)
    assert RolloutSpec.parse({**fields, "prompts": "shipped", "model": "m"}).weights["brevity"] == 0.1
