"""One model call: the reply or the failure that comes of it, and the clients behind it."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import LLMSpec, ModelCallFailed, ModelReply
from broker.runtime.clock import SystemClock
from broker.runtime.errors import StoreUnavailable
from broker.testing.manual_clock import ManualClock
from controller_worker.core.concerns.model_calls import render_last_error
from controller_worker.model.model_call import ask_model, to_model_reply
from controller_worker.model.models import CLIENTS_LIMIT, UNUSED_KEPT_SECONDS, ClientMissing, Models
from controller_worker.providers.errors import HookVeto, LLMConfigError
from controller_worker.providers.llm import LLM, CallUsage, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from tests.controller_parts import free_permit

REQUEST = ModelRequest((Message("user", (TextPart("hi"),)),), (), "conversation-1", 0, "/srv/project")


def models(tmp_path: Path, *turns: dict[str, Any], **env: str) -> Models:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    return with_env(LLM_MODEL=f"scripted/{script}", **env)


def with_env(**env: str) -> Models:
    return Models(env, SystemClock(), is_open=True)


async def attempt(
    of: Models, number: int = 1, spec: LLMSpec | None = None, request: ModelRequest = REQUEST, **options: Any
) -> Completion | ModelCallFailed:
    clock, permit = ManualClock(), free_permit()
    return await ask_model(of, spec or LLMSpec(), request, attempt=number, clock=clock, permit=permit, **options)


async def reply_of(of: Models, **options: Any) -> Completion:
    result = await attempt(of, **options)
    assert isinstance(result, Completion)
    return result


async def failure_of(of: Models, number: int = 1, **options: Any) -> ModelCallFailed:
    result = await attempt(of, number, **options)
    assert isinstance(result, ModelCallFailed)
    return result


def wait_of(failure: ModelCallFailed) -> float:
    assert failure.retry_at is not None
    return (failure.retry_at - ManualClock().now()).total_seconds()


def error(code: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"code": code, "times": None} | fields}


async def test_a_retryable_failure_says_when_to_try_again(tmp_path: Path) -> None:
    failure = await failure_of(models(tmp_path, error("internal", text="boom")), 2)
    assert (failure.code, failure.content, failure.attempt) == ("internal", "boom", 2)
    assert failure.last_error == "STATUS$ERROR_LLM_INTERNAL_SERVER_ERROR"
    assert 16 <= wait_of(failure) <= 20
    limited = await failure_of(models(tmp_path, error("rate_limit", retry_after_seconds=100)))
    assert 100 <= wait_of(limited) <= 125


@pytest.mark.parametrize(
    ("code", "text", "content", "last_error"),
    [("bad_request", "no \ud83d", "no \ufffd", "BadRequestError: no \ufffd")],
    ids=["lone surrogate"],
)
async def test_failure_can_be_logged(tmp_path: Path, code: str, text: str, content: str, last_error: str) -> None:
    failure = await failure_of(models(tmp_path, error(code, text=text)))
    assert (failure.content, failure.last_error) == (content, last_error)


async def test_missing_model_or_script_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    nothing = await failure_of(with_env())
    assert (nothing.code, nothing.retry_at) == ("llm_config", None)
    assert nothing.content.startswith("No model is configured. Set LLM_MODEL and LLM_API_KEY")
    assert nothing.last_error == f"LLMConfigError: {nothing.content}"
    missing = await failure_of(with_env(), spec=LLMSpec(model=f"scripted/{tmp_path}/none.json"))
    assert missing.code == "llm_config"
    assert missing.content.endswith("none.json' cannot be read: No such file or directory.")
    assert with_env().max_message_chars(LLMSpec()) == 30_000
    assert with_env(LLM_BACKEND="openai", LLM_MODEL="gpt-4o").sees_images(LLMSpec())


async def test_the_last_attempt_is_the_last(tmp_path: Path) -> None:
    of = models(tmp_path, error("rate_limit"), LLM_NUM_RETRIES="3")
    assert [(await failure_of(of, n)).retry_at is not None for n in (1, 2, 3)] == [True, True, False]


async def test_a_failure_for_good_is_not_tried_again(tmp_path: Path) -> None:
    result = await attempt(models(tmp_path, error("authentication")))
    assert result == ModelCallFailed(
        code="authentication",
        content="The script fails with authentication.",
        last_error="STATUS$ERROR_LLM_AUTHENTICATION",
        attempts=5,
    )


async def test_unforeseen_error_is_a_failure_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Models):
        def _create(self, spec: LLMSpec, *_: object) -> Any:
            raise ZeroDivisionError(f"secret {spec}")

    result = await attempt(Broken({}, SystemClock()))
    text = (
        "There was an unexpected error while running the agent: ZeroDivisionError. You can ask the agent to try again."
    )
    assert result == ModelCallFailed(code="unexpected", content=text, last_error=f"RuntimeError: {text}")
    assert "model call of conversation conversation-1" in caplog.text


async def test_equal_settings_share_one_client_under_concurrency(tmp_path: Path) -> None:
    of = models(tmp_path)
    found = await asyncio.gather(*(of.get_client(LLMSpec()) for _ in range(5)))
    assert len({id(client) for client, _ in found}) == 1
    other, config = await of.get_client(LLMSpec(temperature=0.7))
    assert other is not found[0][0]
    assert config.temperature == 0.7
    await of.aclose()


async def test_a_pipe_is_no_script(tmp_path: Path) -> None:
    """Opening it would wait for a writer, for ever."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(LLMConfigError, match="not a regular file"):
        await Models({"LLM_MODEL": f"scripted/{pipe}"}, SystemClock()).get_client(LLMSpec())


