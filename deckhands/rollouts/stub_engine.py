r"""A small engine for trying rollouts offline: tokens in, tokens out, with a tokenizer that is ambiguous on purpose.

    deckhands rollouts engine --port 8000

It speaks the parts of vLLM's protocol that rollouts use: `/v1/chat/completions` with `return_token_ids`,
`/v1/chat/completions/tokens`, `/v1/completions` with token ids, `/tokenize`, `/pause` and `/resume`; and
`POST /weights {"version": N}` stands for a trainer's update. It needs no model: each reply follows a script, and the
script's words are sampled in pieces that a tokenizer would not choose, such as "roll" + "outs" where the vocabulary
has "rollouts". A text that is tokenized again therefore never gives the sampled tokens.

Holds: the log-probability of a token follows from the token and the policy version, so a test can determine which
version sampled it. `GET /truth` lists the prompt and the tokens of every reply that the engine has sent.
Does not: authenticate, or limit anything; it is for one machine.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from broker.runtime import draw_jitter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

WORDS = (
    *(
        "rollouts",
        "rollout",
        "roll",
        "outs",
        "out",
        "tokens",
        "token",
        "kens",
        "to",
        "finish",
        "fin",
        "ish",
        "function",
    ),
    *("parameter", "execute_bash", "execute", "_bash", "command", "message", "com", "mand", "the", "echo", "answer"),
)
IM_START, IM_END, END_OF_TEXT = 1, 2, 0
FIRST_BYTE = 3
FIRST_WORD = FIRST_BYTE + 256
SPECIAL = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
TURN = "turn"
PART = "Find a part of the answer."
SESSION_HEADER = "X-Session-ID"
DEFAULT_TOKENS = 16
"""The most tokens of a reply of `/completions` without `max_tokens`, as in vLLM."""
_PIECES = re.compile("|".join(map(re.escape, sorted(WORDS, key=len, reverse=True))))


class AmbiguousTokenizer:
    """A small vocabulary of words and parts of these words, with single bytes for all other text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text: the longest words that match."""
        found: list[int] = []
        at = 0
        for match in _PIECES.finditer(text):
            found += [FIRST_BYTE + byte for byte in text[at : match.start()].encode()]
            found.append(FIRST_WORD + WORDS.index(match.group()))
            at = match.end()
        return found + [FIRST_BYTE + byte for byte in text[at:].encode()]

    def sample(self, text: str) -> list[int]:
        """Return tokens of the same text, drawn as by a model: often not those of `encode`."""
        found: list[int] = []
        at = 0
        while at < len(text):
            choices = [word for word in WORDS if text.startswith(word, at)]
            if choices and draw_share() < 0.9:
                word = min(choices, key=len) if draw_share() < 0.7 else max(choices, key=len)
                found.append(FIRST_WORD + WORDS.index(word))
                at += len(word)
            else:
                found += [FIRST_BYTE + byte for byte in text[at].encode()]
                at += 1
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special ones have none."""
        parts = [
            WORDS[token - FIRST_WORD].encode() if token >= FIRST_WORD else bytes([token - FIRST_BYTE])
            for token in tokens
            if token >= FIRST_BYTE
        ]
        return b"".join(parts).decode(errors="replace")

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, is_open: bool) -> list[int]:
        """Return the tokens of messages in the chat template ChatML."""
        found: list[int] = []
        if tools:
            found += [IM_START, *self.encode("tools\n" + json.dumps(tools, sort_keys=True)), IM_END, *self.encode("\n")]
        for message in messages:
            text = to_text(message)
            found += [IM_START, *self.encode(f"{message['role']}\n{text}"), IM_END, *self.encode("\n")]
        return found + ([IM_START, *self.encode("assistant\n")] if is_open else [])


def to_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text, with its tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = [
        "<tool_call>" + json.dumps({"name": one["function"]["name"], "arguments": one["function"]["arguments"]})
        for one in message.get("tool_calls") or ()
    ]
    return "".join([content, *calls])


@dataclass(slots=True)
class Policy:
    """The version of the engine's weights. An update changes it, even while replies are being sampled."""

    version: int = 0
    is_paused: bool = False
    aborts: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


