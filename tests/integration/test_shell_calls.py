"""The shell as a model's calls meet it: several commands at once, through a real host."""

from __future__ import annotations

import pytest

from tests.integration.model_hands import ModelHands
from tool_worker.workspace.workspaces import Workspaces


@pytest.fixture
async def hands(workspaces: Workspaces) -> ModelHands:
    return ModelHands(await workspaces.open("conversation"))


@pytest.mark.parametrize(
    ("script", "shown", "exit_code"),
    [
        ("mkdir a\ncd a\npwd | grep -o a$\n", "a", 0),
        ("echo one\nfalse", "one", 1),
        ("false\necho two", "two", 0),
        ("# why\nx=3\n\nfor i in 1 2; do\n  echo $i$x  # each\ndone\n", "13\n23", 0),
        ("cat > f <<'END'\na $b\n\nEND\ncat f\nwc -l < f", "a $b\n\n2", 0),
        ("f() {\n  return 4\n}\necho x \\\n  y\nf", "x y", 4),
        ("(exit 5) | cat\nif [ $? = 0 ]; then\n  echo yes\nelse\n  echo no\nfi", "yes", 0),
        ("read line <<< typed\necho $line\ncat < /dev/null\necho end", "typed\nend", 0),
    ],
)
async def test_several_commands_run_in_order_as_a_pasted_script(
    hands: ModelHands, script: str, shown: str, exit_code: int
) -> None:
    answer = await hands.bash(script)
    assert (answer.content, answer.exit_code) == (shown, exit_code)


async def test_lines_before_a_mistake_have_run_and_the_shell_takes_the_next_call(hands: ModelHands) -> None:
    answer = await hands.bash("echo before\nif then\necho behind")
    assert answer.content.startswith("before\nbash: ")
    assert "behind" not in answer.content
    assert answer.exit_code != 0
    assert (await hands.bash("echo next")).content == "next"


async def test_an_interrupt_ends_all_the_lines(hands: ModelHands) -> None:
    waiting = await hands.bash("echo first\nread x\necho third", timeout=0.5)
    assert (waiting.content, waiting.exit_code) == ("first", -1)
    ended = await hands.bash("C-c", is_input="true")
    assert (ended.content, ended.exit_code) == ("", 130)
