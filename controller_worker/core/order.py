"""The order of decisions: what a conversation wants next is what the first of these wants (OpenHands 1.8).

Read it from top to bottom; the reason for each place stands beside it.
"""

from __future__ import annotations

from controller_worker.core.concern import Errands, Want
from controller_worker.core.concerns import (
    acceptance,
    confirmation,
    delegation,
    double_texting,
    greeting,
    inbox,
    lifecycle,
    limits,
    loops,
    model_calls,
    notes,
    opening,
    start,
    survey,
    tools,
)

ERRANDS: tuple[Errands, ...] = (delegation.errands,)
"""What comes before any decision and leaves nothing in the log."""

ORDER: tuple[Want, ...] = (
    start.await_start,  # nothing is said, asked or opened before the time has come
    # Before anything else: what the log needs to be complete.
    greeting.greet,  # a prompt begins with the system message
    notes.take_note,  # a note is written even if a person has stopped the agent since
    loops.recover,  # a person chose a way out of a loop: it may drop what the rest would act on
    double_texting.end_turn,  # what is stopped or taken back must lead to nothing below
    # A person has spoken: what their words need, then the words.
    opening.open_workspace,  # the survey and every tool need the workspace
    survey.survey_workspace,  # the recall shows what the survey finds
    inbox.recall_message,  # a message counts once it is recalled, and rejects what waits for a confirmation
    confirmation.carry_out_answer,  # an answer is more than a change of state: it starts or settles an action
    lifecycle.announce_request,  # what a person asked for comes before what the agent wants
    # The turn that has been taken.
    delegation.report_ends,  # also while the agent rests: its delegates end when they end
    lifecycle.end_turn,  # a finished turn takes no further step, so no limit is asked about it
    limits.stop_in_time,  # the time limit ends every wait below
    model_calls.wait_for_permit,  # a call that waits for a quota has passed all that is below
    model_calls.end_rate_limit,
    confirmation.end_confirmation,
    lifecycle.rest_unless_working,  # everything below is work
    tools.await_tools,  # the next step needs the results of this one
    delegation.await_delegates,
    inbox.rest_until_message,  # nobody has given the agent anything to do
    acceptance.refuse_finish,  # the agent has to know why its finish did not count
    acceptance.end_corrections,
    # The next step.
    model_calls.wait_for_retry,
    acceptance.ask_critic,  # the critic is called after the wait of a failed call, but is no step of a loop
    loops.respond,  # before the limits: a loop is named as one even if it also used up the steps
    limits.refuse_step,
    delegation.leave_room,  # what delegates may still use up is not free
    model_calls.condense,
    model_calls.call_model,
)
