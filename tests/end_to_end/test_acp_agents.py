"""ACP agents: a scripted one in runs of the command line, and on a cluster with questions, limits and SIGKILL.

Recorded work is not repeated; work between two reports is the agent's responsibility."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.contract.actions import AgentFinishAction, MessageAction
from broker.contract.events import AgentSpec, Event, EventSource, ModelCallFailed, ModelReply, WorkspaceSpec
from broker.contract.policies import ConfirmationPolicy
from broker.contract.session_events import AcpObservation, AcpPermissionAction, AcpTurnAction
from broker.contract.specs import AcpSpec, Limits
from broker.contract.task_list import TaskTrackingObservation
from tests.faults.harness import FaultCluster
from tests.integration.command_line import Done, deckhands, environment
from tests.programs import command_of

AGENT = Path(__file__).resolve().parents[1] / "acp_agent.py"
ALWAYS = ConfirmationPolicy(mode="always")
LIMIT_SECONDS = 120.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(tmp_path).running() as running:
        running.start()
        yield running


async def begun(
    cluster: FaultCluster,
    *steps: str,
    habits: str = "load",
    program: str = "",
    silence: float = 60.0,
    limits: Limits | None = None,
    **spec: Any,
) -> str:
    """Start a conversation of the scripted agent in a new workspace."""
    folder = cluster.root / "work" / f"folder-{len(list(cluster.root.glob('work/*')))}"
    folder.mkdir(parents=True)
    shutil.copy(AGENT, folder / "agent.py")
    acp = AcpSpec(command=program or f"{sys.executable} agent.py {habits}", timeout_seconds=silence)
    cid = await cluster.client.submit(
        "\n".join(steps),
        agent=AgentSpec(name="AcpAgent", acp=acp, **spec),
        workspace=WorkspaceSpec(path=str(folder), sandbox="none"),
        limits=limits or Limits(),
    )
    (cluster.root / f"{cid}.where").write_text(str(folder))
    return cid


async def settled(cluster: FaultCluster, cid: str, state: str = "finished") -> list[Event]:
    """Wait until it has come to rest, and return its log."""
    await cluster.settle([cid], limit=LIMIT_SECONDS)
    events = await cluster.check_log(cid)
    assert (await cluster.client.row(cid)).state == state, [event.sentence for event in events[-6:]]
    return events


def of(events: Sequence[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def words(events: Sequence[Event]) -> str:
    said = [event.content for event in of(events, MessageAction) if event.source is EventSource.AGENT]
    return " ".join([*said, *(event.final_thought for event in of(events, AgentFinishAction))])


def agents(cluster: FaultCluster) -> list[psutil.Process]:
    """Return the processes of scripted agents, not the shells that have started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_agent = process.cmdline()[1:2] == ["agent.py"]
            if is_agent and Path(process.cwd()).is_relative_to(cluster.root):
                found.append(process)
    return found


async def until_file(cluster: FaultCluster, path: Path) -> None:
    await cluster.until(path.exists, limit=LIMIT_SECONDS, what=str(path))


def where(cluster: FaultCluster, cid: str) -> Path:
    return Path((cluster.root / f"{cid}.where").read_text())


async def test_a_turn_becomes_events(cluster: FaultCluster) -> None:
    cid = await begun(
        cluster,
        *("!think Let me see.", "!plan look|repair", "!say I begin.", "!call List|ls agent.py", "!edit new.txt|one"),
        *("!ask Remove|rm new.txt", "!terminal echo out; exit 3", "!write {}/w.txt|by us", "!cost 0.25", "!say Done."),
    )
    events = await settled(cluster, cid)
    reports = of(events, AcpObservation)
    calls = [report.call for report in reports if report.call is not None]
    assert [call.title for call in calls] == ["List", "Edit new.txt", "Remove", "Terminal"]
    assert calls[0].text == "agent.py\n"
    assert (calls[1].diffs[0].path, calls[1].diffs[0].new_text) == ("new.txt", "one")
    assert calls[3].text == "out\n"
    assert [item.title for item in of(events, TaskTrackingObservation)[-1].task_list] == ["look", "repair"]
    assert "Let me see." in "".join(report.thoughts for report in reports)
    assert of(events, AcpPermissionAction)[0].call.command == "rm new.txt"
    assert not (where(cluster, cid) / "new.txt").exists()
    assert words(events).startswith("I begin.")
    assert "exit: 3" in words(events)
    assert sum(reply.cost_usd or 0 for reply in of(events, ModelReply)) == pytest.approx(0.25)
    await cluster.client.send_message(cid, "Thanks")
    events = await settled(cluster, cid)
    assert words(events).endswith("You said: Thanks")
    assert len({report.session_id for report in of(events, AcpObservation)}) == 1


