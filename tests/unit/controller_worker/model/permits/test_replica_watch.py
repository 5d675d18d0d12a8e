"""The reports of engines: as vLLM and SGLang write them, and as nothing should write them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from aiohttp import web

from controller_worker.model.permits.replica_watch import MAX_REPORT_BYTES, ReplicaReport, ReplicaWatch, parse_metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 12.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.4375
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",calculate_kv_scales="False",cpu_offload_gb="0",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.9",num_cpu_blocks="None",num_gpu_blocks="27341",num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256",sliding_window="None",swap_space="4"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="Qwen/Qwen3-8B"} 1.048576e+06
"""
OLD_VLLM = (
    'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\nvllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1\n'
)
SGLANG = """\
# HELP sglang:token_usage The token usage
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="meta-llama/Llama-3.1-8B",pp_rank="0",tp_rank="0"} 0.28
# HELP sglang:max_total_num_tokens Maximum total number of tokens in the KV cache pool.
sglang:max_total_num_tokens{engine_type="unified",model_name="meta-llama/Llama-3.1-8B"} 454132.0
sglang:num_running_reqs{model_name="meta-llama/Llama-3.1-8B"} 162.0
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [(VLLM, (27_341 * 16, 0.4375)), (OLD_VLLM, (3_200, 0.25)), (SGLANG, (454_132, 0.28))],
    ids=["vllm", "old vllm", "sglang"],
)
def test_real_metrics_are_read(text: str, found: tuple[int, float]) -> None:
    assert parse_metrics(text) == found
    assert parse_metrics(text.replace("\n", "\r\n")) == found


def test_the_fullest_of_several_engines_counts() -> None:
    text = "".join(f'vllm:kv_cache_usage_perc{{engine="{n}"}} 0.{n}\n' for n in (1, 7, 3))
    text += "".join(f'sglang:max_total_num_tokens{{rank="{n}"}} {n}000\n' for n in (4, 2, 9))
    assert parse_metrics(text) == (2_000, 0.7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0\xff\ufffd\n",
        "vllm:kv_cache_usage_perc NaN\nsglang:max_total_num_tokens +Inf\n",
        "vllm:kv_cache_usage_perc 1.5\nvllm:kv_cache_usage_perc -0.1\n",
        "sglang:max_total_num_tokens 0\nsglang:max_total_num_tokens -5\nsglang:max_total_num_tokens 1e300\n",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n',
        'vllm:cache_config_info{block_size="1e308",num_gpu_blocks="1e308"} 1.0\n',
        "vllm:cache_config_info{block_size=16,num_gpu_blocks=100} 1\n",
        "vllm:cache_config_info 1\n",
        'x{a="vllm:kv_cache_usage_perc 0.5"} 1\n # vllm:kv_cache_usage_perc 0.5\n',
        "<html>vllm:kv_cache_usage_perc 0.5</html>\n",
    ],
)
def test_numbers_out_of_range_count_as_not_reported(text: str) -> None:
    assert parse_metrics(text) == (None, None)


def test_a_label_cannot_forge_another() -> None:
    name = r"m\",num_gpu_blocks=\"999999999"
    text = f'vllm:cache_config_info{{block_size="16",model_name="{name}",num_gpu_blocks="10"}} 1.0\n'
    assert parse_metrics(text) == (160, None)


@pytest.mark.parametrize(
    "body",
    [
        "a" * MAX_REPORT_BYTES,
        "vllm:cache_config_info{" + "a" * (1 << 20) + "} 1",
        "vllm:" + "{" * (1 << 20) + "}" * 9,
        "vllm:cache_config_info{" + 'a="' * (1 << 18) + "} 1",
        "vllm:x" + " " * (1 << 20),
        "vllm:x{" + "}" * (1 << 20),
    ],
    ids=["no line end", "a long word", "braces", "open texts", "spaces", "closed braces"],
)
def test_a_hostile_report_is_read_in_linear_time(body: str) -> None:
    assert parse_metrics(body) == (None, None)  # quadratic time would be hours


async def asked(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> ReplicaReport:
    """Return the report of an engine that answers so."""
    app = web.Application()
    app.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    watch = ReplicaWatch()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return await watch.ask(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    finally:
        await watch.aclose()
        await runner.cleanup()


async def test_a_report_has_limits_and_follows_no_redirect() -> None:
    paths: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        if request.path == "/health":
            return web.Response()
        if request.path == "/metrics":
            raise web.HTTPFound("/elsewhere")
        return web.Response(text=SGLANG)

    assert await asked(answer) == ReplicaReport(is_up=True)
    assert paths == ["/health", "/metrics"]


async def test_an_endless_report_is_cut() -> None:
    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if request.path == "/metrics":
            await response.write(SGLANG.encode())
            with suppress(ConnectionError):
                while True:
                    await response.write(b"# more\n" * 10_000)
                    await asyncio.sleep(0)
        return response

    assert await asked(send) == ReplicaReport(is_up=True, cache_tokens=454_132, use=0.28)
