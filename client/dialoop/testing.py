"""In-memory twins: a scripted policy and an environment without a server; records to test with.

    policy = ScriptedPolicy(["<request><Calculator>3+4<call>", "Result=7<submit>"])
    episode = await play(task, sessions=InMemoryEnvironment(arithmetic()), policy=policy)

    group(0.0, trajectory(reward=1.0, truncated=True))

The twins answer as the services do, with real token sequences, so that `dialoop.rollout` and
whatever is built on it runs in a notebook or a test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dialoop.chat import ChatHistory, History, Message, Messages, ToolDefinition, as_history
from dialoop.episode import Sample
from dialoop.errors import InvalidInput
from dialoop.local.client import LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.sequences import Sequence as TokenSequence
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import (
    DoneReason,
    Group,
    Reward,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from dialoop.user_functions import call

Script = Sequence[str] | Callable[[History], str | Awaitable[str]]

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer with a token per byte and ChatML's two: 258 ids, nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}

    def engine() -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(_SPECIAL_TOKENS)
        return tokenizer

    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    return Tokenizer(engine(), engine(), config)


def byte_builder() -> TokenBuilder:
    """Make a TokenBuilder on `byte_tokenizer`."""
    tokenizer = byte_tokenizer()
    return TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))


class ScriptedPolicy:
    """A policy that answers from a list, one text per turn, or with what a function returns.

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

    async def generate(  # noqa: PLR0913 - a policy's question
        self,
        history: Messages,
        *,
        context: TokenSequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
        tools: Iterable[ToolDefinition] = (),
    ) -> tuple[Sample, ...]:
        """Answer the prompt, the same each time."""
        history, sampling = as_history(history), sampling or SamplingParams()
        prompt = self._builder.prompt(
            history,
            context=context,
            num_context_messages=num_context_messages,
            turn=turn,
            options={"tools": tools} if (tools := tuple(tools)) else {},
        )
        ids, stop_reason, stop_string = self._sample_ids(await self._text(history, turn), sampling)
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

    async def _text(self, history: History, turn: int) -> str:
        if callable(self._script):
            return str(await call(self._script, history))
        if turn >= len(self._script):
            raise InvalidInput(
                f"The script has {len(self._script)} answers and none for turn {turn}.",
                reason=Reason.SCRIPT_ENDED,
                remedy="Give one answer per turn, or a function of the history.",
            )
        return self._script[turn]

    def _sample_ids(self, text: str, sampling: SamplingParams) -> tuple[list[int], StopReason, str]:
        """Return the answer's token ids, why they end, and the stop string that ended them."""
        tokenizer = self._builder.tokenizer
        matches = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        start, stop_string = min(matches, default=(len(text), ""))
        ids = list(tokenizer.encode(text[: start + len(stop_string)]).ids)
        if not stop_string:
            ids += tokenizer.end_of_turn_ids[:1]
        if sampling.max_new_tokens is not None and len(ids) > sampling.max_new_tokens:
            return ids[: sampling.max_new_tokens], StopReason.LENGTH, ""
        return ids, StopReason.STOP, stop_string


InMemoryEnvironment = LocalEnvironmentClient
"""Plays environments in this process, as an EnvironmentClient plays them on a server."""


def trajectory(*, reward: float = 1.0, **fields: Any) -> Trajectory:
    """Return a finished episode of one turn: "1+2" was asked, "3" answered in two tokens.

    `fields` replace those of Trajectory: trajectory(truncated=True, turns=()).
    """
    sampled = {"source": Source.MODEL, "policy_version": PolicyVersion(lineage="main", number=0)}
    usual: dict[str, Any] = {
        "trajectory_id": "t0",
        "group_id": "t#1",
        "task_key": "1+2",
        "seed": 0,
        "environment": "arithmetic",
        "environment_version": "1",
        "history": History(
            (Message(role="user", content="1+2"), Message(role="assistant", content="3"))
        ),
        "turns": (
            Turn(message_start=1, num_messages=1, rewards=(Reward(name="r", value=reward),)),
        ),
        "sequences": (
            sequence_of(
                [([5, 8, 2], {"source": Source.PROMPT}), ([11, 12], sampled)],
                logprobs=(-0.5, -1.25),
            ),
        ),
        "terminated": True,
        "done_reason": DoneReason.SUBMITTED,
    }
    return Trajectory(**usual | fields)


def group(*members: Trajectory | float, group_id: str = "t#1", **fields: Any) -> Group:
    """Return a group of trajectories; a number stands for a trajectory with that reward.

    `fields` replace those of its task, which is the members': group(0.0, 1.0, epoch=2).
    """
    trajectories = tuple(
        replace(member, group_id=group_id)
        if isinstance(member, Trajectory)
        else trajectory(reward=member, trajectory_id=f"t{index}", group_id=group_id)
        for index, member in enumerate(members)
    )
    first = trajectories[0] if trajectories else trajectory()
    usual: dict[str, Any] = {
        "task_id": group_id.partition("#")[0],
        "environment": first.environment,
        "split": "train",
        "key": first.task_key,
        "num_trajectories": len(trajectories),
    }
    return Group(group_id=group_id, task=Task(**usual | fields), trajectories=trajectories)