async def test_a_person_is_asked_and_may_refuse(cluster: FaultCluster) -> None:
    cid = await begun(cluster, "!ask First|touch first", "!ask Second|touch second", "!say End.", confirmation=ALWAYS)
    for answer in (cluster.client.confirm, cluster.client.reject):
        await settled(cluster, cid, "awaiting_user_confirmation")
        await (answer(cid) if answer == cluster.client.confirm else cluster.client.reject(cid, reason="Never."))
        await cluster.until(lambda: _is_not_asking(cluster, cid), limit=LIMIT_SECONDS)
    events = await settled(cluster, cid)
    assert (where(cluster, cid) / "first").exists()
    assert not (where(cluster, cid) / "second").exists()
    assert "End." in words(events)
    assert any("Never." in prompt.prompt for prompt in of(events, AcpTurnAction))


async def _is_not_asking(cluster: FaultCluster, cid: str) -> bool:
    return (await cluster.client.row(cid)).state != "awaiting_user_confirmation" or len(
        [event for event in await cluster.client.events(cid) if isinstance(event, AcpPermissionAction)]
    ) > 2


@pytest.mark.parametrize("victim", ["t1", "c1"])
async def test_a_worker_that_dies_in_a_call_costs_nothing(cluster: FaultCluster, victim: str) -> None:
    cid = await begun(cluster, "!call One|echo 1 >> trace; sleep 2; echo 2 >> trace", "!call Two|echo 3 >> trace")
    await until_file(cluster, where(cluster, cid) / "trace")
    cluster.kill(victim)
    (cluster.start_tool if victim == "t1" else cluster.start_controller)("survivor")
    events = await settled(cluster, cid)
    assert (where(cluster, cid) / "trace").read_text().split() == ["1", "2", "3"]
    assert [report.call.title for report in of(events, AcpObservation) if report.call] == ["One", "Two"]
    assert len([turn for turn in of(events, AcpTurnAction) if turn.prompt]) == 1


@pytest.mark.parametrize("habits", ["load", ""])
async def test_killed_agent_continues_or_reads_what_happened(cluster: FaultCluster, habits: str) -> None:
    cid = await begun(cluster, "!call One|echo 1 >> trace", "!call Two|echo 2 >> trace; sleep 600", habits=habits)
    trace = where(cluster, cid) / "trace"
    await cluster.until(lambda: trace.exists() and "2" in trace.read_text(), limit=LIMIT_SECONDS, what="the call")
    for agent in agents(cluster):
        agent.kill()
    events = await settled(cluster, cid)
    prompts = [turn for turn in of(events, AcpTurnAction) if turn.prompt]
    sessions = [report.session_id for report in of(events, AcpObservation) if report.session_id]
    if habits:
        assert len(set(sessions)) == 1
        assert prompts[-1].prompt.startswith("You were interrupted.")
        assert "REPLAYED" not in words(events)
    else:
        assert len(set(sessions)) == 2
        assert "You ran (completed): One" in prompts[-1].prompt
    assert trace.read_text().split() == ["1", "2"]
    titles = Counter(report.call.title for report in of(events, AcpObservation) if report.call)
    assert titles["One"] == 1


async def test_killed_host_ends_its_agent_and_next_one_continues(cluster: FaultCluster) -> None:
    cid = await begun(cluster, "!call One|touch trace; sleep 600")
    await until_file(cluster, where(cluster, cid) / "trace")
    [agent] = agents(cluster)
    host = next(parent for parent in agent.parents() if "tool_worker/host" in " ".join(command_of(parent)))
    host.kill()
    events = await settled(cluster, cid)
    assert any(turn.prompt.startswith("You were interrupted.") for turn in of(events, AcpTurnAction))
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE


async def test_a_cancelled_conversation_leaves_no_agent_at_work(cluster: FaultCluster) -> None:
    cid = await begun(cluster, "!ignore-cancel", "!tick ticks")
    ticks = where(cluster, cid) / "ticks"
    await until_file(cluster, ticks)
    await cluster.client.cancel(cid, wait_seconds=LIMIT_SECONDS)
    await cluster.until(lambda: not agents(cluster), limit=LIMIT_SECONDS, what="the end of the agent")
    assert (await cluster.client.row(cid)).state == "stopped"


async def test_a_paused_agent_rests_and_continues(cluster: FaultCluster) -> None:
    cid = await begun(cluster, "!call One|touch trace", "!ask Two|touch second", "!say End.", confirmation=ALWAYS)
    await settled(cluster, cid, "awaiting_user_confirmation")
    [agent] = agents(cluster)
    await cluster.until(lambda: agent.status() == psutil.STATUS_STOPPED, limit=LIMIT_SECONDS, what="its rest")
    await cluster.client.confirm(cid)
    assert "End." in words(await settled(cluster, cid))


