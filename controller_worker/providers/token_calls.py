"""Calls of a rollout: token in, token out, at servers such as vLLM.

A reply of a rollout comes with the exact tokens of its prompt and of its text. The next prompt consists of the tokens
recorded so far, the tokens that the chat template puts behind the reply, and the tokens of the new messages; recorded
tokens are never computed from text again. `LLM_ROLLOUT_API` selects how they are sent:

    chat         `/chat/completions` with `return_token_ids`. The server renders each prompt from its messages. If its
                 tokens do not continue the recorded ones, a new segment starts.
    chat_tokens  the first prompt as in `chat`; later ones as `tokens` of `/chat/completions/tokens` (prime-rl).
    completions  all prompts as tokens of `/completions`, with `/tokenize` for the messages. The reply is text, so the
                 tools are in the prompt as text. A reply that the engine aborts is continued from its own tokens.
    llama_cpp    the same at llama.cpp's server, by `/apply-template`, `/tokenize` with text, and `/completion`.

Holds: a reply is returned only with one token for each sampled position. If a prompt does not continue the recorded
tokens, `ReplyTokens.reason` says why. The tokens of new messages are rendered together with the reply before them. They
are used only if the rendering of that reply alone is a prefix of this text.
Does not: stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from broker.contract import UNKNOWN_VERSION, TokenRecord, to_runs
from broker.runtime import Clock
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import (
    LLMConfigError,
    MalformedReplyError,
    ServiceUnavailableError,
    TokensMissingError,
)
from controller_worker.providers.llm import ModelRequest, ReplyTokens, TokenPrefix
from controller_worker.providers.messages.message_memo import json_bytes
from controller_worker.providers.packed_tokens import PackedTokens
from controller_worker.providers.wires.chat_wire import ChatWire
from controller_worker.providers.wires.http_transport import HttpTransport
from controller_worker.providers.wires.raw_client import RawClient

CHAT, CHAT_TOKENS, COMPLETIONS, LLAMA_CPP = "chat", "chat_tokens", "completions", "llama_cpp"
ABORTED = frozenset({"abort", "aborted"})
MAX_PIECES = 64
"""How often an aborted reply is continued."""
MAX_VERSION = 1 << 31
WHOLE_PROMPTS = 16
"""How many whole prompts are rendered at a time. Their tokens, as JSON, are the largest answers."""
_ASKED: Mapping[str, Any] = {"return_token_ids": True}
_ASKED_OF_LLAMA_CPP: Mapping[str, Any] = {"return_tokens": True, "n_probs": 1}
_WHOLE_DISTRIBUTION: Mapping[str, Any] = {"top_k": 0, "top_p": 1, "min_p": 0}
"""llama.cpp's defaults leave tokens out, and its log-probabilities do not show that."""
_QUESTION = {"role": "user", "content": "?"}
"""The message before a reply whose continuation is rendered: most templates want one."""
_REMEDY = (
    "Use a server that returns token ids and log-probabilities (vLLM 0.10.2 or newer) with the backend openai, or "
    "submit the task without rollout."
)


