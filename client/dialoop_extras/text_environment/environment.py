"""Episodes in one running text, in which the model calls tools and reads their answers inline.

    environment = TextEnvironment(policy, tokenizer, tools=[calculate], reward=exact, prompt=SHOTS)
    run = await environment.run(["What is 13-3?"], answers=["10"])
    run.histories[0].text
    # "What is 13-3?<request><calculate>13-3<call>10<response>Result=10<submit>"

A turn ends at `<call>` or `<submit>`. The tool's answer and `<response>` follow it inline, masked.
Only the model's own text can call, submit or end an episode.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.environments.tools.text_tools import CallSyntax, ToolFunction
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.failures import error_of, failure_of
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.trajectory import Failure, Owner, SamplingParams, StopReason
from dialoop.user_functions import call, name_of

from dialoop_extras.text_environment.history import TextHistory
from dialoop_extras.text_environment.tools import TextTools

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.episode import Sample
    from dialoop.tokens.tokenizer import Tokenizer

Reward = Callable[..., Any]
"""A function of a list with each model's last text, and of the extra arguments of `run`.

It returns one number per text, and may be async. `each` makes one from a function of one text.
"""


class TextPolicy(Protocol):
    """Continues token ids. An InferenceClient is one."""

    async def generate(
        self, *, token_ids: Iterable[int], sampling: SamplingParams, turn: int
    ) -> tuple[Sample, ...]:
        """Return one answer, with the whole `sequence` and its `text`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRun:
    """The result of `run`, one entry per query. It unpacks into five lists, as in TRL.

    queries, responses: token ids; masks: 1 for the response tokens that the model wrote; rewards:
    None if there is none (the history's failures say why).
    """

    queries: list[list[int]]
    responses: list[list[int]]
    masks: list[list[int]]
    rewards: list[float | None]
    histories: list[TextHistory]

    @classmethod
    def of(cls, histories: Iterable[TextHistory]) -> TextRun:
        """Return the lists of these episodes."""
        histories = list(histories)
        split = [history.split_query_response_tokens() for history in histories]
        return cls(
            queries=[query for query, _, _ in split],
            responses=[response for _, response, _ in split],
            masks=[mask for _, _, mask in split],
            rewards=[history.reward for history in histories],
            histories=histories,
        )

    def __iter__(self) -> Any:
        return iter((self.queries, self.responses, self.masks, self.rewards, self.histories))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """Limits of an episode; `max_length` counts tokens, and None means no limit."""

    max_turns: int = 4
    max_tool_response: int = 100
    max_length: int | None = None
    tool_timeout_s: float = 10.0
    reward_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value <= 0:
                raise InvalidConfig(
                    f"{limit.name} of the text environment is {value:g}.",
                    remedy="Set it above 0.",
                )


