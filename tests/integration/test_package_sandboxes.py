"""Sandboxes of installed packages: used by name, tested like ours, and never a danger to the worker that loads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entry_points import install_package
from tests.integration.command_line import deckhands, environment, run_command, script
from tests.integration.workspace_hosts import Terminal, opened
from tool_worker.errors import SandboxUnavailable, SandboxUnsafe
from tool_worker.sandbox import find_capabilities, find_sandbox, make_sandboxes
from tool_worker.settings import load_tool_settings
from tool_worker.worker.placement import build_node_offer

SOURCE = """
from pathlib import Path

from tool_worker.sandbox import BubblewrapSandbox, Capabilities, NoSandbox

SWEPT = Path(__file__).with_name("swept")


class Jail(BubblewrapSandbox):
    name = "jail"

    def __init__(self, files, containers):
        super().__init__(files)

    def remove_dead(self, root, is_alive):
        SWEPT.write_text(f"{root} {is_alive('none')}")


class Sieve(NoSandbox):
    name = "sieve"
    capabilities = Capabilities(confines_programs=True)
    workspace = None

    def __init__(self, files, containers):
        pass

    def options(self, enclosure):
        type(self).workspace = enclosure.workspace
        return ()

    def command(self, program, options, descriptors=None):
        return [part.replace("/workspace", str(self.workspace)) for part in program]


class Impostor(Jail):
    name = "bwrap"


class Broken(Jail):
    name = "broken"

    def __init__(self, files, containers):
        raise SystemExit("no licence")
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with sandboxes; return its folder."""
    folder = tmp_path / "packages"
    folder.mkdir()
    names = {"jail": "Jail", "sieve": "Sieve", "bwrap": "Impostor", "other": "Jail", "broken": "Broken", "lost": "Lost"}
    install_package(folder, monkeypatch, "jails", SOURCE, {"deckhands.sandboxes": names})
    return folder


async def test_workspace_runs_in_the_sandbox_of_a_package(packages: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox="jail") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        assert (await run("pwd; ls /proc | grep -c '^[0-9]'")).content.split()[0] == "/workspace"
        assert "No such file" in (await run(f"cat {packages}/jails.py")).content
    assert (packages / "swept").read_text() == f"{tmp_path / 'node'} False"


async def test_sandbox_of_a_package_that_leaks_is_refused(packages: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox="sieve") as workspaces:
        with pytest.raises(SandboxUnsafe, match="The sandbox sieve failed its self-test"):
            await workspaces.open("conversation")


@pytest.mark.usefixtures("packages")
def test_package_replaces_no_sandbox_of_ours(tmp_path: Path) -> None:
    assert [*make_sandboxes(tmp_path)] == ["bwrap", "docker", "kubernetes", "none", "jail", "sieve"]
    assert type(find_sandbox("bwrap", tmp_path)).__name__ == "BubblewrapSandbox"
    assert find_sandbox("auto", tmp_path).name == "bwrap"
    assert find_capabilities("jail") == find_capabilities("bwrap")


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lost", "The sandbox lost cannot be loaded: AttributeError"),
        ("other", "The sandbox other cannot be used: its class has another name"),
        ("broken", "The sandbox broken cannot be created: SystemExit: no licence"),
        ("absent", "There is no sandbox 'absent'"),
    ],
)
def test_unusable_sandbox_is_named_with_its_reason(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(SandboxUnavailable, match=reason):
        find_sandbox(name, tmp_path)
    assert name == "broken" or find_capabilities(name) is None


@pytest.mark.usefixtures("packages")
def test_node_offers_the_sandboxes_of_packages(tmp_path: Path) -> None:
    offer = build_node_offer(load_tool_settings({"DECKHANDS_HOME": str(tmp_path)}))
    assert offer.sandboxes == ("bwrap", "jail", "sieve")


def test_a_run_in_the_sandbox_of_a_package(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    env = environment(tmp_path / "home", PYTHONPATH=str(packages))
    model = script(tmp_path / "m.json", run_command("ls /proc | grep -c '^[0-9]'"))
    named = ("-w", tmp_path / "w", "--model", model, "--json")
    done = deckhands("run", "-t", "Look", "--sandbox", "jail", *named, env=env)
    assert done.code == 0, done
    (output,) = (event for event in done.json if event.get("kind") == "observation.run")
    assert "unsandboxed" not in output
    assert int(output["content"]) < 20
    refused = deckhands("run", "-t", "Look", "--sandbox", "bwarp", *named, env=env)
    assert refused.code == 2
    assert "'bwarp' is no sandbox. Use auto, bwrap, docker, kubernetes or none" in refused.err
