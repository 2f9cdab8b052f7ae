"""Six published bugs, each as a context in which the services of this process have it.

The product has none of them. Each context replaces a function of a service by one with the bug, and
puts the right one back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from dialoop.environments.tasks.source import TaskPage
from dialoop.sequences import Sequence
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.packing.rows import TokenRow
from dialoop_services.collector.task_supply import TaskSupply
from dialoop_services.inference.transformers_engine import engine as engine_module
from dialoop_services.inference.transformers_engine.batch import DecodingBatch

Bug = Callable[[Path], AbstractContextManager[None]]
"""Takes the model's directory; the bug is there while the context is open."""

TOP_K = 3
LONGEST_PROMPT = 4


@contextmanager
def adapter_never_delivered(_: Path) -> Iterator[None]:
    """Answer that the second and every later adapter is loaded, and load none (verl #7495)."""
    real, loads = engine_module.copy_weights, iter(range(1_000_000))

    def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
        if next(loads) == 0:
            real(model, tensors, tied=tied)

    with patch.object(engine_module, "copy_weights", copy_weights):
        yield


@contextmanager
def stale_tied_head(_: Path) -> Iterator[None]:
    """Keep the head of the first policy where it should be the embedding of each."""
    real = engine_module.copy_weights

    def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
        # A copy of the head no longer follows the embedding, in which the new weights arrive.
        head = copy.deepcopy(model.lm_head.weight.data)
        is_first = not hasattr(model, "first_head")
        model.lm_head.weight = model.get_input_embeddings().weight
        real(model, tensors, tied=tied)
        model.first_head = model.lm_head.weight.data.clone() if is_first else head
        model.lm_head.weight = torch.nn.Parameter(model.first_head, requires_grad=False)

    with patch.object(engine_module, "copy_weights", copy_weights):
        yield


@contextmanager
def stale_prefix_cache(_: Path) -> Iterator[None]:
    """Take the keys of each prompt from the first policy, as a cache that no load empties."""
    real_copy, real_admit = engine_module.copy_weights, DecodingBatch.admit
    first: list[Any] = []

    def copy_weights(model: Any, tensors: dict[str, torch.Tensor], *, tied: bool) -> None:
        real_copy(model, tensors, tied=tied)
        if not first:
            first.append(copy.deepcopy(model))

    def admit(self: DecodingBatch, rows: Any, which: Any = None) -> torch.Tensor:
        fresh, self._model = self._model, first[0] if first else self._model
        try:
            return real_admit(self, rows, which)
        finally:
            self._model = fresh

    with ExitStack() as patches:
        patches.enter_context(patch.object(engine_module, "copy_weights", copy_weights))
        patches.enter_context(patch.object(DecodingBatch, "admit", admit))
        yield


@contextmanager
def retokenised_history(model: Path) -> Iterator[None]:
    """Train on the text of each answer, encoded anew and padded to the width of its log-probs."""
    real = TokenRow.from_sequence
    tokenizer = Tokenizer.from_directory(model)
    (padding,) = tokenizer.encode("<|endoftext|>", trusted=True).ids

    def from_sequence(sequence: Sequence, **options: Any) -> TokenRow:
        row = real(sequence, **options)
        mask = row.response_mask.tolist()
        edges = [i for i, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
        ids = row.token_ids.clone()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            text = tokenizer.decode(ids[start:end].tolist())
            again = tokenizer.encode(text, trusted=True).ids[: end - start]
            again = [*again, *[padding] * (end - start - len(again))]
            ids[start:end] = torch.tensor(again)
        return replace(row, token_ids=ids)

    with patch.object(TokenRow, "from_sequence", from_sequence):
        yield


@contextmanager
def truncated_sampling(_: Path) -> Iterator[None]:
    """Sample from the likeliest tokens alone, where the job said nothing of it."""
    real = engine_module.processed_logprobs  # type: ignore[attr-defined]

    def processed_logprobs(logits: torch.Tensor, sampling: Any, token_ids: Any) -> torch.Tensor:
        least = logits.topk(TOP_K, dim=-1).values[:, -1:]
        return real(logits.masked_fill(logits < least, float("-inf")), sampling, token_ids)

    with patch.object(engine_module, "processed_logprobs", processed_logprobs):
        yield


@contextmanager
def resume_skips_long_prompts(_: Path) -> Iterator[None]:
    """Pass over every task with a long prompt; the program opens this for a resumed job alone."""
    real = TaskSupply._list_tasks

    async def list_tasks(self: TaskSupply, stream: Any, token: str, size: int) -> TaskPage:
        page = await real(self, stream, token, size)
        short = tuple(task for task in page.tasks if len(task.key) <= LONGEST_PROMPT)
        return replace(page, tasks=short)

    with patch.object(TaskSupply, "_list_tasks", list_tasks):
        yield


BUGS: dict[str, Bug] = {
    bug.__name__: bug
    for bug in (
        adapter_never_delivered,
        stale_tied_head,
        stale_prefix_cache,
        retokenised_history,
        truncated_sampling,
        resume_skips_long_prompts,
    )
}
