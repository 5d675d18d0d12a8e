from .announcement import announce as announce, end_in_error as end_in_error, to_answer as to_answer
from .commit import Commit as Commit, settle as settle, to_index_fields as to_index_fields
from .concerns.acceptance import check_outputs as check_outputs, needs_verdict as needs_verdict
from .concerns.confirmation import apply_answer as apply_answer
from .concerns.delegation import has_room as has_room
from .concerns.delegation import NOT_STARTED as NOT_STARTED, STARTED as STARTED, Delegate as Delegate
from .concerns.delegation import find_side_effects as find_side_effects, find_unanswered as find_unanswered
from .concerns.delegation import sum_reserved_usd as sum_reserved_usd
from .concerns.double_texting import is_call_ending as is_call_ending
from .concerns.inbox import make_recall as make_recall
from .concerns.limits import BUDGET_CODE as BUDGET_CODE, count_steps as count_steps
from .concerns.limits import render_budget_text as render_budget_text
from .concerns.model_calls import BATCH as BATCH, BUDGET as BUDGET, QUOTA as QUOTA
from .concerns.model_calls import find_recheck_time as find_recheck_time
from .concerns.survey import parse_survey_skills as parse_survey_skills
from .concerns.survey import parse_survey_skills_in_turns as parse_survey_skills_in_turns
from .controller import apply as apply, find_decision_name as find_decision_name, fold as fold
from .controller import next_effect as next_effect
from .effects import Append as Append, AwaitDelegates as AwaitDelegates, AwaitStart as AwaitStart
from .effects import AwaitTools as AwaitTools, CallModel as CallModel, CarryOut as CarryOut, Effect as Effect
from .effects import Greet as Greet, NotifyDelegates as NotifyDelegates, Park as Park, Recall as Recall, Rest as Rest
from .effects import ManageDelegates as ManageDelegates
from .effects import SideEffect as SideEffect, StartDelegate as StartDelegate, TakeNote as TakeNote
from .concerns.model_calls import find_error_code as find_error_code, render_last_error as render_last_error
from .concerns.limits import LARGEST_RATIO as LARGEST_RATIO, compute_ratio as compute_ratio
from .concerns.limits import correct_estimate as correct_estimate, find_latest_call as find_latest_call
from .state import EMPTY as EMPTY, State as State, parse_snapshot as parse_snapshot, to_snapshot as to_snapshot
