import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import (
    CONTROL_TOKENS,
    SYNTAX_TOKENS,
    make_tiny_model,
    tiny_tokenizer,
)
from dialoop_learning.packing.rows import TokenRow, pack_rows
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

CHAT = [
    {"role": "user", "content": "35+40"},
    {"role": "assistant", "content": "<request><Calculator>35+40<call>"},
    {"role": "tool", "content": "75<response>"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


def _auto(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("marker", [*CONTROL_TOKENS, *SYNTAX_TOKENS])
def test_markers_are_single_tokens(directory: Path, marker: str) -> None:
    light = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert len(light.encode(marker).ids) == 1
    assert _auto(directory)(marker)["input_ids"] == light.encode(marker).ids


def test_syntax_markers_are_content_and_control_tokens_are_not(directory: Path) -> None:
    text = "<|im_start|><request><Calculator>3<call><response><submit><|im_end|>"
    shown = "<request><Calculator>3<call><response><submit>"
    light = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = light.encode(text).ids
    assert light.decode(ids, skip_special_tokens=True) == shown
    assert _auto(directory).decode(ids, skip_special_tokens=True) == shown


def test_every_digit_is_a_token_of_its_own() -> None:
    assert tiny_tokenizer().encode("35+40=1207").tokens == list("35+40=1207")


def test_vocabulary_is_fixed() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.get_vocab_size() == 314
    assert tokenizer.encode("Result=75<submit>").ids == [278, 28, 22, 20, 312]


def test_any_text_survives_the_round_trip() -> None:
    tokenizer = tiny_tokenizer()
    text = "What is 3+4?\n\tΩ é 数 the user's system"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("text", ["a  b\n\n c", "it's = 7,5+3", " 12 34", "été\r\nÅ <call>x"])
def test_transformers_and_the_light_library_agree(directory: Path, text: str) -> None:
    assert _auto(directory)(text)["input_ids"] == tiny_tokenizer().encode(text).ids


def test_chat_template_is_chatml_without_a_system_prompt(directory: Path) -> None:
    shown = _auto(directory).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert shown == (
        "<|im_start|>user\n35+40<|im_end|>\n"
        "<|im_start|>assistant\n<request><Calculator>35+40<call><|im_end|>\n"
        "<|im_start|>tool\n75<response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tokenizer_names_its_end_and_padding(directory: Path) -> None:
    tokenizer = _auto(directory)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    config = json.loads((directory / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    files = [make_tiny_model(tmp_path / str(i), seed=s) for i, s in enumerate((0, 0, 1))]
    weights = [(f / "model.safetensors").read_bytes() for f in files]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(state, torch.random.get_rng_state())


def test_model_has_829_thousand_parameters(directory: Path) -> None:
    assert sum(p.numel() for p in load_policy(directory).parameters()) == 828_800


def test_tied_embeddings_survive_saving_a_trained_model(directory: Path, tmp_path: Path) -> None:
    policy = load_policy(directory)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    policy.save(tmp_path)
    again = load_policy(tmp_path)
    model = again.causal_lm
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    batch = pack_rows([TokenRow.from_demonstration([1, 2, 3], [False, True, True])])
    assert torch.equal(policy(batch).logprobs, again(batch).logprobs)
