"""Tests of every agent, with the Claude Agent SDK itself: the tests that the stand-in passes in its place."""

from __future__ import annotations

import pytest

from tests.conversation_hands import Hands
from tests.integration.test_sdk_control import (  # noqa: F401  (tests, which take the fixture of this module)
    SDK,
    Trial,
    test_a_hook_forbids_an_action_and_a_finish,
    test_a_limit_ends_the_conversation,
    test_a_loop_is_answered_and_the_agent_continues,
    test_a_pause_while_a_command_runs_waits_for_its_result,
    test_a_pause_while_the_model_thinks_keeps_its_reply,
    test_a_person_leads_an_agent_out_of_its_loop,
    test_a_person_rejects_with_a_reason_and_accepts_another,
    test_a_short_wait_for_a_models_quota_keeps_the_program,
    test_a_stop_while_a_command_runs_ends_the_command,
    test_a_tenants_budget_is_waited_for_and_paid_from,
    test_neither_the_log_nor_the_sdk_has_a_secret,
)
from tests.sdk_parts import with_sdk

pytestmark = [pytest.mark.claude, pytest.mark.timeout(600)]


@pytest.fixture
def trial(hands: Hands) -> Trial:
    made = Trial(hands, SDK)
    made.hears = False
    with_sdk(hands)
    return made
