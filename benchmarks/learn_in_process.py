"""Test whether the demo's recipe learns: warm start and RL in one process, without any service.

    python -m benchmarks.learn_in_process --seeds 0 1 2

Task: two-digit addition. The warm start demonstrates direct guesses (60 %) and calculator calls
(40 %); RL shifts the weight to what is rewarded. Prints one JSON line per seed.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticTasks
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop_learning.loss.loss_loading import load_loss
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack, pack_rows
from dialoop_learning.rl.advantages import group_advantages
from dialoop_learning.rl.packing_plan import plan_rows
from dialoop_learning.training import update
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.servers.figures import print_figures

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from dialoop.sequences import Sequence
    from dialoop_learning.model.policy import PolicyModel
    from dialoop_learning.packing.rows import PackedBatch

OPEN, CLOSE = "<|im_start|>{}\n", "<|im_end|>\n"
CALL = re.compile(r"<request><Calculator>(\d{1,4})\+(\d{1,4})<call>$")
ANSWER = re.compile(r"Result=(\d+)<submit>$")
Piece = tuple[list[int], Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that the run depends on, except the seed."""

    sft_steps: int = 220
    sft_batch: int = 64
    sft_learning_rate: float = 3e-3
    sft_warmup: int = 20
    guess_share: float = 0.6
    rl_steps: int = 50
    num_prompts: int = 16
    group_size: int = 8
    minibatches: int = 2
    learning_rate: float = 1e-4
    loss: str = "grpo"
    max_new_tokens: int = 24
    max_turns: int = 3
    max_row_tokens: int = 8192
    num_held_out: int = 256


@dataclass(slots=True, kw_only=True)
class Episode:
    """One conversation being played: token pieces with their origin, and what was sampled."""

    a: int
    b: int
    pieces: list[Piece]
    logprobs: list[float]
    reward: float = 0.0
    used_tool: bool = False
    done: bool = False

    @property
    def ids(self) -> list[int]:
        """Return all tokens so far."""
        return [token for piece, _ in self.pieces for token in piece]

    def sequence(self, advantage: float) -> Sequence:
        """Return the token row that a trainer would lease."""
        version = PolicyVersion(lineage="main", number=0)
        pieces = [
            (ids, {"source": source, "policy_version": version if source is Source.MODEL else None})
            for ids, source in self.pieces
        ]
        return replace(sequence_of(pieces, logprobs=self.logprobs), advantage=advantage)