def test_equal_models_are_resolved_to_one_object() -> None:
    of = Models({"LLM_MODEL": "scripted/x"}, SystemClock(), is_open=True)
    first, second = (of.choose(LLMSpec(model=f"scripted/{name}"), "") for name in ("y", "y"))
    assert first is second
    assert of.choose(LLMSpec(model="scripted/z"), "") != first


async def test_a_client_that_could_not_be_made_is_tried_again(tmp_path: Path) -> None:
    of = Models({"LLM_MODEL": f"scripted/{tmp_path}/script.json"}, SystemClock(), is_open=True)
    with pytest.raises(LLMConfigError, match="No such file"):
        await of.get_client(LLMSpec())
    assert of.max_message_chars(LLMSpec()) == 30_000
    (tmp_path / "script.json").write_text("{}")
    client, _ = await of.get_client(LLMSpec())
    assert (await of.get_client(LLMSpec()))[0] is client
    await of.aclose()


async def test_cancelled_caller_does_not_spoil_the_shared_client(tmp_path: Path) -> None:
    of = models(tmp_path)
    first, second = (asyncio.create_task(of.get_client(LLMSpec())) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    client, _ = await second
    assert first.cancelled()
    assert (await of.get_client(LLMSpec()))[0] is client


async def test_how_long_a_text_may_be_is_a_setting(tmp_path: Path) -> None:
    of = models(tmp_path, LLM_MAX_MESSAGE_CHARS="500")
    assert of.max_message_chars(LLMSpec()) == 500
    await of.get_client(LLMSpec())
    assert of.max_message_chars(LLMSpec()) == 500


@pytest.mark.parametrize(
    ("model", "is_seeing"),
    [("claude-sonnet-4-5", True), ("openai/gpt-4o", True), ("deepseek/deepseek-chat", False), ("llama-of-mine", False)],
)
def test_which_models_are_shown_images(model: str, is_seeing: bool) -> None:
    spec = LLMSpec(model=model)
    assert with_env().sees_images(spec) is is_seeing
    assert with_env(LLM_DISABLE_VISION="true").sees_images(spec) is False
    assert with_env(LLM_DISABLE_VISION="false").sees_images(spec) is True


def test_images_are_shown_if_any_model_that_may_answer_sees(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[llm]\nmodel = "deepseek/deepseek-chat"\n[llm.eyes]\nmodel = "openai/gpt-4o"\n'
        '[llm.routed]\nmodel = "deepseek/deepseek-chat"\nrouter = {kind = "random", weights = {eyes = 1}}\n'
        '[llm.falling]\nmodel = "deepseek/deepseek-chat"\nfallbacks = [{use = "eyes"}]\n'
    )
    of = with_env(LLM_CONFIG=str(path))
    seeing = [of.sees_images(LLMSpec(model=name)) for name in (None, "eyes", "routed", "falling")]
    assert seeing == [False, True, True, True]


async def test_a_router_is_resolved_before_quotas_and_budgets_are_asked(tmp_path: Path) -> None:
    path, script = tmp_path / "models.toml", tmp_path / "s.json"
    script.write_text('{"turns": []}')
    path.write_text(
        f'[llm]\nmodel = "scripted/{script}"\n[llm.small]\nmodel = "scripted/{script}"\nmax_output_tokens = 7\n'
        '[llm.auto]\nrouter = {kind = "rules", rules = [{use = "small", service = "condenser"}]}\n'
    )
    models, request = with_env(LLM_CONFIG=str(path)), REQUEST
    spec = LLMSpec(model="auto", temperature=0.5)
    with pytest.raises(ClientMissing):
        await models.route(spec, request, "")
    await models.get_client(spec)
    own = await models.route(spec, request, "")
    other = await models.route(spec, replace(request, service="condenser"), "")
    assert (own.model, other.model, other.temperature) == ("auto#routed", "small#routed", 0.5)
    assert (await models.get_client(own))[1].router is None
    assert (await models.get_client(other))[1].max_output_tokens == 7
    assert await models.route(own, request, "") == own
    assert await models.route(LLMSpec(model="small"), request, "") == LLMSpec(model="small")


def test_how_errors_are_shown() -> None:
    assert render_last_error(LLMConfigError("No.", remedy="Yes.")) == "LLMConfigError: No. Yes."
    assert render_last_error(StoreUnavailable("Gone.")) == "StoreUnavailable: Gone."
    assert render_last_error(KeyError("x")) == (
        "RuntimeError: There was an unexpected error while running the agent: KeyError. "
        "You can ask the agent to try again."
    )


def completion(*calls: ToolCall, **fields: Any) -> Completion:
    known: dict[str, Any] = {
        "text": "",
        "thinking_blocks": (),
        "model": "acme/large",
        "response_id": "r1",
        "stop_reason": "stop",
        "usage": CallUsage(),
        "cost_usd": None,
        "latency_seconds": 0.5,
    }
    return Completion(tool_calls=calls, **known | fields)


def reply(*calls: ToolCall, **fields: Any) -> ModelReply:
    return to_model_reply(completion(*calls, **fields), iteration=3, seen_id=20, event_id=22)


def test_a_reply_becomes_its_event() -> None:
    block = {"type": "thinking", "thinking": "hm"}
    counts = {"prompt_tokens": 100, "completion_tokens": 10, "cache_read_tokens": 60, "cache_write_tokens": 5}
    call = ToolCall("a", "think", "{}")
    event = reply(call, text="Hi.", thinking_blocks=(block,), usage=CallUsage(**counts), cost_usd=0.5)
    assert event.id == 22
    assert event.wire() == {
        "kind": "model.reply",
        "source": "agent",
        "service": "agent",
        "content": "Hi.",
        "tool_calls": [{"id": "a", "name": "think", "arguments": "{}"}],
        "thinking_blocks": [block],
        "model": "acme/large",
        "response_id": "r1",
        "stop_reason": "stop",
        "usage": counts,
        "cost_usd": 0.5,
        "latency_seconds": 0.5,
        "iteration": 3,
        "seen_id": 20,
    }
    odd = reply(ToolCall("a", "b\udc00", "{\udc00}"), text="c\udc00")
    (call,) = odd.tool_calls
    assert (odd.content, call.name, call.arguments) == ("c\ufffd", "b\ufffd", "{\ufffd}")


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a_2", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_2", "a_2_3"]),
        (["a_3", "a", "a"], ["a_3", "a", "a_3_3"]),
        (["", ""], ["call_22_1", "call_22_2"]),
        (["call_22_2", ""], ["call_22_2", "call_22_2_2"]),
        (["\ud83d"], ["\ufffd"]),
    ],
)
def test_call_ids_are_unique_and_can_be_logged(given: list[str], made: list[str]) -> None:
    event = reply(*(ToolCall(call_id, "think", "{}") for call_id in given))
    assert [call.id for call in event.tool_calls] == made


