"""A run that asks the user who watches it, and the verbs that answer for a conversation of a cluster."""

from __future__ import annotations

import asyncio
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from broker.contract.actions import RiskyAction
from broker.contract.events import AgentSpec, LLMSpec, WorkspaceSpec
from broker.contract.policies import ConfirmationPolicy
from deckhands.client.reading.summary import ExitCode
from deckhands.client.runs.headless import RunCallbacks, Task, run_on_cluster
from deckhands.client.tasks.spec import TaskSpec
from tests.faults.harness import FaultCluster
from tests.integration.command_line import COMMAND, deckhands, environment
from tests.polling import until
from tests.turns import call, finish, script

ALWAYS = ConfirmationPolicy(mode="always")


def task(root: Path) -> Task:
    script = root / "asking.json"
    script.write_text(
        '{"turns": [{"tool_calls": [{"name": "execute_bash", "arguments": {"command": "echo hi > out"}}]}]}'
    )
    folder = root / "work" / "folder"
    folder.mkdir(parents=True)
    agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"), confirmation=ALWAYS)
    return Task(TaskSpec(task="do it", agent=agent, workspace=WorkspaceSpec(path=str(folder), sandbox="none")))


@pytest.mark.parametrize(("agrees", "code"), [(True, ExitCode.FINISHED), (False, ExitCode.NEEDS_PERSON)])
async def test_whoever_looks_on_is_asked(cluster: FaultCluster, agrees: bool, code: ExitCode) -> None:
    cluster.start()
    asked: list[RiskyAction] = []

    async def ask(action: RiskyAction) -> bool:
        asked.append(action)
        return agrees

    ending = await run_on_cluster(cluster.store.url, task(cluster.root), RunCallbacks(ask=ask))
    assert ending.exit_code is code
    assert [action.sentence for action in asked] == ["Running command: echo hi > out"]
    assert (cluster.root / "work" / "folder" / "out").exists() is agrees
    await cluster.close_workspaces([ending.summary.conversation_id])


async def test_where_nobody_is_there_the_run_ends(cluster: FaultCluster) -> None:
    cluster.start()
    async with asyncio.timeout(30):
        ending = await run_on_cluster(cluster.store.url, task(cluster.root), RunCallbacks())
    assert (ending.exit_code, ending.summary.state) == (ExitCode.NEEDS_PERSON, "awaiting_user_confirmation")
    asked_id = ending.summary.asked_id
    env = environment(cluster.root / "home", DECKHANDS_URL=cluster.store.url)
    shown = await asyncio.to_thread(deckhands, "show", ending.summary.conversation_id, env=env)
    question = f"The agent asks to run action {asked_id} (risk LOW):\n  $ echo hi > out\n"
    assert question in shown.out, shown


@pytest.mark.parametrize(
    ("answer", "code"),
    [(b"y\n", ExitCode.FINISHED), pytest.param(b"\n", ExitCode.NEEDS_PERSON, marks=pytest.mark.soak)],
)
def test_terminal_question_shows_the_content_to_be_written(tmp_path: Path, answer: bytes, code: ExitCode) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    create = {"command": "create", "path": f"{folder}/a.txt", "file_text": "one\ntwo\n"}
    turn = call("str_replace_editor", **create)
    model = script(tmp_path / "asking.json", turn, finish("Done."))
    command = [*COMMAND, "run", "--confirm", "always", "-t", "do it", "-w", str(folder), "--model", model]
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    done = subprocess.run(
        command,
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(tmp_path / "home"),
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == code, done.stderr
    question = f"  Editing {folder}/a.txt (create)\n  + one\n    two\nRun it? [y/N] "
    assert question in done.stderr
    assert (folder / "a.txt").exists() is (code is ExitCode.FINISHED)


async def test_an_answer_that_the_store_loses_is_asked_for_again(durable_cluster: FaultCluster) -> None:
    asked, started, losing = list[int](), list[str](), list[asyncio.Task[None]]()
    older, current = durable_cluster.root / "older", durable_cluster.store.directory / "appendonlydir"
    durable_cluster.start()
    watcher = RunCallbacks(on_start=started.append)

    async def lose(last_id: int) -> None:
        """Bring the store back as it was before the answer, and then the controller worker."""

        async def is_answered() -> bool:
            return await durable_cluster.client.log.load_last_id(started[0]) > last_id

        await until(is_answered, limit=30, what="the answer")
        await durable_cluster.kill_store()
        shutil.rmtree(current)
        older.rename(current)
        await durable_cluster.store.start()
        await until(lambda: len(asked) == 2, limit=30, what="the second question")
        durable_cluster.start_controller()

    async def ask(action: RiskyAction) -> bool:
        asked.append(action.id)
        if len(asked) == 1:  # no process reads the answer: the controller worker ends before it arrives
            durable_cluster.kill("c1")
            shutil.copytree(current, older)
            losing.append(asyncio.create_task(lose(await durable_cluster.client.log.load_last_id(started[0]))))
        return True

    watcher.ask = ask
    async with asyncio.timeout(90):
        ending = await run_on_cluster(durable_cluster.store.url, task(durable_cluster.root), watcher)
        await losing[0]
    assert ending.exit_code is ExitCode.FINISHED
    assert len(asked) == 2
    assert asked[0] == asked[1]
    await durable_cluster.close_workspaces([ending.summary.conversation_id])


async def test_stop_without_controller_workers_does_not_wait(cluster: FaultCluster) -> None:
    notices: list[str] = []
    watcher = RunCallbacks(on_notice=notices.append)
    watcher.on_start = lambda _: watcher.interrupted.set()
    async with asyncio.timeout(60):
        ending = await run_on_cluster(cluster.store.url, task(cluster.root), watcher)
    assert ending.exit_code is ExitCode.INTERRUPTED
    assert notices[-1] == "No controller worker is running; the next one stops the conversation."
    cluster.start_controller()
    async with asyncio.timeout(60):
        summary = await cluster.client.wait_until_settled(ending.summary.conversation_id)
    assert summary.state == "stopped"
