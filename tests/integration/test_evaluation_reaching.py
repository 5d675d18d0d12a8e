"""The store of an evaluation, reached while it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.errors import DeckhandsError
from broker.store.embedded import EmbeddedValkey
from deckhands.client.client import Client
from deckhands.cluster.home import Home
from deckhands.evaluation.attempts.steering import EvaluationSteering
from deckhands.evaluation.store_access import run_in_store
from deckhands.settings import CliSettings


async def test_unfinished_work_of_a_private_store_is_repeated(tmp_path: Path) -> None:
    home, name = Home(tmp_path), "one"
    folder = home.evaluation_folder(name)
    home.prepare(folder)
    first = EmbeddedValkey(folder / "valkey")
    await first.start()
    tries = 0

    async def pause(client: Client) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            await first.stop()  # as when the command that carries the evaluation out ends
        await EvaluationSteering(client.store, name).set_desired(state="paused")

    settings = CliSettings.from_env({"DECKHANDS_HOME": str(tmp_path)})
    await run_in_store(settings, name, pause)
    assert tries == 2

    async def state(client: Client) -> str | None:
        return (await EvaluationSteering(client.store, name).read()).desired.state

    assert await run_in_store(settings, name, state) == "paused"


async def test_permanent_error_is_raised_at_once(tmp_path: Path) -> None:
    home, tries = Home(tmp_path), 0
    home.prepare(home.evaluation_folder("one"))

    async def fail(_: Client) -> None:
        nonlocal tries
        tries += 1
        raise DeckhandsError("It cannot be done.")

    with pytest.raises(DeckhandsError, match="cannot be done"):
        await run_in_store(CliSettings.from_env({"DECKHANDS_HOME": str(tmp_path)}), "one", fail)
    assert tries == 1
