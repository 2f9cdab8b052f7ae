"""Rollouts of a simulated policy, as a run of ours and as a dump of TRL writes them.

The policy is a table of logits that every train step changes; its log-probs are right, and the
faults of `planted_faults` are put in afterwards or by what `World` says the engine really did.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
LETTERS = "abcdefgh"
MERGES = [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")]
OTHERS = ["\n", *"0123456789userianttol #"]


def make_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Write a model directory with a tokenizer that has two ways to write some texts."""
    symbols = list(dict.fromkeys([*LETTERS, *OTHERS]))
    vocabulary = {s: i for i, s in enumerate([*symbols, *("".join(m) for m in MERGES)])}
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    engine.decoder = decoders.Fuse()
    engine.add_special_tokens([START, END, PAD])
    directory.mkdir(parents=True, exist_ok=True)
    engine.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": END, "pad_token": PAD})
    )
    return engine


@dataclass(kw_only=True)
class World:
    """What was trained, and what the engine did.

    arrives: False never loads new weights. only_short_from: from this step on, tasks whose prompt
    is long are passed over; 0: never.
    """

    seed: int
    num_steps: int = 12
    groups_per_step: int = 4
    group_size: int = 8
    claimed_temperature: float = 1.0
    temperature: float = 1.0
    reports_raw: bool = False
    top_k: int = 0
    arrives: bool = True
    two_turns: float = 0.4
    branches: float = 0.2
    max_new_tokens: int = 14
    num_tasks: int = 12
    lag: int = 1
    only_short_from: int = 0
    engine: tokenizers.Tokenizer = field(init=False)

    def make(self, model_dir: Path) -> list[dict[str, Any]]:
        """Return every played episode, and write the tokenizer."""
        self.engine = make_tokenizer(model_dir)
        self.random = np.random.default_rng(self.seed)
        self.size = self.engine.get_vocab_size()
        self.end = self.engine.token_to_id(END)
        base = self.random.normal(0, 1.2, (self.size, self.size))
        change = self.random.normal(0, 0.06, (self.size, self.size))
        allowed = [self.engine.token_to_id(s) for s in (*LETTERS, *("".join(m) for m in MERGES))]
        self.mask = np.full(self.size, -np.inf)
        self.mask[[*allowed, self.end]] = 0
        self.logits = lambda version: base + version * change
        return [
            self._episode(step, group, member)
            for step in range(1, self.num_steps + 1)
            for group in range(self.groups_per_step)
            for member in range(self.group_size)
        ]

    def ids(self, text: str) -> list[int]:
        """Encode text as the template does."""
        return list(self.engine.encode(text).ids)

    def logprobs(self, version: int, last: int, temperature: float) -> np.ndarray:
        """Return the policy's distribution after a token."""
        logits = (self.logits(version)[last] + self.mask) / temperature
        return logits - np.logaddexp.reduce(logits)

    def _answer(self, ids: list[int], version: int) -> dict[str, Any]:
        loaded = version if self.arrives else 1
        tokens, engine, trainer, last = [], [], [], ids[-1]
        while len(tokens) < self.max_new_tokens:
            own = self.logprobs(loaded, last, self.temperature)
            if self.top_k:
                own = np.where(own >= np.sort(own)[-self.top_k], own, -np.inf)
                own = own - np.logaddexp.reduce(own)
            token = int(self.random.choice(self.size, p=np.exp(own)))
            raw = self.logprobs(loaded, last, 1.0)
            noise = self.random.normal(0, 1e-4)
            engine.append(float((raw if self.reports_raw else own)[token]))
            theirs = self.logprobs(version, last, self.claimed_temperature)[token]
            trainer.append(float(theirs + noise))
            tokens.append(token)
            last = token
            if token == self.end:
                break
        return {"tokens": tokens, "engine": engine, "trainer": trainer}

    def _episode(self, step: int, group: int, member: int) -> dict[str, Any]:
        task = (step * self.groups_per_step + group) % self.num_tasks
        if self.only_short_from and step >= self.only_short_from:
            task %= 10  # a number of one digit
        if member == 0:
            self._has_tool = self.random.random() < self.two_turns
        version = max(1, step - self.lag)
        turns, ids = [], self.ids(f"{START}user\n#{task}{END}\n{START}assistant\n")
        prompt = list(ids)
        for number in range(2 if self._has_tool else 1):
            if number:
                ids = ids + self.ids(f"\n{START}tool\n{task}{END}\n{START}assistant\n")
            answer = self._answer(ids, version)
            turns.append(answer | {"start": len(ids), "before": list(ids)})
            ids = ids + answer["tokens"]
            if answer["tokens"][-1] != self.end:
                break
        wanted = self.engine.token_to_id(LETTERS[task % len(LETTERS)])
        sampled = [t for turn in turns for t in turn["tokens"]]
        reward = float(wanted in sampled) if self.random.random() > 0.1 else 0.0
        return {
            "name": f"{self.seed:02x}{step:03}{group:02}{member:02}",
            "step": step,
            "version": version,
            "group": f"{step}/{group}",
            "task": f"#{task}",
            "prompt": prompt,
            "turns": turns,
            "ids": ids,
            "reward": reward,
            "temperature": self.claimed_temperature,
            "is_branch": len(turns) == 2 and bool(self.random.random() < self.branches),
        }