async def test_an_interrupted_turn_is_cancelled_and_its_session_lives_on(cluster: FaultCluster) -> None:
    cid = await begun(cluster, "!call One|touch trace", "!hang")
    await cluster.until_kind(cid, "observation.acp", limit=LIMIT_SECONDS)
    await cluster.client.interrupt(cid)
    await settled(cluster, cid, "paused")
    await cluster.client.send_message(cid, "Now this")
    events = await settled(cluster, cid)
    assert words(events).endswith("You said: Now this")
    assert len({report.session_id for report in of(events, AcpObservation)}) == 1


@pytest.mark.parametrize(
    ("step", "code", "says"),
    [
        ("!exit 4", "service_unavailable", "exit code 4"),
        ("!long 5000000", "malformed_reply", "a line of more than"),
        ("!hang", "timeout", "said nothing for 2 s"),
        ("!error -32000|Log in first", "authentication", "Log in first"),
    ],
)
async def test_agent_that_cannot_work_ends_with_its_reason(
    cluster: FaultCluster, step: str, code: str, says: str
) -> None:
    cid = await begun(cluster, step, silence=2.0, habits="again")
    events = await settled(cluster, cid, "error")
    failed = [report for report in of(events, AcpObservation) if report.state == "failed"]
    assert failed[-1].code == code
    assert says in failed[-1].reason
    assert says in of(events, ModelCallFailed)[-1].content
    assert len(failed) <= 3


async def test_a_program_that_is_no_agent_ends_in_an_error(cluster: FaultCluster) -> None:
    cid = await begun(cluster, "hello", program="echo no agent >&2; exit 3")
    failed = of(await settled(cluster, cid, "error"), AcpObservation)
    assert failed[-1].reason == "The agent has ended (exit code 3). It said: no agent"


NAME = "acp:python3 agent.py load"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(AGENT, folder / "agent.py")
    return folder


def run(work: Path, *steps: str, options: tuple[str, ...] = (), agent: str = NAME, **variables: str) -> Done:
    env = environment(work.parent / "home", **variables)
    return deckhands("run", "--agent", agent, "-t", "\n".join(steps), "-w", work, *options, env=env)


def kinds(done: Done) -> list[Any]:
    return [event.get("kind") for event in done.json]


def test_a_run_finishes_resumes_and_replays(work: Path) -> None:
    done = run(
        work,
        "!plan look|do",
        "!call List|ls",
        "!edit new.txt|line",
        "!ask Go|touch gone",
        "!say Done.",
        options=("--json",),
    )
    assert done.code == 0, done
    assert {"observation.task_tracking", "observation.acp", "action.acp_permission", "action.finish"} <= set(
        kinds(done)
    )
    assert ((work / "new.txt").read_text(), (work / "gone").exists()) == ("line", True)
    env, cid = environment(work.parent / "home"), done.json[-1]["conversation_id"]
    again = deckhands("run", "--resume", cid, "-t", "More", "--json", env=env)
    assert again.code == 0, again
    # The cluster of the first run has ended, and the agent with it: the session is loaded.
    assert again.json[-1]["message"].endswith("You said: More") or "You said: More" in again.out
    checked = deckhands("replay", cid, "--json", env=env)
    assert checked.json[0]["is_same"], checked


def test_output_has_diffs_and_no_escape_sequence(work: Path) -> None:
    done = run(
        work, "!say Be\x1b[2Jware", "!call \x1b]0;title\x07T|printf '\\033[31mred'", "!edit new.txt|one\x1b[1mline"
    )
    assert done.code == 0, done
    assert "\x1b" not in done.out
    assert "\x07" not in done.out
    assert "new.txt\n+ one" in done.out


def test_the_agent_is_in_the_sandbox(work: Path) -> None:
    secret = work.parent / "secret.txt"
    secret.write_text("canary-file")
    done = run(
        work,
        f"!call Look|cat {secret}; cat /proc/*/environ | tr '\\0' '\\n'; ls /proc",
        f"!read {secret}",
        LLM_API_KEY="canary-key",
    )
    assert done.code == 0, done
    assert "canary" not in done.out.replace(str(secret), "").replace("cat ", "")
    assert "No such file" in done.out


def test_named_secret_reaches_only_the_agent(work: Path) -> None:
    options = ("--secret", "AGENT_KEY", "--secret", "OTHER_KEY", "--json")
    agent = "acp:python3 agent.py $AGENT_KEY"
    check = '!call Check|test "$AGENT_KEY" = canary-one && test -z "$OTHER_KEY" && echo as it should be'
    keys = {"AGENT_KEY": "canary-one", "OTHER_KEY": "canary-two"}
    done = run(work, check, "!env AGENT_KEY", options=options, agent=agent, **keys)
    assert done.code == 0, done
    assert "as it should be" in done.out
    assert "canary" not in done.out.replace("= canary-one", "")


@pytest.mark.parametrize("agent", ["acp:", "acp:  ", "acp:a\x01b"])
def test_an_agent_without_a_command_is_refused(work: Path, agent: str) -> None:
    done = run(work, "hello", agent=agent)
    assert done.code == 2, done
    assert "Traceback" not in done.err
