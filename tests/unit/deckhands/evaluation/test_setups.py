"""A failed set-up in a log: only the environment's own command counts."""

from __future__ import annotations

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import Event
from broker.contract.kinds import EventSource
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation, OutcomeUnknownObservation
from deckhands.evaluation.datasets.instances import SETUP_FAILED, Instance
from deckhands.evaluation.scoring import COMMAND, FailedSetup, find_failed_setup, may_have_failed


def output(exit_code: int, content: str = "", suffix: str = "") -> CmdOutputObservation:
    metadata = CmdOutputMetadata(exit_code=exit_code, suffix=suffix)
    return CmdOutputObservation(id=2, cause=1, command=COMMAND, content=content, metadata=metadata)


def command(source: EventSource = EventSource.ENVIRONMENT, text: str = COMMAND) -> CmdRunAction:
    return CmdRunAction(id=1, command=text, source=source)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (output(0), None),
        (output(3, "no compiler"), FailedSetup("exit_code_3", "no compiler")),
        (output(-1, "half", "\n[timed out]"), FailedSetup("no_exit_code", "half\n[timed out]")),
        (OutcomeUnknownObservation(id=2, cause=1, content="The worker died."), None),
    ],
)
def test_exit_code_of_a_set_up_decides(answer: Event, found: FailedSetup | None) -> None:
    assert find_failed_setup([command(), answer]) == found


def test_agents_cannot_forge_a_failed_set_up() -> None:
    assert find_failed_setup([command(EventSource.AGENT), output(1)]) is None
    assert find_failed_setup([command(EventSource.USER), output(1)]) is None
    assert find_failed_setup([command(text="make check"), output(1)]) is None
    assert find_failed_setup([command(), output(0), command(EventSource.AGENT), output(1)]) is None


@pytest.mark.parametrize(
    ("answer", "may_have"),
    [
        (output(1, "gone\n" + SETUP_FAILED.format(code=7)), True),
        (output(-1), True),
        (output(1, SETUP_FAILED.format(code=7) + "\n1 failed"), False),
        (output(1, "1 failed"), False),
    ],
)
def test_check_says_that_its_set_up_failed(answer: CmdOutputObservation, may_have: bool) -> None:
    assert may_have_failed(answer) is may_have
    assert not may_have or FailedSetup.of(answer) is not None


def test_whole_check_has_the_set_up_first() -> None:
    one = Instance("a", "Do it.", setup="make", check="make test")
    assert one.whole_check == f"{one.setup_check} && eval 'make test'"
