"""Skills that a task names: the agent reads them as those of its workspace, whatever is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, LLMSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation, SurveyObservation
from broker.contract.recall import RecallObservation
from broker.runtime import UsageError
from controller_worker.loop.replay import replay
from tests.faults.harness import FaultCluster
from tests.faults.test_host_kills import end
from tests.trees import write_files
from tests.turns import bash, finish
from tool_worker.workspace.checkpoints.checkpointing import LOST

PDF = "---\nname: pdf\ndescription: Reads PDFs.\n---\nSee references/pages.md."
READ = bash("cat .agents/skills/pdf/references/pages.md; sh .agents/skills/pdf/scripts/count.sh")


def make_skills(cluster: FaultCluster) -> tuple[str, dict[str, str]]:
    """Write the skills of an operator; return their folder, and the settings of tool workers that allow it."""
    folder = cluster.root / "srv"
    write_files(
        folder,
        {"pdf/SKILL.md": PDF, "pdf/references/pages.md": "Pages are numbered.", "pdf/scripts/count.sh": "echo 7 pages"},
    )
    return str(folder), {"DECKHANDS_SKILL_SOURCES": str(folder)}


async def submit(cluster: FaultCluster, folder: str, *, tenant: str = "") -> str:
    task = {"skills": [folder], "tenant": tenant}
    (cid,) = await cluster.submit([READ, finish()], task=task, enable_workspace_skills=True)
    return cid


async def check(cluster: FaultCluster, conversation_id: str) -> None:
    """Check that the agent was shown the skill's description alone, and has read its files."""
    await cluster.settle([conversation_id])
    events = await cluster.client.events(conversation_id)
    (recall,) = [event for event in events if isinstance(event, RecallObservation)]
    assert [(skill.name, skill.location) for skill in recall.available_skills or ()] == [
        ("pdf", ".agents/skills/pdf/SKILL.md")
    ]
    assert "numbered" not in recall.model_dump_json()
    (output,) = [event for event in events if isinstance(event, CmdOutputObservation)]
    assert output.content.split("\n")[:2] == ["Pages are numbered.", "7 pages"] or (
        "Pages are numbered." in output.content and "7 pages" in output.content
    )
    assert replay(events).divergence is None
    installed = cluster.folder_of(conversation_id) / ".agents" / "skills"
    assert [path.name for path in installed.iterdir()] == ["pdf"]


@pytest.mark.parametrize(
    "failpoint", ["tool.skills_drafted", "tool.skills_renamed", "tool.before_run", "tool.after_result"]
)
async def test_killed_installation_is_completed(cluster: FaultCluster, failpoint: str) -> None:
    folder, environment = make_skills(cluster)
    cluster.start_controller()
    cluster.start_tool("victim", **environment, DECKHANDS_FAILPOINTS=f"{failpoint}:kill@1")
    cid = await submit(cluster, folder)
    assert await cluster.until_ended("victim", limit=60) == -9
    cluster.start_tool("survivor", **environment)
    await check(cluster, cid)


async def test_loss_of_installed_skills_is_said_before_the_first_action(cluster: FaultCluster) -> None:
    folder, environment = make_skills(cluster)
    roots = {name: cluster.root / name for name in ("n1", "n2")}
    nodes = [
        {"DECKHANDS_NODE": name, "DECKHANDS_NODE_DIR": str(root), "DECKHANDS_NODE_LOST_SECONDS": "4"}
        for name, root in roots.items()
    ]
    cluster.start_controller()
    cluster.start_tool("n1", **environment, **nodes[0], DECKHANDS_FAILPOINTS="tool.after_append:kill@1")
    agent = AgentSpec(llm=LLMSpec(model=cluster.script(READ, READ, finish())), enable_workspace_skills=True)
    cid = await cluster.client.submit("do it", agent=agent, skills=[folder])
    assert await cluster.until_ended("n1", limit=60) == -9
    await end(roots["n1"], cid)
    cluster.start_tool("n2", **environment, **nodes[1])
    await cluster.settle([cid])
    events = await cluster.client.events(cid)
    assert [event.has_installed for event in events if isinstance(event, SurveyObservation)] == [True]
    (lost,) = [event for event in events if isinstance(event, ErrorObservation)]
    assert (lost.content, lost.error_id) == (LOST, "workspace_lost")
    await end(roots["n2"], cid)


async def test_refused_skills_are_an_error_until_the_operator_allows_them(cluster: FaultCluster) -> None:
    folder, _ = make_skills(cluster)
    cluster.start(DECKHANDS_SKILL_SOURCES=f"acme={folder}")
    allowed, refused = await submit(cluster, folder, tenant="acme"), await submit(cluster, folder, tenant="other")
    await check(cluster, allowed)
    await cluster.settle([refused])
    summary = await cluster.client.summary(refused)
    assert (summary.state, summary.error_code) == (AgentState.ERROR, "skills_unavailable")
    assert "DECKHANDS_SKILL_SOURCES" in str(summary)
    cluster.kill("t1")
    cluster.start_tool("t2", DECKHANDS_SKILL_SOURCES=folder)
    await cluster.client.resume(refused)
    await check(cluster, refused)


async def test_prompt_stays_bounded_with_200_skills(cluster: FaultCluster) -> None:
    folder = cluster.root / "srv"
    text = "---\nname: {}\ndescription: {}\n---\nDo it."
    names = [f"skill-{number}" for number in range(200)]
    write_files(folder, {f"{name}/SKILL.md": text.format(name, "Useful. " * 50) for name in names})
    cluster.start(DECKHANDS_SKILL_SOURCES=str(folder))
    (cid,) = await cluster.submit([finish()], task={"skills": [str(folder)]}, enable_workspace_skills=True)
    await cluster.settle([cid])
    events = await cluster.client.events(cid)
    (recall,) = [event for event in events if isinstance(event, RecallObservation)]
    assert len(recall.available_skills or ()) == len(names)
    assert (
        sum(len(skill.name + skill.description + skill.location) for skill in recall.available_skills or ()) <= 16_000
    )


async def test_kept_skill_of_the_workspace_is_named_to_the_agent(cluster: FaultCluster, tmp_path: Path) -> None:
    folder, environment = make_skills(cluster)
    cluster.start(**environment)
    write_files(tmp_path / "project", {".agents/skills/pdf/SKILL.md": PDF.replace("Reads", "Writes")})
    (cluster.root / "work").mkdir(exist_ok=True)
    project = (tmp_path / "project").rename(cluster.root / "work" / "project")
    task = {"skills": [folder], "workspace": str(project)}
    (cid,) = await cluster.submit([finish()], task=task, enable_workspace_skills=True)
    await cluster.settle([cid])
    (recall,) = [event for event in await cluster.client.events(cid) if isinstance(event, RecallObservation)]
    assert [skill.description for skill in recall.available_skills or ()] == ["Writes PDFs."]
    assert any("skill pdf of the task is left out" in text for text in recall.unreadable_skills or ())


async def test_task_is_refused_whose_agent_reads_no_skills(cluster: FaultCluster) -> None:
    with pytest.raises(UsageError, match="enable_workspace_skills"):
        await cluster.submit([finish()], task={"skills": ["/srv/skills"]}, enable_workspace_skills=False)
    with pytest.raises(UsageError, match="skills"):
        await cluster.submit([finish()], task={"skills": ["https://example.com/a.zip"]}, enable_workspace_skills=True)
