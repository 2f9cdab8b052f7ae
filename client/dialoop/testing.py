"""In-memory twins: a scripted policy and an environment without a server.

    policy = ScriptedPolicy(["<request><Calculator>3+4<call>", "Result=7<submit>"])
    trajectory = await play(task, sessions=InMemoryEnvironment(arithmetic()), policy=policy)

They answer as the services do, with real token sequences, so that `dialoop.rollout` and whatever is
built on it runs in a notebook or a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dialoop.chat import ChatHistory, History
from dialoop.episode import Sample
from dialoop.errors import InvalidInput
from dialoop.local.client import LocalEnvironmentClient
from dialoop.sequences import PolicyVersion
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import SamplingParams, StopReason

if TYPE_CHECKING:
    from dialoop.sequences import Sequence as TokenSequence

Script = Sequence[str] | Callable[[History], str]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]


def byte_tokenizer() -> Tokenizer:
    """One token per byte and the two tokens of a ChatML template: 258 ids, nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}

    def engine() -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(_SPECIAL_TOKENS)
        return made

    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    return Tokenizer(engine(), engine(), config)


def byte_builder() -> TokenBuilder:
    """Tokens of conversations by `byte_tokenizer`."""
    tokenizer = byte_tokenizer()
    return TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))


class ScriptedPolicy:
    """A policy that answers from a list, one text per turn, or with what a function says.

    An answer ends at the first of the sampling's stop strings, at `max_new_tokens`, or with the
    end-of-turn token. Each token has the log-prob `logprob` and the version `policy_version`.
    """

    def __init__(
        self,
        script: Script,
        *,
        builder: TokenBuilder | None = None,
        policy_version: PolicyVersion | None = None,
        logprob: float = -0.5,
    ) -> None:
        self._script = script
        self._builder = builder or byte_builder()
        self._policy_version = policy_version or PolicyVersion(lineage="scripted", number=0)
        self._logprob = logprob

    async def generate(
        self,
        history: History,
        *,
        context: TokenSequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        """Answer the prompt, the same each time."""
        sampling = sampling or SamplingParams()
        prompt = self._builder.prompt(
            history, context=context, num_context_messages=num_context_messages, turn=turn
        )
        ids, stop_reason, stop_string = self._sampled(self._text(history, turn), sampling)
        answer = self._builder.answer(
            prompt,
            ids,
            logprobs=[self._logprob] * len(ids),
            versions=[(len(ids), self._policy_version)],
            is_complete=stop_reason is StopReason.STOP,
        )
        sample = Sample(
            history=ChatHistory(prompt=history).respond(answer.message),
            sequence=answer.appended,
            stop_reason=stop_reason,
            stop_string=stop_string,
            sampling=sampling,
            tokenizer_digest=self._builder.tokenizer.digest,
            template_digest=self._builder.template.digest,
        )
        return (sample,) * num_samples

    def _text(self, history: History, turn: int) -> str:
        if callable(self._script):
            return self._script(history)
        if turn >= len(self._script):
            raise InvalidInput(
                f"The script has {len(self._script)} answers and turn {turn} is asked for.",
                reason="SCRIPT_ENDED",
                remedy="Give one answer per turn, or a function of the history.",
            )
        return self._script[turn]

    def _sampled(self, text: str, sampling: SamplingParams) -> tuple[list[int], StopReason, str]:
        """Token ids of the answer, why they end, and the stop string that ended them."""
        tokenizer = self._builder.tokenizer
        found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        start, stop_string = min(found, default=(len(text), ""))
        ids = list(tokenizer.encode(text[: start + len(stop_string)]).ids)
        if not stop_string:
            ids += tokenizer.end_of_turn_ids[:1]
        if sampling.max_new_tokens is not None and len(ids) > sampling.max_new_tokens:
            return ids[: sampling.max_new_tokens], StopReason.LENGTH, ""
        return ids, StopReason.STOP, stop_string


InMemoryEnvironment = LocalEnvironmentClient
"""Plays environments in this process, as an EnvironmentClient plays them on a server."""
