"""A GGUF file becomes a model directory with the same weights, tokens and template."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from dialoop.errors import DialoopError
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.gguf import convert_gguf
from transformers import AutoModelForCausalLM

from tests.support.samples.gguf_files import llama, tensors, write

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("tied", [True, False])
def test_weights_tokens_and_template_are_those_of_the_file(tmp_path: Path, tied: bool) -> None:
    model = llama(tied=tied)
    file, directory = write(tmp_path / "m.gguf", model, template=TEMPLATE), tmp_path / "model"
    num_weights = sum(weight.size for _, weight in tensors(model))
    assert convert_gguf(file, directory, dtype="float32") == num_weights
    converted = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert converted.config.tie_word_embeddings is tied
    ids = torch.arange(40).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits)
    tokenizer, text = Tokenizer.from_directory(directory), "What is 3+4? It isn't 12.\n\n  Grüße"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.chat_template == TEMPLATE
    (end,) = tokenizer.end_of_turn_ids
    assert tokenizer.decode([end]) == "<|im_end|>"


def test_smollms_digits_stand_alone(tmp_path: Path) -> None:
    convert_gguf(
        write(tmp_path / "m.gguf", llama(), template=TEMPLATE, splits="smollm"), tmp_path / "model"
    )
    made = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    kinds = [part["type"] for part in made["pre_tokenizer"]["pretokenizers"]]
    assert kinds == ["Digits", "ByteLevel"]


def test_what_cannot_be_converted_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, directory = llama(), tmp_path / "model"
    whole = write(tmp_path / "m.gguf", model, template=TEMPLATE)
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(whole.read_bytes()[:-5000])
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    other = write(tmp_path / "mamba.gguf", model, template=TEMPLATE, architecture="mamba")
    splits = write(tmp_path / "splits.gguf", model, template=TEMPLATE, splits="tekken")
    for file, words in (
        (tmp_path / "none.gguf", "There is no file"),
        (torn, "no whole GGUF file"),
        (text, "no whole GGUF file"),
        (other, "architecture 'mamba'"),
        (splits, "splits text as 'tekken' does"),
    ):
        with pytest.raises(DialoopError, match=words) as raised:
            convert_gguf(file, directory)
        assert raised.value.remedy
    memory = psutil.virtual_memory()._replace(available=1 << 10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(DialoopError, match="GiB are free"):
        convert_gguf(whole, directory)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".gguf")) == []
    directory.mkdir()
    with pytest.raises(DialoopError, match="is there already"):
        convert_gguf(whole, directory)
