"""Estimates of prompts, beside OpenAI's own encoding, which litellm ships."""

import base64
import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from broker.contract.tool_specs import ToolSpec
from controller_worker.providers.llm import ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from controller_worker.providers.request_size import estimate_prompt_tokens, estimate_text_tokens

ROOT = Path(__file__).parents[4]
NOISE = random.Random(1)
LOG = "\n".join(json.dumps({"id": n, "kind": "action.run", "args": {"command": f"ls /tmp/{n}"}}) for n in range(100))
TEXTS = {
    "code": (ROOT / "controller_worker" / "model" / "router.py").read_text(),
    "lua": (ROOT / "broker" / "store" / "prelude.lua").read_text(),
    "prose": (ROOT / "docs" / "glossary.md").read_text(),
    "json": LOG,
    "hex": " ".join(NOISE.randbytes(8).hex() for _ in range(100)),
    "chinese": "请修复失败的测试并运行所有测试确认没有其他错误。" * 50,
    "japanese": "テストを修正してから、すべてのテストを実行してください。" * 50,
}


@pytest.fixture(scope="module")
def true_count() -> Callable[[str], int]:
    tiktoken = pytest.importorskip("tiktoken")
    found = find_spec("litellm")
    assert found is not None
    (folder,) = found.submodule_search_locations or ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(Path(folder, "litellm_core_utils", "tokenizers")))
        encoding = tiktoken.get_encoding("o200k_base")
    return lambda text: len(encoding.encode(text, disallowed_special=()))


@pytest.mark.parametrize("kind", TEXTS)
def test_an_estimate_is_near_the_truth(kind: str, true_count: Callable[[str], int]) -> None:
    assert 0.85 <= estimate_text_tokens(TEXTS[kind]) / true_count(TEXTS[kind]) <= 1.35


def test_wordless_text_is_underestimated_by_a_third(true_count: Callable[[str], int]) -> None:
    text = base64.b64encode(NOISE.randbytes(9_000)).decode()
    assert 0.6 <= estimate_text_tokens(text) / true_count(text) <= 0.75


def test_every_part_of_a_prompt_counts() -> None:
    tool = ToolSpec("f", "Do it well.", {"type": "object", "properties": {}})
    history = (
        Message("user", (TextPart("Look at it, please."),)),
        Message("assistant", (), (ToolCall("a", "f", '{"a": 1}'),), thinking_blocks=({"thinking": "Well, well."},)),
    )
    whole = estimate_prompt_tokens(ModelRequest(history, (tool,), "c1", 0, "/w"))
    assert whole > estimate_prompt_tokens(ModelRequest(history, (), "c1", 0, "/w"))
    assert whole > estimate_prompt_tokens(ModelRequest(history[:1], (tool,), "c1", 0, "/w"))
    assert estimate_text_tokens("") == 0
    assert estimate_text_tokens("a") == 1
    assert estimate_text_tokens("\ud800") >= 1
