"""At `pipeline_depth = 0` a job is a plain loop: sample, score, train, publish, in this order.

The loop by hand is transformers, torch and this file. It takes one rule from Dialoop, that of
seeds: member m of a task with sampling seed s draws turn t with seed s + m + 1,000,003 t.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import statistics
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dialoop.clients.trainer import Phase
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import MaxTurns
from dialoop.environments.rewards.functions import Rewards
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.tools.text_tools import CallSyntax, ToolCalls
from dialoop.trajectory import SamplingParams, Task
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_ops.stack.in_process import in_process
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.trainer.learner.learner import Learner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dialoop.environments.episode import Episode

NUM_STEPS, GROUP_SIZE, NUM_TURNS, MAX_NEW_TOKENS = 10, 4, 2, 8
SEED, LEARNING_RATE = 3, 1e-3
WITHIN = 1e-6
MAX_GRAD_NORM = 1e-5
"""So small that gradients are like AdamW's eps. Far above it each element moves by the learning
rate in the direction of its sign, and rounding decides the sign of one whose terms cancel."""
QUESTIONS = [f"{number}+{number * 7 % 10}" for number in range(40)]
SAMPLING_SEEDS = [1000 * number for number in range(len(QUESTIONS))]


# ---- The environment: a tool answers whatever the policy writes; two turns are an episode ----
class EveryAnswer(CallSyntax):
    """Every message is a call, so that a policy that nobody has taught makes calls, too."""

    def spans(self, text: str) -> list[str]:
        return [f"<measure>{text}"]


def measure(text: str) -> str:
    """Return how many bytes a text has."""
    return str(len(text.encode()))


def share_of_letters(texts: Sequence[str]) -> float:
    """Return the reward of the policy's messages."""
    whole = "".join(texts)
    return sum("a" <= sign <= "z" for sign in whole) / max(1, len(whole))


def letters(episode: Episode) -> float:
    return share_of_letters([m.text for m in episode.history if m.role == "assistant"])


environment = ChatEnv(
    name="measured",
    tasks=RowTasks({"train": [{"query": question} for question in QUESTIONS], "none": []}),
    transforms=(
        ToolCalls([measure], syntax=EveryAnswer()),
        MaxTurns(NUM_TURNS),
        Rewards([letters]),
    ),
)


@dataclass
class Step:
    """What a train step sampled, by task and member, its means, and the weights after it."""

    token_ids: dict[str, list[list[int]]] = field(default_factory=dict)
    loss: float = 0.0
    grad_norm: float = 0.0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


# ---- The plain loop ----
@dataclass
class Played:
    """An episode: its tokens, the places and log-probs of the sampled ones, and its texts."""

    ids: list[int]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    advantage: float = 0.0


