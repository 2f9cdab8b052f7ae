"""Traces whose sequences begin alike, and train steps on them in a process of its own.

python -m benchmarks.servers.forest_way THREADS ROW_TOKENS SCALE

reads lines `step TRACE` and answers each with a JSON line: wall and CPU seconds of one forward and
backward pass over the trace, its trained and forwarded tokens, the loss and the gradients' norm.
It calls only what earlier commits have as well, so PYTHONPATH may name another checkout.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

SHAPE = {
    "vocab_size": 16_384,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
"""Of a Qwen3 in small: grouped heads, norms of queries and keys, a tied head."""


@dataclass
class Trace:
    """Sequences as they are queued: ids, which of them are trained, and their group."""

    draw: random.Random
    scale: float
    sequences: list[tuple[list[int], list[bool], int]] = field(default_factory=list)

    def tokens(self, num: int) -> list[int]:
        """Draw about `num` tokens, times the scale."""
        size = max(1, round(num * self.scale * self.draw.uniform(0.7, 1.3)))
        return [self.draw.randrange(10, SHAPE["vocab_size"]) for _ in range(size)]

    def add(self, context: list[int], sampled: list[int], group: int) -> None:
        """Queue what the policy sampled behind a context."""
        mask = [False] * len(context) + [True] * len(sampled)
        self.sequences.append((context + sampled, mask, group))

    def converse(self, context: list[int], num_turns: int, group: int) -> list[int]:
        """Play turns of a template that drops thoughts: each is a sequence; return the context.

        A turn reads what a tool returned, thinks, and calls the next tool.
        """
        for _ in range(num_turns):
            context = context + self.tokens(220)
            thought, answer = self.tokens(100), self.tokens(40)
            self.add(context, thought + answer, group)
            context = context + answer
        return context

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all sequences."""
        return sum(len(ids) for ids, _, _ in self.sequences)

    @property
    def num_distinct(self) -> int:
        """Return how many distinct prefixes the sequences have."""
        trie: dict[int, Any] = {}
        num = 0
        for ids, _, _ in self.sequences:
            place = trie
            for token in ids:
                num += token not in place
                place = place.setdefault(token, {})
        return num


def turns(trace: Trace) -> None:
    """Two tasks, each played twice over eight turns behind a long policy, as tau-squared's are."""
    for task in range(2):
        policy = trace.tokens(3600)
        for _ in range(2):
            trace.converse(policy, 8, task)


def forks(trace: Trace) -> None:
    """Two conversations, four of whose turns are sampled six times; forks train all they hold."""
    for task in range(2):
        context = trace.tokens(3600)
        for _ in range(4):
            context = context + trace.tokens(220)
            sampled = trace.tokens(60)
            for _ in range(6):
                trace.add(context, sampled + trace.tokens(240), task)
            context = context + sampled


def sub_agents(trace: Trace) -> None:
    """A conversation that sends six sub-agents, whose instructions are the same."""
    instructions, context = trace.tokens(5000), trace.tokens(2400)
    for _ in range(3):
        context = trace.converse(context, 2, 0)
        for _ in range(2):
            trace.converse(instructions, 3, 0)


def nothing_shared(trace: Trace) -> None:
    """Sequences of log-normal lengths that have nothing in common."""
    for number in range(48):
        length = trace.draw.lognormvariate(5.5, 0.7)
        trace.add(trace.tokens(min(1200, round(length))), trace.tokens(150), number)


TRACES: dict[str, Callable[[Trace], None]] = {
    "turns": turns,
    "forks": forks,
    "sub_agents": sub_agents,
    "nothing_shared": nothing_shared,
}


def make_trace(name: str, scale: float) -> Trace:
    """Return a trace; the same in every process."""
    trace = Trace(random.Random(name), scale)
    TRACES[name](trace)
    return trace


class Steps:
    """A policy, and passes over traces."""

    def __init__(self, row_tokens: int, scale: float) -> None:
        from dialoop_learning.loss.loss_loading import load_objective
        from dialoop_learning.model.attention import PACKED_ATTENTION
        from dialoop_learning.model.policy import PolicyModel
        from transformers import AutoModelForCausalLM, Qwen3Config

        torch.manual_seed(0)
        config = Qwen3Config(**SHAPE, head_dim=64)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED_ATTENTION, dtype=torch.float32
        )
        self._policy = PolicyModel(model.eval())
        self._loss = load_objective("grpo", aggregation="token")
        self._row_tokens, self._scale = row_tokens, scale

    def step(self, name: str) -> dict[str, float]:
        """Plan, pack, and take one pass forward and backward over a trace."""
        from dialoop_learning.packing.rows import TokenRow
        from dialoop_learning.parallel.ranks import ALONE
        from dialoop_learning.parallel.step_plan import own_rows
        from dialoop_learning.training import forward_backward

        trace = make_trace(name, self._scale)
        draw = random.Random(1)
        rows = [
            TokenRow(
                token_ids=torch.tensor(ids),
                response_mask=torch.tensor(mask),
                inference_logprobs=torch.full((sum(mask),), -9.7),
                advantages=torch.full((sum(mask),), draw.gauss(0, 1)),
                group_index=group,
            )
            for ids, mask, group in trace.sequences
        ]
        self._policy.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        packed = own_rows(rows, ALONE, max_tokens=self._row_tokens)
        report = forward_backward(self._policy, packed, self._loss)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        grads = [p.grad.double().norm() for p in self._policy.parameters() if p.grad is not None]
        return {
            "wall_s": wall,
            "cpu_s": cpu,
            "num_trained": sum(sum(mask) for _, mask, _ in trace.sequences),
            "num_forwarded": report.num_forwarded_tokens,
            "num_rows": len(packed),
            "loss": report.loss,
            "grad_norm": float(torch.stack(grads).norm()),
        }


def main() -> None:
    """Answer orders until the input ends."""
    threads, row_tokens, scale = sys.argv[1:]
    torch.set_num_threads(int(threads))
    steps = Steps(int(row_tokens), float(scale))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(steps.step(line.split()[1])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
