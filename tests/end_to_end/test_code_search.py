"""Questions about code in a real workspace: in its sandbox, beside its shell, and in a run of LocAgent."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest

from broker.contract.code_search import CodeSearchAction, CodeSearchObservation
from broker.contract.events import Observation
from broker.contract.observations import ErrorObservation
from broker.contract.specs import WorkspaceSpec
from tests.integration.command_line import deckhands, environment
from tests.integration.workspace_hosts import LIMIT_SECONDS, opened, processes
from tests.programs import command_of
from tests.turns import finish, script
from tool_worker.tools.code_search import SearchCode
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.workspaces import OpenWorkspace

SANDBOXES = ["none", pytest.param("bwrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]
FILES = {"till.py": "def open():\n    pass\n", "shop.py": "from till import open\n\n\ndef begin():\n    open()\n"}


class Asking:
    """Asks about the code of a workspace under ids of their own."""

    def __init__(self, workspace: OpenWorkspace) -> None:
        self.workspace = workspace
        self.ids = itertools.count(1)

    async def __call__(self, question: str, **arguments: object) -> Observation:
        action = CodeSearchAction(question=question, arguments=arguments)
        request = SearchCode().request(action)
        result = await self.workspace.run(next(self.ids), request.tool, request.arguments)
        return SearchCode().observe(action, result.value)

    async def bash(self, command: str) -> str:
        result = await self.workspace.run(next(self.ids), "bash", {"command": command})
        return str(result.value["content"])


def written(root: Path) -> Path:
    root.mkdir()
    for name, text in FILES.items():
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_a_workspace_is_asked_about_its_code(sandbox: str, tmp_path: Path) -> None:
    workspace = written(tmp_path / "shop")
    async with opened(tmp_path / "node", sandbox=sandbox, named=NamedDirectories([workspace])) as workspaces:
        ask = Asking(await workspaces.open("conversation", WorkspaceSpec(path=str(workspace))))
        found = await ask("explore_tree_structure", start_entities=["begin"])
        assert found == CodeSearchObservation(
            content="shop.py:begin [function]\n└── invokes → till.py:open [function]", question="explore_tree_structure"
        )
        await ask.bash("mkdir -p deep && cd deep && echo 'class New: pass' > new.py")
        found = await ask("get_entity_contents", entity_names=["deep/new.py", f"{workspace}/till.py:open"])
        assert found.content == (
            "deep/new.py [file]\n     1\tclass New: pass\n\ntill.py:open [function]\n     1\tdef open():\n     2\t    pass"
        )
        wrong = await ask("get_entity_contents")
        assert isinstance(wrong, ErrorObservation)
        assert wrong.content.startswith("Give at least one name")


async def test_question_after_a_killed_program_is_answered(tmp_path: Path) -> None:
    async with opened(tmp_path / "node", named=NamedDirectories([tmp_path / "shop"])) as workspaces:
        ask = Asking(await workspaces.open("conversation", WorkspaceSpec(path=str(written(tmp_path / "shop")))))
        first = await ask("get_entity_contents", entity_names=["open"])
        (program,) = [
            process
            for process in processes(tmp_path / "node", "conversation")
            if "code_program" in " ".join(command_of(process))
        ]
        program.kill()
        await asyncio.wait_for(asyncio.to_thread(program.wait), LIMIT_SECONDS)
        again = await ask("get_entity_contents", entity_names=["open"])
        assert again.content.endswith(first.content)


def test_a_run_of_loc_agent_finds_and_changes_nothing(tmp_path: Path) -> None:
    workspace = written(tmp_path / "shop")
    search = {"name": "search_code_snippets", "arguments": {"search_terms": ["begin"]}}
    write = {"name": "execute_bash", "arguments": {"command": "touch changed", "security_risk": "LOW"}}
    model = script(tmp_path / "m.json", {"tool_calls": [search, write]}, finish("shop.py:begin, line 4."))
    arguments = ["run", "-t", "Who opens?", "-w", workspace, "--agent", "LocAgent", "--model", model, "--json"]
    done = deckhands(*arguments, env=environment(tmp_path / "home"))
    assert done.code == 0, done
    found = [event for event in done.json if event.get("kind") == "observation.search_code"]
    assert [event["content"].splitlines()[1] for event in found] == ["shop.py:begin [function]"]
    (refused,) = [event for event in done.json if event.get("kind") == "observation.error"]
    assert refused["content"].startswith("Tool execute_bash is not registered")
    assert sorted(path.name for path in workspace.iterdir()) == ["shop.py", "till.py"]
