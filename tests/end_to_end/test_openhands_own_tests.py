"""The SDK's own tests of remote conversations, unchanged, against a server of ours with real workers.

They come from a copy of the SDK's repository (OpenHands/software-agent-sdk, the tag of the installed version) in
build/peers/software-agent-sdk.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
from pathlib import Path

import pytest

from broker.log import ConversationQuery, Selection
from tests.ingress_parts import saying
from tests.integration.command_line import script
from tests.sdk_peer import IS_INSTALLED, PYTHON
from tests.served_stores import environment_with, worker
from tests.server_parts import served

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "build" / "peers" / "software-agent-sdk"
PLUGIN = ROOT / "tests" / "openhands_own_tests.py"
LIVE = REPOSITORY / "tests" / "cross" / "test_remote_conversation_live_server.py"
PASSED = frozenset(
    {
        "test_health_endpoints_return_ok_json",
        "test_remote_conversation_websocket_first_message_auth",
        "test_remote_conversation_over_real_server",
        "test_bash_command_endpoint_with_live_server",
        "test_file_upload_endpoint_with_live_server",
        "test_server_info_exposes_usable_tools",
    }
)
SOCKETS = REPOSITORY / "tests" / "agent_server" / "test_agent_server_wsproto.py"
PASSED_OF_SOCKETS = frozenset(
    {
        "test_agent_server_websocket_with_wsproto",
        "test_agent_server_websocket_with_wsproto_header_auth",
        "test_agent_server_websocket_first_message_auth_accepted",
        "test_agent_server_websocket_first_message_auth_rejected",
        "test_agent_server_websocket_first_message_auth_malformed",
    }
)
IN_PROCESS = "it looks into the objects of a server in its own process"
OWN_MODEL = "it replaces the model's client in its own process; here controller workers call models"
NOT_APPLICABLE = {
    "test_prepare_for_sandbox_pause_drains_conversations": IN_PROCESS,
    "test_websocket_attach_wait_does_not_block_ready_endpoint": IN_PROCESS,
    "test_events_not_lost_during_client_disconnection": OWN_MODEL,
    "test_post_run_reconcile_needed_under_ws_callback_lag": OWN_MODEL,
    "test_conversation_stats_with_live_server": OWN_MODEL,
    "test_security_risk_field_with_live_server": OWN_MODEL,
    "test_agent_final_response_endpoint": OWN_MODEL,
    "test_interrupt_endpoint_cancels_running_conversation": OWN_MODEL,
    "test_remote_state_exposes_invoked_skills": OWN_MODEL,
    "test_openai_chat_completions_gateway_over_real_server": OWN_MODEL,
    "test_openai_gateway_replays_frozen_llm_fixtures": OWN_MODEL,
    "test_preloaded_custom_tool_resolves_in_live_server": "a server loads no modules of its clients here",
    "test_hook_config_sent_to_server": "hooks of tools are the operator's; those of a stop run, without events of theirs",
    "test_subagent_definitions_forwarded_to_server": IN_PROCESS,  # taken: tests/integration/test_openhands_conversations.py
    "test_workspace_default_llm_resolves_active_profile_despite_settings_drift": "clients write no profiles here",
    "test_settings_and_secrets_api_with_live_server": "clients write no settings here, and no model's key is shown",
}
LIMIT_SECONDS = 300.0

pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="OpenHands' SDK is not installed: run benchmarks/peer/setup.sh"),
    pytest.mark.skipif(not LIVE.exists(), reason="there is no copy of the SDK's repository in build/peers"),
]


def list_tests(file: Path) -> set[str]:
    """Return the tests by name; the file has syntax of a later Python, so it is not parsed."""
    return set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))


def test_each_test_is_run_or_has_a_reason() -> None:
    assert list_tests(LIVE) == PASSED | NOT_APPLICABLE.keys()
    assert not PASSED & NOT_APPLICABLE.keys()
    # The one that is left out asks for a page that shows the API, which this server does not have.
    assert list_tests(SOCKETS) - PASSED_OF_SOCKETS == {"test_agent_server_starts_with_wsproto"}


def link_pytest(folder: Path) -> Path:
    """Make a directory with pytest, what it needs and our plug-in, for another Python.

    The root of our repository is no place to import from there: its package `tests` would hide the SDK's.
    """
    folder.mkdir()
    (folder / PLUGIN.name).symlink_to(PLUGIN)
    for name in ("pytest", "pytest-asyncio", "pluggy", "iniconfig", "packaging", "pygments"):
        found = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / part
            if not link.exists():
                link.symlink_to(str(found.locate_file(part)))
    return folder


async def test_the_tests_of_the_sdk_pass(tmp_path: Path) -> None:
    place = tmp_path / "projects"
    place.mkdir()
    hello = script(tmp_path / "hello.json", *saying("Hello from a cluster"))
    async with served(tmp_path / "log", environment_with(tmp_path), openhands=True) as server:
        models = tmp_path / "models.toml"
        models.write_text(f'[llm]\nmodel = "{hello}"\n[llm.gpt-4o-mini]\n[llm."test-provider/test-model"]\n')
        environment = server.environment(
            tmp_path / "home", DECKHANDS_WORKSPACE_ROOTS=str(place), LLM_CONFIG=str(models)
        )
        async with (
            worker("controller_worker", environment, server.log),
            worker("tool_worker", environment, server.log),
        ):
            await server.working()
            running = await asyncio.create_subprocess_exec(
                *(PYTHON, "-m", "pytest", "-q", "-p", PLUGIN.stem, "-p", "no:cacheprovider"),
                *(f"{LIVE}::{name}" for name in sorted(PASSED)),
                *(f"{SOCKETS}::{name}" for name in sorted(PASSED_OF_SOCKETS)),
                *("-c", os.devnull, "--rootdir", str(REPOSITORY), "--basetemp", str(tmp_path / "own")),
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(tmp_path),
                    "PYTHONPATH": str(link_pytest(tmp_path / "pytest")),
                    "OPENHANDS_TEST_URL": server.url,
                    "OPENHANDS_TEST_KEY": await server.token(),
                    "OPENHANDS_TEST_FOLDER": str(place),
                    "OPENHANDS_SUPPRESS_BANNER": "1",
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                },
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            async with asyncio.timeout(LIMIT_SECONDS):
                output, _ = await running.communicate()
            async for rows in ConversationQuery(server.client.store, Selection()).iterate_pages():
                for row in rows:
                    await server.client.cancel(row.conversation_id, wait_seconds=LIMIT_SECONDS)
    assert running.returncode == 0, output.decode()[-6000:]
    assert f"{len(PASSED | PASSED_OF_SOCKETS)} passed" in output.decode()
