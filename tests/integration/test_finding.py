"""`grep` and `glob` as a model calls them, in a real workspace and its sandbox."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from broker.contract.code_search import CodeSearchObservation
from broker.contract.observations import ErrorObservation
from tests.integration.model_hands import ModelHands
from tests.integration.workspace_hosts import opened

SANDBOXES = ["none", pytest.param("bwrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_searches_begin_where_the_shell_is(sandbox: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox=sandbox) as workspaces:
        hands = ModelHands(await workspaces.open("conversation"))
        await hands.bash("mkdir -p shop/till\necho 'a = 1' > shop/a.py\necho 'b = a' > shop/till/b.py\ncd shop")
        found = await hands("grep", pattern=r"= \w", include="*.py")
        assert isinstance(found, CodeSearchObservation)
        assert sorted(found.content.split("\n\n")) == ["a.py\n1:a = 1", "till/b.py\n1:b = a"]
        assert (await hands("glob", pattern="**/b.*")).content == "till/b.py"
        wrong = await hands("grep", pattern="(")
        assert isinstance(wrong, ErrorObservation)
        assert wrong.content.startswith("ERROR: `pattern` is not a regular expression")
        assert (await hands("glob", pattern="*.py", path="..")).content.splitlines() != []
