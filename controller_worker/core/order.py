"""The order of decisions: the first decision that returns an effect gives the next effect (OpenHands 1.8).

The comment beside each decision gives the reason for its place.
"""

from __future__ import annotations

from controller_worker.core.concern import Decision, SideEffects
from controller_worker.core.concerns import (
    acceptance,
    confirmation,
    delegation,
    double_texting,
    greeting,
    inbox,
    lifecycle,
    limits,
    long_work,
    loops,
    model_calls,
    notes,
    opening,
    progress,
    rules,
    start,
    survey,
    tools,
)

SIDE_EFFECTS: tuple[SideEffects, ...] = (delegation.find_side_effects,)
"""Side effects that come before any decision and leave nothing in the log."""

ORDER: tuple[Decision, ...] = (
    start.await_start,  # before the start time, nothing is said, asked or opened
    # First, events that make the log complete.
    greeting.greet,  # the system message is the first part of a prompt
    notes.take_note,  # a note is written even if a user has stopped the agent since
    delegation.manage_delegates,  # delegates are controlled even if a user has stopped the agent since
    loops.recover,  # a user's recovery option may drop events that the decisions below would act on
    double_texting.end_turn,  # stopped or rolled-back work must not reach the decisions below
    # Then a user's message: first its requirements, then the message.
    opening.open_workspace,  # the survey and every tool need the workspace
    survey.survey_workspace,  # the recall shows the result of the survey
    inbox.recall_message,  # a message counts once it is recalled, and rejects an action that waits for a confirmation
    confirmation.carry_out_answer,  # an answer is more than a change of state: it starts or settles an action
    lifecycle.announce_request,  # a user's request comes before the agent's
    # Then the current turn.
    delegation.report_ends,  # also while the agent rests, because delegates end at any time
    lifecycle.end_turn,  # before the limits: a finished turn takes no further step
    limits.stop_in_time,  # the time limit ends every wait below
    model_calls.wait_for_permit,  # a call that waits for a quota has passed all decisions below
    model_calls.end_rate_limit,
    confirmation.end_confirmation,
    confirmation.await_answer,  # a question may have a deadline, so this is no plain rest
    lifecycle.rest_unless_working,  # all decisions below are work
    tools.ask_person,  # the call of a tool continues with the answer, before calls that wait for their turn
    tools.await_tools,  # the next step needs the results of this one
    delegation.await_delegates,
    inbox.rest_until_message,  # the agent has no task yet
    rules.recall_due_rules,  # the results of the step are complete, and the next prompt has to hold them
    long_work.start_context,  # the next prompt starts with it
    acceptance.refuse_finish,  # the agent must learn why its finish did not count
    acceptance.end_corrections,
    # Then the next step.
    model_calls.wait_for_retry,
    acceptance.ask_critic,  # the critic is called after the wait of a failed call, but is not a step of a loop
    progress.look,  # the policy's response depends on it
    loops.respond,  # before the limits: a loop is reported as a loop even if it also used up the steps
    limits.refuse_step,
    delegation.leave_room,  # limits reserved for running delegates are not free
    model_calls.condense,
    model_calls.call_model,
)