def test_a_thought_that_no_log_can_hold_is_left_out() -> None:
    deep: dict[str, Any] = {"type": "thinking"}
    for _ in range(200):
        deep = {"type": "thinking", "thinking": deep}
    kept = {"type": "thinking", "thinking": "hm", "signature": "s"}
    assert reply(text="Hi.", thinking_blocks=(deep, kept)).thinking_blocks == (kept,)


# Fallbacks


def with_fallbacks(tmp_path: Path, first: str, *fallbacks: dict[str, Any], **scripts: Any) -> Models:
    """A model that fails with the code `first`, and profiles that play the named turns."""
    for name, turn in {"first": error(first), **scripts}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"turns": [turn]}))
    table = ", ".join(
        "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in fallback.items()) + "}"
        for fallback in fallbacks
    )
    sections = [f'[llm]\nmodel = "scripted/{tmp_path}/first.json"\nfallbacks = [{table}]']
    sections += [f'[llm.{name}]\nmodel = "scripted/{tmp_path}/{name}.json"' for name in scripts]
    path = tmp_path / "models.toml"
    path.write_text("\n".join(sections))
    return with_env(LLM_CONFIG=str(path))


async def test_a_fallback_answers_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown: list[Delta] = []
    of = with_fallbacks(tmp_path, "rate_limit", {"use": "spare"}, spare={"text": "Here I am."})
    result = await reply_of(of, request=replace(REQUEST, on_delta=shown.append))
    assert (result.text, result.model) == ("Here I am.", f"scripted/{tmp_path}/spare.json")
    assert "conversation conversation-1: rate_limit; calling spare" in caplog.text
    assert shown[0].kind == "superseded"
    assert "".join(delta.text for delta in shown) == "Here I am."