@dataclass(frozen=True, slots=True)
class TextEnvironment:
    """A text environment: it runs queries with a policy, tools and a reward."""

    policy: TextPolicy
    tokenizer: Tokenizer
    tools: Mapping[str, ToolFunction] | Sequence[ToolFunction] | None = field(
        default=None, kw_only=True
    )
    reward: Reward | None = field(default=None, kw_only=True)
    prompt: str = field(default="", kw_only=True)
    limits: TextLimits = field(default_factory=TextLimits, kw_only=True)
    sampling: SamplingParams = field(default_factory=SamplingParams, kw_only=True)
    syntax: CallSyntax = field(default_factory=CallSyntax, kw_only=True)

    async def run(self, queries: Sequence[str], **extra: Any) -> TextRun:
        """Play one episode per query, all at the same time; pass `extra` to the reward.

        If a tool, the engine or the reward fails, the episode has a failure and no reward.
        """
        if not queries:
            raise InvalidInput(
                "`queries` is empty.",
                reason=Reason.QUERIES_MISSING,
                remedy="Give at least one query.",
            )
        if not all(self.prompt + query for query in queries):
            raise InvalidInput(
                "A query is empty.",
                reason=Reason.QUERIES_MISSING,
                remedy="Give a query or a prompt.",
            )
        async with asyncio.TaskGroup() as playing:
            tasks = [playing.create_task(self.play(query)) for query in queries]
        return TextRun.of(await self._apply_reward([task.result() for task in tasks], extra))

    async def play(self, query: str) -> TextHistory:
        """Play one episode of one query, without its reward."""
        history = self._prompt_history(query)
        for turn in range(self.limits.max_turns):
            history = await self._generate(history, turn)
            if history.completed:
                return history
            history = await self._add_tool_answer(history, turn)
            if history.completed:
                return history
        return self.out_of_turns(history)

    def out_of_turns(self, history: TextHistory) -> TextHistory:
        """Return the history of an episode whose last turn was a call, truncated."""
        return history.complete(truncated=True)

    def rewarded_text(self, history: TextHistory) -> str:
        """Return the text that the reward reads: the model's last one."""
        return history.last_model_text

    def is_over(self, history: TextHistory, text: str, last_id: int) -> bool:
        """Return whether the model ended the episode with its turn `text`."""
        return self.syntax.submit in text or last_id in self.tokenizer.end_of_turn_ids

    async def answer(self, text: str) -> str:
        """Return the tools' answer to the model's turn."""
        tools = TextTools(
            self.tools,
            syntax=self.syntax,
            limit=self.limits.max_tool_response,
            timeout_s=self.limits.tool_timeout_s,
        )
        return await tools.answer(text)

    def _prompt_history(self, query: str) -> TextHistory:
        text = self.prompt + query
        if not text:
            raise InvalidInput("The query is empty.", remedy="Give a query or a prompt.")
        # Special tokens in the author's prompt count as such; those in the query are plain text.
        ids = (
            *self.tokenizer.encode(self.prompt, trusted=True).ids,
            *self.tokenizer.encode(query).ids,
        )
        if not self.tokenizer.spells_special(query):
            ids = self.tokenizer.encode(text, trusted=True).ids
        return TextHistory().append_segment(text, ids, source=Source.PROMPT)

    async def _generate(self, history: TextHistory, turn: int) -> TextHistory:
        stop = (self.syntax.call, self.syntax.submit)
        sampling = replace(self.sampling, stop=tuple(dict.fromkeys((*self.sampling.stop, *stop))))
        tokens = history.tokens
        try:
            (sample,) = await call(
                self.policy.generate, token_ids=tokens, sampling=sampling, turn=turn
            )
        except Exception as error:
            failure = error_of(error, Owner.INFERENCE)
            return replace(history, failures=(*history.failures, failure)).complete(truncated=True)
        sampled = sample.sequence.token_ids[len(tokens) :].tolist()
        if not sampled:
            return history.complete(truncated=True)  # the context is full
        text = self.tokenizer.decode(sampled)
        history = history.append_segment(
            text or "\ufffd",  # a segment needs a text, even if the ids decode to nothing
            sampled,
            source=Source.MODEL,
            turn=turn,
            logprobs=sample.sequence.inference_logprobs.tolist(),
            versions=[
                (s.length, s.policy_version)
                for s in sample.sequence.segments
                if s.policy_version is not None
            ],
        )
        return self._end_if_over(history, sample.stop_reason, sampled[-1], text)

    def _end_if_over(
        self, history: TextHistory, stop: StopReason, last_id: int, text: str
    ) -> TextHistory:
        """Return the history, completed if the model's turn was the last."""
        if self._is_too_long(history):
            return history.complete(truncated=True)
        if self.is_over(history, text, last_id):
            return history.complete()
        if not self.syntax.spans(text):
            return history.complete(truncated=stop is not StopReason.STOP)
        return history

    async def _add_tool_answer(self, history: TextHistory, turn: int) -> TextHistory:
        try:
            text = await self.answer(history.last_text_segment)
        except Exception as error:
            failures = (*history.failures, tool_failure(error))
            return replace(history, failures=failures).complete(truncated=True)
        # Special tokens in the tool's text are plain text; the marker after it is trusted.
        answer = self.tokenizer.encode(text).ids
        closing = self.tokenizer.encode(self.syntax.response, trusted=True).ids
        history = history.append_segment(
            text + self.syntax.response, (*answer, *closing), source=Source.TOOL, turn=turn
        )
        return history.complete(truncated=True) if self._is_too_long(history) else history

    def _is_too_long(self, history: TextHistory) -> bool:
        limit = self.limits.max_length
        return limit is not None and len(history.tokens) > limit

    async def _apply_reward(
        self, histories: list[TextHistory], extra: Mapping[str, Any]
    ) -> list[TextHistory]:
        if self.reward is None:
            return histories
        texts = [self.rewarded_text(history) for history in histories]
        timeout_s = self.limits.reward_timeout_s
        rewards = await rewards_of(self.reward, texts, extra, timeout_s=timeout_s)
        rewarded = []
        for history, reward in zip(histories, rewards, strict=True):
            if isinstance(reward, Failure):
                rewarded.append(replace(history, failures=(*history.failures, reward)))
            else:
                rewarded.append(history if history.failures else history.with_reward(reward))
        return rewarded


