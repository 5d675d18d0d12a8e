"""Work over many contexts, while controller workers die; and an agent that tries to pass features without the work."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from broker.contract.actions import CondensationAction
from broker.contract.condenser_specs import ConversationWindowCondenserSpec
from broker.contract.long_work import (
    FEATURES_FILE,
    INIT_SCRIPT,
    NOTES_FILE,
    FeatureCheckAction,
    FeatureCheckObservation,
    FeatureListObservation,
    SaveProgressAction,
    SaveProgressObservation,
)
from broker.contract.observations import FinishRefusedObservation
from tests.faults.harness import FaultCluster

NAMES = ("list", "add", "remove", "search", "export")
CHECK = (
    "n=$(cat .git/runs-{name} 2>/dev/null | wc -l); echo x >> .git/runs-{name}; "
    "echo begin-{name}-$n >> .git/effects; sleep {seconds}; echo end-{name}-$n >> .git/effects; test -f {name}.py"
)


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def bash(command: str) -> dict[str, Any]:
    return calls("execute_bash", command=command, security_risk="LOW")


def listing(command: str, **arguments: Any) -> dict[str, Any]:
    return calls("feature_list", command=command, security_risk="LOW", **arguments)


def feature(name: str, *, check: str = "", seconds: float = 0.1) -> dict[str, str]:
    check = check or CHECK.format(name=name, seconds=seconds)
    return {"id": name, "description": f"`{name}` works", "check": check}


def whole_work() -> list[dict[str, Any]]:
    """A first context that plans, one for each feature, and a finish."""
    slow = {"remove": 2.0}
    init = f"mkdir -p .deckhands; echo 'echo prepared in $PWD' > {INIT_SCRIPT}; echo planned > {NOTES_FILE}"
    turns = [
        listing("add", features=[feature(name, seconds=slow.get(name, 0.1)) for name in NAMES]),
        bash(f"{init}; git add -A; git commit -qm Plan"),
        calls("request_condensation"),
    ]
    for name in NAMES:
        done = f"touch {name}.py; echo '{name} is done' >> {NOTES_FILE}"
        turns += [bash(done), listing("verify", ids=[name]), calls("request_condensation")]
    return [*turns, calls("finish", message="all features pass")]


def read_file(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


async def test_long_work_survives_two_takeovers(cluster: FaultCluster) -> None:
    cluster.start_tool("t1")
    (cid,) = await cluster.submit(
        whole_work(),
        name="LongWorkAgent",
        condenser=ConversationWindowCondenserSpec(),
        enable_condensation_request=True,
    )
    folder = Path((cluster.root / f"{cid}.where").read_text())
    effects = folder / ".git" / "effects"  # not committed
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    cluster.start_controller("c1")

    # The second run of this check is the verification that follows the work on it.
    await cluster.until(lambda: effects.exists() and "begin-remove-1" in effects.read_text(), limit=90)
    cluster.kill("c1")
    cluster.start_controller("c2")
    await cluster.until_kind(cid, "action.condensation", count=5, limit=90)
    cluster.kill("c2")
    cluster.start_controller("c3")
    await cluster.settle([cid], limit=90)
    await cluster.check([cid], commands=0)

    events = await cluster.client.events(cid)
    contexts = [event for event in events if isinstance(event, SaveProgressAction) and event.report]
    assert len(contexts) == sum(isinstance(event, CondensationAction) for event in events) + 1 >= 6
    runs = effects.read_text().split()
    assert max(Counter(runs).values()) == 1  # no check ran twice for one verification
    assert Counter(line.rpartition("-")[0] for line in runs) == {
        f"{end}-{name}": 3 for name in NAMES for end in ("begin", "end")
    }

    # Each change from failing to passing directly follows a check with exit code 0.
    proven: set[str] = set()
    for event in events:
        if isinstance(event, FeatureCheckObservation):
            (proven.add if event.exit_code == 0 else proven.discard)(event.feature_id)
        elif isinstance(event, FeatureListObservation):
            assert {one.id for one in event.features if one.passes} <= proven
    assert all(one["passes"] for one in read_file(folder / FEATURES_FILE))

    answers = {event.cause: event for event in events if isinstance(event, SaveProgressObservation)}
    last = answers[contexts[-1].id].content
    assert "5 of 5 features pass." in last
    assert "export is done" in last
    assert f"prepared in {folder}" in last
    assert "Save the progress" in last
    commits = subprocess.check_output(["git", "-C", str(folder), "log", "--format=%s"], text=True).splitlines()
    assert commits[0] == "Save the progress: 5 of 5 features pass"
    assert sum(commit.startswith("Save the progress") for commit in commits) >= len(NAMES)
    assert subprocess.check_output(["git", "-C", str(folder), "status", "--porcelain"], text=True) == ""


async def test_agent_cannot_pass_a_feature_without_its_check(cluster: FaultCluster) -> None:
    forged = [{"id": "a", "description": "a", "steps": [], "check": "true", "passes": True}]
    forging = f"printf '%s' '{json.dumps(forged)}' > {FEATURES_FILE}"
    turns = [
        bash(f"cat {FEATURES_FILE}"),
        listing("add", features=[feature("a", check="test -f a.py")]),
        bash(forging),
        listing("verify"),
        bash(f"rm -r .deckhands; mkdir -p elsewhere; ln -s elsewhere .deckhands; {forging}"),
        calls("finish", message="done"),
        calls("str_replace_editor", command="create", path="{workspace}/a.py", file_text="1", security_risk="LOW"),
        calls("finish", message="done"),
    ]
    cluster.start_tool("t1")
    (cid,) = await cluster.submit(turns, name="LongWorkAgent")
    folder = Path((cluster.root / f"{cid}.where").read_text())
    shipped = folder / FEATURES_FILE
    shipped.parent.mkdir()
    shipped.write_text(json.dumps(forged))  # as a repository may bring it along
    cluster.start_controller("c1")
    await cluster.settle([cid], limit=90)
    await cluster.check([cid], commands=0)
    events = await cluster.client.events(cid)
    saves = {event.id: event for event in events if isinstance(event, SaveProgressAction)}
    edited = [event.was_edited for event in events if isinstance(event, SaveProgressObservation)]
    assert len(saves) == len(edited) == 5
    assert edited == [False, True, True, True, False]  # the first context writes nothing
    lists = [event for event in events if isinstance(event, FeatureListObservation)]
    assert [event.features[0].passes for event in lists] == [False, False, False, True]
    assert ["had been edited" in event.content for event in lists] == [True, True, True, False]
    assert [event.command for event in events if isinstance(event, FeatureCheckAction)] == ["test -f a.py"] * 4
    assert sum(isinstance(event, FinishRefusedObservation) for event in events) == 1
    assert not (folder / "elsewhere" / "features.json").read_text().count('"test -f a.py"')
    assert not shipped.parent.is_symlink()
    assert [(one["check"], one["passes"]) for one in read_file(shipped)] == [("test -f a.py", True)]