class Sampler:
    """A stand-in for the inference service: its own weights, batched decoding with a KV cache."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
        self.stops = [tokenizer.token_to_id(t) for t in ("<call>", "<submit>", "<|im_end|>")]
        self.pad = tokenizer.token_to_id("<|endoftext|>")

    def load(self, policy: PolicyModel) -> None:
        """Copy the policy's weights."""
        self.model.load_state_dict(policy.causal_lm.state_dict())

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], limit: int, generator: torch.Generator | None
    ) -> list[tuple[list[int], list[float]]]:
        """Return ids and log-probs per prompt; greedy without a generator, else temperature 1."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        cache, inputs, positions = None, ids, (mask.cumsum(-1) - 1).clamp(min=0)
        alive = torch.ones(len(prompts), dtype=torch.bool)
        answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        for _ in range(limit):
            output = self.model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logprobs = output.logits[:, -1].float().log_softmax(-1)
            if generator is None:
                chosen = logprobs.argmax(-1)
            else:
                chosen = logprobs.exp().multinomial(1, generator=generator).squeeze(-1)
            taken = logprobs.gather(-1, chosen[:, None]).squeeze(-1).tolist()
            for i in alive.nonzero().squeeze(-1).tolist():
                answers[i][0].append(int(chosen[i]))
                answers[i][1].append(taken[i])
            alive &= ~torch.isin(chosen, torch.tensor(self.stops))
            if not alive.any():
                break
            inputs, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], -1)
        return answers


class Task:
    """Addition with a calculator, in chat form."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self.tokenizer = tokenizer
        self.recipe = recipe
        tasks = ArithmeticTasks(num_heldout=recipe.num_held_out)
        self.training = [_pair(key) for key in tasks.keys("train")]
        self.held_out = [_pair(key) for key in tasks.keys("heldout")]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text with markers."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def begin(self, a: int, b: int) -> Episode:
        """Return a new episode with its prompt."""
        text = OPEN.format("user") + f"{a}+{b}" + CLOSE + OPEN.format("assistant")
        return Episode(a=a, b=b, pieces=[(self.encode(text), Source.PROMPT)], logprobs=[])

    def demonstration(self, a: int, b: int, *, guess: bool) -> TokenRow:
        """Return a correct conversation: answered at once, or with the calculator."""
        episode = self.begin(a, b)
        if not guess:
            call = self.encode(f"<request><Calculator>{a}+{b}<call>")
            episode.pieces += [(call, Source.MODEL), *self.tool_pieces(str(a + b))]
        episode.pieces.append((self.encode(f"Result={a + b}<submit>"), Source.MODEL))
        mask = [source is Source.MODEL for ids, source in episode.pieces for _ in ids]
        return TokenRow.from_demonstration(episode.ids, mask)

    def tool_pieces(self, answer: str) -> list[Piece]:
        """Return the text between two messages of the policy, which was not sampled."""
        return [
            (self.encode(CLOSE + OPEN.format("tool")), Source.TEMPLATE),
            (self.encode(f"{answer}<response>"), Source.TOOL),
            (self.encode(CLOSE + OPEN.format("assistant")), Source.TEMPLATE),
        ]

    def advance(self, episode: Episode, ids: list[int], logprobs: list[float]) -> None:
        """Take the policy's message: run the tool, score the answer, or end."""
        episode.pieces.append((ids, Source.MODEL))
        episode.logprobs += logprobs
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        call, answer = CALL.search(text), ANSWER.search(text)
        turns = sum(source is Source.MODEL for _, source in episode.pieces)
        if call and turns < self.recipe.max_turns:
            episode.used_tool = True
            episode.pieces += self.tool_pieces(str(int(call[1]) + int(call[2])))
            return
        episode.done = True
        episode.reward = float(bool(answer and int(answer[1]) == episode.a + episode.b))

    def play(
        self,
        sampler: Sampler,
        pairs: Many[tuple[int, int]],
        generator: torch.Generator | None = None,
    ) -> list[Episode]:
        """Play one episode per pair until all have ended."""
        episodes = [self.begin(a, b) for a, b in pairs]
        while running := [e for e in episodes if not e.done]:
            answers = sampler.generate(
                [e.ids for e in running], self.recipe.max_new_tokens, generator
            )
            for episode, (ids, logprobs) in zip(running, answers, strict=True):
                self.advance(episode, ids, logprobs)
        return episodes

    def evaluate(self, sampler: Sampler, seed: int) -> dict[str, float]:
        """Accuracy and tool rate on the held-out pairs, greedy and at temperature 1."""
        generator = torch.Generator().manual_seed(seed)
        greedy = self.play(sampler, self.held_out)
        sampled = self.play(sampler, self.held_out, generator)
        return {
            "greedy": _mean([e.reward for e in greedy]),
            "greedy_tool_rate": _mean([e.used_tool for e in greedy]),
            "sampled": _mean([e.reward for e in sampled]),
            "sampled_tool_rate": _mean([e.used_tool for e in sampled]),
        }


def _pair(key: str) -> tuple[int, int]:
    """Return the numbers of a task key: "35+40" is (35, 40)."""
    a, _, b = key.partition("+")
    return int(a), int(b)


def _mean(values: Many[float]) -> float:
    return round(sum(values) / len(values), 3)


