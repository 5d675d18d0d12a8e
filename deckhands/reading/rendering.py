"""Events as lines for a terminal.

Holds: whatever an event holds, nothing of it can move the cursor, change colours, set the title, reverse the reading
direction or hide: control characters reach the terminal spelt out.
Does not: show everything; `logs --json` and `export` do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from broker.contract.actions import (
    AgentFinishAction,
    AgentRejectAction,
    AgentThinkAction,
    BrowseInteractiveAction,
    ChangeAgentStateAction,
    CmdRunAction,
    IPythonRunCellAction,
    MessageAction,
    OfferedToolAction,
    RecallAction,
    RiskyAction,
    SurveyAction,
    SystemMessageAction,
)
from broker.contract.agent_state import AgentState
from broker.contract.events import Action, Event, EventSource, ModelCallFailed, ModelReply, ModelSwitched, Observation
from broker.contract.file_events import FileEditAction, FileEditObservation, FileReadObservation, FileWriteAction
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputObservation,
    ErrorObservation,
    FinishVerdictObservation,
    LoopDetectionObservation,
    NullObservation,
    OutcomeUnknownObservation,
    RecallObservation,
    SurveyObservation,
)
from broker.contract.planning import PlanAction
from broker.contract.unknown_event import UnknownEvent
from broker.contract.workspace_events import WorkspaceFailedObservation
from deckhands.reading.terminal import clean

MAX_LINES = 20
MAX_PLAN_LINES = 1_000
MAX_COLUMNS = 2_000
MAX_ASKED_LINES = 10_000
MAX_ASKED_COLUMNS = 100_000
"""Who agrees to something has to see the whole of it, however much there is to scroll."""

_RESET = "\x1b[0m"
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m", "red": "\x1b[31m", "green": "\x1b[32m", "cyan": "\x1b[36m"}


class Renderer:
    """Turns events into lines, with colour or without."""

    def __init__(self, *, is_coloured: bool) -> None:
        self._is_coloured = is_coloured

    def styled(self, text: str, style: str) -> str:
        """Return a text of ours in a style: bold, dim, red, green or cyan."""
        return f"{_STYLES[style]}{text}{_RESET}" if self._is_coloured and text else text

    def lines(self, event: Event) -> list[str]:
        """Return the lines to show for an event; none for what a reader does not need."""
        return list(self._lines(event))

    def asked(self, action: Action) -> list[str]:
        """Return the lines that show somebody who is asked about an action all that it would do."""
        return list(self._asked(action))

    def question(self, action: RiskyAction) -> list[str]:
        """Return the lines of the question whether an action may run."""
        return [f"The agent asks to run action {action.id} (risk {action.security_risk.name}):", *self.asked(action)]

    def _asked(self, action: Action) -> Iterator[str]:
        match action:
            case CmdRunAction():
                yield from self._all("  < " if action.is_input else "  $ ", action.command, "cyan")
            case IPythonRunCellAction():
                yield from self._all("  ", action.code, "cyan")
            case BrowseInteractiveAction():
                yield from self._all("  ", action.browser_actions, "cyan")
            case FileWriteAction():
                where = "" if (action.start, action.end) == (0, -1) else f", lines [{action.start}, {action.end})"
                yield from self._all("  ", action.sentence + where, "cyan")
                yield from self._all("  + ", action.content, "green")
            case FileEditAction():
                where = "" if action.insert_line is None else f", after line {action.insert_line}"
                yield from self._all("  ", action.sentence + where, "cyan")
                yield from self._all("  - ", action.old_str or "", "red")
                yield from self._all("  + ", action.file_text or action.new_str or action.content, "green")
            case OfferedToolAction():
                yield from self._all("  ", f"{action.sentence} {json.dumps(action.arguments, indent=2)}", "cyan")
            case _:
                yield from self._all("  ", action.sentence, "cyan")

    def _all(self, mark: str, text: str, style: str) -> Iterator[str]:
        return self._block(mark, text, style, max_lines=MAX_ASKED_LINES, max_columns=MAX_ASKED_COLUMNS)

    def _lines(self, event: Event) -> Iterator[str]:
        match event:
            case SystemMessageAction() | RecallAction() | NullObservation() | ModelReply():
                return
            case SurveyAction() | SurveyObservation():
                return
            case Action():
                yield from self._action(event)
            case AgentStateChangedObservation():
                yield from self._state(event)
            case ModelCallFailed():
                yield from self._block("! ", event.sentence, "red")
            case ModelSwitched():
                yield from self._block("", event.sentence, "dim")
            case Observation():
                yield from self._observation(event)
            case UnknownEvent():
                yield from self._block("", f"[{event.id}] {event.sentence}", "dim")

    def _action(self, action: Action) -> Iterator[str]:
        match action:
            case MessageAction(source=EventSource.USER):
                yield from self._block("You: ", action.content, "bold")
            case MessageAction():
                yield from self._block("Agent: ", action.content, "")
            case AgentThinkAction():
                yield from self._block("", action.thought, "dim")
            case CmdRunAction():
                yield from self._block("", action.thought, "")
                yield from self._block("< " if action.is_input else "$ ", action.command, "cyan")
            case AgentFinishAction():
                yield from self._block("", action.sentence, "green")
            case AgentRejectAction():
                yield from self._block("", action.sentence, "red")
            case PlanAction():
                yield from self._block("", action.thought, "")
                yield from self._block("", action.sentence, "", max_lines=MAX_PLAN_LINES)
            case ChangeAgentStateAction():
                yield self.styled(action.sentence, "dim")
            case _:
                yield from self._block("", action.thought, "")
                yield from self._block("", action.sentence, "cyan")

    def _state(self, event: AgentStateChangedObservation) -> Iterator[str]:
        if event.agent_state is AgentState.ERROR:
            yield from self._block("! ", event.reason or "The agent stopped with an error.", "red")
        elif event.agent_state not in (AgentState.RUNNING, AgentState.FINISHED, AgentState.REJECTED):
            yield self.styled(f"({event.agent_state.value.replace('_', ' ')})", "dim")

    def _observation(self, event: Observation) -> Iterator[str]:
        match event:
            case (
                ErrorObservation()
                | LoopDetectionObservation()
                | OutcomeUnknownObservation()
                | WorkspaceFailedObservation()
            ):
                yield from self._block("  ! ", event.content, "red")
            case RecallObservation():
                for reason in event.unreadable_skills or ():
                    yield from self._block("  ! ", f"Left out, because it is no skill: {reason}", "red")
            case FinishVerdictObservation():
                yield from self._block("  ", event.sentence, "green" if event.is_accepted else "red")
            case CmdOutputObservation():
                yield from self._block("  ", event.content, "dim")
                if event.exit_code not in (0, -1):
                    yield self.styled(f"  exit code {event.exit_code}", "red")
            case FileEditObservation() if event.diff:
                yield from self._block("  ", event.diff, "dim")
            case FileReadObservation():
                count = len(event.content.splitlines())
                yield self.styled(f"  {count} line{'' if count == 1 else 's'}", "dim")
            case _:
                yield from self._block("  ", event.content, "dim")

    def _block(
        self, mark: str, text: str, style: str, *, max_lines: int = MAX_LINES, max_columns: int = MAX_COLUMNS
    ) -> Iterator[str]:
        """Yield the first and the last lines of a text behind a mark; nothing for an empty text."""
        lines = clean(text).strip("\n").split("\n")
        if lines == [""]:
            return
        if len(lines) > max_lines:
            half = max_lines // 2
            lines = [*lines[:half], f"… {len(lines) - 2 * half} more lines …", *lines[-half:]]
        for number, line in enumerate(lines):
            shown = line if len(line) <= max_columns else line[:max_columns] + "…"
            full = (mark if number == 0 else " " * len(mark)) + shown
            yield self.styled(full, style) if style else full
