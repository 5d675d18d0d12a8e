"""Trains a tiny policy by TRL on rollouts of a cluster; runs in build/trl-venv, which benchmarks/peer/trl.sh makes.

    build/trl-venv/bin/python -m tests.trl_program DIRECTORY STEPS

The directory has `tiny.gguf`, which llama.cpp serves, and `rewards.py`. Writes `result.json` into it: the fields of each
call of the rollout function, the trainer's log, and how far the log-probabilities of the engine are from the model's.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from deckhands.rollouts import RolloutSpec, get_reward, make_rollout_function

ROWS = [{"id": f"sum-{n}", "task": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(2)]
COMPLETIONS = 3


def find_largest_difference(model, fields) -> float:
    """Return the largest difference between the engine's log-probability of a sampled token and the model's."""
    largest = 0.0
    for prompt, completion, logprobs, mask in zip(
        fields["prompt_ids"], fields["completion_ids"], fields["logprobs"], fields["env_mask"], strict=True
    ):
        tokens = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = model(tokens, logits_to_keep=len(completion) + 1).logits[0, :-1]
        found = torch.log_softmax(logits, -1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].tolist()
        for own, given, is_sampled in zip(found, logprobs, mask, strict=True):
            if is_sampled and given is not None:
                largest = max(largest, abs(own - given))
    return largest


def main() -> None:
    """Train, and write the result."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf", pad_token="<|endoftext|>")
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)
    config = LlamaConfig.from_dict(
        {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    )
    model = LlamaForCausalLM(config)  # a trainer refuses a model from such a file, as if it were quantized
    model.load_state_dict(loaded.state_dict())
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    scorers = (f"{folder / 'rewards.py'}@length",)
    spec = RolloutSpec(prompts=ROWS, model="openai/tiny", max_iterations=6, scorers=scorers)
    roll_out = make_rollout_function(spec, name="trl")
    calls = []

    def record(prompts, trainer):
        fields = roll_out(prompts, trainer)
        difference = find_largest_difference(trainer.model, fields) if not calls else None
        calls.append({"prompts": prompts, "step": trainer.state.global_step, "difference": difference, **fields})
        return fields

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            num_generations=COMPLETIONS,
            per_device_train_batch_size=len(ROWS) * COMPLETIONS,
            max_steps=steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            off_policy_mask_threshold=100.0,  # the trainer reads the log-probabilities
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row["task"]}]} for row in ROWS]),
        rollout_func=record,
        reward_funcs=[get_reward],
    )
    trainer.train()
    changed = sum(not torch.equal(before[name], value) for name, value in model.named_parameters())
    result = {"calls": calls, "log": trainer.state.log_history, "changed": changed, "parameters": len(before)}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
