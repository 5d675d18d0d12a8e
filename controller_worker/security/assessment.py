"""The risk of every runnable action, and whether a user must confirm it first.

Installed packages add confirmation policies and risk analyzers, by entry point.

Holds: pure. If an analyzer fails, the risk is HIGH. If a policy fails, the user is asked. Every runnable action is
assessed while a policy requires it. A package cannot replace a built-in policy or analyzer. Its code is loaded only
when a conversation names it.
Differs: the original asks for only five types of actions, and ran three of those before they were confirmed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeGuard

from broker.contract import (
    ANALYZERS,
    POLICIES,
    AcpCall,
    AcpPermissionAction,
    AcpTurnAction,
    ActionSecurityRisk,
    ApplyPatchAction,
    BrowseInteractiveAction,
    BrowseURLAction,
    CmdRunAction,
    CodeSearchAction,
    ConfirmationPolicy,
    ConfirmationStatus,
    Event,
    FeatureListAction,
    FileEditAction,
    FileReadAction,
    FileWriteAction,
    PlanAction,
    RiskyAction,
    WorkspaceSpec,
    with_fields,
)
from broker.runtime import UsageError
from broker.tools import entry_points
from controller_worker.security.path_risk import WORKSPACE, Rating, rate_reading, rate_writing
from controller_worker.security.shell_analyzer import rate_shell

_WHAT = {POLICIES: "confirmation policy", ANALYZERS: "risk analyzer"}


class PolicyPlugin(Protocol):
    """Decides whether a user must confirm. Made with the policy's settings, for each reply."""

    def needs_confirmation(self, action: RiskyAction, risk: ActionSecurityRisk) -> bool:
        """Return whether a user must confirm an action before it runs. Pure, so that a replay decides the same."""
        ...


class AnalyzerPlugin(Protocol):
    """Rates the risk of actions. Made with the policy's settings, for each reply."""

    def risk(self, action: RiskyAction, workspace: str) -> ActionSecurityRisk:
        """Return the risk of an action. Pure, so that a replay decides the same.

        Args:
            workspace: the directory that may be changed.
        """
        ...


def load_policy(policy: ConfirmationPolicy) -> PolicyPlugin | None:
    """Return the plug-in that a policy names, or None for a built-in one. Raises like `check_plugins`."""
    found: PolicyPlugin | None = _make_plugin(POLICIES, policy)
    return found


def load_analyzer(policy: ConfirmationPolicy) -> AnalyzerPlugin | None:
    """Return the analyzer that a policy names, or None for a built-in one. Raises like `check_plugins`."""
    found: AnalyzerPlugin | None = _make_plugin(ANALYZERS, policy)
    return found


def list_plugins() -> Mapping[str, list[str]]:
    """Return the names of all installed plug-ins, by group."""
    return {group: sorted(entry_points(group).names) for group in _WHAT}


def check_plugins(policy: ConfirmationPolicy) -> None:
    """Check that the plug-ins named by a policy are installed and can be made.

    Raises:
        UsageError: one is missing or cannot be loaded.
    """
    for group, _ in policy.plugins:
        _make_plugin(group, policy)


