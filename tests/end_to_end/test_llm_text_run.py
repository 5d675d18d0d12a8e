"""A whole run with a model that writes its calls as text: one is wrong, and the model corrects it when it reads so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.integration.command_line import COMMAND, environment

BAD = "I try.\n<function=execute_bash>\n<parameter=comand>echo hello > a</parameter>\n</function>"
GOOD = """I fix it.
<function=execute_bash>
<parameter=command>
echo hello > a &&
cat a
</parameter>
<parameter=security_risk>LOW</parameter>
</function>"""
FINISH = "<function=finish><parameter=message>Done.</parameter></function>"


def test_a_run_in_text(tmp_path: Path) -> None:
    workspace, path = tmp_path / "workspace", tmp_path / "script.json"
    workspace.mkdir()
    path.write_text(json.dumps({"turns": [{"text": text} for text in (BAD, GOOD, FINISH)]}))
    env = environment(tmp_path / "home", LLM_MODEL=f"scripted/{path}", LLM_NATIVE_TOOL_CALLING="false")
    command = [*COMMAND, "run", "-t", "Do it.", "-w", str(workspace), "--sandbox", "none", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done
    *events, summary = (json.loads(line) for line in done.stdout.splitlines())
    assert (workspace / "a").read_text() == "hello\n"
    assert (summary["state"], summary["message"], summary["iterations"]) == ("finished", "Done.", 3)
    (error,) = (event for event in events if event["kind"] == "observation.error")
    assert error["content"].startswith("Parameter 'comand' is not allowed for function 'execute_bash'.")
    (run,) = (event for event in events if event["kind"] == "action.run")
    assert (run["command"], run["thought"]) == ("echo hello > a &&\ncat a", "I fix it.")
