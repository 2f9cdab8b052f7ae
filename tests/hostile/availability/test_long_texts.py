"""A text that no context holds is refused before it is encoded; a long one is encoded apart."""

from __future__ import annotations

import threading

import pytest
from dialoop.tokens.tokenizer import LONG_TEXT, Encoded, Tokenizer
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_services.inference.rendering import apart

from tests.support.rest_world import http_of, service

TEXT = "hello world 1234 " * 60_000
MESSAGES = [{"role": "user", "content": TEXT}]
REQUESTS = [
    ("/v1/generate", {"text": TEXT}, "CONTEXT_FULL"),
    ("/v1/generate", {"history": {"prompt": {"messages": MESSAGES}}}, "CONTEXT_FULL"),
    ("/v1/logprob", {"texts": [TEXT]}, "CONTEXT_FULL"),
    ("/v1/logprob", {"histories": [{"full": {"messages": MESSAGES}}]}, "CONTEXT_FULL"),
    ("/v1/templates/bytes/render", {"history": {"messages": MESSAGES}}, "CONTEXT_FULL"),
    ("/v1/completions", {"model": "bytes", "prompt": TEXT}, "context_length_exceeded"),
    ("/v1/chat/completions", {"model": "bytes", "messages": MESSAGES}, "context_length_exceeded"),
]


async def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(monkeypatch):
    async with service("inference") as server, http_of(server) as http:
        long: list[int] = []
        encode = Tokenizer.encode

        def noting(self: Tokenizer, text: str, *, trusted: bool = False) -> Encoded:
            long.extend([len(text)] if len(text) > LONG_TEXT else [])
            return encode(self, text, trusted=trusted)

        monkeypatch.setattr(Tokenizer, "encode", noting)
        for path, body, reason in REQUESTS:
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            document = answer.json()
            assert document.get("reason", document.get("error", {}).get("code")) == reason, path
        assert not long


def test_a_long_text_has_the_tokens_that_it_had(tmp_path):
    tokenizer = Tokenizer.from_directory(make_tiny_model(tmp_path))
    text = TEXT[: LONG_TEXT // 2]
    half, whole = tokenizer.encode(text), tokenizer.encode(text + "\n" + text * 2)
    assert whole.ids[: len(half.ids) - 1] == half.ids[:-1]
    assert whole.offsets[: len(half.ids) - 1] == half.offsets[:-1]
    assert tokenizer.max_token_chars is not None


async def test_long_texts_are_encoded_in_another_thread():
    assert await apart(threading.get_ident, size=LONG_TEXT) == threading.get_ident()
    assert await apart(threading.get_ident, size=LONG_TEXT + 1) != threading.get_ident()


@pytest.mark.parametrize("trusted", [True, False])
def test_a_long_text_spells_special_tokens_only_where_it_is_trusted(tmp_path, trusted):
    tokenizer = Tokenizer.from_directory(make_tiny_model(tmp_path))
    special = "<|im_end|>"
    ids = tokenizer.encode("a" * LONG_TEXT + special, trusted=trusted).ids
    assert tokenizer.is_special(ids[-1]) is trusted
