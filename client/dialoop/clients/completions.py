"""Tokens and log-probs of a server with OpenAI's completions that Dialoop does not run.

`complete` samples after given token ids, and `logprobs` scores token ids, where the server can:
float32 [n - 1]. Servers differ in what they say of tokens. `Completions` asks each of them once
what it can do:

    token ids       `token_ids` (vLLM, Dialoop), "token_id:17" (older vLLM), or the text of a token,
                    which is taken only where no other token has the same
    given ids       `prompt_logprobs` (vLLM, Dialoop), or `echo` with `logprobs` (OpenAI's form)
    log-probs       of the distribution that was sampled from, or raw ones, of temperature 1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dialoop.errors import InvalidConfig, InvalidInput, Unavailable, Unsupported
from dialoop.reasons import Reason
from dialoop.trajectory import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop.sequences import Floats
    from dialoop.tokens.tokenizer import Tokenizer

_TOKEN_ID = "token_id:"
_PROBE = "What is 12 + 34, and why? Größe, naïve."
_RAW_TOLERANCE = 1e-5
_REFUSES_FIELDS = (400, 422)
_ALL = {"ignore_eos": True, "stop_token_ids": [], "return_token_ids": True}
_FORMS: tuple[Mapping[str, Any], ...] = ({**_ALL, "return_tokens_as_token_ids": True}, _ALL, {})
"""Fields that are not OpenAI's, from the most to the fewest; a server gets the first it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer: its tokens with the server's log-probs, and whether the server stopped it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    has_stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server said when it was asked.

    model: the name it serves. max_model_len: its longest sequence; None if it does not say.
    fields: those beside OpenAI's that it takes. scores_by: the field that gives log-probs of given
    ids; empty where it gives none. is_raw: whether log-probs are those of temperature 1, whatever
    was sampled from.
    """

    model: str
    max_model_len: int | None
    fields: Mapping[str, Any]
    scores_by: str
    is_raw: bool


class Completions:
    """A server's completions; it needs the package openai (`pip install "dialoop[endpoint]"`)."""

    facts: ServerFacts

    def __init__(
        self,
        url: str,
        *,
        tokenizer: Tokenizer,
        model: str = "",
        api_key: str = "",
        timeout_s: float = 600.0,
    ) -> None:
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise InvalidConfig(
                "A server of OpenAI's API needs the package openai.",
                reason=Reason.PACKAGE_MISSING,
                remedy='Run: pip install "dialoop[endpoint]"',
            ) from error
        self._url, self._model, self._tokenizer = url, model, tokenizer
        # The library refuses an empty key, and a server without keys reads none.
        self._client = AsyncOpenAI(
            base_url=url, api_key=api_key or "none", timeout=timeout_s, max_retries=2
        )

    async def __aenter__(self) -> Self:
        try:
            self.facts = await self._ask()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        num_samples: int = 1,
    ) -> tuple[Completion, ...]:
        """Continue `prompt_ids`; an answer ends with the first of `stop_ids`, which it keeps.

        Raises Unsupported (SAMPLING_UNSUPPORTED) where the server would sample otherwise, or give
        log-probs of another distribution than the one that it sampled from.
        """
        self._require_sampling(sampling)
        values = {
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": sampling.seed,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(stop) or None,
        }
        request = {name: value for name, value in values.items() if value is not None}
        fields = dict(self.facts.fields)
        if "stop_token_ids" in fields:
            fields["stop_token_ids"] = list(stop_ids)
        answer = await self._post(
            {"prompt": list(prompt_ids), "n": num_samples, "logprobs": 0} | request | fields
        )
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return tuple(self._completion(choice, frozenset(stop_ids)) for choice in choices)

    async def logprobs(self, token_ids: Sequence[int]) -> Floats:
        """Return float32 [L - 1], nats: of each given token but the first, at temperature 1.

        Raises Unsupported (UNSUPPORTED_LOGPROBS) where the server scores no given tokens.
        """
        if not self.facts.scores_by:
            raise Unsupported(
                f"The server at {self._url} gives no log-probs of given tokens.",
                reason=Reason.UNSUPPORTED_LOGPROBS,
                remedy="Use a server that takes prompt_logprobs (vLLM, Dialoop), or echo.",
            )
        if len(token_ids) == 1:
            return np.zeros(0, dtype=np.float32)
        return await self._score(token_ids, self.facts.scores_by)

    def _require_sampling(self, sampling: SamplingParams) -> None:
        unusual = [
            name
            for name in ("top_k", "min_p", "repetition_penalty")
            if getattr(sampling, name) is not None
        ]
        if unusual and not self.facts.fields:
            raise Unsupported(
                f"The server at {self._url} takes OpenAI's fields alone, and {unusual[0]} is none.",
                reason=Reason.SAMPLING_UNSUPPORTED,
                remedy="Leave it out.",
            )
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        changes = temperature not in (0.0, 1.0) or (temperature and sampling.truncates)
        if self.facts.is_raw and (changes or sampling.repetition_penalty not in (None, 1.0)):
            raise Unsupported(
                f"The server at {self._url} gives log-probs of temperature 1 with nothing cut off, "
                "which are not those of the distribution that was asked for.",
                reason=Reason.SAMPLING_UNSUPPORTED,
                remedy="Sample at temperature 1 or 0 without top_p, top_k, min_p and penalties; or "
                "start vLLM's server with --logprobs-mode processed_logprobs.",
            )

    async def _ask(self) -> ServerFacts:
        model, max_model_len = await self._find_model()
        prompt = list(self._tokenizer.encode(_PROBE).ids)
        fields = await self._find_fields(model, prompt)
        self.facts = ServerFacts(
            model=model, max_model_len=max_model_len, fields=fields, scores_by="", is_raw=True
        )
        await self._require_same_tokenizer(prompt)
        return ServerFacts(
            model=model,
            max_model_len=max_model_len,
            fields=fields,
            scores_by=await self._find_score_field(prompt),
            is_raw=await self._has_raw_logprobs(prompt),
        )

    async def _find_model(self) -> tuple[str, int | None]:
        """Return the name and the longest sequence of the model that is asked for, or the only."""
        document = await self._call("GET", "/models", None)
        models = {str(each["id"]): each for each in document["data"]}
        if not self._model and len(models) == 1:
            (self._model,) = models
        if self._model not in models:
            raise InvalidConfig(
                f"The server at {self._url} serves {', '.join(models)}, "
                + (f"and not {self._model}." if self._model else "and no model is named."),
                reason=Reason.MODEL_NOT_FOUND,
                remedy="Name one of these as `model`.",
            )
        longest = models[self._model].get("max_model_len")
        return self._model, None if longest is None else int(longest)

    async def _find_fields(self, model: str, prompt: list[int]) -> Mapping[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 0}
        for fields in _FORMS:
            try:
                await self._call("POST", "/completions", {**body, **fields})
            except InvalidInput:
                if not fields:
                    raise
            else:
                return fields
        raise AssertionError  # the last form has no fields

    async def _require_same_tokenizer(self, prompt: list[int]) -> None:
        """Compare the ids of a text, or their number where the server names none."""
        answer = await self._post({"prompt": _PROBE, "max_tokens": 1} | dict(self.facts.fields))
        ids = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")
        num_ids = (answer.get("usage") or {}).get("prompt_tokens")
        is_same = (
            ids[-len(prompt) :] == prompt  # a server may put its first token before them
            if ids is not None
            else num_ids in (None, len(prompt), len(prompt) + 1)
        )
        if not is_same:
            raise InvalidConfig(
                f"The server at {self._url} cuts a text into other tokens than the tokenizer of "
                "the model directory.",
                reason=Reason.TOKENIZER_MISMATCH,
                remedy="Give the directory of the model that the server serves.",
            )

    async def _find_score_field(self, prompt: list[int]) -> str:
        for field in ("prompt_logprobs", "echo"):
            try:
                await self._score(prompt, field)
            except (InvalidInput, Unsupported):
                continue
            return field
        return ""

    async def _score(self, token_ids: Sequence[int], field: str) -> Floats:
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0}
        if field == "echo":
            answer = await self._post(body | {"echo": True, "logprobs": 0})
            logprobs = answer["choices"][0].get("logprobs") or {}
            values = (logprobs.get("token_logprobs") or [])[1 : len(token_ids)]
        else:
            answer = await self._post(body | {"prompt_logprobs": 0})
            rows = (answer["choices"][0].get("prompt_logprobs") or [])[1:]
            pairs = zip(rows, token_ids[1:], strict=False)
            values = [row[str(token)]["logprob"] for row, token in pairs]
        if len(values) != len(token_ids) - 1 or any(value is None for value in values):
            raise Unsupported(
                f"The server at {self._url} answers {field} without a log-prob for each token.",
                reason=Reason.UNSUPPORTED_LOGPROBS,
                remedy="Use a server that gives log-probs of given tokens, as vLLM's.",
            )
        return np.asarray(values, dtype=np.float32)

    async def _has_raw_logprobs(self, prompt: list[int]) -> bool:
        """Return whether the likeliest next token has one log-prob at two temperatures.

        A server that does not name it is taken for one with raw log-probs: then only temperature 1
        is sampled at, where both are the same.
        """
        highest = []
        for temperature in (1.0, 2.0):
            body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "temperature": temperature}
            try:
                answer = await self._post(body)
            except InvalidInput:
                return True
            tops = (answer["choices"][0].get("logprobs") or {}).get("top_logprobs") or [{}]
            if not tops[0]:
                return True
            highest.append(max(tops[0].values()))
        return bool(abs(highest[0] - highest[1]) < _RAW_TOLERANCE)

    def _completion(self, choice: Mapping[str, Any], stop_ids: frozenset[int]) -> Completion:
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs")
        if values is None:
            raise Unsupported(
                f"The server at {self._url} answers without log-probs.",
                reason=Reason.UNSUPPORTED_LOGPROBS,
                remedy="Use a server whose completions have `logprobs`.",
            )
        ids = choice.get("token_ids")
        token_ids = list(map(self._id_of, logprobs["tokens"])) if ids is None else list(ids)
        if len(token_ids) != len(values):
            raise Unsupported(
                f"The server at {self._url} gives {len(values)} log-probs for {len(token_ids)} "
                "tokens.",
                reason=Reason.UNSUPPORTED_LOGPROBS,
                remedy="Use a server that gives one for each token, as vLLM's.",
            )
        # A server that takes no stop tokens goes on after them. What follows is left out.
        end = next((i + 1 for i, token in enumerate(token_ids) if token in stop_ids), None)
        return Completion(
            token_ids=tuple(token_ids[:end]),
            logprobs=tuple(map(float, values[:end])),
            has_stopped=end is not None or choice.get("finish_reason") == "stop",
        )

    def _id_of(self, token: str) -> int:
        if token.startswith(_TOKEN_ID):
            return int(token.removeprefix(_TOKEN_ID))
        ids = self._ids_by_text.get(token, ())
        if len(ids) != 1:
            raise Unsupported(
                f"The server at {self._url} names a token by its text alone, and {len(ids)} tokens "
                f"have the text {token!r}.",
                reason=Reason.UNSUPPORTED_LOGPROBS,
                remedy="Use a server that takes return_token_ids, as vLLM's and Dialoop's.",
            )
        return ids[0]

    @cached_property
    def _ids_by_text(self) -> dict[str, list[int]]:
        ids: dict[str, list[int]] = {}
        for token in range(self._tokenizer.vocab_size):
            ids.setdefault(self._tokenizer.decode([token]), []).append(token)
        return ids

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", "/completions", {"model": self.facts.model} | dict(body))

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        from openai import APIError, APIStatusError

        try:
            if method == "GET":
                answer: Any = await self._client.get(path, cast_to=object)
            else:
                answer = await self._client.post(path, cast_to=object, body=body)
        except APIStatusError as error:
            if error.status_code in _REFUSES_FIELDS:
                raise InvalidInput(
                    f"The server at {self._url} refuses the request: {error.message}",
                    reason=Reason.SAMPLING_UNSUPPORTED,
                    remedy="See that the model of that name takes token ids and log-probs.",
                ) from error
            raise self._unavailable(error.message) from error
        except APIError as error:
            raise self._unavailable(error.message) from error
        if not isinstance(answer, dict):
            raise self._unavailable("it answers with no JSON object")
        return answer

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(
            f"The server at {self._url} does not answer: {why}",
            reason=Reason.UNAVAILABLE,
            remedy="See that its address, model name and key are right.",
        )
