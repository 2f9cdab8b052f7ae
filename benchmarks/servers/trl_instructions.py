"""Run TRL's GRPOTrainer on the real model's task, in a Python that has TRL over our packages.

    PYTHON -m benchmarks.servers.trl_instructions '{"model": "DIR", "out": "DIR", "seed": 0, ...}'

It goes on from its newest checkpoint in OUT. OUT/clock.json has the seconds of training until each
train step's end. Weights go to OUT/weights/<step>.safetensors, while the clock stands still.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.servers.real_race import InstructionReward, TrainingClock, write_json


class Timekeeper(TrainerCallback):  # TRL is not installed where mypy runs
    """Stops the clock between train steps, keeps weights, and ends the training at its deadline."""

    def __init__(self, clock: TrainingClock, recipe: dict[str, Any]) -> None:
        self._clock, self._every = clock, recipe["every"]
        self._weights = Path(recipe["out"]) / "weights"
        self._deadline = time.monotonic() + recipe["limit_s"]
        self._begun = time.monotonic()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Count from here: answers are sampled after this."""
        self._begun = time.monotonic()
        self._clock.go_on()

    def on_step_end(self, _: Any, state: Any, control: Any, *, model: Any, **__: Any) -> Any:
        """Note a train step, and stop where the next one would come too late."""
        self._clock.reach(state.global_step)
        if self._every and state.global_step % self._every == 0:
            self._weights.mkdir(exist_ok=True)
            whole = model.state_dict().items()
            tensors = {name: value.detach() for name, value in whole if name != "lm_head.weight"}
            save_file(tensors, self._weights / f"{state.global_step}.safetensors")
        now = time.monotonic()
        if now + (now - self._begun) > self._deadline:
            control.should_save = control.should_training_stop = True
        return control


def config_of(recipe: dict[str, Any]) -> GRPOConfig:
    """Return TRL's config: what both sides share, and a batch in micro-batches."""
    rows = recipe["groups"] * recipe["group_size"]
    return GRPOConfig(
        output_dir=recipe["out"],
        seed=recipe["seed"],
        max_steps=recipe["num_steps"],
        per_device_train_batch_size=recipe["micro_batch"],
        gradient_accumulation_steps=rows // recipe["micro_batch"],
        num_generations=recipe["group_size"],
        max_completion_length=recipe["max_new_tokens"],
        temperature=recipe["temperature"],
        top_k=0,
        learning_rate=recipe["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # a mean over the tokens of the whole batch, as ours
        adam_beta2=0.95,  # ours
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,  # ours keeps its activations too
        save_strategy="steps" if recipe["every"] else "no",
        save_steps=recipe["every"] or 1,
        save_total_limit=1,
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


def last_checkpoint(out: Path) -> tuple[int, str | None]:
    """Return the newest whole checkpoint and its train step; delete any that was cut short."""
    found: list[tuple[int, str]] = []
    for path in out.glob("checkpoint-*"):
        if (path / "trainer_state.json").is_file():  # the last file to be written
            found.append((int(path.name.rpartition("-")[2]), str(path)))
        else:
            shutil.rmtree(path)
    return max(found, default=(0, None))


def main() -> None:
    """Train from the newest checkpoint to the end, or to the deadline."""
    recipe = json.loads(sys.argv[1])
    torch.set_num_threads(recipe["threads"])
    out = Path(recipe["out"])
    of_answers = InstructionReward()
    tasks = of_answers.tasks("train")

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        answers = [completion[0]["content"] for completion in completions]
        return of_answers([tasks[n] for n in number], answers)

    rows = [
        {"prompt": [{"role": "user", "content": task.question}], "number": number}
        for number, task in enumerate(tasks)
    ]
    step, checkpoint = last_checkpoint(out)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(recipe["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config_of(recipe),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(recipe["model"]),
        callbacks=[Timekeeper(TrainingClock(out / "clock.json", train_step=step), recipe)],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    of_answers.close()
    packages = {"trl": trl, "transformers": transformers, "torch": torch}
    logged = [row for row in trainer.state.log_history if "reward" in row]
    facts = {
        "versions": {name: package.__version__ for name, package in packages.items()},
        "rewards": {str(row["step"]): row["reward"] for row in logged},
    }
    write_json(out / "trl.json", facts)


if __name__ == "__main__":
    main()
