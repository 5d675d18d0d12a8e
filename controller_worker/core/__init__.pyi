from .announcement import announce as announce, end_in_error as end_in_error
from .commit import Commit as Commit, index_fields as index_fields, settle as settle
from .concerns.acceptance import examined as examined, wants_verdict as wants_verdict
from .concerns.confirmation import carried_out as carried_out
from .concerns.delegation import NOT_STARTED as NOT_STARTED, STARTED as STARTED, Delegate as Delegate
from .concerns.delegation import answering as answering, errands as errands, unanswered as unanswered
from .concerns.delegation import usd_reserved as usd_reserved
from .concerns.double_texting import ends_call as ends_call
from .concerns.inbox import recalled as recalled
from .concerns.limits import BUDGET_CODE as BUDGET_CODE, budget_text as budget_text, steps_used as steps_used
from .concerns.model_calls import BATCH as BATCH, BUDGET as BUDGET, QUOTA as QUOTA, asks_again_at as asks_again_at
from .concerns.survey import skills_from as skills_from, skills_read as skills_read
from .controller import apply as apply, concern_wanting as concern_wanting, fold as fold, next_effect as next_effect
from .effects import Append as Append, AwaitDelegates as AwaitDelegates, AwaitStart as AwaitStart
from .effects import AwaitTools as AwaitTools, CallModel as CallModel, CarryOut as CarryOut, Effect as Effect
from .effects import Errand as Errand, Greet as Greet, Park as Park, Recall as Recall, Rest as Rest
from .effects import StartDelegate as StartDelegate, TakeNote as TakeNote, TellDelegates as TellDelegates
from .failures import code_of as code_of, last_error_of as last_error_of
from .latest_calls import LARGEST_RATIO as LARGEST_RATIO, corrected as corrected, latest_of as latest_of
from .latest_calls import ratio_of as ratio_of
from .state import State as State, snapshot_of as snapshot_of, state_from as state_from