def text_of(world: World, ids: list[int]) -> str:
    """Decode without special tokens."""
    return world.engine.decode([i for i in ids if i < world.engine.token_to_id(START)])


def own_row(world: World, episode: dict[str, Any]) -> dict[str, Any]:
    """Return an episode as a line of trajectories.jsonl; a branch is a second sequence."""
    messages: list[dict[str, str]] = [{"role": "user", "content": episode["task"]}]
    turns = []
    for number, turn in enumerate(episode["turns"]):
        if number:
            messages.append({"role": "tool", "content": "0"})
        stop = "STOP" if turn["tokens"][-1] == world.end else "LENGTH"
        turns.append({"message_start": len(messages), "num_messages": 1, "stop_reason": stop})
        messages.append({"role": "assistant", "content": text_of(world, turn["tokens"])})
    if episode["is_branch"]:
        first, second = episode["turns"]
        parts = [[(0, first)], [(1, second)]]
        ends = [first["start"] + len(first["tokens"]), len(episode["ids"])]
    else:
        parts, ends = [list(enumerate(episode["turns"]))], [len(episode["ids"])]
    return {
        "outcome": "trained",
        "label": "training",
        "train_step": episode["step"],
        "trajectory_id": episode["name"],
        "group_id": episode["group"],
        "task_key": episode["task"],
        "environment": "world",
        "reward": episode["reward"],
        "done_reason": "SUBMITTED",
        "num_tool_calls": len(turns) - 1,
        "temperature": episode["temperature"],
        "update_mode": "RECOMPUTE",
        "messages": messages,
        "turns": [t | {"rewards": {"right": episode["reward"] / len(turns)}} for t in turns],
        "sequences": [
            _sequence(episode, own, end, number)
            for number, (own, end) in enumerate(zip(parts, ends, strict=True))
        ],
        "failures": [],
    }


def _sequence(
    episode: dict[str, Any], turns: list[tuple[int, dict[str, Any]]], end: int, number: int
) -> dict[str, Any]:
    segments: list[dict[str, Any]] = []
    position = 0
    nobody: dict[str, Any] = {"lineage": None, "policy_version": None, "message_index": None}
    for index, turn in turns:
        length = turn["start"] - position
        segments.append(
            {"start": position, "length": length, "source": "TEMPLATE", "turn": index} | nobody
        )
        length = len(turn["tokens"])
        segments.append(
            {"start": turn["start"], "length": length, "source": "MODEL", "turn": index}
            | {"message_index": 1 + 2 * index}
            | {"lineage": "main", "policy_version": episode["version"]}
        )
        position = turn["start"] + length
    return {
        "token_ids": episode["ids"][:end],
        "segments": segments,
        "inference_logprobs": [p for _, turn in turns for p in turn["engine"]],
        "advantage": episode["reward"] - 0.5,
        "token_advantages": [],
        "fork_cause": "BRANCHED" if number else "NONE",
        "columns": {},
    }


