"""The store of an evaluation, reached while it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.errors import DeckhandsError
from broker.store.embedded import EmbeddedValkey
from deckhands.client.client import Client
from deckhands.cluster.home import Home
from deckhands.evaluation.attempts.steering import Steering
from deckhands.evaluation.reaching import in_store
from deckhands.settings import FaceSettings


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
        await Steering(client.store, name).wish(state="paused")

    settings = FaceSettings.from_env({"DECKHANDS_HOME": str(tmp_path)})
    await in_store(settings, name, pause)
    assert tries == 2

    async def state(client: Client) -> str | None:
        return (await Steering(client.store, name).read()).wishes.state

    assert await in_store(settings, name, state) == "paused"


async def test_permanent_error_is_raised_at_once(tmp_path: Path) -> None:
    home, tries = Home(tmp_path), 0
    home.prepare(home.evaluation_folder("one"))

    async def fail(_: Client) -> None:
        nonlocal tries
        tries += 1
        raise DeckhandsError("It cannot be done.")

    with pytest.raises(DeckhandsError, match="cannot be done"):
        await in_store(FaceSettings.from_env({"DECKHANDS_HOME": str(tmp_path)}), "one", fail)
    assert tries == 1
