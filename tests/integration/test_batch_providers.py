"""Both batch APIs over HTTP: submission, recovery, and every kind of result."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable

import pytest

from broker.contract.events import LLMSpec
from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_batch_provider, create_llm
from controller_worker.providers.batching import (
    BatchProvider,
    BatchSearch,
    BatchUnconfirmed,
    OutgoingBatch,
    load_reply,
    make_lane,
)
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError, ModelError, RateLimitError
from tests.model_server.running_server import RunningModelServer
from tests.polling import until

pytest_plugins = ("tests.model_server.fixtures",)

BODY = json.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}).encode()
TWO = OutgoingBatch("tag1", {"1": BODY, "2": BODY})


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "say:hello", "--batch-seconds", "0.3")


def config(server: RunningModelServer, protocol: str) -> LLMConfig:
    url = server.url + ("/v1" if protocol == "openai" else "")
    return LLMConfig(model="m", base_url=url, api_key="secret-key", backend=protocol, batch=True)  # type: ignore[arg-type]


@pytest.fixture(params=["anthropic", "openai"])
async def provider(server: RunningModelServer, request: pytest.FixtureRequest) -> AsyncIterator[BatchProvider]:
    server.clear()
    made = create_batch_provider(config(server, request.param), SystemClock())
    yield made
    await made.aclose()


async def bought(provider: BatchProvider, outgoing: OutgoingBatch = TWO) -> str:
    return await provider.submit(outgoing, await provider.upload(outgoing))


async def results(provider: BatchProvider, provider_id: str) -> dict[str, bytes]:
    found: list[dict[str, bytes]] = []

    async def is_over() -> bool:
        ended = await provider.results(provider_id)
        found.extend([ended] if ended is not None else [])
        return bool(found)

    await until(is_over, what="the end of the batch")
    return found[0]


async def test_every_call_gets_its_own_reply(provider: BatchProvider, server: RunningModelServer) -> None:
    provider_id = await bought(provider)
    assert await provider.results(provider_id) is None
    replies = await results(provider, provider_id)
    assert sorted(replies) == ["1", "2"]
    assert "hello" in json.dumps(load_reply(replies["1"]))
    assert [item["body"] for item in server.batches()[-1]["items"]] == [json.loads(BODY)] * 2


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("expired", "service_unavailable"),
        ("canceled", "bad_request"),
        ("bad_request", "bad_request"),
        ("overloaded", "service_unavailable"),
        ("context_overflow", "context_window"),
        ("content_policy", "content_policy"),
        ("server_error", "internal"),
        ("rate_limit", "rate_limit"),
    ],
)
async def test_an_item_that_fails(provider: BatchProvider, server: RunningModelServer, kind: str, code: str) -> None:
    server.plan({"kind": kind})
    replies = await results(provider, await bought(provider))
    assert load_reply(replies["1"])  # the provider comes to the second first
    with pytest.raises(ModelError) as failure:
        load_reply(replies["2"])
    assert failure.value.code == code


async def test_an_item_without_a_result_is_left_out(provider: BatchProvider, server: RunningModelServer) -> None:
    server.plan({"kind": "missing"})
    assert list(await results(provider, await bought(provider))) == ["1"]


async def test_a_batch_is_found_again(provider: BatchProvider) -> None:
    sent_ms = round(time.time() * 1000)
    other = await bought(provider, OutgoingBatch("other", TWO.bodies))
    mine = await bought(provider, OutgoingBatch("mine", TWO.bodies))

    async def find(tag: str, *known: str, count: int = 2) -> str | None:
        found: list[str | None] = []

        async def is_known() -> bool:
            try:
                found.append(await provider.find(BatchSearch(tag, count, sent_ms, frozenset(known))))
            except BatchUnconfirmed:
                return False
            return True

        await until(is_known, what="an answer")
        return found[0]

    assert await find("mine", other) == mine
    assert await find("mine") == mine
    assert await find("never-sent") is None


async def test_a_refusal_is_an_error(provider: BatchProvider, server: RunningModelServer) -> None:
    server.plan({"kind": "rate_limit", "turn": -1, "retry_after": "7"})
    with pytest.raises(RateLimitError) as failure:
        await bought(provider)
    assert failure.value.retry_after_seconds == 7.0


async def test_what_was_taken_back_cannot_be_bought(server: RunningModelServer) -> None:
    provider = create_batch_provider(config(server, "openai"), SystemClock())
    uploaded = await provider.upload(TWO)
    await provider.revoke(uploaded)
    await provider.revoke(uploaded)
    with pytest.raises(ModelError):
        await provider.submit(TWO, uploaded)
    await provider.aclose()


def test_a_model_without_a_batch_api_is_refused() -> None:
    with pytest.raises(LLMConfigError, match="cannot batch calls"):
        create_llm(LLMConfig(model="gemini/gemini-2.5-pro", batch=True, api_key="k"), SystemClock())  # type: ignore[arg-type]


def test_a_router_cannot_be_batched() -> None:
    router = {"kind": "random", "weights": {"primary": 1, "a": 1}}
    with pytest.raises(LLMConfigError, match="cannot be batched"):
        LLMConfig.create(model="m", batch=True, router=router)


def test_settings_from_the_environment() -> None:
    made = LLMConfig.from_env({"LLM_MODEL": "m", "LLM_BATCH": '{"max_calls": 7}'})
    assert made.batch is not None
    assert made.batch.max_calls == 7
    assert LLMConfig.from_env({"LLM_MODEL": "m", "LLM_BATCH": "true"}).batch is not None
    assert LLMConfig.from_env({"LLM_MODEL": "m", "LLM_BATCH": "false"}).batch is None


def test_lane_has_one_address_one_model_and_no_key() -> None:
    spec = LLMSpec(model="m")
    one = make_lane(spec, LLMConfig(model="m", api_key="a"))  # type: ignore[arg-type]
    assert one == make_lane(spec, LLMConfig(model="m", api_key="b"))  # type: ignore[arg-type]
    assert one != make_lane(spec, LLMConfig(model="m", base_url="http://other"))
    assert one != make_lane(LLMSpec(model="profile"), LLMConfig(model="m"))
