"""The runbooks of docs/kubernetes.md: each has tests that cause its fault and take its steps."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.integration.command_line import cluster, deckhands, environment, started
from tests.polling import until
from tests.source_code import ROOT
from tests.turns import bash, finish, script

SERVED, SENTINELS = "tests/faults/test_served_sentinels.py", "tests/faults/test_sentinel_faults.py"
PODS, LETTERS = "tests/integration/test_kubernetes.py", "tests/integration/test_cli_commands.py"
HERE = "tests/end_to_end/test_runbooks.py"
TRIED_BY = {
    "`DeckhandsStoreAway`": [f"{SERVED}::test_killed_primary_returns_as_a_replica"],
    "no primary": [f"{SERVED}::test_empty_primary_waits_until_another_server_is_chosen"],
    "writes refused: `NOREPLICAS`": [f"{SERVED}::test_primary_without_replicas_writes_again_with_one"],
    "`DeckhandsStoreFull`": ["tests/faults/test_store.py::test_store_refusing_writes_is_reported_once_and_awaited"],
    "`DeckhandsNoWorker`": [f"{HERE}::test_action_without_tool_workers_continues_with_one"],
    "commands are answered": [f"{PODS}::test_living_pod_on_another_machine_is_replaced"],
    "`DeckhandsQueueWaits`": [f"{HERE}::test_action_without_tool_workers_continues_with_one"],
    "`DeckhandsDeadConversations`": [
        f"{LETTERS}::test_the_dead_can_continue",
        f"{LETTERS}::test_dead_entries_are_discarded",
    ],
    "`DeckhandsModelCallsFail`": [
        "tests/unit/deckhands/client/reasons/test_chain.py::test_error_key_is_explained_with_the_providers_text"
    ],
    "workers restart with status 79": [
        "tests/faults/test_upgrades.py::test_a_check_of_an_upgrade_names_what_it_would_do"
    ],
    "workers restart with status 78": [
        "tests/faults/test_store.py::test_store_emptied_stops_the_workers_instead_of_beginning_anew",
        "tests/faults/test_backups.py::test_a_restored_store_has_all_until_the_backup_and_continues",
    ],
    "`DeckhandsNoBeat`": ["tests/faults/test_jobs_kills.py::test_a_worker_that_dies_loses_nothing_that_has_settled"],
    "a password has to change": ["tests/faults/test_rotated_logins.py::test_workers_read_a_rotated_password_again"],
}
"""Tests by the beginning of a runbook's first cell."""
UNTRIED = ["a pod of tools waits with `Multi-Attach`"]
"""It needs volumes of a cloud."""


def test_every_runbook_has_tests() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \|", page.partition("## Runbooks")[2], re.MULTILINE)[1:]
    found = [next((start for start in (*TRIED_BY, *UNTRIED) if row.startswith(start)), row) for row in rows]
    assert sorted(found) == sorted([*TRIED_BY, *UNTRIED])
    for path, _, name in (test.partition("::") for tests in TRIED_BY.values() for test in tests):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_action_without_tool_workers_continues_with_one(tmp_path: Path) -> None:
    """The runbook of waiting actions: `why` names the missing workers, and the first one that starts is enough."""
    home = tmp_path / "home"
    model = script(tmp_path / "model.json", bash("echo done > done.txt"), finish())
    env = environment(home)
    with cluster(home, "--tools", "0", "--sandbox", "none", LLM_MODEL=model):
        conversation_id = deckhands("submit", "-t", "Work", env=env).out.strip()

        async def is_explained() -> bool:
            shown = (await asyncio.to_thread(deckhands, "why", conversation_id, env=env)).out
            return "No tool worker of the pool bash is running." in shown and "Start a tool worker" in shown

        asyncio.run(until(is_explained, limit=60, what="explanation", every=0.5))
        with started("tools", "--sandbox", "none", env=env | {"DECKHANDS_WORKSPACE_ENDS_WITH_WORKER": "1"}):
            done = deckhands("wait", conversation_id, "--timeout", "120", env=env)
            assert done.code == 0, done
