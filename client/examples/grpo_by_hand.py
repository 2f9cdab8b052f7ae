"""GRPO by hand: play, score, train and publish in one `main()`, with the services' own functions.

    .venv/bin/python client/examples/grpo_by_hand.py [--seed 0] [--json result.json]

A model of 0.8M parameters adds two-digit numbers and may ask a calculator:

    user       35+40
    assistant  <request><Calculator>35+40<call>
    tool       75<response>
    assistant  Result=75<submit>                    reward 1

It first imitates demonstrations, 60 % of which guess the sum without the calculator. The model is
too small to guess well. GRPO (arXiv 2402.03300) then teaches it to use the calculator, since only
right answers get a reward. All this takes about a minute on two CPU cores.

`dialoop train` takes the same steps. There each step belongs to a service, and queues between the
services let them work at the same time. "In the services" below names the file that takes the step
there, in services/dialoop_services/ or services/. It needs dialoop-services[trainer,inference].
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from dialoop import (
    Group,
    LocalEnvironmentClient,
    PolicyVersion,
    SamplingParams,
    Task,
    arithmetic,
    play_group,
)
from dialoop_learning.loss.losses import grpo, sft
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.rl.advantages import with_advantages
from dialoop_learning.training import loss_inputs, update
from dialoop_services.inference.engine import EngineOptions
from dialoop_services.inference.generate import EnginePolicy
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.transformers_engine.engine import TransformersEngine

# The values of infra/configs/demo.toml, but with 15 train steps and not 24.
WARM_START_STEPS, DEMONSTRATIONS_PER_STEP, WARM_START_LEARNING_RATE = 220, 64, 3e-3
TRAIN_STEPS, GROUPS_PER_STEP, GROUP_SIZE, MINIBATCHES, LEARNING_RATE = 15, 16, 8, 2, 1e-4
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NEW_TOKENS = 256, 128, 24


async def main(seed: int, folder: Path) -> dict[str, float]:  # noqa: PLR0915 - one story, one function
    """Teach the tiny model to use the calculator; return its accuracy before and after."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    started, cpu_started = time.perf_counter(), time.process_time()

    # --- The environment, the model and the renderer -----------------------------------------
    # An environment holds the tasks, runs the tools and gives the rewards. The client plays it in
    # this process, behind the interface of the environment service (environment/servicer.py).
    environment = arithmetic()
    sessions = LocalEnvironmentClient(environment)
    train_keys, heldout_keys = environment.tasks.keys("train"), environment.tasks.keys("heldout")

    # The trainer's model gives log-probs of packed rows (dialoop_learning/model/policy.py). One
    # renderer turns messages into tokens and back, for demonstrations and for sampling. The trainer
    # thus sees the same tokens as the engine (inference/rendering.py).
    model_dir = make_tiny_model(folder / "model", seed=seed)
    policy = load_policy(model_dir)
    renderer = Renderer.of(model_dir)

    # --- Warm start: imitate demonstrations --------------------------------------------------
    # With random weights no answer is right, so every reward and every advantage is 0 and RL
    # learns nothing. In the services: trainer/data/demonstrations.py.
    settings = OptimizerSettings(
        learning_rate=WARM_START_LEARNING_RATE, warmup_steps=20, total_steps=WARM_START_STEPS
    )
    optimizer = GuardedOptimizer(policy.parameters(), settings)
    for _ in range(WARM_START_STEPS):
        keys = rng.choices(train_keys, k=DEMONSTRATIONS_PER_STEP)
        tasks = [environment.tasks.get("train", key) for key in keys]
        shown = [environment.demonstration(task, rng) for task in tasks]
        stop = environment.traits.stop  # an answer ends where the environment would end it
        sequences = [renderer.builder().demonstration(history, stop=stop) for history in shown]
        batch = pack_rows([TokenRow.from_sequence(sequence) for sequence in sequences])
        update(policy, optimizer, [batch], sft)  # forward, loss, backward, step: as below

    # --- The engine that samples -------------------------------------------------------------
    # The engine has its own weights and samples all running sequences in one batch. Here trainer
    # and engine take turns; in the services the engine goes on while the trainer works.
    options = EngineOptions(max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, seed=seed)
    engine = await TransformersEngine.start(model_dir, options)
    player = EnginePolicy(engine, renderer)
    # With temperature 1 and no top-k or top-p, the engine's log-probs are those of the policy.
    sampling = SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, stop=stop)

    async def publish(number: int) -> None:
        """Give the engine the trainer's weights; it labels each token with their version."""
        # In the services: trainer/publish/publisher.py, and inference/replica/replica.py loads.
        policy.save(folder / "published")
        version = PolicyVersion(lineage="main", number=number)
        await engine.load_weights(folder / "published" / "model.safetensors", version)

    async def play(split: str, keys: list[str], group_size: int) -> list[Group]:
        """Play a group of episodes of each task, all at once."""
        # Each episode resets a session, then samples and steps until the environment ends it. In
        # the services the collector leases a task from a queue (replay/servicer.py) and plays
        # it (collector/player.py). Its group goes into a queue for the scorer and the trainer.
        tasks = [
            Task(
                task_id=key,
                environment=environment.name,
                split=split,
                key=key,
                num_trajectories=group_size,
                sampling=sampling,
            )
            for key in keys
        ]
        playing = (
            play_group(task, sessions=sessions, policy=player, group_id=task.task_id)
            for task in tasks
        )
        return list(await asyncio.gather(*playing))

    async def heldout_accuracy() -> float:
        """Play each held-out task once, sampled as in training; return the share that is right."""
        # In the services: trainer/job/evaluation.py.
        groups = await play("heldout", list(heldout_keys), 1)
        return sum(group.trajectories[0].reward for group in groups) / len(groups)

    await publish(0)
    before = await heldout_accuracy()
    print(f"after the warm start: held-out accuracy {before:.2f} (sampled)")

    # --- GRPO ----------------------------------------------------------------------------------
    optimizer = GuardedOptimizer(
        policy.parameters(), OptimizerSettings(learning_rate=LEARNING_RATE)
    )
    for step in range(1, TRAIN_STEPS + 1):
        # Play several episodes of each task; they differ because sampling is random.
        groups = await play("train", rng.sample(train_keys, GROUPS_PER_STEP), GROUP_SIZE)

        # An episode's advantage is its reward minus the group's mean, over the group's standard
        # deviation. No value model is needed. In the services: scorer/scoring.py.
        scored = [with_advantages(group) for group in groups]

        # A row per token sequence holds its ids, which of them the policy sampled, their log-probs
        # from the engine, and their advantage. The tool's text is context and is not trained. If
        # all rewards of a group are equal, its advantages are 0, so it is left out. In the
        # services: trainer/data/batches.py chooses, dialoop_learning/packing/rows.py makes rows.
        rows = [
            TokenRow.from_sequence(sequence, group_index=index)
            for index, group in enumerate(scored)
            for trajectory in group.trajectories
            for sequence in trajectory.sequences
            if sequence.advantage
        ]

        # Several updates per step reuse the same episodes. After the first update the policy is
        # no longer the one that sampled; the loss's ratio corrects for that. In the services:
        # trainer/learner/learner.py, and dialoop_learning/training.py for one update.
        rng.shuffle(rows)
        minibatches = [rows[start::MINIBATCHES] for start in range(MINIBATCHES)]
        for minibatch in filter(None, minibatches):
            # Pack sequences of different lengths into one row without padding: attention stays
            # within each. (dialoop_learning/rl/packing_plan.py plans several rows when one would be
            # too long.)
            batch = pack_rows(minibatch)
            # Log-probs [M] of the M sampled tokens under the current weights, with gradients.
            scores = policy(batch, temperature=1.0)
            # -min(r A, clip(r, 0.8, 1.2) A), mean over tokens; r = exp(log-prob - engine's).
            output = grpo(loss_inputs(batch, scores.logprobs))
            output.loss.backward()
            # Clip the gradient's norm, step, and clear; skip a step that is not finite.
            optimizer.step(float(output.loss.detach()))

        # The engine plays the next groups with the new weights.
        await publish(step)
        if step % 5 == 0:
            played = [trajectory for group in groups for trajectory in group.trajectories]
            reward = sum(trajectory.reward for trajectory in played) / len(played)
            called = sum(trajectory.num_tool_calls > 0 for trajectory in played) / len(played)
            print(
                f"step {step}: reward {reward:.2f}, asked the calculator {called:.2f}", flush=True
            )

    after = await heldout_accuracy()
    await engine.close()
    print(f"after {TRAIN_STEPS} GRPO steps: held-out accuracy {after:.2f} (sampled)")
    return {
        "seed": seed,
        "heldout_sampled_before": round(before, 4),
        "heldout_sampled_after": round(after, 4),
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(time.process_time() - cpu_started, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO from reset to publish, by hand.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a model this small gains nothing from more
    with tempfile.TemporaryDirectory() as temporary:
        result = asyncio.run(main(arguments.seed, Path(temporary)))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
