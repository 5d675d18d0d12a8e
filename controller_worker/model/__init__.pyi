from .batch_keeper import BatchKeeper as BatchKeeper
from .critic import parse_verdict as parse_verdict
from .model_call import ask_model as ask_model, to_call_failure as to_call_failure, to_model_reply as to_model_reply
from .models import Models as Models
from .permits.call_permit import CallPermit as CallPermit
from .permits.permits import Permits as Permits
from .question import Question as Question
from .prompt_history import PromptHistory as PromptHistory
from .steps.call_task import CallTask as CallTask, Started as Started
from .steps.own_budget import check_own_budget as check_own_budget
from .steps.pending_call import PendingCall as PendingCall, StartOutcome as StartOutcome
from .steps.prompt_count import count_prompt as count_prompt
from .steps.start_steps import acquire_permit as acquire_permit, find_own_endpoint as find_own_endpoint
from .steps.start_steps import make_missing_client as make_missing_client
from .steps.start_steps import make_question as make_question, note_waiting as note_waiting
from .steps.start_steps import require_client as require_client, wait_for_batch as wait_for_batch
from .streaming import stream_reply as stream_reply
from .call_spans import add_traceparent as add_traceparent, call_span as call_span
from .call_spans import describe_content as describe_content, describe_result as describe_result
from .call_spans import name_provider as name_provider
from .usage import sum_usage_by_model as sum_usage_by_model