async def test_fallbacks_are_asked_for_the_error_before_them(tmp_path: Path) -> None:
    long = {"use": "long", "on": ["context_window"]}
    scripts = {"small": error("context_window"), "long": {"text": "I am long."}}
    of = with_fallbacks(tmp_path, "rate_limit", long, {"use": "small"}, long, **scripts)
    assert (await reply_of(of)).text == "I am long."
    bad = {"use": f"scripted/{tmp_path}/none.json"}
    of = with_fallbacks(tmp_path, "rate_limit", bad, {"use": "spare"}, spare={"text": "Here."})
    assert (await reply_of(of)).text == "Here."


@pytest.mark.parametrize(
    ("code", "on", "is_asked"),
    [
        ("authentication", [], True),
        ("context_window", [], False),
        ("context_window", ["context_window"], True),
        ("rate_limit", ["context_window"], False),
        ("content_policy", [], False),
        ("bad_request", [], False),
    ],
)
async def test_a_fallback_is_for_its_errors(tmp_path: Path, code: str, on: list[str], is_asked: bool) -> None:
    result = await attempt(with_fallbacks(tmp_path, code, {"use": "spare", "on": on}, spare={"text": "Here."}))
    assert isinstance(result, Completion) is is_asked
    assert is_asked or (isinstance(result, ModelCallFailed) and result.code == code)


