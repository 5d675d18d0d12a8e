from .batch_keeper import BatchKeeper as BatchKeeper
from .critic import verdict_of as verdict_of
from .model_call import ask as ask, failed_by as failed_by, reply_of as reply_of
from .models import Models as Models
from .permits.call_permit import CallPermit as CallPermit
from .permits.permits import Permits as Permits
from .question import Question as Question
from .recollection import Recollection as Recollection
from .steps.call_task import CallTask as CallTask, Started as Started
from .steps.own_budget import check_own_budget as check_own_budget
from .steps.pending_call import PendingCall as PendingCall, StartOutcome as StartOutcome
from .steps.prompt_count import count_prompt as count_prompt
from .steps.start_steps import acquire_permit as acquire_permit, make_missing_client as make_missing_client
from .steps.start_steps import make_question as make_question, note_waiting as note_waiting
from .steps.start_steps import require_client as require_client, wait_for_batch as wait_for_batch
from .streaming import shown as shown
from .traced import call_span as call_span, describe as describe, led_to_by as led_to_by
from .usage import usage_by_model as usage_by_model
