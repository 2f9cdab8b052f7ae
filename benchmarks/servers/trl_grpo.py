"""Run TRL's GRPOTrainer on the race's task, in a Python that has TRL and none of our services.

    PYTHON -m benchmarks.servers.trl_grpo '{"model": "DIR", "tasks": "FILE", "out": "DIR", ...}'

Writes the weights of every train step to OUT/<step>.safetensors, and OUT/trl.json: when each of
them was ready, in seconds since 1970 with the seconds of writing taken off, and CPU seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from dialoop.tasks.column_addition import final_number
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):  # TRL is not installed where mypy runs
    """Keeps the weights of every train step, and when they were ready."""

    def __init__(self, out: Path, updates_per_step: int) -> None:
        self._out, self._per_step = out, updates_per_step
        self._writing_s = 0.0
        self.begun_s = self.begun_cpu_s = 0.0
        self.ready: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Note the start; the first batch of prompts is not sampled yet."""
        self.begun_s, self.begun_cpu_s = time.time(), time.process_time()

    def on_step_end(self, _: Any, state: Any, __: Any, *, model: Any, **___: Any) -> None:
        """After every optimiser update."""
        if state.global_step % self._per_step:
            return
        now, cpu = time.time(), time.process_time()
        step = state.global_step // self._per_step
        rl = {"rl_s": now - self.begun_s - self._writing_s, "cpu_s": cpu - self.begun_cpu_s}
        self.ready.append({"train_step": step, **rl})
        tensors = {k: v.detach() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(tensors, self._out / f"{step}.safetensors")
        self._writing_s += time.time() - now


def reward(
    completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
) -> list[float]:
    """Return 1 for a whole message that ends in `#### N` with the right number, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(ids[-1] == reward.end and final_number(text) == truth)  # type: ignore[attr-defined]
        for text, ids, truth in zip(texts, completion_ids, answer, strict=True)
    ]


def config_of(recipe: dict[str, Any]) -> GRPOConfig:
    """Return TRL's config, with what both arms of the race share."""
    updates, rows = recipe["num_minibatches"], recipe["groups"] * recipe["group_size"]
    return GRPOConfig(
        output_dir=recipe["out"],
        seed=recipe["seed"],
        max_steps=recipe["num_steps"] * updates,
        per_device_train_batch_size=rows // updates,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=recipe["group_size"],
        max_completion_length=recipe["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        learning_rate=recipe["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="bnpo",  # over the tokens of an update, as ours
        adam_beta2=0.95,  # ours
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=recipe.get("continuous_batching", False),
        save_strategy="no",
        report_to="none",
        logging_steps=10_000,
        disable_tqdm=True,
    )


def main() -> None:
    """One run."""
    recipe = json.loads(sys.argv[1])
    torch.set_num_threads(recipe["threads"])
    out = Path(recipe["out"])
    tokenizer = AutoTokenizer.from_pretrained(recipe["model"])
    reward.end = tokenizer.eos_token_id  # type: ignore[attr-defined]
    tasks = json.loads(Path(recipe["tasks"]).read_text("utf-8"))
    rows = [
        {"prompt": [{"role": "user", "content": task["question"]}], "answer": task["answer"]}
        for task in tasks
    ]
    clock = Clock(out, recipe["num_minibatches"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(recipe["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config_of(recipe),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    report = {"begun_s": clock.begun_s, "train_steps": clock.ready}
    (out / "trl.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
