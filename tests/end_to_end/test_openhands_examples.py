"""The SDK's examples of remote conversations, unchanged, against a server of ours with real workers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from broker.log import ConversationQuery, Selection
from tests.end_to_end.test_openhands_own_tests import LIMIT_SECONDS, REPOSITORY, ROOT
from tests.integration.command_line import script
from tests.polling import unhurried
from tests.sdk_peer import IS_INSTALLED, PYTHON
from tests.served_stores import environment_with, worker
from tests.server_parts import served
from tests.turns import bash, finish

EXAMPLES = REPOSITORY / "examples" / "02_remote_agent_server"
BROKEN, REPAIRED = "def broken(:\n    pass\n", "def broken():\n    pass\n"
RUN: dict[str, tuple[list[dict[str, Any]], str]] = {
    "01_convo_with_local_agent_server.py": (
        [
            bash(f"cat > test_broken.py <<'END'\n{BROKEN}END"),
            finish("Written."),
            bash(f"cat > test_broken.py <<'END'\n{REPAIRED}END"),
            finish("Repaired."),
        ],
        "EXAMPLE_COST: 0",
    ),
    "11_conversation_fork.py": (
        [
            bash("echo hello-from-source"),
            finish("Over."),
            bash("echo hello-from-fork"),
            finish("Over again."),
        ],
        "RemoteConversation.fork() works end-to-end.",
    ),
}
"""The replies of the model, and what the example prints once it has succeeded."""
OTHER_SERVER = "it starts a server in a container, or at another provider"
WRITES_SETTINGS = "it writes settings, profiles or keys of models, which are the operator's here"
NOT_APPLICABLE = {
    "02_convo_with_docker_sandboxed_server.py": OTHER_SERVER,
    "03_browser_use_with_docker_sandboxed_server.py": OTHER_SERVER,
    "04_convo_with_api_sandboxed_server.py": OTHER_SERVER,
    "05_vscode_with_docker_sandboxed_server.py": OTHER_SERVER,
    "06_custom_tool": OTHER_SERVER,
    "07_convo_with_cloud_workspace.py": OTHER_SERVER,
    "08_convo_with_apptainer_sandboxed_server.py": OTHER_SERVER,
    "09_acp_agent_with_remote_runtime.py": OTHER_SERVER,
    "10_cloud_workspace_share_credentials.py": OTHER_SERVER,
    "12_settings_and_secrets_api.py": WRITES_SETTINGS,
    "13_workspace_get_llm.py": WRITES_SETTINGS,
    "14_client_defined_tools.py": "tools run on the tool workers of a cluster",
    "15_openai_compatible_gateway.py": WRITES_SETTINGS,
    "16_deferred_init.py": "a cluster serves many tenants, so none of them sets up its server",
}

pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="OpenHands' SDK is not installed: run benchmarks/peer/setup.sh"),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="there is no copy of the SDK's repository in build/peers"),
]


def test_each_example_is_run_or_has_a_reason() -> None:
    found = {path.name for path in EXAMPLES.iterdir() if path.name[0].isdigit()}
    assert found == RUN.keys() | NOT_APPLICABLE.keys()
    assert not RUN.keys() & NOT_APPLICABLE.keys()


@pytest.mark.parametrize("name", sorted(RUN))
async def test_example_of_the_sdk_runs_unchanged(name: str, tmp_path: Path) -> None:
    turns, success = RUN[name]
    model = script(tmp_path / "model.json", *turns)
    place = tmp_path / "projects"
    place.mkdir()
    async with served(tmp_path / "log", environment_with(tmp_path), openhands=True) as server:
        environment = server.environment(tmp_path / "home", DECKHANDS_WORKSPACE_ROOTS=str(place))
        async with (
            worker("controller_worker", environment, server.log),
            worker("tool_worker", environment, server.log),
        ):
            await server.working()
            with (tmp_path / "output").open("wb") as output:
                running = await asyncio.create_subprocess_exec(
                    *(PYTHON, "-P", str(ROOT / "tests" / "openhands_example.py"), str(EXAMPLES / name)),
                    env={
                        "PATH": os.environ["PATH"],
                        "HOME": str(tmp_path),
                        "TMPDIR": str(place),  # where examples make the directories of their agents
                        "PYTHONPATH": str(ROOT / "tests"),
                        "OPENHANDS_TEST_URL": server.url,
                        "OPENHANDS_TEST_KEY": await server.token(),
                        "LLM_API_KEY": "sk-of-the-client",
                        "LLM_MODEL": model,
                        "OPENHANDS_SUPPRESS_BANNER": "1",
                        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    },
                    cwd=tmp_path,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                )
                try:
                    async with asyncio.timeout(unhurried(LIMIT_SECONDS)):
                        await running.wait()
                finally:
                    if running.returncode is None:
                        running.kill()
                        await running.wait()
            async for rows in ConversationQuery(server.client.store, Selection()).iterate_pages():
                for row in rows:  # one of them is the workspace of the key, which its owner keeps
                    await server.client.cancel(row.conversation_id, wait_seconds=LIMIT_SECONDS)
    printed = (tmp_path / "output").read_text()
    assert running.returncode == 0, printed[-6000:]
    assert success in printed
    if name.startswith("01"):
        (written,) = place.glob("*/test_broken.py")
        assert written.read_text() == REPAIRED, "the hook of the stop has refused the broken file"
