"""Confirmation policies and risk analyzers of installed packages, by entry point.

Holds: a package cannot replace a built-in policy or analyzer. Its code is loaded only when a conversation names it. If
it raises, no action runs unconfirmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from broker.contract import ANALYZERS, POLICIES, ActionSecurityRisk, ConfirmationPolicy, RiskyAction
from broker.runtime import UsageError
from broker.tools import entry_points

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
