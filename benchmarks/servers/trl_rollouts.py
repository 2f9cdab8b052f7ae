"""Run TRL's GRPOTrainer and keep what it rolled out, in a Python that has TRL.

    PYTHON -m benchmarks.servers.trl_rollouts '{"model": "DIR", "out": "DIR", "seed": 0, ...}'

Writes OUT/rollouts.jsonl, a row for each completion with the columns of TRL's own batch, and what
`log_completions` writes: OUT/completions/*.parquet, with trainer_state.json in the checkpoint.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

COLUMNS = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"),
    *("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps", "tool_mask"),
)


class RecordingTrainer(GRPOTrainer):  # TRL is not installed where mypy runs
    """GRPOTrainer, with a line in rollouts.jsonl for each completion of a batch."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training:
            columns = {name: batch[name].tolist() for name in COLUMNS if name in batch}
            rewards = list(self._logs["rewards"]["right"])[-len(inputs) :]
            texts = list(self._logs["completion"])[-len(inputs) :]
            path = Path(self.args.output_dir) / "rollouts.jsonl"
            with path.open("a", encoding="utf-8") as lines:
                for number, row in enumerate(inputs):
                    own = {"step": self.state.global_step, "prompt": row["prompt"]}
                    own |= {"completion": texts[number], "right": rewards[number]}
                    own |= {name: values[number] for name, values in columns.items()}
                    lines.write(json.dumps(own | {"temperature": self.args.temperature}) + "\n")
        return batch


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for a completion that says the sum."""
    return [float(answer in c[0]["content"]) for c, answer in zip(completions, answer, strict=True)]


def tasks(seed: int, size: int) -> list[dict[str, Any]]:
    """Return sums as rows of TRL's data sets."""
    chance = random.Random(seed)
    pairs = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(size)]
    return [
        {"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": f"={a + b}"}
        for a, b in pairs
    ]


def config_of(recipe: dict[str, Any]) -> GRPOConfig:
    """Return TRL's config: small steps, two updates for each batch of completions."""
    return GRPOConfig(
        output_dir=recipe["out"],
        seed=recipe["seed"],
        max_steps=recipe["num_steps"],
        per_device_train_batch_size=recipe["rows"],
        per_device_eval_batch_size=recipe["rows"],
        num_generations=recipe["group_size"],
        steps_per_generation=recipe.get("steps_per_generation", 1),
        num_iterations=recipe.get("num_iterations", 2),
        max_completion_length=recipe["max_new_tokens"],
        temperature=recipe["temperature"],
        top_k=0,
        learning_rate=recipe["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        eval_strategy="steps",
        eval_steps=max(1, recipe["num_steps"] // 4),
        save_strategy="steps",
        save_steps=recipe["num_steps"],
        save_only_model=True,
        report_to="none",
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        disable_tqdm=True,
    )


def main() -> None:
    """One run."""
    recipe = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    trainer = RecordingTrainer(
        model=AutoModelForCausalLM.from_pretrained(recipe["model"], dtype=torch.float32),
        reward_funcs=right,
        args=config_of(recipe),
        train_dataset=Dataset.from_list(tasks(recipe["seed"], recipe["num_tasks"])),
        eval_dataset=Dataset.from_list(tasks(recipe["seed"] + 1, recipe["rows"])),
        processing_class=AutoTokenizer.from_pretrained(recipe["model"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