@dataclass(slots=True)
class StubEngine:
    """The state of one engine.

    Attributes:
        turns: the steps of a trajectory before it finishes.
        seconds_per_token: the time to sample a token.
        tool: the tool that a step calls: `execute_bash`, or `think`, which needs no tool worker.
        delegates: whether chats with the tool `delegate` start by giving a part of their task away.
        max_model_len: the value reported by `/tokenize`; None to report none.
        refuses: whether it answers `/completions` with the status 401.
        stalls_after: later replies than this number are never sent; None to send all.
        truth: a row for each reply sent: the tokens of its prompt, its sampled tokens, their versions, and the session
            that the request named.
    """

    turns: int = 3
    seconds_per_token: float = 0.0
    model: str = "stub"
    tool: str = "execute_bash"
    delegates: bool = False
    keeps_truth: bool = True
    max_model_len: int | None = 1 << 20
    refuses: bool = False
    stalls_after: int | None = None
    sent: int = 0
    policy: Policy = field(default_factory=Policy)
    truth: list[dict[str, Any]] = field(default_factory=list)
    tokenizer: AmbiguousTokenizer = field(default_factory=AmbiguousTokenizer)
    in_flight: int = 0
    _cut_off: dict[tuple[int, ...], list[int]] = field(default_factory=dict, repr=False)

    def app(self) -> web.Application:
        """Build the application."""
        from aiohttp import web

        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._list_models),
                web.get("/truth", self._show_truth),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/chat/completions/tokens", self._chat),
                web.post("/v1/completions", self._complete),
                web.post("/weights", self._set_weights),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
            ]
        )
        return app

    def write_reply(self, step: int, *, as_text: bool, key: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a step's reply, and its tool calls, which may be part of the text."""
        if step >= self.turns:
            name, arguments = "finish", {"message": f"the answer tokens {key}"}
        elif self.tool == "think":
            name, arguments = "think", {"thought": f"rollouts {step} {key}"}
        else:
            name, arguments = "execute_bash", {"command": f"echo rollouts {step} {key}", "security_risk": "LOW"}
        if as_text:
            written = "\n".join(f"<parameter={one}>{value}</parameter>" for one, value in arguments.items())
            return f"rollouts of tokens, {TURN} {step}.\n<function={name}>\n{written}\n</function>", []
        function = {"name": name, "arguments": json.dumps(arguments)}
        call_id = f"call_{step}_{key}"
        return f"rollouts of tokens, {TURN} {step}.", [{"id": call_id, "type": "function", "function": function}]

    async def generate(
        self, prompt: Sequence[int], tokens: Sequence[int], limit: int | None = None, *, session: str = ""
    ) -> tuple[list[int], list[int], bool]:
        """Send tokens up to a limit; return them, their versions, and whether an abort cut them off."""
        aborts = self.policy.aborts
        self.sent += 1
        if self.stalls_after is not None and self.sent > self.stalls_after:
            await asyncio.Event().wait()
        sent: list[int] = []
        versions: list[int] = []
        self.in_flight += 1
        try:
            for token in tokens[:limit]:
                async with self.policy.changed:
                    await self.policy.changed.wait_for(
                        lambda: not self.policy.is_paused or self.policy.aborts != aborts
                    )
                if self.policy.aborts != aborts:
                    break
                sent.append(token)
                versions.append(self.policy.version)
                await asyncio.sleep(self.seconds_per_token)
        finally:
            async with self.policy.changed:
                self.in_flight -= 1
                self.policy.changed.notify_all()
        if self.keeps_truth:
            self.truth.append({"prompt": list(prompt), "tokens": sent, "versions": versions, "session": session})
        is_cut = len(sent) < len(tokens[:limit])
        if is_cut:
            self._cut_off[(*prompt, *sent)] = list(tokens[len(sent) :])
        return sent, versions, is_cut

    async def _chat(self, request: web.Request) -> web.Response:
        from aiohttp import web

        body = await request.json()
        messages, tools = body["messages"], body.get("tools") or []
        prompt = body.get("tokens") or self.tokenizer.render(messages, tools, is_open=True)
        step = sum(message["role"] == "assistant" for message in messages)
        key = draw_word()
        text, calls = self.write_reply(step, as_text=not tools, key=key)
        names = [one.get("function", {}).get("name") for one in tools]
        if self.delegates and step == 0 and "delegate" in names and PART not in json.dumps(messages):
            arguments = {"agent": "CodeActAgent", "task": PART}
            calls[0]["function"] = {"name": "delegate", "arguments": json.dumps(arguments)}
        whole = to_text({"content": text, "tool_calls": calls})
        sampled, versions, is_cut = await self.generate(
            prompt, [*self.tokenizer.sample(whole), IM_END], session=request.headers.get(SESSION_HEADER, "")
        )
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        reason = "abort" if is_cut else "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        if body.get("logprobs"):
            rows = zip(sampled, versions, strict=True)
            choice["logprobs"] = {"content": [{"token": "", "logprob": logprob_of(*row)} for row in rows]}
        return web.json_response(self._answer(body, prompt, (sampled, versions), choice, "chat.completion"))

    async def _complete(self, request: web.Request) -> web.Response:
        from aiohttp import web

        if self.refuses:
            return web.json_response({"error": {"message": "no access"}}, status=401)
        body = await request.json()
        prompt = [int(token) for token in body["prompt"]]
        open_at = max((at for at, token in enumerate(prompt) if token == IM_START), default=0)
        head = self.tokenizer.encode("assistant\n")
        turns = self._split_turns(prompt[:open_at])
        step = sum(turn[: len(head)] == head for turn in turns)
        stops = body.get("stop") or []
        rest = self._cut_off.pop(tuple(prompt), None)
        if rest is None:
            text, _ = self.write_reply(step, as_text=True, key=draw_word())
            rest = [*self.tokenizer.sample(text), IM_END]
        limit = int(body.get("max_tokens") or DEFAULT_TOKENS)
        sampled, versions, is_cut = await self.generate(
            prompt, rest, limit, session=request.headers.get(SESSION_HEADER, "")
        )
        shown = self.tokenizer.decode(sampled)
        for stop in [stops] if isinstance(stops, str) else stops:
            shown = shown.partition(stop)[0]
        reason = "abort" if is_cut else "length" if len(sampled) < len(rest) else "stop"
        choice = {"index": 0, "text": shown, "finish_reason": reason}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": [logprob_of(*row) for row in zip(sampled, versions, strict=True)]}
        return web.json_response(self._answer(body, prompt, (sampled, versions), choice, "text_completion"))

    def _answer(
        self,
        body: Mapping[str, Any],
        prompt: Sequence[int],
        generated: tuple[Sequence[int], Sequence[int]],
        choice: dict[str, Any],
        kind: str,
    ) -> dict[str, Any]:
        sampled, versions = generated
        shown: dict[str, Any] = {"id": f"{kind}-{len(self.truth)}", "object": kind, "created": 0}
        shown["model"] = body.get("model", "stub")
        if body.get("return_token_ids"):
            choice |= {"token_ids": list(sampled), "output_versions": list(versions)}
            shown["prompt_token_ids"] = list(prompt)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
        usage["total_tokens"] = sum(usage.values())
        return shown | {"choices": [choice], "usage": usage}

    def _split_turns(self, prompt: Sequence[int]) -> list[list[int]]:
        turns: list[list[int]] = []
        for token in prompt:
            if token == IM_START:
                turns.append([])
            elif turns:
                turns[-1].append(token)
        return turns

    async def _tokenize(self, request: web.Request) -> web.Response:
        from aiohttp import web

        body = await request.json()
        if "messages" in body:
            is_open = body.get("add_generation_prompt", True)
            tokens = self.tokenizer.render(body["messages"], body.get("tools") or [], is_open=is_open)
        else:
            tokens = self.tokenizer.encode(body["prompt"])
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.max_model_len})

    async def _set_weights(self, request: web.Request) -> web.Response:
        from aiohttp import web

        body = await request.json()
        async with self.policy.changed:
            self.policy.version = int(body["version"])
            self.policy.changed.notify_all()
        return web.json_response({"version": self.policy.version})

    async def _pause(self, request: web.Request) -> web.Response:
        """Pause as vLLM does: `abort` ends replies in flight, `wait` lets them end, `keep` freezes them."""
        from aiohttp import web

        mode = request.query.get("mode", "abort")
        async with self.policy.changed:
            self.policy.aborts += mode == "abort"
            self.policy.changed.notify_all()
            if mode == "wait":
                await self.policy.changed.wait_for(lambda: not self.in_flight)
            self.policy.is_paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        async with self.policy.changed:
            self.policy.is_paused = False
            self.policy.changed.notify_all()
        return web.json_response({"status": "resumed"})

    async def _health(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"version": self.policy.version, "in_flight": self.in_flight})

    async def _list_models(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _show_truth(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response(self.truth)


def draw_share() -> float:
    """Draw a number from 0 to 1."""
    return draw_jitter() - 0.5


def draw_word() -> str:
    """Draw a word that distinguishes replies."""
    return f"{int(draw_share() * (1 << 24)):06x}"


def logprob_of(token: int, version: int) -> float:
    """Return the log-probability that the engine reports for a token of a policy version."""
    return -((token * 31 + version * 17) % 101 + 1) / 64


@asynccontextmanager
async def serve_stub(engine: StubEngine | None = None, *, port: int = 0) -> AsyncIterator[str]:
    """Serve an engine in this program; yield its address."""
    from aiohttp import web

    runner = web.AppRunner((engine or StubEngine()).app(), shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
