"""A raw text begins as the tokenizer begins one; answers show bytes and places of their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialoop.clients.inference import InferenceClient
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.support.agent_world import ScriptedEngine, agent_world

BOS = "<|endoftext|>"


def model_dir(path: Path, *, starts: bool = False, **config: Any) -> Path:
    """A tokenizer that puts a BOS before each text where it `starts` so."""
    tokenizer = tiny_tokenizer()
    if starts:
        number = tokenizer.token_to_id(BOS)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
    } | config
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"bos_token": None},
    ],
)
def test_a_text_begins_with_a_bos_where_it_does_in_transformers(
    starts: bool, config: dict[str, Any], tmp_path: Path
) -> None:
    directory = model_dir(tmp_path, starts=starts, **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    right = theirs("3+4").input_ids
    for tokenizer in (Tokenizer.from_directory(directory), Tokenizer.from_transformers(theirs)):
        assert tokenizer.encode_prompt("3+4") == right
        bare = theirs("3+4", add_special_tokens=False).input_ids
        assert tokenizer.encode_prompt("3+4", add_special_tokens=False) == bare
        assert tokenizer.encode_prompt(BOS + "3+4").count(tokenizer.encode_prompt(BOS)[0]) == 1


async def test_text_prompts_and_completions_begin_with_one_bos_unless_one_turns_it_off(
    tmp_path: Path,
) -> None:
    directory = model_dir(tmp_path, starts=True)
    engine = ScriptedEngine(directory, ["7"] * 8)
    tokenizer = Tokenizer.from_directory(directory)
    number, *rest = tokenizer.encode_prompt("3+4")
    bare: dict[str, Any] = {"add_special_tokens": False}
    async with agent_world(directory, engine) as world:
        client = InferenceClient(world.channel)
        for text in ("3+4", BOS + "3+4"):
            (sample,) = await client.generate(text=text)
            assert sample.text is not None
            assert sample.text.prompt == text
            body = {"model": "tiny", "prompt": text}
            assert (await world.post("/v1/completions", body)).status_code == 200
        await client.generate(text="3+4", **bare)
        body = {"model": "tiny", "prompt": "3+4"} | bare
        assert (await world.post("/v1/completions", body)).status_code == 200
        await client.generate(token_ids=rest)
    prompts = [list(sampling.prompt_ids) for sampling in engine.log]
    assert prompts == [[number, *rest]] * 4 + [rest] * 3


async def test_a_recorded_completion_goes_on_after_a_text_that_began_with_a_bos(
    tmp_path: Path,
) -> None:
    directory = model_dir(tmp_path, starts=True)
    engine = ScriptedEngine(directory, ["7", "8"])
    async with agent_world(directory, engine) as world:
        client = await world.start_recording()
        first = await client.completions.create(model="tiny", prompt="3+4=")
        said = world.tokenizer.decode(engine.log[0].token_ids)
        await client.completions.create(model="tiny", prompt=f"3+4={said} 4+4=")
        trajectory = await world.recordings.close("r")
    assert first.choices[0].text == "7"
    assert len(trajectory.sequences) == 1
    start = engine.log[0].prompt_ids + engine.log[0].token_ids
    assert engine.log[1].prompt_ids[: len(start)] == start
