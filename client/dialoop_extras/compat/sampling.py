"""Sampling parameters by the names of transformers and vLLM, translated to ours.

    options = generate_options(max_tokens=8, n=4, do_sample=False)
    await client.generate(history, sampling=options.sampling, num_samples=options.num_samples)

Of two names for one thing the older wins, with a warning; two numbers of samples are an error. A
parameter that would change the samples and is not supported is an error and never ignored: every
token's log-prob is that of a draw from the policy, under the weights of its version.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dialoop.errors import DialoopWarning, InvalidInput, Unsupported
from dialoop.reasons import Reason
from dialoop.trajectory import SamplingParams

_PLAIN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_new_tokens")
_LENGTHS = ("max_tokens", "max_new_tokens")
_STOPS = ("stop_sequences", "stop_strings", "stop")
_COUNTS = ("n", "num_return_sequences", "num_samples")
_BEAM_ONLY = ("length_penalty", "early_stopping")
# Further names of vLLM and transformers, and the values with which they do nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "bad_words": ([],),
        "bad_words_ids": ([],),
        "allowed_token_ids": (),
        "min_tokens": (0,),
        "min_new_tokens": (0,),
        "ignore_eos": (False,),
        "stop_token_ids": ([],),
        "best_of": (1,),
        "use_beam_search": (False,),
        "typical_p": (1,),
        "no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1,),
        "diversity_penalty": (0,),
        "num_beam_groups": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "penalty_alpha": (),
        "include_stop_str_in_output": (True,),
        "prompt_logprobs": (),
        "return_log_probs": (True,),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The translated parameters: sampling, the number of samples, and warnings for the caller."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    skip_special_tokens: bool = False
    warnings: tuple[str, ...] = ()


def generate_options(**parameters: Any) -> GenerateOptions:
    """Read options as `read_generate_options` does; issue its warnings with Python's `warnings`."""
    options = read_generate_options(parameters)
    for text in options.warnings:
        warnings.warn(text, DialoopWarning, stacklevel=2)
    return options


def read_generate_options(parameters: Mapping[str, Any]) -> GenerateOptions:
    """Translate another library's parameters; one that is None counts as absent.

    Raises InvalidInput (INVALID_SAMPLING, UNKNOWN_FIELD), and Unsupported (BEAMS_UNSUPPORTED,
    SAMPLING_UNSUPPORTED) for what would change the samples and is not supported.
    """
    return _Reader(
        {name: value for name, value in parameters.items() if value is not None}
    ).options()


