from .anthropic_backend import AnthropicLLM as AnthropicLLM
from .anthropic_batches import AnthropicBatches as AnthropicBatches
from .batching import BatchProvider as BatchProvider, BatchSearch as BatchSearch, BatchUnconfirmed as BatchUnconfirmed
from .batching import CallBatched as CallBatched, OutgoingBatch as OutgoingBatch, load_reply as load_reply
from .batching import make_lane as make_lane, to_stored_failure as to_stored_failure
from .choices import PRIMARY as PRIMARY, BatchSpec as BatchSpec, RouteRule as RouteRule, RouterSpec as RouterSpec
from .config import LLMConfig as LLMConfig, find_ignored_variables as find_ignored_variables
from .config import may_have_claude_login as may_have_claude_login
from .errors import AuthenticationError as AuthenticationError, BadRequestError as BadRequestError
from .errors import ContextWindowError as ContextWindowError, HookVeto as HookVeto
from .errors import InternalServerError as InternalServerError, LLMConfigError as LLMConfigError
from .errors import MalformedReplyError as MalformedReplyError, ModelError as ModelError
from .errors import ModelTimeoutError as ModelTimeoutError, NoResponseError as NoResponseError
from .errors import NotFoundError as NotFoundError, OutOfCreditsError as OutOfCreditsError
from .errors import RateLimitError as RateLimitError, ServiceUnavailableError as ServiceUnavailableError
from .errors import UnreachableError as UnreachableError
from .errors import TokensMissingError as TokensMissingError
from .limited_threads import LimitedThreads as LimitedThreads
from .litellm_backend import LitellmLLM as LitellmLLM, is_known_to_litellm as is_known_to_litellm
from .litellm_backend import check_provider as check_provider
from .llm import ReplyTokens as ReplyTokens, TokenPrefix as TokenPrefix
from .packed_tokens import PackedTokens as PackedTokens
from .llm import LLM as LLM, CallUsage as CallUsage, Completion as Completion, Delta as Delta
from .llm import ModelRequest as ModelRequest, count_prompt_tokens as count_prompt_tokens
from .messages.fn_call_prompt import add_example as add_example, add_suffix as add_suffix
from .messages.fn_call_prompt import needs_example as needs_example, render_system_suffix as render_system_suffix
from .messages.fn_call_text import STOP_WORD as STOP_WORD, read_calls as read_calls, write_calls as write_calls
from .messages.messages import NOT_SEEN as NOT_SEEN, ImagePart as ImagePart, Message as Message, TextPart as TextPart
from .messages.messages import ToolCall as ToolCall, has_images as has_images
from .messages.message_memo import MessageMemo as MessageMemo
from .model_features import find_features as find_features, sees_images as sees_images
from .model_table import find_max_input_tokens as find_max_input_tokens, list_providers as list_providers
from .model_table import find_provider as find_provider, look_up as look_up
from .openai_backend import COMPATIBLE_PROVIDERS as COMPATIBLE_PROVIDERS, OpenAICompatibleLLM as OpenAICompatibleLLM
from .openai_batches import OpenAIBatches as OpenAIBatches
from .profiles import Profiles as Profiles, find_address as find_address
from .scripted import REPLAY_PREFIX as REPLAY_PREFIX, ReplayedLLM as ReplayedLLM
from .request_size import estimate_cost_usd as estimate_cost_usd, estimate_max_cost_usd as estimate_max_cost_usd
from .request_size import estimate_prompt_tokens as estimate_prompt_tokens
from .retry import compute_next_wait_seconds as compute_next_wait_seconds
from .scripted import SCRIPTED_PREFIX as SCRIPTED_PREFIX, ScriptedLLM as ScriptedLLM
from .scripted import SILENT_MODEL as SILENT_MODEL, SilentLLM as SilentLLM
from .strict_schemas import remove_forced_nulls as remove_forced_nulls
from .wires.provider_errors import classify_text as classify_text, is_overflow as is_overflow
