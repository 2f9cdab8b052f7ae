"""Episodes in one running text: the model asks for tools inline and reads their answers there.

    environment = TextEnvironment(policy, tokenizer, tools=[calculate], reward=exact, prompt=SHOTS)
    run = await environment.run(["What is 13-3?"], answers=["10"])
    run.histories[0].text
    # "What is 13-3?<request><calculate>13-3<call>10<response>Result=10<submit>"

A turn ends at `<call>` or `<submit>`; the tool's answer and `<response>` follow it inline, masked.
Only what the model wrote can call, submit or end an episode.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from dialoop.environments.failures import failure_of
from dialoop.environments.tools.call_syntax import CallSyntax
from dialoop.environments.tools.calling import name_of
from dialoop.environments.tools.text_tools import ToolFunction
from dialoop.errors import DialoopError, InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop.sequences import Source
from dialoop.text_environment.history import TextHistory
from dialoop.text_environment.tools import TextTools
from dialoop.trajectory import Failure, Owner, SamplingParams, StopReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.episode import Sample
    from dialoop.tokens.tokenizer import Tokenizer

Reward = Callable[..., Any]
"""Takes the last texts the model wrote, a list, and what `run` was given; gives a list.

Sync or async. `each` makes one of a function of a single text.
"""


class TextPolicy(Protocol):
    """Whoever continues token ids: an InferenceClient, or a twin."""

    async def generate(
        self, *, token_ids: Iterable[int], sampling: SamplingParams, turn: int
    ) -> tuple[Sample, ...]:
        """One answer, with `sequence` whole and `text` set."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRun:
    """What `run` returns, one entry per query; unpacks as the seed's five lists.

    queries, responses: token ids; masks: 1 on the response tokens that the model wrote; rewards:
    None where none could be given (the history's failures say why).
    """

    queries: list[list[int]]
    responses: list[list[int]]
    masks: list[list[int]]
    rewards: list[float | None]
    histories: list[TextHistory]

    @classmethod
    def of(cls, histories: Iterable[TextHistory]) -> TextRun:
        """The lists of these episodes."""
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
    """When an episode ends by itself; max_length counts tokens, None is no limit."""

    max_turns: int = 4
    max_tool_response: int = 100
    max_length: int | None = None
    tool_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        limits = (self.max_turns, self.max_tool_response, self.tool_timeout_s, self.max_length or 1)
        if min(limits) <= 0:
            raise InvalidConfig(
                "A limit of the text environment is not positive.",
                remedy="Set max_turns, max_tool_response, max_length and tool_timeout_s above 0.",
            )


