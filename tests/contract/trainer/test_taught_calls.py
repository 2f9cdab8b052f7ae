"""A tiny model that SFT has shown 50 calls makes the right ones on 50 tasks that it never saw."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop.answers import AnswerForm
from dialoop.clients.trainer import Phase
from dialoop.environments import ChatEnv, MaxTurns, NativeCalls, Rewards, ToolUse
from dialoop.environments.episode import Episode
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.tools.function_tools import FunctionTool
from dialoop.messages import tool_for_template
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.tiny import tiny_config
from dialoop_ops.stack.in_process import in_process
from transformers import Qwen2ForCausalLM

from tests.support.families import family

PAIRS = list(product(range(10), repeat=2))
TAUGHT = [pair for pair in PAIRS if sum(pair) % 2 == 0]
HELD_OUT = [pair for pair in PAIRS if sum(pair) % 2]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def adding(grammar: str, shows_tools: bool) -> ChatEnv:
    """Sums of two digits, of which the call is rewarded."""
    syntax = NativeCalls(AnswerForm(calls=grammar))

    def is_right_call(episode: Episode) -> bool:
        assert episode.answer is not None
        calls = [(c.name, c.arguments, c.problem) for c in syntax.calls(episode.answer)]
        return calls == [("add", json.loads(episode.task.answer), "")]

    def rows(pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
        return [{"query": f"{a}+{b}?", "answer": json.dumps({"a": a, "b": b})} for a, b in pairs]

    return ChatEnv(
        name="adding",
        tasks=RowTasks({"train": rows(TAUGHT), "heldout": rows(HELD_OUT)}),
        transforms=(ToolUse([add], syntax=syntax), MaxTurns(1), Rewards([is_right_call])),
        tools_in_prompt=shows_tools,
    )


def make_model(name: str, path: Path) -> Path:
    """One layer of the tiny model behind the family's tokenizer and template."""
    shutil.copytree(family(name).directory, path)
    config = tiny_config()
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    config.vocab_size = Tokenizer.from_directory(path).vocab_size
    config.max_position_embeddings = 1024
    ends = (path / "generation_config.json").read_bytes()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").write_bytes(ends)
    return path


def write_calls(path: Path, *, with_tools: bool) -> Path:
    """A file of demonstrations: a question, and the call that answers it."""
    tools = [tool_for_template(FunctionTool(add).definition)]
    rows: list[dict[str, Any]] = []
    for a, b in TAUGHT:
        function = {"name": "add", "arguments": {"a": a, "b": b}}
        call = {"id": "call00001", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        row = {"messages": [{"role": "user", "content": f"{a}+{b}?"}, answer]}
        rows.append({**row, "tools": tools} if with_tools else row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "shows_tools", "num_steps"),
    [
        ("qwen3", False, 120),
        pytest.param(
            *("deepseek_v3_1", False, 120),  # its template shows no tools
            marks=pytest.mark.heavy(reason="a second template, taught as the first"),
        ),
        pytest.param(
            *("qwen3", True, 400),
            marks=pytest.mark.heavy(reason="prompts of 500 tokens, for the tools in them"),
        ),
    ],
)
async def test_fifty_calls_teach_the_calls_of_tasks_that_were_held_out(
    name: str, shows_tools: bool, num_steps: int, tmp_path: Path
) -> None:
    options = {"grammar": family(name).grammar, "shows_tools": shows_tools}
    calls = write_calls(tmp_path / "calls.jsonl", with_tools=shows_tools)
    config = {
        "run": "calls",
        "model": {"directory": str(make_model(name, tmp_path / "model"))},
        "environment": {"use": f"{__name__}:adding", "options": options},
        "inference": {"max_model_len": 1024},
        "collector": {"group_size": 1, "max_new_tokens": 60},
        "train": {
            "mode": "sft",
            "num_steps": num_steps,
            "learning_rate": 3e-3,
            "weight_decay": 0.5,  # without it some models learn the calls by heart
            "max_row_tokens": 4096,
        },
        "sft": {"file": str(calls), "batch_size": 10, "heldout_fraction": 0.0},
        "evaluation": {"num_tasks": len(HELD_OUT), "every": 0},
    }
    async with in_process(config, folder=tmp_path) as dialoop:
        while (status := await dialoop.trainer.get_status()).phase is not Phase.DONE:
            assert status.phase is not Phase.FAILED, status.failure
            await asyncio.sleep(0.1)
    lines = (tmp_path / "calls" / "metrics.jsonl").read_text("utf-8").splitlines()
    right = {
        row["label"]: row["mean_reward"]
        for row in map(json.loads, lines)
        if row["kind"] == "evaluation"
    }
    assert right["before_greedy"] <= 0.1
    assert right["before_sampled"] <= 0.1
    assert right["after_greedy"] >= 0.9
    assert right["after_sampled"] >= 0.9
