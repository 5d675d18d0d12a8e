"""The part of a container's command line that a tenant controls: the image's name, and never an option."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from tool_worker.errors import WorkspaceRefused
from tool_worker.sandbox.docker import ContainerSettings, DockerSandbox
from tool_worker.sandbox.sandbox import Enclosure, HostDescriptors, find_interpreter
from tool_worker.settings import load_tool_settings

ALL = ContainerSettings(("python:3.12", "*"))


@pytest.mark.parametrize(
    "image",
    [
        *("--privileged", "-v=/:/machine", "--mount=type=bind,source=/,target=/machine", "--image=--privileged"),
        *(" python", "python --privileged", "python\n", "Python", "team/../python", "team//python", "python:"),
        *("python:-tag", "python@sha256:abc", "https://registry.example.com/python", "a" * 256, "*", "\0"),
    ],
)
def test_invalid_image_name_is_refused_despite_patterns(image: str) -> None:
    with pytest.raises(WorkspaceRefused, match="not the name of an image"):
        ALL.choose_image(image)


@pytest.mark.parametrize(
    "image",
    [
        "python",
        "python:3.12-slim",
        "team/python_x__y--z.w:V1.0_rc",
        "localhost:5000/python",
        "Registry.example.com/team/python@sha256:" + "0" * 64,
        "registry.example.com:443/team/build:7@sha256:" + "a" * 64,
        "[fd00::1]:5000/python",
        "sha256:" + "f" * 64,
        "f" * 64,
    ],
)
def test_every_name_that_an_engine_takes_is_taken(image: str) -> None:
    assert ALL.choose_image(image) == image


def test_no_option_follows_the_image(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    sandbox = DockerSandbox(ALL)
    options = sandbox.options(Enclosure(tmp_path, "/workspace", is_own=True, image="team/build:7"))
    assert list(options[-2:]) == ["--", "team/build:7"]
    for descriptors in (None, 9, HostDescriptors(5, 6, 7)):
        command = list(sandbox.command([find_interpreter(), "-c", "pass"], options, descriptors))
        assert command.index("--") == command.index("team/build:7") - 1


@pytest.mark.parametrize("path", ["/a,readonly=false", '/a"b', "/a\nb"])
def test_path_with_further_meaning_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(WorkspaceRefused, match="cannot be mounted"):
        DockerSandbox(ALL).options(Enclosure(tmp_path, path, is_own=True))


def test_the_operators_first_image_is_a_name_too() -> None:
    with pytest.raises(UsageError, match="DECKHANDS_DOCKER_IMAGES"):
        load_tool_settings({"DECKHANDS_DOCKER_IMAGES": "--privileged,*"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_root_hands_over_a_workspace_without_following_links(tmp_path: Path) -> None:
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    (workspace / "folder").mkdir(parents=True)
    outside.write_text("root's")
    (workspace / "folder" / "file").write_text("x")
    (workspace / "link").symlink_to(outside)
    (workspace / "folder" / "around").symlink_to(tmp_path)
    enclosure = Enclosure(workspace, "/workspace", is_own=True, home=tmp_path / "home")
    (tmp_path / "home").mkdir()
    options = list(DockerSandbox(ALL).options(enclosure))
    assert options[options.index("--user") + 1] == "1000:1000"
    given = [tmp_path / "home", workspace, *workspace.rglob("*")]
    assert {path.lstat().st_uid for path in given} == {1000}
    assert [path.lstat().st_uid for path in (outside, tmp_path)] == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_what_was_given_half_is_given_whole_the_next_time(tmp_path: Path) -> None:
    """The top goes last: a worker that dies before has not said that all is given."""
    workspace = tmp_path / "workspace"
    (workspace / "folder").mkdir(parents=True)
    (workspace / "folder" / "file").write_text("x")
    os.chown(workspace / "folder" / "file", 1000, 1000)
    list(DockerSandbox(ALL).options(Enclosure(workspace, "/workspace", is_own=True)))
    assert {path.lstat().st_uid for path in (workspace, *workspace.rglob("*"))} == {1000}


@pytest.mark.skipif(os.geteuid() != 0, reason="root has to own it")
def test_roots_own_directory_is_not_given_away(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceRefused, match="belongs to root"):
        list(DockerSandbox(ALL).options(Enclosure(tmp_path, "/workspace", is_own=False)))
    assert tmp_path.stat().st_uid == 0