async def test_batch_call_has_no_fallback(tmp_path: Path) -> None:
    async def carry(body: bytes) -> Any:
        raise AssertionError(body)

    of = with_fallbacks(tmp_path, "rate_limit", {"use": "spare"}, spare={"text": "Here I am."})
    assert (await failure_of(of, request=replace(REQUEST, carry=carry))).code == "rate_limit"
    assert (await reply_of(of, spec=LLMSpec(model="spare"))).text == "Here I am."  # chosen between two steps


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("rate_limit", "authentication", "rate_limit"),
        ("authentication", "timeout", "timeout"),
        ("authentication", "not_found", "authentication"),
    ],
)
async def test_attempt_is_repeated_if_any_error_may_pass(tmp_path: Path, first: str, second: str, told: str) -> None:
    failure = await failure_of(with_fallbacks(tmp_path, first, {"use": "spare"}, spare=error(second)))
    assert (failure.code, failure.retry_at is not None) == (told, told != "authentication")


@pytest.mark.parametrize(("code", "told"), [("rate_limit", "rate_limit"), ("authentication", "llm_config")])
async def test_unusable_fallback_does_not_make_a_failure_final(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, told: str
) -> None:
    failure = await failure_of(with_fallbacks(tmp_path, code, {"use": f"scripted/{tmp_path}/none.json"}))
    assert (failure.code, failure.retry_at is not None) == (told, told == "rate_limit")
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize(("code", "told"), [("rate_limit", "rate_limit"), ("authentication", "hook_veto")])
async def test_a_fallback_that_may_not_be_called_is_not(tmp_path: Path, code: str, told: str) -> None:
    asked: list[str] = []

    async def admit(model: str) -> None:
        asked.append(Path(model).stem)
        if "spare" in model:
            raise HookVeto("not this one")

    of = with_fallbacks(tmp_path, code, {"use": "spare"}, spare={"text": "Here."})
    assert ((await failure_of(of, admit=admit)).code, asked) == (told, ["first", "spare"])


@pytest.mark.parametrize(
    "env",
    [
        {"LLM_BACKEND": "openai"},
        {"LLM_BACKEND": "scripted"},
        {"LLM_BATCH": "true", "LLM_MODEL": "anthropic/claude-sonnet-4-5"},
    ],
)
async def test_an_agent_without_a_model_works_whatever_model_is_configured(env: dict[str, str]) -> None:
    models = with_env(**env)
    spec = LLMSpec(model="silent")
    assert models.sees_images(spec)
    llm, _ = await models.get_client(spec)
    assert (await llm.complete(REQUEST)).text == ""
    await models.aclose()


async def test_clients_are_bounded_and_none_in_use_is_closed(tmp_path: Path) -> None:
    """A task chooses its temperature, and each one takes another client."""
    of = Models({"LLM_MODEL": "openai/x", "LLM_BASE_URL": "http://127.0.0.1:9/v1"}, SystemClock())

    async def call(temperature: float) -> LLM:
        async with of.use_client(LLMSpec(temperature=temperature)) as (client, _):
            return client

    async with of.use_client(LLMSpec(temperature=0.5)) as (used, _):
        first = await call(1.0)
        for number in range(CLIENTS_LIMIT):
            await call(2.0 + number)
        assert len(of._clients) == CLIENTS_LIMIT
        assert await call(0.5) is used
        assert await call(1.0) is not first
    await of.aclose()


async def test_new_client_is_kept_for_its_waiting_call() -> None:
    """Conversations with more models than the limit would otherwise close each other's clients before any call."""
    clock = ManualClock()
    of = Models({"LLM_MODEL": "openai/x", "LLM_BASE_URL": "http://127.0.0.1:9/v1"}, clock)
    specs = [LLMSpec(temperature=float(number)) for number in range(CLIENTS_LIMIT + 8)]
    for spec in specs:
        await of.get_client(spec)
    assert all(map(of.is_ready, specs))
    clock.advance(UNUSED_KEPT_SECONDS)
    await of.get_client(LLMSpec(temperature=0.5))  # no call has used them
    assert sum(map(of.is_ready, specs)) < CLIENTS_LIMIT
    await of.aclose()