class PlainLoop:
    """One model, which samples and is trained by turns."""

    def __init__(self, model_dir: Path, *, num_groups: int, num_minibatches: int) -> None:
        torch.set_num_threads(1)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        self.end_of_turn = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.ends = (self.end_of_turn, self.tokenizer.convert_tokens_to_ids("<call>"))
        self.num_groups, self.num_minibatches = num_groups, num_minibatches
        self.orders = random.Random(SEED)
        self.tasks = iter(range(len(QUESTIONS)))

    def steps(self) -> Iterator[Step]:
        for _ in range(NUM_STEPS):
            step, batch = Step(), list[Played]()
            while len(step.token_ids) < self.num_groups:
                number = next(self.tasks)
                group = [self.play(number, member) for member in range(GROUP_SIZE)]
                if self.score(group):
                    step.token_ids[str(number)] = [played.ids for played in group]
                    batch += group
            self.train(batch, step)
            state = self.model.state_dict()
            step.weights = {name: tensor.clone() for name, tensor in state.items()}
            yield step

    @torch.no_grad()
    def play(self, number: int, member: int) -> Played:
        opening = f"<|im_start|>user\n{QUESTIONS[number]}<|im_end|>\n<|im_start|>assistant\n"
        played = Played(ids=self.tokenizer.encode(opening))
        for turn in range(NUM_TURNS):
            start = len(played.ids)
            self.sample(played, seed=SAMPLING_SEEDS[number] + member + 1_000_003 * turn)
            has_ended = played.ids[-1] == self.end_of_turn
            text = self.tokenizer.decode(played.ids[start : len(played.ids) - has_ended])
            played.texts.append(text)
            if turn + 1 < NUM_TURNS:
                end = "\n" if has_ended else "<|im_end|>\n"
                tool = f"<|im_start|>tool\n{measure(text)}<response><|im_end|>\n"
                played.ids += self.tokenizer.encode(f"{end}{tool}<|im_start|>assistant\n")
        return played

    def sample(self, played: Played, *, seed: int) -> None:
        """Draw tokens: p / Exponential(1) is largest at i with chance p_i."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(MAX_NEW_TOKENS):
            logits = self.model(input_ids=torch.tensor([played.ids])).logits[0, -1]
            logprobs = logits.log_softmax(-1)
            noise = torch.empty(len(logprobs)).exponential_(generator=generator)
            token = int((logprobs.exp() / noise).argmax())
            played.sampled.append(len(played.ids))
            played.logprobs.append(float(logprobs[token]))
            played.ids.append(token)
            if token in self.ends:
                return

    def score(self, group: list[Played]) -> bool:
        """Give each its advantage; return whether there is anything to learn."""
        rewards = [share_of_letters(played.texts) for played in group]
        if max(rewards) == min(rewards):
            return False
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        for played, reward in zip(group, rewards, strict=True):
            played.advantage = (reward - mean) / deviation
        return True

    def train(self, batch: list[Played], step: Step) -> None:
        """Take GRPO's updates: the mean over an update's tokens of -min(r A, clip(r) A)."""
        self.orders.shuffle(batch)
        for start in range(self.num_minibatches):
            part = batch[start :: self.num_minibatches]
            num_tokens = sum(len(played.sampled) for played in part)
            for played in part:
                logits = self.model(input_ids=torch.tensor([played.ids])).logits[0]
                every = logits[[place - 1 for place in played.sampled]].log_softmax(-1)
                tokens = torch.tensor([played.ids[place] for place in played.sampled])
                logprobs = every.gather(-1, tokens[:, None])[:, 0]
                ratio = (logprobs - torch.tensor(played.logprobs)).exp()
                clipped = ratio.clamp(0.8, 1.2)
                gain = torch.minimum(ratio * played.advantage, clipped * played.advantage)
                loss = -gain.sum() / num_tokens
                loss.backward()
                step.loss += float(loss.detach()) / self.num_minibatches
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            step.grad_norm += float(norm) / self.num_minibatches
            self.optimizer.step()
            self.optimizer.zero_grad()


# ---- The stack ----
def config_of(model_dir: Path, *, num_groups: int, num_minibatches: int) -> dict[str, Any]:
    return {
        "run": "plain",
        "seed": SEED,
        "model": {"directory": str(model_dir)},
        "environment": {
            "use": f"{__name__}:environment",
            "name": "measured",
            "train_split": "none",  # `run_job` offers tasks with seeds
            "heldout_split": "train",
        },
        # Rows that decode together are other sums of floats than a row alone.
        "inference": {"max_model_len": 128, "max_num_seqs": 1},
        "collector": {
            "group_size": GROUP_SIZE,
            "max_new_tokens": MAX_NEW_TOKENS,
            "stop": ["<call>"],
            "max_groups_in_flight": 1,
        },
        "train": {
            "loss": "grpo",
            "num_steps": NUM_STEPS,
            "groups_per_train_step": num_groups,
            "num_minibatches": num_minibatches,
            "pipeline_depth": 0,
            "learning_rate": LEARNING_RATE,
            "max_grad_norm": MAX_GRAD_NORM,
            "keep_policies": 0,
        },
        "warm_start": {"num_steps": 0},
        "evaluation": {"num_tasks": 2, "every": 4, "num_running_tasks": 8},
    }


async def run_job(config: dict[str, Any], folder: Path) -> Path:
    """Run the job to its end on tasks with sampling seeds, and return its folder."""
    tasks = [
        Task(
            task_id=f"measured/train/0/{number}",
            environment="measured",
            split="train",
            key=str(number),
            num_trajectories=GROUP_SIZE,
            sampling=SamplingParams(seed=seed),
        )
        for number, seed in enumerate(SAMPLING_SEEDS)
    ]
    run_dir = folder / config["run"]
    async with in_process(config, folder=folder) as dialoop:
        run = json.loads((run_dir / "run.json").read_text("utf-8"))["run_id"]
        await dialoop.replay.offer_tasks(run, tasks)
        while (status := await dialoop.trainer.get_status()).phase is not Phase.DONE:
            assert status.phase is not Phase.FAILED, status.failure
            await asyncio.sleep(0.05)
    return run_dir


def steps_of(run_dir: Path) -> list[Step]:
    """Read the steps from the run's files, in which no trained token is of an older policy."""
    steps = [Step() for _ in range(NUM_STEPS)]
    for row in lines_of(run_dir / "trajectories.jsonl"):
        if row["outcome"] == "trained":
            (sequence,) = row["sequences"]
            segments = [s for s in sequence["segments"] if s["source"] == "MODEL"]
            assert [s["policy_version"] for s in segments] == [row["train_step"]] * NUM_TURNS
            assert row["num_tool_calls"] == NUM_TURNS
            own = steps[row["train_step"] - 1].token_ids.setdefault(row["task_key"], [])
            own.append(sequence["token_ids"])
    trained = [row for row in lines_of(run_dir / "metrics.jsonl") if row["kind"] == "train"]
    for step, row in zip(steps, trained, strict=True):
        assert row["staleness_max"] == 0
        step.loss, step.grad_norm = row["loss"], row["grad_norm"]
        # The first policy is the model before the first step.
        path = run_dir / "policies" / f"main-{row['train_step'] + 1}" / "model.safetensors"
        step.weights = load_file(path)
    return steps


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Note when the services sample, score, train and load a published policy."""
    noted: list[tuple[str, str]] = []

    def note(owner: type, name: str, kind: str) -> None:
        work = getattr(owner, name)

        @contextmanager
        def noting() -> Iterator[None]:
            noted.append((kind, "begins"))
            yield
            noted.append((kind, "ends"))

        async def call_async(*arguments: Any, **named: Any) -> Any:
            with noting():
                return await work(*arguments, **named)

        def call(*arguments: Any, **named: Any) -> Any:
            with noting():
                return work(*arguments, **named)

        is_async = inspect.iscoroutinefunction(work)
        monkeypatch.setattr(owner, name, call_async if is_async else call)

    note(TransformersEngine, "sample", "sample")
    note(Scoring, "score", "score")
    note(Learner, "train_step", "train")
    note(TransformersEngine, "load_weights", "publish")
    return noted


def overlaps_of(calls: list[tuple[str, str]]) -> set[frozenset[str]]:
    """Return what was under way when something else began."""
    is_open, found = Counter[str](), set[frozenset[str]]()
    for kind, moment in calls:
        if moment == "begins":
            found |= {frozenset((kind, other)) for other in is_open.elements()}
            is_open[kind] += 1
        else:
            is_open[kind] -= 1
    return found


@pytest.mark.parametrize(("num_groups", "num_minibatches"), [(1, 2), (2, 1)])
async def test_depth_0_is_the_plain_loop_token_for_token_and_weight_for_weight(
    num_groups: int, num_minibatches: int, tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", seed=SEED)
    sizes = {"num_groups": num_groups, "num_minibatches": num_minibatches}
    run_dir = await run_job(config_of(model_dir, **sizes), tmp_path)
    by_hand = list(PlainLoop(model_dir, **sizes).steps())
    for ours, theirs in zip(steps_of(run_dir), by_hand, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.weights.keys() <= theirs.weights.keys()  # the tied head is not in the file
        for name, weights in ours.weights.items():
            torch.testing.assert_close(weights, theirs.weights[name], rtol=0, atol=WITHIN)
    before = load_file(model_dir / "model.safetensors")
    moved = [float((by_hand[-1].weights[name] - before[name]).abs().max()) for name in before]
    assert min(moved) > 100 * WITHIN

    # Evaluations sample, too.
    begun = [kind for kind, moment in calls if moment == "begins"]
    order = "".join({"score": "c"}.get(kind, kind[0]) for kind in begun)
    assert re.fullmatch(rf"p(s+c[sc]*tp){{{NUM_STEPS}}}[sc]*", order), order
    assert overlaps_of(calls) <= {frozenset(("sample",)), frozenset(("sample", "score"))}
