from __future__ import annotations

import json

import pytest
import tokenizers
from dialoop.errors import InvalidInput
from dialoop.tokens.tokenizer import LONG_TEXT, RunningText, Tokenizer
from dialoop_learning.model.tiny import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers


def byte_level() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), tiny_tokenizer(), {"eos_token": "<|im_end|>"})


def sentence_piece() -> Tokenizer:
    """Make one like Llama 2's: spaces are metaspaces, unknown bytes are tokens, decoding strips."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁hello", "▁wor", "ld", "a", "b"]
    vocabulary = words + [f"<0x{byte:02X}>" for byte in range(256)]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(vocabulary)},
        merges=[],
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    return Tokenizer(tokenizer, other, {"eos_token": "</s>"})


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()
IDS = st.lists(st.integers(0, 313), max_size=24)
PIECE_IDS = st.lists(st.integers(3, 8) | st.sampled_from([1, 2]), max_size=24)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE])
@pytest.mark.parametrize("length", [1, LONG_TEXT + 1])
def test_half_a_character_is_refused_by_name(tokenizer: Tokenizer, length: int) -> None:
    text = "a" * length + "\udc00"
    for encode in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode(text, trusted=True),
        lambda: tokenizer.encode_prompt(text),
        lambda: tokenizer.encode_all(["a", text]),
    ):
        with pytest.raises(InvalidInput, match=r"half a character, '\\udc00'") as caught:
            encode()
        assert caught.value.reason == "HALF_CHARACTER"
    with pytest.raises(TypeError):  # what is no text at all is another mistake
        tokenizer.encode(3)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(ids=IDS, more=IDS)
def test_decoding_more_is_decoding_all_whatever_the_bytes(ids, more):
    text = BYTE_LEVEL.decode_more(BYTE_LEVEL.decode(ids), ids, more)
    assert text == BYTE_LEVEL.decode([*ids, *more])


@settings(max_examples=200, deadline=None)
@given(ids=PIECE_IDS, more=PIECE_IDS)
def test_decoding_more_keeps_the_spaces_that_begin_words(ids, more):
    text = SENTENCE_PIECE.decode_more(SENTENCE_PIECE.decode(ids), ids, more)
    assert text == SENTENCE_PIECE.decode([*ids, *more])


@settings(max_examples=200, deadline=None)
@given(ids=IDS)
def test_a_running_text_is_the_text_once_its_characters_are_whole(ids):
    ids = [*ids, *BYTE_LEVEL.encode("end").ids]
    running = RunningText(BYTE_LEVEL)
    assert "".join(running.add([token]) for token in ids) == BYTE_LEVEL.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=PIECE_IDS)
def test_a_running_text_of_word_pieces_keeps_its_spaces(ids):
    running = RunningText(SENTENCE_PIECE)
    assert "".join(running.add([token]) for token in ids) == SENTENCE_PIECE.decode(ids)


def test_a_character_of_several_tokens_is_told_once_and_whole():
    ids = BYTE_LEVEL.encode("世").ids
    running = RunningText(BYTE_LEVEL)
    assert [running.add([token]) for token in ids] == ["", "", "世"]


def test_a_running_text_costs_the_same_for_each_token(monkeypatch):
    num_decoded = 0
    decode = Tokenizer.decode

    def counting(self, ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    running = RunningText(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("ab 12 世").ids * 200
    for token in ids:
        running.add([token])
    assert num_decoded < 12 * len(ids)


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        (None, ["<|im_end|>"]),
        ({"eos_token_id": 306}, ["<|im_end|>", "<|endoftext|>"]),
        ({"eos_token_id": [308, 306]}, ["<|im_end|>", "<|endoftext|>"]),
        ({"eos_token_id": [306, 99999]}, ["<|im_end|>", "<|endoftext|>"]),
        ({}, ["<|im_end|>"]),
    ],
)
def test_the_generation_config_names_further_tokens_that_end_a_turn(tmp_path, generation, ends):
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer.from_directory(str(tmp_path))
    assert [tokenizer.decode([i]) for i in tokenizer.end_of_turn_ids] == ends


def test_the_places_that_spell_special_tokens_are_found():
    assert BYTE_LEVEL.special_spans("a<|im_end|>b<|im_start|>") == ((1, 11), (12, 24))
    assert not BYTE_LEVEL.spells_special("<|im_end|")
