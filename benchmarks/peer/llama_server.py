"""Serves a tiny model of random weights by llama.cpp; runs in build/llama-venv, which llama.sh makes.

    build/llama-venv/bin/python benchmarks/peer/llama_server.py DIRECTORY

Writes the model into the directory, prints the server's address, and serves until its input ends. The weights follow
from a seed. The vocabulary is a byte-level BPE trained on Deckhands' pages, so a text has several tokenizations, and
the model samples others than the tokenizer would choose. The chat template is ChatML.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import xllamacpp

ROOT = Path(__file__).parents[2]

SEED = 34
LAYERS, WIDTH, HEADS, FEED_FORWARD, CONTEXT, VOCABULARY = 2, 64, 4, 128, 16384, 4000
SLOTS = 4
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = ("docs/agents.md", "docs/tools.md", "docs/python.md", "controller_worker/agents/prompts/codeact.j2")
END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
END_LOGIT, WORD_LOGIT, BIAS_WIDTH = 0.9, 0.2, 8.0
"""How much likelier than other tokens the end and ASCII text are. Other bytes remain possible."""


def train_vocabulary() -> tuple[list[str], list[str]]:
    """Return the tokens and the merges of a byte-level BPE; the special tokens come last."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train([str(ROOT / text) for text in TEXTS], vocab_size=VOCABULARY, show_progress=False)
    model = json.loads(bpe.to_str())["model"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    return [*sorted(model["vocab"], key=model["vocab"].__getitem__), *SPECIAL], merges


def write_model(path: Path) -> None:
    """Write the model's file."""
    tokens, merges = train_vocabulary()
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL)) + [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index(END))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(TEMPLATE)

    random = np.random.default_rng(SEED)

    def draw(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    # The first dimension is the same for each token. Through it, the output's first column is the tokens' own logits.
    embedding, output = draw(len(tokens), WIDTH), draw(len(tokens), WIDTH)
    embedding[:, 0] = BIAS_WIDTH
    output[:, 0] = [WORD_LOGIT if text.isascii() else 0 for text in tokens]
    output[[tokens.index(text) for text in SPECIAL], 0] = (-100, -100, END_LOGIT)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output.weight", output)
    for layer in range(LAYERS):
        shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
        shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (FEED_FORWARD, WIDTH)) | {"ffn_down": (WIDTH, FEED_FORWARD)}
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", draw(*shape))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Serve until the input ends."""
    path = Path(sys.argv[1]) / "tiny.gguf"
    write_model(path)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel = CONTEXT * SLOTS, SLOTS
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    # The defaults round so much that the same token has another log-probability when its prompt comes from the cache.
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.port = 0
    parameters.warmup = False
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