@dataclass(frozen=True, slots=True)
class TextEnvironment:
    """Runs queries against a policy, tools and a reward."""

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
        """Play one episode per query, all at the same time; `extra` goes to the reward.

        A tool or engine that fails ends its episode, which then has a failure and no reward.
        """
        if not queries:
            raise InvalidInput(
                "There is no query.", reason=Reason.QUERIES_MISSING, remedy="Give at least one."
            )
        if not all(self.prompt + query for query in queries):
            raise InvalidInput(
                "A query is empty.",
                reason=Reason.QUERIES_MISSING,
                remedy="Give a query or a prompt.",
            )
        async with asyncio.TaskGroup() as playing:
            tasks = [playing.create_task(self.play(query)) for query in queries]
        return TextRun.of(await self._rewarded([task.result() for task in tasks], extra))

    async def play(self, query: str) -> TextHistory:
        """One episode of one query, without its reward."""
        history = self._opening(query)
        for turn in range(self.limits.max_turns):
            history = await self._generated(history, turn)
            if history.completed:
                return history
            history = await self._answered(history, turn)
            if history.completed:
                return history
        return self.out_of_turns(history)

    def out_of_turns(self, history: TextHistory) -> TextHistory:
        """An episode whose last turn was a call."""
        return history.complete(truncated=True)

    def rewarded_text(self, history: TextHistory) -> str:
        """What the reward reads of an episode: what the model wrote last."""
        return history.last_model_text

    def is_over(self, history: TextHistory, text: str, last_id: int) -> bool:
        """Whether the model's turn, `text`, was meant to be the last."""
        return self.syntax.submit in text or last_id in self.tokenizer.end_of_turn_ids

    async def answer(self, text: str) -> str:
        """What the tools say to the model's turn."""
        tools = TextTools(
            self.tools,
            syntax=self.syntax,
            limit=self.limits.max_tool_response,
            timeout_s=self.limits.tool_timeout_s,
        )
        return await tools.answer(text)

    def _opening(self, query: str) -> TextHistory:
        text = self.prompt + query
        if not text:
            raise InvalidInput("The query is empty.", remedy="Give a query or a prompt.")
        # The author's prompt may show the markers; the query is a stranger's and may not.
        ids = (
            *self.tokenizer.encode(self.prompt, trusted=True).ids,
            *self.tokenizer.encode(query).ids,
        )
        if not self.tokenizer.spells_special(query):
            ids = self.tokenizer.encode(text, trusted=True).ids
        return TextHistory().append_segment(text, ids, source=Source.PROMPT)

    async def _generated(self, history: TextHistory, turn: int) -> TextHistory:
        stop = (self.syntax.call, self.syntax.submit)
        sampling = replace(self.sampling, stop=tuple(dict.fromkeys((*self.sampling.stop, *stop))))
        tokens = history.tokens
        try:
            (sample,) = await self.policy.generate(token_ids=tokens, sampling=sampling, turn=turn)
        except DialoopError as error:
            failure = Failure(owner=Owner.INFERENCE, reason=error.reason, message=str(error))
            return replace(history, failures=(*history.failures, failure)).complete(truncated=True)
        sampled = sample.sequence.token_ids[len(tokens) :].tolist()
        if not sampled:
            return history.complete(truncated=True)  # the context is full
        text = self.tokenizer.decode(sampled)
        history = history.append_segment(
            text or "\ufffd",  # ids that spell nothing are tokens all the same
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
        return self._ended(history, sample.stop_reason, sampled[-1], text)

    def _ended(
        self, history: TextHistory, stop: StopReason, last_id: int, text: str
    ) -> TextHistory:
        """The history, complete when the model's turn was the last."""
        if self._is_too_long(history):
            return history.complete(truncated=True)
        if self.is_over(history, text, last_id):
            return history.complete()
        if not self.syntax.spans(text):
            return history.complete(truncated=stop is not StopReason.STOP)
        return history

    async def _answered(self, history: TextHistory, turn: int) -> TextHistory:
        try:
            text = await self.answer(history.last_text_segment)
        except Exception as error:
            failure = failure_of(error, owner=Owner.TOOL, reason=Reason.TOOL_FAILED, what="A tool")
            return replace(history, failures=(*history.failures, failure)).complete(truncated=True)
        # What a tool says is a stranger's text; the marker after it is ours.
        said = self.tokenizer.encode(text).ids
        closing = self.tokenizer.encode(self.syntax.response, trusted=True).ids
        history = history.append_segment(
            text + self.syntax.response, (*said, *closing), source=Source.TOOL, turn=turn
        )
        return history.complete(truncated=True) if self._is_too_long(history) else history

    def _is_too_long(self, history: TextHistory) -> bool:
        limit = self.limits.max_length
        return limit is not None and len(history.tokens) > limit

    async def _rewarded(
        self, histories: list[TextHistory], extra: Mapping[str, Any]
    ) -> list[TextHistory]:
        if self.reward is None:
            return histories
        texts = [self.rewarded_text(history) for history in histories]
        try:
            values = self.reward(texts, **extra)
            given = list(await values if inspect.isawaitable(values) else values)
            rewards = [float(value) for value in given]
        except Exception as error:
            what = f"The reward {name_of(self.reward)}"
            failure = failure_of(error, owner=Owner.REWARD, reason=Reason.REWARD_FAILED, what=what)
            return [replace(h, failures=(*h.failures, failure)) for h in histories]
        if len(rewards) != len(histories):
            raise InvalidInput(
                f"The reward gave {len(rewards)} values for {len(histories)} episodes.",
                reason=Reason.REWARD_FAILED,
                remedy="Give one number per text, or wrap a function of one text with `each`.",
            )
        return [
            history if history.failures else history.rewarded(reward)
            for history, reward in zip(histories, rewards, strict=True)
        ]


def each(function: Callable[..., float]) -> Reward:
    """A reward for lists from a function of one text; list arguments are taken one by one.

    each(lambda text, answer: float(text == answer))(["a", "b"], answer=["a", "c"])   # [1.0, 0.0]
    """

    def rewards(texts: Sequence[str], **extra: Any) -> list[float]:
        found = []
        for index, text in enumerate(texts):
            own = {
                name: value[index] if isinstance(value, (list, tuple)) else value
                for name, value in extra.items()
            }
            found.append(float(function(text, **own)))
        return found

    return rewards
