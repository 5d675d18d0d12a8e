"""SDK agents in containers, tried with a real engine.

The image is built unless there is one; `IMAGE` and `CLAUDE_IMAGE` name others, of one version. Run by `pytest -m docker`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.compose_project import Project, docker, engine_answers, image_is_there, project_in
from tests.integration.test_compose import CLAUDE

BUILD_LIMIT_SECONDS = 1_800
UP_LIMIT_SECONDS = 300

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(BUILD_LIMIT_SECONDS + UP_LIMIT_SECONDS)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A controller whose image has the SDK, and a tool worker."""
    if not engine_answers():
        pytest.skip("no docker engine with compose answers here")
    image = os.environ.get("CLAUDE_IMAGE", "deckhands-claude:latest")
    project = project_in(tmp_path_factory.mktemp("deckhands-claude"), CLAUDE, CLAUDE_IMAGE=image)
    if not image_is_there(image):
        project.compose("build", "controller", "tools", limit=BUILD_LIMIT_SECONDS)
    try:
        project.compose("up", "-d", "--no-build", "--wait", "controller", "tools", limit=UP_LIMIT_SECONDS)
        yield project
    finally:
        project.down()


def test_an_sdk_agent_is_carried_out_in_its_sandbox(project: Project) -> None:
    conversation_id = project.submit("short", "--agent", "CodeActAgentSDK")
    project.deckhands("logs", "-f", conversation_id)
    kinds = [event["kind"] for event in project.events(conversation_id)]
    assert kinds.count("model.reply") == 3
    assert "conversation.changed" not in kinds  # no legacy agent has helped
    (controller,) = project.containers("controller")
    assert docker("exec", controller, "printenv", "DECKHANDS_SDK_SANDBOX") == "bwrap"
    assert "the SDK starts" in project.compose("logs", "controller")
