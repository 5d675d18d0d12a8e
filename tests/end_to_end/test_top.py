"""`deckhands top` on a real terminal, over a cluster of real workers."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from broker.contract.policies import ConfirmationPolicy
from tests.faults.conftest import cluster  # noqa: F401  (fixture)
from tests.faults.harness import FaultCluster, steps
from tests.integration.command_line import COMMAND, environment
from tests.terminal_parts import Person, person

ALWAYS = ConfirmationPolicy(mode="always")
HOSTILE = "evil \x1b]0;title\x07\x1b[2J\x9b31m\u202eabc [bold]x[/bold]"
LEFT = re.compile(rb"\x1b\]0;|\xc2[\x80-\x9f]|\xe2\x80\xae")
"""What a title or an agent may not have sent: OSC, C1, bidi."""


async def test_a_person_watches_a_cluster_and_acts_on_it(cluster: FaultCluster) -> None:  # noqa: F811
    cluster.start_controller()
    cluster.start_tool()
    (done,) = await cluster.submit(steps(1))
    (asking,) = await cluster.submit(steps(1), confirmation=ALWAYS)
    waiting = await cluster.client.submit(HOSTILE, title=HOSTILE, delay=3_600)
    await cluster.client.wait_until_settled(done, timeout_seconds=60)
    await cluster.client.wait_until_settled(asking, timeout_seconds=60)
    env = environment(cluster.root / "home", DECKHANDS_URL=cluster.store.url)

    def look() -> None:
        with person([*COMMAND, "top"], env, columns=170) as seen:
            _see_the_list(seen, done, asking, waiting)
            _refuse_an_action(seen, asking)
            seen.type("\x1b")
            seen.waits_for("CONVERSATION")
            seen.type("c")
            seen.waits_for("Queues", "ready_interactive")
            seen.type("q")
            seen.waits_for("CONVERSATION")
            _cancel(seen, waiting)
            seen.type("q")
            assert seen.leaves() == 0
            assert not LEFT.search(bytes(seen.raw)), "something of a title has reached the terminal raw"
            assert b"\x1b[?1049l" in seen.raw, "the screen is not given back"

    await asyncio.to_thread(look)
    events = await cluster.client.events(asking)
    assert "not that way" in [getattr(event, "reason", None) for event in events]
    assert (await cluster.client.row(waiting)).state == "stopped"


def _see_the_list(seen: Person, done: str, asking: str, waiting: str) -> None:
    seen.waits_for("Conversations: 3", "1 finished", "Workers: controller 1", "tool 1", done, asking, waiting)
    row = next(line for line in seen.lines if waiting in line)
    assert row.startswith("loading (scheduled)"), row
    assert r"evil \x1b]0;title\x07\x1b[2J\x9b31m\u202eabc [bold]x" in row
    row = next(line for line in seen.lines if asking in line)
    assert row.startswith("awaiting user confirmation"), row
    seen.type("s")
    seen.waits_for("AGEv")
    seen.type("/")
    seen.waits_for("words that must all match")
    seen.type("awaiting")
    seen.waits_for("Filter: awaiting · 1 conversation", gone=waiting)
    seen.type("\r")
    seen.waits_for("Open", gone="words that must")


def _refuse_an_action(seen: Person, asking: str) -> None:
    seen.type("\r")
    seen.waits_for("waits for a user", "The agent asks to run action", "echo begin-0", "You: do it")
    assert asking in seen.text
    seen.type("n")
    seen.waits_for("Why not?")
    seen.type("not that way\r")
    seen.waits_for("The action was rejected.")
    seen.waits_for("Action has been rejected by the user", "The conversation is finished")


def _cancel(seen: Person, waiting: str) -> None:
    seen.type("\x1b")
    seen.waits_for("Conversations: 3", waiting)
    seen.type("/")
    seen.waits_for("words that must all match")
    seen.type("scheduled\r")
    seen.waits_for("Filter: scheduled · 1 conversation")
    seen.type("x")
    seen.waits_for(f"Stop {waiting}", "[y/N]")
    seen.type("y")
    seen.waits_for(f"{waiting} was asked to stop.")


def test_without_a_terminal_it_says_what_to_use(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "top"], env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "deckhands: `deckhands top` needs a terminal.\n  `deckhands ls` prints a list.\n"
