"""Completion in a real bash, and the answers for zsh and fish."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.contract.actions import MessageAction
from broker.contract.events import ConversationCreated, EventSource
from broker.log.event_log import EventLog
from deckhands.chaos.proxy import StoreProxy
from tests.faults.harness import FaultCluster
from tests.integration.command_line import COMMAND, environment
from tests.terminal_parts import person

PROGRAM = Path(sys.executable).with_name("deckhands")


def asked(shell: str, words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    variables = {"_DECKHANDS_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    at = words.rsplit(" ", maxsplit=1)[-1] if shell == "fish" else str(words.count(" "))
    return subprocess.run(
        [PROGRAM], env={**env, **variables, "COMP_CWORD": at}, capture_output=True, text=True, check=False
    )


async def begin(cluster: FaultCluster, name: str, title: str) -> None:
    created = ConversationCreated(conversation_id=name, source=EventSource.USER, title=title)
    message = MessageAction(content="Do it.", source=EventSource.USER)
    await EventLog(cluster.client.store).create(created, [message])


async def test_a_person_presses_tab(cluster: FaultCluster) -> None:
    await begin(cluster, "wharf-1234", "Fix it\x1b]0;evil\x07\nplain\nrm")
    await begin(cluster, "quay-1", "Other")
    forged = "wharf-$(touch evil)"
    await cluster.client.store.connection.call("ZADD", cluster.client.store.all_shards[0].index, 1, forged)
    env = environment(cluster.root / "home", DECKHANDS_URL=cluster.store.url)
    env["PATH"] = f"{PROGRAM.parent}{os.pathsep}{env['PATH']}"
    env |= {"PS1": "ready> ", "BASH_SILENCE_DEPRECATION_WARNING": "1"}

    def press() -> None:
        with person(["bash", "--norc", "-i"], env) as seen:
            seen.waits_for("ready>")
            # The new prompt, which the typed line does not show, says that the script was read.
            seen.type(
                "bind 'set enable-bracketed-paste off'; source <(deckhands completion bash); clear; PS1='re''ad> '\r"
            )
            seen.waits_for("read>", gone="source")
            seen.type("deckhands comple\t")
            seen.waits_for("deckhands completion")
            seen.type("\x15deckhands logs whar\t")
            seen.waits_for("deckhands logs wharf-1234")
            seen.type("\x15deckhands logs --pl\t")
            seen.waits_for("deckhands logs --plain")
            seen.type("\x15exit\r")
            seen.leaves()

    await asyncio.to_thread(press)
    zsh = await asyncio.to_thread(asked, "zsh", "deckhands logs wharf", env)
    assert zsh.stdout == "plain\nwharf-1234\n" + r"loading Fix it\x1b]0;evil\x07 plain rm" + "\n"
    fish = await asyncio.to_thread(asked, "fish", "deckhands logs qu", env)
    assert fish.stdout.startswith("plain,quay-1")


async def test_a_store_that_answers_slowly_is_waited_for(cluster: FaultCluster) -> None:
    await begin(cluster, "wharf-1234", "Fix it")
    proxy = StoreProxy(cluster.store.url, Path(f"{cluster.store.socket}.proxy"))
    proxy.delay_seconds = 0.15
    env = environment(cluster.root / "home", DECKHANDS_URL=f"{cluster.store.url}.proxy")
    async with proxy:
        bash = await asyncio.to_thread(asked, "bash", "deckhands logs whar", env)
    assert bash.stdout == "plain,wharf-1234\n"


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "nonsense", ""])
def test_nothing_is_said_where_no_cluster_answers(tmp_path: Path, url: str) -> None:
    env = environment(tmp_path, **({"DECKHANDS_URL": url} if url else {}))
    done = asked("bash", "deckhands logs ", env)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_there_is_a_script_for_each_shell(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            [*COMMAND, "completion", shell], env=environment(tmp_path), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"_DECKHANDS_COMPLETE={shell}_complete" in done.stdout
        assert "2>/dev/null)" in done.stdout