def debug_rows(episode: dict[str, Any], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the trainer's lines about a row of trajectories.jsonl."""
    lines = []
    trainer = [p for turn in episode["turns"] for p in turn["trainer"]]
    for sequence in row["sequences"]:
        places = [
            position
            for s in sequence["segments"]
            if s["source"] == "MODEL"
            for position in range(s["start"], s["start"] + s["length"])
        ]
        lines.append(
            {
                "trajectory_id": row["trajectory_id"],
                "num_tokens": len(sequence["token_ids"]),
                "response_positions": places,
                "response_tokens": [sequence["token_ids"][p] for p in places],
                "policy_logprobs": trainer[: len(places)],
                "staleness": [0.0] * len(places),
            }
        )
        trainer = trainer[len(places) :]
    return lines


@dataclass(kw_only=True)
class Run:
    """The files of a run before they are written."""

    world: World
    rows: list[dict[str, Any]]
    debug: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    config: dict[str, Any]

    def write(self, run_dir: Path) -> Path:
        """Write the run."""
        run_dir.mkdir(parents=True, exist_ok=True)
        for name, rows in (
            ("trajectories", self.rows),
            ("debug_table", self.debug),
            ("metrics", self.metrics),
        ):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (run_dir / f"{name}.jsonl").write_text(text)
        (run_dir / "run.json").write_text(json.dumps({"config": self.config}))
        return run_dir


def make_run(run_dir: Path, world: World, *, debug: bool = True) -> Run:
    """Play a world, and return it as a run whose tokenizer is in `run_dir`."""
    episodes = world.make(run_dir / "model")
    rows = [own_row(world, episode) for episode in episodes]
    lines = [
        line
        for episode, row in zip(episodes, rows, strict=True)
        for line in debug_rows(episode, row)
        if debug
    ]
    metrics: list[dict[str, Any]] = []
    for step in range(world.num_steps + 1):
        place = {"time": 0.0, "train_step": step, "policy_version": step + 1, "lineage": "main"}
        metrics.append({"kind": "publish", "max_logprob_difference": 1e-5} | place)
        if step:
            mean = float(np.mean([e["reward"] for e in episodes if e["step"] == step]))
            mismatch = float(abs(world.random.normal(0, 1e-4)))
            metrics.append({"kind": "train", "reward": mean, "fresh_mismatch_kl": mismatch} | place)
        if step % 3 == 0:
            value = float(world.random.binomial(64, 0.4 + 0.02 * step) / 64)
            metrics.append(
                {"kind": "evaluation", "label": "during_greedy", "mean_reward": value}
                | {"num_trajectories": 64}
                | place
            )
    config = {
        "model": {"directory": ""},
        "collector": {"temperature": world.claimed_temperature, "max_new_tokens": 14},
        "train": {"max_staleness": 4},
        "gates": {"logprob_difference_at_most": 1e-4},
    }
    return Run(world=world, rows=rows, debug=lines, metrics=metrics, config=config)


def trl_row(world: World, episode: dict[str, Any]) -> dict[str, Any]:
    """Return an episode as a row of a batch of TRL's GRPOTrainer, padded, with its own names."""
    start = episode["turns"][0]["start"]
    completion = episode["ids"][start:]
    tool, engine, trainer = ([0] * len(completion) for _ in range(3))
    for turn in episode["turns"]:
        own = slice(turn["start"] - start, turn["start"] - start + len(turn["tokens"]))
        tool[own], engine[own], trainer[own] = (
            [1] * len(turn["tokens"]),
            turn["engine"],
            turn["trainer"],
        )
    messages = [{"role": "assistant", "content": text_of(world, episode["turns"][0]["tokens"])}]
    for turn in episode["turns"][1:]:
        messages.append({"role": "tool", "content": "0"})
        messages.append({"role": "assistant", "content": text_of(world, turn["tokens"])})
    num_pads = max(0, 40 - len(completion))
    pad = world.engine.token_to_id(PAD)
    return {
        "step": episode["step"],
        "prompt": [{"role": "user", "content": episode["task"]}],
        "completion": messages,
        "right": episode["reward"],
        "advantage": episode["reward"] - 0.5,
        "prompt_ids": [pad, pad, *episode["prompt"]],
        "prompt_mask": [0, 0, *[1] * len(episode["prompt"])],
        "completion_ids": completion + [pad] * num_pads,
        "completion_mask": [1] * len(completion) + [0] * num_pads,
        "tool_mask": tool + [1] * num_pads,
        "sampling_per_token_logps": engine + [0.0] * num_pads,
        "old_per_token_logps": trainer + [0.0] * num_pads,
        "model_version": episode["version"],
    }


@dataclass(kw_only=True)
class TrlDump:
    """A dump of TRL before it is written, and its trainer_state.json."""

    world: World
    rows: list[dict[str, Any]]
    history: list[dict[str, Any]]

    def write(self, folder: Path, *, is_parquet: bool = False) -> Path:
        """Write a file of rows, or one table for each step as `log_completions` does."""
        (folder / "completions").mkdir(parents=True, exist_ok=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": self.history}))
        if not is_parquet:
            text = "".join(json.dumps(row) + "\n" for row in self.rows)
            (folder / "completions" / "rollouts.jsonl").write_text(text)
            return folder
        import pyarrow
        from pyarrow import parquet

        for step in sorted({row["step"] for row in self.rows}):
            table = pyarrow.Table.from_pylist([r for r in self.rows if r["step"] == step])
            parquet.write_table(table, folder / "completions" / f"completions_{step:05d}.parquet")
        return folder


def make_trl_dump(folder: Path, world: World) -> TrlDump:
    """Play a world, and return it as a dump of TRL; its tokenizer is in folder/model."""
    episodes = world.make(folder / "model")
    history: list[dict[str, Any]] = []
    for step in range(1, world.num_steps + 1):
        mean = float(np.mean([e["reward"] for e in episodes if e["step"] == step]))
        history.append({"step": step, "reward": mean, "loss": 0.1})
        if step % 3 == 0:
            value = 0.4 + 0.02 * step + float(world.random.normal(0, 0.03))
            history.append({"step": step, "eval_reward": value})
    return TrlDump(world=world, rows=[trl_row(world, e) for e in episodes], history=history)
