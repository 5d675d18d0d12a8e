from .anthropic_backend import AnthropicLLM as AnthropicLLM
from .anthropic_batches import AnthropicBatches as AnthropicBatches
from .batching import BatchProvider as BatchProvider, CallBatched as CallBatched, NotYetKnown as NotYetKnown
from .batching import Outgoing as Outgoing, Sought as Sought, failed as failed, lane_of as lane_of
from .batching import reply_from as reply_from
from .choices import PRIMARY as PRIMARY, BatchSpec as BatchSpec, RouteRule as RouteRule, RouterSpec as RouterSpec
from .config import LLMConfig as LLMConfig, ignored_variables as ignored_variables
from .errors import AuthenticationError as AuthenticationError, BadRequestError as BadRequestError
from .errors import ContextWindowError as ContextWindowError, HookVeto as HookVeto
from .errors import InternalServerError as InternalServerError, LLMConfigError as LLMConfigError
from .errors import MalformedReplyError as MalformedReplyError, ModelError as ModelError
from .errors import ModelTimeoutError as ModelTimeoutError, NoResponseError as NoResponseError
from .errors import NotFoundError as NotFoundError, OutOfCreditsError as OutOfCreditsError
from .errors import RateLimitError as RateLimitError, ServiceUnavailableError as ServiceUnavailableError
from .limited_threads import LimitedThreads as LimitedThreads
from .litellm_backend import LitellmLLM as LitellmLLM
from .llm import LLM as LLM, Completion as Completion, Delta as Delta, ModelRequest as ModelRequest, Usage as Usage
from .llm import counted_tokens as counted_tokens
from .messages.fn_call_prompt import system_suffix as system_suffix, wants_example as wants_example
from .messages.fn_call_prompt import with_example as with_example, with_suffix as with_suffix
from .messages.fn_call_text import STOP_WORD as STOP_WORD, read_calls as read_calls, write_calls as write_calls
from .messages.messages import NOT_SEEN as NOT_SEEN, ImagePart as ImagePart, Message as Message, TextPart as TextPart
from .messages.messages import ToolCall as ToolCall
from .messages.written_messages import MessageMemo as MessageMemo
from .model_features import features_of as features_of, sees_images as sees_images
from .model_table import max_input_tokens as max_input_tokens, providers as providers
from .openai_backend import COMPATIBLE_PROVIDERS as COMPATIBLE_PROVIDERS, OpenAICompatibleLLM as OpenAICompatibleLLM
from .openai_batches import OpenAIBatches as OpenAIBatches
from .profiles import Profiles as Profiles, address_of as address_of
from .replayed import REPLAY_PREFIX as REPLAY_PREFIX, ReplayedLLM as ReplayedLLM
from .request_size import expected_cost_usd as expected_cost_usd, prompt_tokens as prompt_tokens
from .request_size import worst_cost_usd as worst_cost_usd
from .retry import next_wait_seconds as next_wait_seconds
from .scripted import SCRIPTED_PREFIX as SCRIPTED_PREFIX, ScriptedLLM as ScriptedLLM
from .silent import MODEL as MODEL, SilentLLM as SilentLLM
from .strict_schemas import without_forced_nulls as without_forced_nulls
from .wires.provider_texts import class_of_text as class_of_text, is_overflow as is_overflow
