"""Ends of a browser or a page, caused by itself, the sandbox, a proxy or a tool worker."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from broker.contract.browser_events import BrowserOutputObservation
from broker.contract.observations import ErrorObservation
from broker.contract.specs import WorkspaceSpec
from tests.browser_parts import SETTINGS, Surfer, opened_site
from tests.integration.workspace_hosts import ROOT, alive, opened, processes
from tests.polling import until
from tests.programs import command_of
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.launch.session_programs import SessionPrograms

CONVERSATION = "conversation-1"


def of_kind(node: Path, kind: str) -> list[psutil.Process]:
    """The processes of a workspace's Chromium of the type `renderer` and the like, or `browser` for the first one."""
    found = []
    for process in processes(node, CONVERSATION):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "chromium":
                types = [word for word in process.cmdline() if word.startswith("--type=")]
                found += [process] if (types or ["--type=browser"])[0] == f"--type={kind}" else []
    return found


async def _serve_page(surf: Surfer) -> None:
    """Have a page served in the workspace by a separate program."""
    await surf.bash("echo '<h1>Mine</h1>' > mine.html; python3 -m http.server 8000 > /dev/null 2>&1 &")
    await surf.bash("until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do :; done")


async def test_pages_crash_and_browsers_die_but_the_next_action_works(tmp_path: Path) -> None:
    node = tmp_path / "node"
    async with opened_site() as site, opened(node, **SETTINGS) as workspaces:
        surf = Surfer(await workspaces.open(CONVERSATION))
        url = site.page("/one", "<h1>One</h1>")
        await surf(f"goto({url!r})")
        for renderer in of_kind(node, "renderer"):
            renderer.kill()
        told = await surf.failing("noop(500)")
        assert told == "The page crashed. Its tab was closed."
        await surf(f"goto({url!r})")

        for chromium in of_kind(node, "browser"):
            chromium.kill()
        shown = await surf.any(f"goto({url!r})")
        assert isinstance(shown, BrowserOutputObservation)
        if shown.error:  # the action came before the death was noticed
            assert "Chromium ended during the action." in shown.last_browser_action_error
            shown = await surf(f"goto({url!r})")
        assert "[Chromium had ended; this is a new one" in shown.content
        assert "heading 'One'" in shown.content

        for driver in processes(node, CONVERSATION):
            with suppress(psutil.NoSuchProcess):  # some of Chromium's end by themselves
                if driver.name().startswith("node"):
                    driver.kill()
        assert "[Chromium had ended; this is a new one" in (await surf(f"goto({url!r})")).content

        # A new tool worker finds the page as it was.
        await workspaces.aclose()
        async with opened(node, **SETTINGS) as later:
            again = Surfer(await later.open(CONVERSATION), surf.ids)
            assert "heading 'One'" in (await again("noop(0)")).content
            found = processes(node, CONVERSATION)
            assert of_kind(node, "browser")
            await later.close(CONVERSATION)
            await until(lambda: not alive(found), what="end of the processes")


async def test_browser_runs_in_the_sandbox_with_its_network(tmp_path: Path) -> None:
    async with opened_site() as site, opened(tmp_path / "node", sandbox="bwrap", **SETTINGS) as workspaces:
        surf = Surfer(await workspaces.open(CONVERSATION))
        await _serve_page(surf)
        assert "heading 'Mine'" in (await surf("goto('http://localhost:8000/mine.html')")).content
        assert "heading 'Mine'" in (await surf("goto('file:///workspace/mine.html')")).content
        outside = await surf.failing(f"goto({site.url('/')!r})")
        assert "ERR_CONNECTION_REFUSED" in outside  # this machine's loopback is not the sandbox's
        assert site.asked == []
        away = await surf.failing("goto('http://example.com/')")
        assert "The workspace has no access to the network" in away
        assert "ERR_FILE_NOT_FOUND" in await surf.failing(f"goto('file://{tmp_path}')")


async def test_it_reaches_what_is_on_the_list_of_its_workspace(tmp_path: Path) -> None:
    gate = EgressGate(private=("127.0.0.2/32",))
    async with (
        opened_site("127.0.0.2") as site,
        opened_site("127.0.0.3") as other,
        opened(tmp_path / "node", sandbox="bwrap", gate=gate, **SETTINGS) as workspaces,
    ):
        allow = (f"127.0.0.2:{site.port}",)
        surf = Surfer(await workspaces.open(CONVERSATION, WorkspaceSpec(allow=allow)))
        form = "<h1>Listed</h1><form><input name=email><input type=password></form>"
        assert "heading 'Listed'" in (await surf(f"goto({site.page('/listed', form)!r})\nnoop(2000)")).content
        refused = await surf(f"goto({other.page('/', '<h1>Not listed</h1>')!r})")
        assert "Not listed" not in refused.content
        assert "is not among the hosts that this workspace may reach" in refused.content
        told = await surf.failing(f"goto({other.url('/').replace('http', 'https')!r})")
        assert "does not let it reach this host" in told
        assert other.asked == []
        # Chromium sends no request by itself.
        log = (tmp_path / "node" / CONVERSATION / "host" / "egress.log").read_text().splitlines()
        assert [line for line in log if "127.0.0.3" not in line] == []
        # The workspace's own machine is not asked through the proxy, which would refuse it.
        await _serve_page(surf)
        assert "heading 'Mine'" in (await surf("goto('http://localhost:8000/mine.html')")).content


async def test_broken_chromium_is_an_error_and_unused_browser_ends(tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho 'no display here' >&2\nexit 3\n")
    program.chmod(0o755)
    *command, _ = SETTINGS["programs"].commands["browser"]
    programs = SessionPrograms({"browser": [*command, str(program), "6"]})
    node = tmp_path / "node"
    async with opened(node, programs=programs) as workspaces:
        surf = Surfer(await workspaces.open(CONVERSATION))
        answer = await surf.any("noop()")
        assert isinstance(answer, ErrorObservation)
        assert answer.content.startswith("ERROR: Chromium cannot be started: ")

        sessions_now = [one for one in processes(node, CONVERSATION) if str(program) in command_of(one)]
        assert len(sessions_now) == 1
        await until(lambda: not psutil.pid_exists(sessions_now[0].pid), what="end of the session")
        again = await surf.any("noop()")
        assert isinstance(again, ErrorObservation)
        assert again.content.startswith("[browser had ended. This is a new one; the old state is lost.]\nERROR: ")


def test_looking_leaves_no_session_with_the_browser_behind() -> None:
    program = [sys.executable, "-m", "tests.browser_looks", SETTINGS["programs"].commands["browser"][-1]]
    # As in a session, what Chromium and its driver leave there goes with it; the name is short, as it is for a socket.
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        done = subprocess.run(
            program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    assert (done.stdout, done.returncode) == ("True 0\n" * 3, 0), done.stderr


@pytest.mark.soak
async def test_a_page_whose_program_never_rests_loses_its_tab(tmp_path: Path) -> None:
    async with opened_site() as site, opened(tmp_path / "node", **SETTINGS) as workspaces:
        surf = Surfer(await workspaces.open(CONVERSATION))
        url = site.page("/busy", "<button onclick='setTimeout(() => { for (;;); }, 1)'>Spin</button>")
        await surf(f"goto({url!r})")
        told = await surf.failing(f"click({surf.bid('Spin')!r})")
        assert "The page did not answer" in told
        assert "heading" in (await surf(f"goto({site.page('/next', '<h1>Next</h1>')!r})")).content