class TokenCalls:
    """Makes the calls of rollouts over the client of an OpenAI-compatible server."""

    def __init__(self, config: LLMConfig, client: RawClient, wire: ChatWire, clock: Clock, key: str) -> None:
        self._config = config
        self._client = client
        self._wire = wire
        self._root: RawClient | None = None
        self._clock, self._key = clock, key
        self._whole_prompts = asyncio.Semaphore(WHOLE_PROMPTS)
        self._closing: tuple[int, ...] | None = None
        self._window: int | None = None  # tokens of a prompt and its reply, by the last answer of /tokenize

    async def ask(
        self, parameters: Mapping[str, Any], request: ModelRequest, headers: Mapping[str, str]
    ) -> tuple[Any, Mapping[str, str], int, ReplyTokens]:
        """Return the reply in the form of a chat completion, its headers, the bytes sent, and its tokens.

        Raises:
            TokensMissingError: the server returns no tokens.
            LLMConfigError: the length of a reply is not known.
            ModelError: the call failed.
        """
        prefix = request.rollout
        assert prefix is not None
        tools, messages = self._wire.list_parts(request)
        reason = self._find_break(prefix, tools, messages)
        known = prefix.tokens if not reason else PackedTokens()
        api = self._config.rollout_api
        new: PackedTokens | None = None
        if api != CHAT and known:
            new = await self._find_new_tokens(prefix, messages, headers)
            if new is None:
                reason, known = "template", PackedTokens()
        if self._config.has_text_rollouts and new is None:
            new = await self._tokenize_first(_to_values(messages), headers, tools=tools)
        count, digest = len(messages), _digest(tools, messages)
        del tools, messages  # most of the memory of a call in flight would be theirs
        with self._wire.written.forget_if_slow(request.messages):
            if self._config.has_text_rollouts:
                assert new is not None
                answer, found, size, sampled = await self._complete(parameters, request, known, new, headers)
            else:
                path = "/chat/completions" if new is None else "/chat/completions/tokens"
                body = self._write_chat(parameters, request, known, new)
                size, asking = len(body), self._client.ask(request, path, body, headers, stream=None)
                del body
                answer, found = await asking
                sampled = read_sampled(answer)
                if _find_finish(answer) in ABORTED:
                    raise ServiceUnavailableError("The engine has aborted the reply.")
                shown = _find_prompt(answer)
                if shown is not None:
                    if shown[: len(known)] != known.unpack():
                        reason, known = "retokenized", PackedTokens()
                    new = PackedTokens(shown[len(known) :])
                elif new is None:
                    raise TokensMissingError(f"The server of {self._config.model!r} returns no tokens.", remedy=_REMEDY)
        tokens = ReplyTokens(
            new, TokenRecord(array("i"), *sampled), start=len(known), messages=count, digest=digest, reason=reason
        )
        return answer, found, size, tokens

    async def aclose(self) -> None:
        """Close its connections to the server's root."""
        if self._root is not None:
            await self._root.aclose()

    def _find_break(self, prefix: TokenPrefix, tools: bytes, messages: Sequence[bytes]) -> str:
        """Return why the recorded tokens cannot be continued; empty if they can, or if there are none."""
        if not prefix.tokens:
            return prefix.hint
        if prefix.model != self._config.model:
            return "model_changed"
        count = prefix.messages
        follows = len(messages) > count and json.loads(messages[count])["role"] == "assistant"
        if not follows or _digest(tools, messages[:count]) != prefix.digest:
            return prefix.hint or "history_changed"
        return ""

    def _write_chat(
        self, parameters: Mapping[str, Any], request: ModelRequest, known: PackedTokens, new: PackedTokens | None
    ) -> bytes:
        fields = {**parameters, **_ASKED, "logprobs": True}
        fields |= {"tokens": (known.unpack() + new.unpack()).tolist()} if new is not None else {}
        return self._wire.write_body(fields, request)

    async def _find_new_tokens(
        self, prefix: TokenPrefix, messages: Sequence[bytes], headers: Mapping[str, str]
    ) -> PackedTokens | None:
        """Return the tokens of the new messages behind the recorded ones; None if the template allows none."""
        reply, *new = _to_values(messages[prefix.messages :])
        before = [_QUESTION, reply]
        calls = [
            asyncio.ensure_future(self._tokenize(before, headers, is_open=False)),
            asyncio.ensure_future(self._tokenize([*before, *new], headers)),
        ]
        try:
            base, whole = await asyncio.gather(*calls)
        finally:
            for one in calls:  # one may still run if the other has failed
                one.cancel()
        if whole[: len(base)] != base:
            return None
        rest = whole[len(base) :]
        if self._config.rollout_api == LLAMA_CPP:  # it does not close a reply at the end of the messages
            size = 1  # its models end a reply with one token
        else:
            closing = await self._load_closing(headers)
            rest, size = [*closing, *rest], len(closing)
        # The engine returns the token that ended the reply, which is the first of those that the template puts there.
        known = prefix.tokens.unpack()
        while size and known[-size:].tolist() != rest[:size]:
            size -= 1
        return PackedTokens(array("i", rest[size:]))

    async def _load_closing(self, headers: Mapping[str, str]) -> tuple[int, ...]:
        """Return the tokens that the template puts behind each reply: those that two different replies end with."""
        if self._closing is None:
            ends = [
                await self._tokenize([_QUESTION, {"role": "assistant", "content": text}], headers, is_open=False)
                for text in ("A", "7")
            ]
            size = 0
            while size < min(map(len, ends)) and ends[0][-1 - size] == ends[1][-1 - size]:
                size += 1
            self._closing = tuple(ends[0][len(ends[0]) - size :])
        return self._closing

    async def _tokenize_first(
        self, messages: Sequence[Any], headers: Mapping[str, str], *, tools: bytes
    ) -> PackedTokens:
        """Return the tokens of a whole prompt.

        Only a few answers are read at a time, because many conversations may start at once.
        """
        async with self._whole_prompts:
            return PackedTokens(array("i", await self._tokenize(messages, headers, tools=tools)))

    async def _tokenize(
        self, messages: Sequence[Any], headers: Mapping[str, str], *, tools: bytes = b"", is_open: bool = True
    ) -> list[int]:
        """Return the tokens of messages as the server's chat template renders them.

        Raises:
            TokensMissingError: the server has another protocol.
        """
        if self._config.rollout_api == LLAMA_CPP:
            return await self._tokenize_at_llama_cpp(messages, headers, is_open=is_open)
        model = self._config.model
        provider, _, rest = model.partition("/")
        fields: dict[str, Any] = {
            "model": rest if rest and provider in ("openai", "custom_openai", "hosted_vllm") else model,
            "messages": list(messages),
            "add_generation_prompt": is_open,
        }
        if tools:
            fields["tools"] = json.loads(tools)
        answer = await self._post("/tokenize", fields, headers)
        window = answer.get("max_model_len")
        self._window = window if isinstance(window, int) and window > 0 else None
        tokens = _read_tokens(answer)
        if not tokens:
            raise TokensMissingError(
                f"The server of {self._config.model!r} tokenizes no messages.",
                remedy="If it is llama.cpp's, set LLM_ROLLOUT_API=llama_cpp.",
            )
        return tokens

    async def _tokenize_at_llama_cpp(
        self, messages: Sequence[Any], headers: Mapping[str, str], *, is_open: bool
    ) -> list[int]:
        """Return the tokens of messages. A reply at the end is not closed unless `is_open`."""
        fields = {"messages": list(messages), "add_generation_prompt": is_open, "continue_final_message": not is_open}
        text = (await self._post("/apply-template", fields, headers)).get("prompt")
        if not isinstance(text, str):
            raise MalformedReplyError("The answer of /apply-template has no prompt.")
        # As /chat/completions of this server does it.
        fields = {"content": text, "add_special": True, "parse_special": True}
        return _read_tokens(await self._post("/tokenize", fields, headers))

    async def _post(self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Return an object that the server's root answers."""
        content = await self._get_root().request("POST", path, headers, content=json_bytes(fields))
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise MalformedReplyError(f"The answer of {path} is not JSON: {error}.") from error
        if not isinstance(answer, dict):
            raise MalformedReplyError(f"The answer of {path} is no object.")
        return answer

    def _get_root(self) -> RawClient:
        """Return a client of the server's root, where `/tokenize` and llama.cpp's `/completion` are."""
        if self._root is None:
            address = urlsplit(self._config.base_url or "")
            root = address._replace(path=address.path.rstrip("/").removesuffix("/v1")).geturl()
            config = self._config.model_copy(update={"base_url": root})
            self._root = RawClient(HttpTransport(config, self._key), config, self._clock)
        return self._root

    async def _complete(
        self,
        parameters: Mapping[str, Any],
        request: ModelRequest,
        known: PackedTokens,
        new: PackedTokens,
        headers: Mapping[str, str],
    ) -> tuple[Any, Mapping[str, str], int, tuple[array[int], array[float], tuple[tuple[int, int], ...]]]:
        """Sample a reply from tokens. If the engine aborts it, continue from the tokens sampled so far."""
        is_llama_cpp = self._config.rollout_api == LLAMA_CPP
        client, path = (self._get_root(), "/completion") if is_llama_cpp else (self._client, "/completions")
        asked = _ASKED_OF_LLAMA_CPP if is_llama_cpp else {**_ASKED, "logprobs": 1}
        fields = dict(_WHOLE_DISTRIBUTION) if is_llama_cpp else {}
        fields |= {name: value for name, value in parameters.items() if name != "max_completion_tokens"}
        prompt_tokens = len(known) + len(new)
        limit = self._find_limit(parameters, prompt_tokens)
        stops = {"stop": list(request.stop)} if request.stop else {}
        ids, logprobs, versions, texts = array("i"), array("f"), list[int](), list[str]()
        for _ in range(MAX_PIECES):
            left = {"max_tokens": limit - len(ids), **stops, **asked}
            body = json_bytes({**fields, **left, "prompt": (known.unpack() + new.unpack() + ids).tolist()})
            size, asking = len(body), client.ask(request, path, body, headers, stream=None)
            del body
            answer, found = await asking
            if is_llama_cpp:
                answer = read_llama_cpp_reply(answer)
            is_aborted = _find_finish(answer) in ABORTED
            piece = read_sampled(answer, may_be_empty=is_aborted)
            ids, logprobs = ids + piece[0], logprobs + piece[1]
            versions += [version for count, version in piece[2] for _ in range(count)]
            texts.append(str(answer["choices"][0].get("text") or ""))
            if not is_aborted or len(ids) >= limit:
                break
        else:
            raise ServiceUnavailableError("The engine aborts the reply repeatedly.")
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        choice = {"index": 0, "message": {"role": "assistant", "content": "".join(texts)}}
        choice["finish_reason"] = "length" if is_aborted else _find_finish(answer)
        whole = {"id": answer.get("id"), "model": answer.get("model"), "choices": [choice], "usage": usage}
        return whole, found, size, (ids, logprobs, to_runs(versions))

    def _find_limit(self, parameters: Mapping[str, Any], prompt_tokens: int) -> int:
        """Return the maximum number of tokens of a reply, because the default of `/completions` is only 16."""
        limit = parameters.get("max_completion_tokens", parameters.get("max_tokens"))
        if limit is not None:
            return int(limit)
        if self._config.rollout_api == LLAMA_CPP:
            return MAX_VERSION - 1  # it ends the reply where the context ends
        if self._window is None:
            raise LLMConfigError(
                f"The server of {self._config.model!r} does not name the length of its context (max_model_len).",
                remedy="Set LLM_MAX_OUTPUT_TOKENS.",
            )
        return max(1, self._window - prompt_tokens)  # the server refuses a prompt that is too long


def read_sampled(
    answer: Any, *, may_be_empty: bool = False
) -> tuple[array[int], array[float], tuple[tuple[int, int], ...]]:
    """Return the sampled tokens of an answer, their log-probabilities, and their policy versions as runs.

    vLLM: `token_ids` and `logprobs` of the choice. SGLang: `meta_info.output_token_logprobs` and
    `meta_info.weight_version`. Versions for each token, as AReaL names them: `output_versions`.

    Raises:
        TokensMissingError: the answer has no tokens.
        MalformedReplyError: the log-probabilities or versions are not one number for each token.
    """
    try:
        choice = answer["choices"][0]
        about = choice.get("meta_info") or answer.get("meta_info") or {}
        if isinstance(given := about.get("output_token_logprobs"), list):
            ids, logprobs = _to_ids([row[1] for row in given]), [row[0] for row in given]
        elif isinstance(given := choice.get("token_ids"), list):
            ids, logprobs = _to_ids(given), _list_logprobs(choice.get("logprobs"))
        else:
            raise TokensMissingError("The server returns no token ids.", remedy=_REMEDY)
        if not ids and not may_be_empty:
            raise TokensMissingError("The server returns no token of the reply.", remedy=_REMEDY)
        if logprobs and len(logprobs) != len(ids):
            raise MalformedReplyError(f"The reply has {len(ids)} tokens and {len(logprobs)} log-probabilities.")
        numbers = [math.nan if one is None else float(one) for one in logprobs or [None] * len(ids)]
        return array("i", ids), array("f", numbers), to_runs(_list_versions(answer, choice, about, len(ids)))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MalformedReplyError(f"The tokens of the reply cannot be read: {error!r}.") from error


def read_llama_cpp_reply(answer: Any) -> dict[str, Any]:
    """Return an answer of llama.cpp's `/completion` in the form of `/completions`.

    It reports no log-probability for tokens that end within a character, nor for those of a stop word. If it is not
    certain to which of several equal tokens a log-probability belongs, none of them gets one.

    Raises:
        TokensMissingError: the answer has no tokens.
        MalformedReplyError: it cannot be read.
    """
    try:
        if not isinstance(answer.get("tokens"), list):
            raise TokensMissingError(
                "The server returns no token ids.", remedy="LLM_ROLLOUT_API=llama_cpp is for llama.cpp's server."
            )
        tokens = _to_ids(answer["tokens"])
        given = [(int(one["id"]), float(one["logprob"])) for one in answer.get("completion_probabilities") or ()]
        reported = [token for token, _ in given]
        first = _find_places(tokens, reported)
        last = [len(tokens) - 1 - place for place in reversed(_find_places(tokens[::-1], reported[::-1]))]
        logprobs: list[float | None] = [None] * len(tokens)
        for place, other, (_, logprob) in zip(first, last, given, strict=True):
            if place == other:
                logprobs[place] = logprob
        choice = {
            "index": 0,
            "text": str(answer.get("content") or ""),
            "finish_reason": "length" if answer.get("stop_type") == "limit" else "stop",
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs},
        }
        return {"id": answer.get("id"), "model": answer.get("model"), "choices": [choice]}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MalformedReplyError(f"The tokens of the reply cannot be read: {error!r}.") from error


