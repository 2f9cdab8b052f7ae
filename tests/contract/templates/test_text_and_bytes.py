"""A raw text begins as the tokenizer begins one; answers show bytes and places of their tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from dialoop.clients.inference import InferenceClient
from dialoop.testing import byte_tokenizer
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
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


TEXT = "a世界 é\U0001f44d🏽b"


async def ask(directory: Path, path: str, **body: Any) -> list[dict[str, Any]]:
    """The only choice of each chunk of an answer."""
    async with agent_world(directory, ScriptedEngine(directory, [TEXT])) as world:
        answer = await world.post(path, {"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [answer.json()["choices"][0]]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_tokens_make_the_text_and_offsets_count_its_characters(
    stream: bool, tmp_path: Path
) -> None:
    directory = model_dir(tmp_path)
    question = [{"role": "user", "content": "?"}]
    options: dict[str, Any] = {"stream": stream, "max_tokens": 99}
    chat = await ask(directory, "/v1/chat/completions", messages=question, logprobs=True, **options)
    entries = [entry for choice in chat for entry in choice["logprobs"]["content"]]
    assert sum(entry["token"].count("\ufffd") for entry in entries) > 9
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == TEXT + "<|im_end|>"
    plain = await ask(directory, "/v1/completions", prompt="?", logprobs=0, **options)
    tokens = [token for choice in plain for token in choice["logprobs"]["tokens"]]
    offsets = [place for choice in plain for place in choice["logprobs"]["text_offset"]]
    assert "".join(choice["text"] for choice in plain) == TEXT
    assert len(tokens) == len(offsets)
    assert offsets == [
        len(b"".join(bytes(e["bytes"]) for e in entries[:n]).decode(errors="ignore"))
        for n in range(len(entries))
    ]


@pytest.mark.parametrize("text", ["a STO b", "a\u20acb"])
async def test_offsets_of_a_stream_are_those_of_the_whole_answer(text: str, tmp_path: Path) -> None:
    """Also behind text that a stream holds back, since a stop string may begin there."""
    directory = model_dir(tmp_path)
    said = []
    async with agent_world(directory, ScriptedEngine(directory, [text] * 2)) as world:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "?", "logprobs": 0, "stop": "STOPPED"}
            answer = await world.post("/v1/completions", body | {"stream": stream})
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            chunks = [json.loads(line) for line in lines] or [answer.json()]
            logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            tokens = [token for each in logprobs for token in each["tokens"]]
            said.append((tokens, [place for each in logprobs for place in each["text_offset"]]))
    assert said[0] == said[1]
    tokens, offsets = said[0]
    assert offsets == sorted(offsets)
    assert offsets[tokens.index("b")] == text.index("b")


def test_bytes_of_a_byte_level_vocabulary_spell_any_text() -> None:
    rng = random.Random(0)
    for tokenizer in (byte_tokenizer(),):
        for _ in range(50):
            text = "".join(chr(rng.choice((rng.randrange(1, 0xD800), 0x1F600))) for _ in range(9))
            ids = tokenizer.encode(text).ids
            assert b"".join(map(tokenizer.bytes_of, ids)).decode() == text
        assert tokenizer.bytes_of(tokenizer.end_of_turn_ids[0]) == b"<|im_end|>"


def test_bytes_of_a_vocabulary_with_byte_fallback() -> None:
    vocabulary = {"▁the": 0, "▁": 1, "t": 2} | {f"<0x{n:02X}>": 3 + n for n in range(256)}

    def engine() -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
        return made

    tokenizer = Tokenizer(engine(), engine(), {})
    assert [tokenizer.bytes_of(number) for number in (0, 1, 2)] == [b" the", b" ", b"t"]
    spelled = [vocabulary[f"<0x{byte:02X}>"] for byte in "世".encode()]
    assert b"".join(map(tokenizer.bytes_of, spelled)).decode() == "世"