def _make_plugin(group: str, policy: ConfirmationPolicy) -> Any:
    name = dict(policy.plugins).get(group)
    if name is None:
        return None
    what = _WHAT[group]
    installed = entry_points(group)
    if name not in installed.names:
        known = ", ".join(sorted(installed.names)) or "none"
        raise UsageError(f"There is no {what} named {name!r}.", remedy=f"Besides the built-in ones there are: {known}.")
    try:
        return installed[name].load()(dict(policy.settings or {}))
    except Exception as error:
        raise UsageError(f"The {what} {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


PATCHED_PATHS = re.compile(
    r"^(?:\*\*\* (?:Add|Update|Delete) File: |\*\*\* Move to: |(?:---|\+\+\+) (?!/dev/null\s*$)(?:[ab]/)?)([^\t\n]+)",
    re.MULTILINE,
)
KEYS = frozenset(("C-c", "C-d", "C-z"))

_log = logging.getLogger(__name__)


def assess(events: Iterable[Event], policy: ConfirmationPolicy, workspace: WorkspaceSpec) -> tuple[Event, ...]:
    """Return the events with the risk of each runnable action; actions that a user must confirm are marked as waiting.

    Raises:
        UsageError: the policy names a plug-in that is not installed.
    """
    if policy.mode == "never":
        return tuple(events)
    return tuple(_assess_action(event, policy, workspace) if _is_examined(event) else event for event in events)


def _is_examined(event: Event) -> TypeGuard[RiskyAction]:
    # The planning agent decides whether a plan needs a confirmation. An ACP agent asks before it acts.
    return isinstance(event, RiskyAction) and not isinstance(event, PlanAction | AcpTurnAction)


def find_risk(action: RiskyAction, policy: ConfirmationPolicy, workspace: WorkspaceSpec) -> Rating:
    """Return the risk of an action according to the policy's analyzer."""
    if policy.analyzer == "none":
        return Rating.UNKNOWN
    if policy.analyzer == "llm":
        return Rating[action.security_risk.name]
    plugin = load_analyzer(policy)
    try:
        if plugin is not None:
            return Rating[ActionSecurityRisk(plugin.risk(action, workspace.path or WORKSPACE)).name]
        parsed = parse_risk(action, workspace.path or WORKSPACE)
    except Exception:  # noqa: BLE001  (what an analyzer cannot take is dangerous)
        _log.exception("an action of the kind %s could not be analyzed", action.kind)
        return Rating.HIGH
    # UNKNOWN is the lowest number: any real estimate counts.
    return parsed if policy.analyzer == "shell" else max(parsed, Rating[action.security_risk.name])


def parse_risk(action: RiskyAction, workspace: str) -> Rating:
    """Return the risk derived from the action itself; never UNKNOWN."""
    match action:
        case CmdRunAction(is_input=True, command=command):
            # The effect of any other input depends on the running program.
            return Rating.LOW if command.strip() in KEYS or not command.strip() else Rating.HIGH
        case CmdRunAction(control="list" | "kill" | "reset"):
            return Rating.LOW
        case CmdRunAction():
            return rate_shell(action.command, workspace, action.cwd)
        case CodeSearchAction():
            path = action.arguments.get("path") or "."
            return rate_reading(path, workspace) if isinstance(path, str) else Rating.LOW
        case FileReadAction():
            return rate_reading(action.path, workspace)
        case FileEditAction() | FileWriteAction():
            return rate_writing(action.path, workspace)
        case ApplyPatchAction():
            # The editor finds no path that this pattern misses: both read the same header lines.
            paths = [path.strip() for path in PATCHED_PATHS.findall(action.patch)]
            return max((rate_writing(path, workspace) for path in paths), default=Rating.HIGH)
        case FeatureListAction():
            # The environment runs the checks of an accepted list without asking again.
            checks = (rate_shell(feature.check, workspace) for feature in action.features)
            return max(checks, default=Rating.LOW)
        case BrowseURLAction() | BrowseInteractiveAction():
            return Rating.MEDIUM
        case AcpPermissionAction():
            return _find_call_risk(action.call, workspace)
    return Rating.HIGH


def _find_call_risk(call: AcpCall, workspace: str) -> Rating:
    """Return the risk of an ACP agent's announced action; an incomplete announcement is HIGH."""
    paths = [*call.paths, *(diff.path for diff in call.diffs)]
    if call.command:
        return max([rate_shell(call.command, workspace), *(rate_writing(path, workspace) for path in paths)])
    if call.tool_kind in ("edit", "delete", "move") and paths:
        return max(rate_writing(path, workspace) for path in paths)
    if call.tool_kind in ("read", "search") and paths:
        return max(rate_reading(path, workspace) for path in paths)
    return Rating.HIGH


def needs_confirmation(action: RiskyAction, rating: Rating, policy: ConfirmationPolicy) -> bool:
    """Return whether a user must confirm an action of this rating."""
    if policy.mode in ("never", "always"):
        return policy.mode == "always"
    if policy.mode != "risky":
        return _ask_policy_plugin(action, rating.risk, policy)
    if rating is Rating.UNKNOWN:
        return policy.confirm_unknown
    is_unclear = rating is Rating.UNCLEAR and policy.confirm_unknown
    return is_unclear or rating.risk >= ActionSecurityRisk[policy.threshold]


def _ask_policy_plugin(action: RiskyAction, risk: ActionSecurityRisk, policy: ConfirmationPolicy) -> bool:
    plugin = load_policy(policy)
    assert plugin is not None
    try:
        return plugin.needs_confirmation(action, risk) is not False
    except Exception:  # noqa: BLE001  (what a policy cannot judge, a person does)
        _log.exception("the confirmation policy %s could not judge an action of the kind %s", policy.mode, action.kind)
        return True


def _assess_action(action: RiskyAction, policy: ConfirmationPolicy, workspace: WorkspaceSpec) -> Event:
    rating = find_risk(action, policy, workspace)
    is_waiting = action.confirmation_state is ConfirmationStatus.AWAITING_CONFIRMATION
    waits = is_waiting or needs_confirmation(action, rating, policy)
    status = ConfirmationStatus.AWAITING_CONFIRMATION if waits else ConfirmationStatus.CONFIRMED
    return with_fields(action, security_risk=rating.risk, confirmation_state=status)