def _find_places(tokens: Sequence[int], reported: Sequence[int]) -> list[int]:
    """Return the first places of tokens at which those reported follow each other."""
    places: list[int] = []
    for token in reported:
        places.append(tokens.index(token, places[-1] + 1 if places else 0))
    return places


def _list_logprobs(given: Any) -> list[Any]:
    if not given:
        return []
    if "content" in given:
        return [one["logprob"] for one in given["content"] or ()]
    return list(given.get("token_logprobs") or ())


def _list_versions(
    answer: Mapping[str, Any], choice: Mapping[str, Any], about: Mapping[str, Any], count: int
) -> list[int]:
    each = choice.get("output_versions") or answer.get("output_versions")
    if isinstance(each, list) and len(each) == count:
        return [_to_version(one) for one in each]
    places = (about, choice, answer)
    names = ("weight_version", "policy_version")
    given = next((place[name] for place in places for name in names if place.get(name) is not None), None)
    return [_to_version(given)] * count


def _to_version(given: Any) -> int:
    """Return a version; anything but a number is an unknown version."""
    try:
        version = int(given)
    except (TypeError, ValueError, OverflowError):
        return UNKNOWN_VERSION
    return version if 0 <= version < MAX_VERSION else UNKNOWN_VERSION


def _find_prompt(answer: Any) -> array[int] | None:
    """Return the tokens of the prompt as the server used them; None if it does not report them."""
    try:
        given = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
        return array("i", _to_ids(given)) if given else None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MalformedReplyError(f"The tokens of the prompt cannot be read: {error!r}.") from error


def _find_finish(answer: Any) -> str:
    try:
        reason = answer["choices"][0].get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        return ""  # the reader of the reply reports it
    return str(reason.get("type") if isinstance(reason, dict) else reason or "")


def _read_tokens(answer: Mapping[str, Any]) -> list[int]:
    try:
        return _to_ids(answer["tokens"])
    except (ValueError, LookupError, TypeError) as error:
        raise MalformedReplyError(f"The answer of /tokenize has no tokens: {error!r}.") from error


def _to_ids(given: Sequence[Any]) -> list[int]:
    ids = list(given)
    # For each of thousands of tokens in a step, so without a loop in Python.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= MAX_VERSION):
        raise ValueError("a token is not an id")
    return ids


def _to_values(messages: Sequence[bytes]) -> list[Any]:
    return [json.loads(message) for message in messages]


def _digest(tools: bytes, messages: Sequence[bytes]) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in (tools, *messages):
        found.update(len(part).to_bytes(4, "big"))
        found.update(part)
    return found.hexdigest()
