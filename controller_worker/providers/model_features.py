"""The features of a model, by its name: OpenHands' table of globs, completed by litellm's for newer models.

Holds: a pattern without `/` is matched against the normalised base name, one with `/` against the whole lower-case
name.
Does not: query a provider. A model in neither table has no feature except stop words.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from controller_worker.providers.model_table import look_up

FUNCTION_CALLING = (
    *("claude-3-7-sonnet*", "claude-3.7-sonnet*", "claude-sonnet-3-7-latest", "claude-3-5-sonnet*"),
    *("claude-3.5-sonnet*", "claude-3.5-haiku*", "claude-3-5-haiku*", "claude-sonnet-4*", "claude-opus-4*"),
    *("gpt-4o*", "gpt-4.1", "gpt-5*", "o1-2024-12-17", "o3*", "o4-mini*", "gemini-2.5-pro*", "gemini-3*", "groq/*"),
    *("kimi-k2-0711-preview", "kimi-k2-instruct", "qwen3-coder*", "qwen3-coder-480b-a35b-instruct"),
    *("deepseek-chat", "grok-code-fast-1"),
)
REASONING_EFFORT = (
    *("o1-2024-12-17", "o1", "o3", "o3-2025-04-16", "o3-mini", "o3-mini-2025-01-31", "o4-mini", "o4-mini-2025-04-16"),
    *("gemini-2.5-flash", "gemini-2.5-pro", "gpt-5*", "deepseek-r1-0528*"),
    *("claude-sonnet-4-5*", "claude-haiku-4-5*"),
)
NEWER_REASONING = (
    *("gpt-[6-9]*", "gpt-[1-9][0-9]*", "o[1-9]-pro*", "o[5-9]*", "gemini-[3-9]*"),
    *("kimi-k2.[5-9]*", "kimi-k2-thinking*", "kimi-k[3-9]*"),
)
"""Models newer than the original's globs. Needed for installations whose price table lacks them."""
OPENAI_REASONING = ("gpt-*", "o[1-9]*", "openai.gpt-*")
"""Reasoning models among these refuse a temperature; those of other makers accept one."""
REASONING_CONTENT_READERS = (
    *("kimi-k2-thinking*", "kimi-k2.[5-9]*", "kimi-k[3-9]*", "minimax-m[2-9]*", "glm-4.[6-9]*", "glm-[5-9]*"),
    *("deepseek-reasoner*", "deepseek-chat*", "deepseek-v3.2*", "deepseek-v[4-9]*", "mimo-v2*"),
)
"""Models whose `reasoning_content` must be sent back: some refuse a call's result without it."""
PROMPT_CACHE = (
    *("claude-3-7-sonnet*", "claude-3.7-sonnet*", "claude-sonnet-3-7-latest", "claude-3-5-sonnet*"),
    *("claude-3-5-haiku*", "claude-3.5-haiku*", "claude-3-haiku-20240307", "claude-3-opus-20240229"),
    *("claude-sonnet-4*", "claude-opus-4*"),
)
NO_STOP_WORDS = ("o1*", "grok-4-0709", "grok-code-fast-1", "deepseek-r1-0528*")
EFFORT_NEVER_SENT = ("claude-sonnet-4-5*", "claude-haiku-4-5*", "grok-4", "grok-4-0709", "grok-code-fast-1")


ThoughtForm = Literal["none", "signed", "content", "items", "calls"]
"""The format in which thinking is sent back: not at all, as Claude's signed blocks, as `reasoning_content`, as
items of the Responses API, or as attachments of calls (Gemini)."""


@dataclass(frozen=True, slots=True)
class ModelFeatures:
    """The features of a model.

    Attributes:
        is_claude: made by Anthropic, at any provider.
        function_calling: supports tools natively.
        reasoning: a reasoning model that refuses temperature and top_p.
        reasoning_effort: accepts a reasoning effort.
        adaptive_thinking: decides by itself how much to think, if asked to.
        sampling: accepts temperature, top_p and top_k.
        sampling_defaults: whether the model accepts our defaults for sampling parameters that the user did not set.
        prompt_cache: accepts explicit cache marks.
        stop_words: accepts stop sequences.
        thoughts: the format in which it accepts its thinking back.
        strict_schemas: supports enforced schemas for its tools and its output.
    """

    is_claude: bool
    function_calling: bool
    reasoning: bool
    reasoning_effort: bool
    adaptive_thinking: bool
    sampling: bool
    sampling_defaults: bool
    prompt_cache: bool
    stop_words: bool
    thoughts: ThoughtForm
    strict_schemas: bool


@lru_cache(maxsize=256)
def find_features(model: str) -> ModelFeatures:
    """Return the features of the model."""
    row = look_up(model)
    is_claude = "claude" in normalise_name(model)
    is_listed = _matches(model, REASONING_EFFORT)
    reasons = is_listed or (row.reasons if row is not None else _matches(model, NEWER_REASONING))
    refuses_sampling = is_listed or (reasons and _matches(model, OPENAI_REASONING))
    calls_functions = _matches(model, FUNCTION_CALLING)
    is_new = is_claude or _matches(model, NEWER_REASONING)
    # Differs: the original knows these features by its globs only, which end with the models of late 2025.
    return ModelFeatures(
        is_claude=is_claude,
        function_calling=calls_functions or (is_new if row is None else row.function_calling),
        reasoning=refuses_sampling and not is_claude,
        reasoning_effort=(is_listed or (row is not None and row.takes_effort) if is_claude else reasons)
        and not _matches(model, EFFORT_NEVER_SENT),
        adaptive_thinking=is_claude and row is not None and row.thinks_adaptively,
        # An unknown Claude is a new one: it supports tools and refuses sampling parameters.
        sampling=row.takes_sampling if row is not None else not is_claude,
        sampling_defaults=not reasons and (row.takes_sampling if row is not None else calls_functions),
        prompt_cache=_matches(model, PROMPT_CACHE) or (is_claude and row is not None and row.prompt_cache),
        stop_words=not _matches(model, NO_STOP_WORDS),
        thoughts=_thought_form(model, reasons=reasons, asks_responses=row is not None and row.asks_responses),
        strict_schemas=row is not None
        and (row.native_schemas if is_claude else row.response_schemas and _matches(model, OPENAI_REASONING)),
    )


def _thought_form(model: str, *, reasons: bool, asks_responses: bool) -> ThoughtForm:
    name = normalise_name(model)
    if "claude" in name:
        return "signed"
    if "gemini" in name:
        return "calls"
    if _matches(model, REASONING_CONTENT_READERS):
        return "content"
    return "items" if reasons and (asks_responses or "responses/" in model) else "none"


def sees_images(model: str) -> bool:
    """Return whether the model is known to accept images."""
    row = look_up(model)
    return "claude" in normalise_name(model) if row is None else row.vision


def normalise_name(model: str) -> str:
    """Return the lower-case base name without provider, `:variant` and `-gguf`."""
    name = model.strip().lower()
    if "/" in name:
        name = name.rsplit("/", 1)[1].split(":", 1)[0]
    return name.removesuffix("-gguf")


def _matches(model: str, patterns: tuple[str, ...]) -> bool:
    whole = model.strip().lower()
    name = normalise_name(model)
    return any(fnmatchcase(whole if "/" in pattern else name, pattern) for pattern in patterns)
