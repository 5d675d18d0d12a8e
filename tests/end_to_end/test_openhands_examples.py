"""The SDK's examples of remote conversations, unchanged, against a server of ours with real workers.

They come from a copy of the SDK's repository (OpenHands/software-agent-sdk) in build/peers/software-agent-sdk.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import FaultCluster
from tests.faults.server_process import free_port, server
from tests.sdk_peer import IS_INSTALLED, PYTHON
from tests.server_parts import add_key
from tests.turns import bash, call, finish

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "build" / "peers" / "software-agent-sdk" / "examples" / "02_remote_agent_server"
LIMIT_SECONDS = 300.0
BROKEN, CORRECT = "def broken(:\n    pass\n", "def broken():\n    pass\n"


def write(text: str) -> dict[str, Any]:
    return call("str_replace_editor", command="create", path="{workspace}/test_broken.py", file_text=text)


TURNS = {
    "01_convo_with_local_agent_server.py": [
        write(BROKEN),
        finish("Written."),
        bash("sed -i 's/(:/():/' test_broken.py"),
        finish("Corrected."),
    ],
    "11_conversation_fork.py": [
        bash("echo hello-from-source"),
        finish("Said."),
        bash("echo hello-from-fork"),
        finish("Said again."),
    ],
}
"""The replies of the model in the examples that a cluster can run."""
DOCKER = "it starts a container with OpenHands' server"
CLOUD = "it starts a machine at a provider"
NOT_APPLICABLE = {
    "02_convo_with_docker_sandboxed_server.py": DOCKER,
    "03_browser_use_with_docker_sandboxed_server.py": DOCKER,
    "04_convo_with_api_sandboxed_server.py": CLOUD,
    "05_vscode_with_docker_sandboxed_server.py": DOCKER,
    "07_convo_with_cloud_workspace.py": CLOUD,
    "08_convo_with_apptainer_sandboxed_server.py": "it starts a container with OpenHands' server",
    "09_acp_agent_with_remote_runtime.py": CLOUD,
    "10_cloud_workspace_share_credentials.py": CLOUD,
    "12_settings_and_secrets_api.py": "clients write no settings here",
    "13_workspace_get_llm.py": "clients read no model's key here",
    "14_client_defined_tools.py": "tools run on the tool workers of a cluster",
    "15_openai_compatible_gateway.py": "clients write no profiles here; /v1 is documented in docs/serving.md",
    "16_deferred_init.py": "it initializes a server that runs in its own container",
}

pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="OpenHands' SDK is not installed: run benchmarks/peer/setup.sh"),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="there is no copy of the SDK's repository in build/peers"),
    pytest.mark.timeout(2 * LIMIT_SECONDS),
]


def test_each_example_is_run_or_has_a_reason() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TURNS.keys() | NOT_APPLICABLE.keys()


@pytest.mark.parametrize("name", TURNS)
async def test_example_of_the_sdk_runs_unchanged(cluster: FaultCluster, tmp_path: Path, name: str) -> None:
    model = cluster.script(*TURNS[name])
    place = tmp_path / "place"
    place.mkdir()
    cluster.start(DECKHANDS_WORKSPACE_ROOTS=str(place))
    port, key = free_port(), await add_key(cluster.client.store, "acme")
    async with server(cluster.store.url, tmp_path / "home", port, options=("--openhands",)):
        running = await asyncio.create_subprocess_exec(
            *(PYTHON, "-P", "-m", "tests.openhands_examples", str(EXAMPLES / name)),
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "TMPDIR": str(place),
                "PYTHONPATH": str(ROOT),
                "OPENHANDS_TEST_URL": f"http://127.0.0.1:{port}",
                "OPENHANDS_TEST_KEY": key,
                "OPENHANDS_TEST_FOLDER": str(place),
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LLM_MODEL": model,
                "LLM_API_KEY": "sk-of-the-client",
                "LLM_BASE_URL": "http://127.0.0.1:1",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(LIMIT_SECONDS):
            output, _ = await running.communicate()
    assert running.returncode == 0, output.decode()[-6000:]
    assert "EXAMPLE_COST" in output.decode()
    if "01" in name:
        (written,) = place.glob("agent_server_demo_*/test_broken.py")
        assert written.read_text() == CORRECT, "the hook of the stop has refused the first finish"