def warm_start(policy: PolicyModel, task: Task, recipe: Recipe, seed: int) -> float:
    """Imitate demonstrations; return the last loss in nats per token."""
    rng = random.Random(seed)
    optimizer = GuardedOptimizer(
        policy.parameters(),
        OptimizerSettings(
            learning_rate=recipe.sft_learning_rate,
            warmup_steps=recipe.sft_warmup,
            total_steps=recipe.sft_steps,
        ),
    )
    loss = load_loss("sft")
    for _ in range(recipe.sft_steps):
        rows = [
            task.demonstration(*rng.choice(task.training), guess=rng.random() < recipe.guess_share)
            for _ in range(recipe.sft_batch)
        ]
        report = update(policy, optimizer, [pack_rows(rows)], loss)
    return round(report.loss, 4)


def with_advantages(episodes: list[Episode], group_size: int) -> list[Sequence]:
    """Return sequences with their advantages; uniform groups are left out, as RL learns nothing."""
    kept = []
    for start in range(0, len(episodes), group_size):
        group = episodes[start : start + group_size]
        advantages = group_advantages([e.reward for e in group])
        if not advantages.is_uniform:
            kept += [e.sequence(a) for e, a in zip(group, advantages.values, strict=True)]
    return kept


def pack_into_rows(sequences: list[Sequence], max_tokens: int) -> list[PackedBatch]:
    """Return packed rows of at most `max_tokens` tokens."""
    plan = plan_rows([len(s) for s in sequences], max_tokens=max_tokens)
    return [pack([sequences[i] for i in row]) for row in plan]


def reinforce(
    policy: PolicyModel, sampler: Sampler, task: Task, recipe: Recipe, seed: int
) -> dict[str, Any]:
    """Run RL; return seconds spent generating and updating, and accuracy on the way."""
    rng, generator = random.Random(seed + 1), torch.Generator().manual_seed(seed + 1)
    optimizer = GuardedOptimizer(
        policy.parameters(), OptimizerSettings(learning_rate=recipe.learning_rate)
    )
    loss = load_loss(recipe.loss)
    seconds, curve = {"generate": 0.0, "update": 0.0}, []
    metrics: dict[str, float] = {}
    for step in range(recipe.rl_steps):
        if step % 10 == 0:
            curve.append(task.evaluate(sampler, seed))
        started = time.perf_counter()
        pairs = rng.sample(task.training, recipe.num_prompts)
        repeated = [pair for pair in pairs for _ in range(recipe.group_size)]
        sequences = with_advantages(task.play(sampler, repeated, generator), recipe.group_size)
        generated = time.perf_counter()
        rng.shuffle(sequences)
        for part in range(min(recipe.minibatches, len(sequences))):
            rows = pack_into_rows(sequences[part :: recipe.minibatches], recipe.max_row_tokens)
            metrics = update(policy, optimizer, rows, loss).metrics
        sampler.load(policy)
        seconds["generate"] += generated - started
        seconds["update"] += time.perf_counter() - generated
    curve.append(task.evaluate(sampler, seed))
    return {"seconds": seconds, "curve": curve, "last_metrics": metrics}


def run(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Run everything once, from random weights."""
    with tempfile.TemporaryDirectory() as folder:
        directory = make_tiny_model(Path(folder), seed=seed)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        policy, sampler = load_policy(directory), Sampler(directory, tokenizer)
    task = Task(tokenizer, recipe)
    started = time.perf_counter()
    sft_loss = warm_start(policy, task, recipe, seed)
    sft_s = time.perf_counter() - started
    sampler.load(policy)
    result = reinforce(policy, sampler, task, recipe, seed)
    return {
        "seed": seed,
        "sft_loss": sft_loss,
        "sft_s": round(sft_s, 1),
        "generate_s": round(result["seconds"]["generate"], 1),
        "update_s": round(result["seconds"]["update"], 1),
        "before": result["curve"][0],
        "after": result["curve"][-1],
        "sampled_curve": [point["sampled"] for point in result["curve"]],
        "greedy_curve": [point["greedy"] for point in result["curve"]],
        "last_metrics": {k: round(v, 4) for k, v in result["last_metrics"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    seeds, threads = arguments.pop("seeds"), arguments.pop("threads")
    torch.set_num_threads(threads)
    for seed in seeds:
        print_figures({"seed": seed}, run(Recipe(**arguments), seed), indent=None)


if __name__ == "__main__":
    main()