class _Reader:
    """Takes known parameters out one by one; what is left is unknown."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self._parameters = parameters
        self._warnings: list[str] = []

    def options(self) -> GenerateOptions:
        self._refuse_beams()
        self._refuse_others()
        num_top = self._take_logprobs()
        length = self._oldest(_LENGTHS)
        stop = self._oldest(_STOPS)
        count = self._count()
        sampling = {n: self._parameters.pop(n) for n in _PLAIN if n in self._parameters}
        self._take_do_sample(sampling)
        skips = self._parameters.pop("skip_special_tokens", False)
        _require(isinstance(skips, bool), "skip_special_tokens", skips, "true or false")
        constraint = self._parameters.pop("constraint", "")
        _require(isinstance(constraint, str), "constraint", constraint, "JSON text")
        self._require_nothing_left()
        _require_numbers(sampling | ({} if length is None else {"max_new_tokens": length}))
        return GenerateOptions(
            sampling=SamplingParams(
                **sampling,
                max_new_tokens=length,
                stop=_texts(stop),
                constraint=constraint,
                top_logprobs=num_top,
            ),
            num_samples=count,
            skip_special_tokens=skips,
            warnings=tuple(self._warnings),
        )

    def _refuse_beams(self) -> None:
        num_beams = self._parameters.pop("num_beams", 1)
        _require(_is_count(num_beams), "num_beams", num_beams, "1")
        if num_beams > 1:
            raise Unsupported(
                f"num_beams is {num_beams}: what beam search finds is not a sample of the policy, "
                "and its tokens have no probability of being drawn.",
                reason=Reason.BEAMS_UNSUPPORTED,
                remedy="Leave num_beams out; ask for num_samples and keep the likeliest, or give "
                "temperature 0 for greedy decoding.",
            )
        for name in _BEAM_ONLY:
            if name in self._parameters:
                del self._parameters[name]
                self._warnings.append(f"{name} is ignored: it is for beam search only.")

    def _refuse_others(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if name not in self._parameters:
                continue
            value = self._parameters.pop(name)
            if not any(value == allowed and isinstance(value, bool) <= isinstance(allowed, bool)
                       for allowed in neutral):  # fmt: skip
                raise Unsupported(
                    f"{name} is not supported.",
                    reason=Reason.SAMPLING_UNSUPPORTED,
                    remedy=_REMEDIES.get(name, "Leave it out."),
                )

    def _take_logprobs(self) -> int:
        """Return how many likeliest tokens `top_logprobs` asks for, or else `logprobs`.

        The sampled token's own log-prob always comes, so `logprobs` of 0 and 1 asks for none.
        """
        num_top = self._parameters.pop("top_logprobs", 0)
        _require(_is_count(num_top, least=0), "top_logprobs", num_top, "a number")
        logprobs = self._parameters.pop("logprobs", None)
        is_number = logprobs is None or _is_count(logprobs, least=0)
        _require(is_number, "logprobs", logprobs, "a number, and never true or false")
        return num_top or (logprobs if logprobs is not None and logprobs > 1 else 0)

    def _oldest(self, names: tuple[str, ...]) -> Any:
        """Return the value of the first name that is there; warn of others with other values."""
        values = {name: self._parameters.pop(name) for name in names if name in self._parameters}
        if not values:
            return None
        name, value = next(iter(values.items()))
        self._warnings += [
            f"{name} {value} was taken, {other} {unused} was not: give one of them."
            for other, unused in values.items()
            if unused != value
        ]
        return value

    def _count(self) -> int:
        counts = {name: self._parameters.pop(name) for name in _COUNTS if name in self._parameters}
        for name, value in counts.items():
            _require(_is_count(value), name, value, "a number of samples, 1 or more")
        if len(set(counts.values())) > 1:
            listing = ", ".join(f"{name} is {value}" for name, value in counts.items())
            raise _invalid(f"{listing}.", "Give one of them.")
        return int(next(iter(counts.values()), 1))

    def _take_do_sample(self, sampling: dict[str, Any]) -> None:
        """Read `do_sample`: False is temperature 0 and contradicts any other."""
        do_sample = self._parameters.pop("do_sample", None)
        _require(
            do_sample is None or isinstance(do_sample, bool),
            "do_sample",
            do_sample,
            "true or false",
        )
        temperature = sampling.get("temperature")
        is_greedy = temperature == 0
        if do_sample is False and temperature is None:
            sampling["temperature"] = 0.0
        elif do_sample is not None and do_sample == is_greedy:
            raise _invalid(
                f"do_sample is {do_sample} and temperature is {temperature}.",
                "Greedy decoding is do_sample=False with temperature 0, or without one.",
            )

    def _require_nothing_left(self) -> None:
        if self._parameters:
            raise InvalidInput(
                f"Sampling has no parameter '{next(iter(self._parameters))[:40]}'.",
                reason=Reason.UNKNOWN_FIELD,
                remedy="Leave it out.",
            )


_NO_PENALTY = (
    "It would change what is sampled with every token, and training needs the distribution that "
    "was sampled. Give repetition_penalty, with which nothing is trained, or leave it out."
)
_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "include_stop_str_in_output": "Leave it out: a stop string stays, as it was sampled.",
        "prompt_logprobs": "Ask LogProb for the log-probs of a prompt.",
        "return_log_probs": "Leave it out: log-probs always come with the tokens.",
        "stop_token_ids": "Give the tokens' text as stop_sequences.",
        "presence_penalty": _NO_PENALTY,
        "frequency_penalty": _NO_PENALTY,
    }
)


def _texts(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    is_list = isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
    _require(is_list, "stop", stop, "text, or a list of texts")
    return tuple(texts)


def _require_numbers(sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        is_whole = name in ("top_k", "seed", "max_new_tokens")
        kinds = (int,) if is_whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        _require(is_number, name, value, "a whole number" if is_whole else "a number")


def _is_count(value: Any, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise _invalid(f"{name} is {value!r:.40}.", f"Give {expected}.")


def _invalid(message: str, remedy: str) -> InvalidInput:
    return InvalidInput(message, reason=Reason.INVALID_SAMPLING, remedy=remedy)