_EACH = (
    "It is called with the list of all texts and returns one number for each; wrap a function of "
    "one text with `each`."
)


async def rewards_of(
    reward: Reward, texts: Sequence[str], extra: Mapping[str, Any], *, timeout_s: float
) -> list[float | Failure]:
    """Return the reward of each text, or in its place the failure of the reward function."""
    what = f"The reward {name_of(reward)}"
    failed = partial(Failure, owner=Owner.REWARD)
    try:
        values = await call(partial(reward, texts, **extra), timeout_s=timeout_s)
        rewards = [float(value) for value in values]
    except Exception as error:
        is_late = isinstance(error, TimeoutError)
        reason = Reason.REWARD_TIMEOUT if is_late else Reason.REWARD_FAILED
        failure = failure_of(error, owner=Owner.REWARD, reason=reason, what=what)
        if isinstance(error, (AttributeError, TypeError)):  # as of a list that is no text
            failure = replace(failure, message=f"{failure.message} {_EACH}")
        return [failure for _ in texts]
    if len(rewards) != len(texts):
        message = f"{what} returned {len(rewards)} values for {len(texts)} texts. {_EACH}"
        return [failed(reason=Reason.REWARD_FAILED, message=message) for _ in texts]
    message = f"{what} returned a number that is not finite."
    return [
        value if math.isfinite(value) else failed(reason=Reason.REWARD_NOT_FINITE, message=message)
        for value in rewards
    ]


def tool_failure(error: Exception) -> Failure:
    """Return the failure of a tool that raised, or that took too long."""
    reason = Reason.TOOL_TIMEOUT if isinstance(error, TimeoutError) else Reason.TOOL_FAILED
    return failure_of(error, owner=Owner.TOOL, reason=reason, what="A tool")


def each(function: Callable[..., float | Awaitable[float]]) -> Reward:
    """Make a reward of lists from a function of one text; it passes list arguments one by one.

    The function may be async.

    right = each(lambda text, answer: float(text == answer))
    await right(["a", "b"], answer=["a", "c"])    # [1.0, 0.0]
    """

    @wraps(function)  # so that it has the function's name, and tells which arguments it takes
    async def rewards(texts: Sequence[str], **extra: Any) -> list[float]:
        values = []
        for index, text in enumerate(texts):
            own = {
                name: value[index] if isinstance(value, (list, tuple)) else value
                for name, value in extra.items()
            }
            values.append(float(await call(partial(function, text, **own))))
        return values

    return rewards
