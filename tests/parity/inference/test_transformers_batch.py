"""Rows that join and leave a decoding batch, beside the same rows computed whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from dialoop_services.inference.transformers_engine.batch import DecodingBatch, close_up
from dialoop_services.inference.transformers_engine.engine import load_model
from dialoop_services.inference.transformers_engine.keys import DECODING_ATTENTION

from tests.support.engine_world import save_model

VOCAB = 300


def test_the_last_rows_close_up_the_gaps_of_those_that_left() -> None:
    assert close_up([0, 2, 3, 5]) == [0, 5, 2, 3]
    assert close_up([4, 5]) == [4, 5]
    assert close_up([0, 1, 2]) == [0, 1, 2]
    assert close_up([]) == []


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_join_and_leave_have_the_logits_of_a_whole_forward_pass(
    tmp_path: Path, seed: int
) -> None:
    model = load_model(save_model(tmp_path, seed=0, tied=True), torch.float32)
    config = model.config
    assert config._attn_implementation == DECODING_ATTENTION
    assert config.num_key_value_heads < config.num_attention_heads
    chance = random.Random(seed)
    batch, rows = DecodingBatch(model), list[list[int]]()
    for turn in range(70):
        staying = batch.keep([i for i in range(len(rows)) if chance.random() < 0.96])
        rows = [rows[i] for i in staying]
        logits = []
        with torch.inference_mode():
            if rows:
                logits.append(batch.step([row[-1] for row in rows], [len(row) - 1 for row in rows]))
            if turn % 9 == 0:
                new = [
                    [chance.randrange(VOCAB) for _ in range(chance.randint(1, 9))] for _ in range(4)
                ]
                logits.append(batch.admit(new))
                rows += new
            last_logits = torch.cat(logits) if logits else torch.empty(0, 0)
            for row, its in zip(rows, last_logits, strict=True):
                whole = model(torch.tensor([row]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(its, whole, atol=1e-5, rtol=0)
                row.append(chance.randrange(VOCAB))
