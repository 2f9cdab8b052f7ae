"""A server of OpenAI's API as an engine: it samples and scores, and Dialoop sets no weights of it.

The model directory needs the tokenizer alone. Prompts go as token ids, and answers come back with
the ids and log-probs that the server gives, so nothing is made again from text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path

from dialoop.clients.completions import Completion, Completions
from dialoop.episode import UpdateMode
from dialoop.errors import InvalidConfig
from dialoop.sequences import PolicyVersion
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import SamplingParams, StopReason

from dialoop_services.config.outside import outside_server
from dialoop_services.inference.engine import (
    OUTSIDE_VERSION,
    EngineOptions,
    LoadTimes,
    Sampled,
    Scored,
    StopTokens,
    VersionSpan,
    context_full,
    engine_stopped,
    loads_refused,
    require_fit,
    require_ids,
    require_sampling,
    room_for,
)


class OutsideEngine:
    """What `engine = "openai"` names."""

    name = "openai"
    policy_version = OUTSIDE_VERSION
    weights_are_outside = True

    def __init__(
        self, server: Completions, *, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
    ) -> None:
        self._server, self._tokenizer = server, tokenizer
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.version = version_of("openai")  # whoever made the server has the package
        self.is_alive = True

    @classmethod
    async def start(cls, model_dir: Path, options: EngineOptions) -> OutsideEngine:
        """Ask the server what it can do; InvalidConfig where it serves another model."""
        outside = outside_server(options.own)
        tokenizer = Tokenizer.from_directory(model_dir)
        server = await outside.completions(tokenizer).__aenter__()
        longest = server.facts.max_model_len
        if longest is not None and longest < options.max_model_len:
            await server.close()
            raise InvalidConfig(
                f"max_model_len is {options.max_model_len}, and the server at {outside.url} takes "
                f"{longest} tokens.",
                remedy=f"Set max_model_len to {longest} or less.",
            )
        return cls(
            server,
            tokenizer=tokenizer,
            vocab_size=_vocab_size(model_dir, tokenizer),
            max_model_len=options.max_model_len,
        )

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        num_samples: int = 1,
    ) -> tuple[Sampled, ...]:
        """Continue `prompt_ids` `num_samples` times."""
        self._require_open()
        require_ids(prompt_ids, vocab_size=self.vocab_size)
        require_sampling(sampling)
        room = room_for(prompt_ids, sampling, self.max_model_len)
        if room <= 0:
            return context_full(num_samples)
        answers = await self._server.complete(
            prompt_ids,
            replace(sampling, max_new_tokens=room),
            stop_ids=tuple(stop.by_id),
            stop=stop.strings,
            num_samples=num_samples,
        )
        return tuple(self._make_sample(answer, stop) for answer in answers)

    async def logprobs(self, token_ids: Sequence[int]) -> Scored:
        """Score given ids; Unsupported where the server gives no log-probs of them."""
        self._require_open()
        require_ids(token_ids, vocab_size=self.vocab_size)
        require_fit(token_ids, self.max_model_len)
        values = await self._server.logprobs(token_ids)
        return Scored(logprobs=values, policy_version=self.policy_version)

    async def load_weights(
        self, path: Path, version: PolicyVersion, *, mode: UpdateMode = UpdateMode.RECOMPUTE
    ) -> LoadTimes:
        """Raise Unsupported: the weights are the server's own."""
        raise loads_refused(self.name)

    async def close(self) -> None:
        """Close the connections; the server goes on. Idempotent."""
        self.is_alive = False
        await self._server.close()

    def _make_sample(self, answer: Completion, stop: StopTokens) -> Sampled:
        length = len(answer.token_ids)
        stop_string = ""
        if answer.has_stopped and length:
            last = answer.token_ids[-1]
            text = "" if last in stop.by_id else self._tokenizer.decode(answer.token_ids)
            spanning = (string for string in stop.strings if string in text)
            stop_string = stop.by_id.get(last) or next(spanning, "")
        return Sampled(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=(VersionSpan(start=0, length=length, policy_version=self.policy_version),),
            stop_reason=StopReason.STOP if answer.has_stopped else StopReason.LENGTH,
            stop_string=stop_string,
        )

    def _require_open(self) -> None:
        if not self.is_alive:
            raise engine_stopped()


def _vocab_size(model_dir: Path, tokenizer: Tokenizer) -> int:
    """Return how many ids the model embeds, as its config.json says; else those of the tokenizer.

    A directory of the tokenizer alone has no config.json.
    """
    path = model_dir / "config.json"
    fields = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    size = fields.get("text_config", fields).get("vocab_size", tokenizer.vocab_size)
    return int(size)
