"""Texts with quadratic cost or worse: the worker's loop, which all conversations share, reads a model's output.

Each text is so long that quadratic work takes minutes, far more than a test may.
"""

from __future__ import annotations

import pytest

from broker.contract.browser_events import BrowseInteractiveAction
from broker.contract.events import ActionSecurityRisk, AgentSpec, ModelReply
from broker.tools.bash_syntax import MAX_PIPES
from controller_worker.agents.browsing import BrowsingAgent
from controller_worker.core.stuck_detector import SLEEPS
from controller_worker.providers.messages.fn_call_text import read_calls
from controller_worker.security.shell_analyzer import rate_shell
from tool_worker.host.search.file_search import path_regex


@pytest.mark.parametrize("text", ["\n" * 400_000, " \n" * 200_000, "; " * 200_000, ";" + " " * 400_000])
def test_blank_lines_of_a_command_that_may_sleep(text: str) -> None:
    assert SLEEPS.search(text) is None
    assert SLEEPS.search(f"{text}\n sleep 5") is not None


@pytest.mark.parametrize(
    ("command", "risk"),
    [
        ("ls|" * 33_000 + "ls", ActionSecurityRisk.HIGH),
        ("find . " + "-exec ls {} \\; " * 6_000, ActionSecurityRisk.HIGH),
        ("curl '-" + "d" * 90_000 + "\n'", ActionSecurityRisk.HIGH),
        ("cat <<E\n" + "a | b\n" * MAX_PIPES + "E", ActionSecurityRisk.LOW),
    ],
)
def test_the_risk_of_a_command(command: str, risk: ActionSecurityRisk) -> None:
    assert rate_shell(command, "/workspace").risk is risk


@pytest.mark.parametrize("text", ["<function=" * 100_000, "<function=a" * 90_000 + ">"])
def test_calls_that_are_begun_and_never_ended(text: str) -> None:
    words, calls = read_calls(text, {}, ids="c")
    assert (len(words) > 100_000 or len(calls) == 1) is True


@pytest.mark.parametrize("pattern", ["[" * 300_000, "{" * 200_000 + "}" * 10])
def test_the_brackets_of_a_pattern(pattern: str) -> None:
    assert path_regex(pattern).count("\\") >= 190_000


def test_an_action_in_the_browser_behind_many_others() -> None:
    lines = "click('é')\n" * 10_000
    reply = ModelReply(content=f"Go.\n```\n{lines}send_msg_to_user('x')\n```", service="agent")
    doing = BrowsingAgent(AgentSpec()).events_of(reply)[0]
    assert isinstance(doing, BrowseInteractiveAction)
    assert doing.browser_actions == lines.strip()
    assert doing.browsergym_send_msg_to_user == "x"


@pytest.mark.parametrize("before", ["click('é'); ", "click('a')  # why\n", "a = '''\n'''\n"])
def test_what_stands_before_words_is_done_as_it_was_written(before: str) -> None:
    reply = ModelReply(content=f"```\n{before}send_msg_to_user('x')\n```", service="agent")
    doing = BrowsingAgent(AgentSpec()).events_of(reply)[0]
    assert isinstance(doing, BrowseInteractiveAction)
    assert doing.browser_actions == before.strip().rstrip(";")
