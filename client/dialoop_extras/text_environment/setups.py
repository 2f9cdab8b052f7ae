"""Text environments without their policy, which authors write and services load by name.

setup = TextSetup(name="sums", tools=[lookup], tasks=tasks, query_format="What is {question}? ")
setup.query_of(tasks.get("train", "1"))      # "What is 1+2? "

A job trains on one with tasks: `[environment] use = "my_file:setup"`, `play = "text"`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import History, Message
from dialoop.environments.environment import Given
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.modes import Answered, InputMode
from dialoop.environments.tasks.arithmetic_tasks import ArithmeticTasks
from dialoop.environments.tasks.source import NoTasks, TaskSource
from dialoop.environments.tools.calculator import Calculator
from dialoop.environments.tools.text_tools import CallSyntax, ToolFunction
from dialoop.environments.transform import Traits
from dialoop.environments.views import TextView, text_response
from dialoop.errors import InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.import_paths import load_attribute, make_from_options
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Reward, Trajectory
from dialoop.user_functions import name_of

from dialoop_extras.text_environment.environment import Reward as TextReward
from dialoop_extras.text_environment.environment import (
    TextEnvironment,
    TextLimits,
    each,
    rewards_of,
    tool_failure,
)
from dialoop_extras.text_environment.tools import TextTools

if TYPE_CHECKING:
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import SamplingParams

    from dialoop_extras.text_environment.environment import TextPolicy

_SHOTS = """\
What is 13-3?
<request><Calculator>13-3<call>10<response>Result=10<submit>
What is 4*5?
<request><Calculator>4*5<call>20<response>Result=20<submit>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSetup:
    """The parts of a TextEnvironment except a policy and its tokenizer."""

    name: str
    tools: Mapping[str, ToolFunction] | Sequence[ToolFunction] | None = None
    reward: TextReward | None = None
    prompt: str = ""
    limits: TextLimits = field(default_factory=TextLimits)
    syntax: CallSyntax = field(default_factory=CallSyntax)
    description: str = ""
    # What a training job plays; the query is this text with the task's question in it.
    tasks: TaskSource = field(default_factory=NoTasks)
    query_format: str = "{question}"
    version: str = "1"

    def __post_init__(self) -> None:
        if "{question}" not in self.query_format:
            raise InvalidConfig(
                f"query_format of the text environment {self.name} is {self.query_format!r:.60}.",
                remedy="Put {question} where the task's question belongs.",
            )

    @property
    def reward_name(self) -> str:
        """Return the name of its reward in trajectories and metrics."""
        return "" if self.reward is None else name_of(self.reward)

    def query_of(self, task: TaskData) -> str:
        """Return the query of a task."""
        return self.query_format.replace("{question}", task.question)

    def extra_of(self, task: TaskData) -> dict[str, Any]:
        """Return the reward's extra arguments, one value in each list, by the names it takes.

        They are `answers` or `answer`, `questions` or `question`, and the task's metadata. Raise
        InvalidConfig (BAD_OPTIONS) when the reward needs another.
        """
        if self.reward is None:
            return {}
        try:
            parameters = list(inspect.signature(self.reward).parameters.values())[1:]
        except ValueError:
            parameters = []  # a callable without a signature
        values = {
            **task.metadata,
            "answers": task.answer,
            "questions": task.question,
        }
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters} | (set(values) if takes_any else set())
        values |= {"answer": task.answer, "question": task.question}
        missing = [
            p.name
            for p in parameters
            if p.name not in values
            and p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if missing:
            raise InvalidConfig(
                f"The reward {name_of(self.reward)} of the text environment {self.name} takes "
                f"{missing[0]!r}, which task {task.key!r:.60} does not have.",
                reason=Reason.BAD_OPTIONS,
                remedy=f"Take one of {', '.join(values)}, or add it to the task's metadata.",
            )
        return {name: [value] for name, value in values.items() if name in names}

    def as_environment(self) -> TextModeEnvironment:
        """Return it as an environment of sessions, which play it in text mode."""
        return TextModeEnvironment(self)

    def on(
        self,
        policy: TextPolicy,
        tokenizer: Tokenizer,
        *,
        sampling: SamplingParams,
        kind: type[TextEnvironment] = TextEnvironment,
    ) -> TextEnvironment:
        """Make the environment; `kind` may be a subclass, such as that of `compat.trl_text`."""
        return kind(
            policy,
            tokenizer,
            tools=self.tools,
            reward=self.reward,
            prompt=self.prompt,
            limits=self.limits,
            sampling=sampling,
            syntax=self.syntax,
        )


@dataclass(frozen=True, slots=True)
class TextModeEnvironment:
    """A TextSetup as an environment: sessions send it texts, and its tools answer inline.

    A policy that samples by token ids plays it with `dialoop_extras.text_environment.playing`.
    Limits in tokens hold there alone, since a session does not see tokens.
    """

    setup: TextSetup
    input_mode: InputMode = field(default=InputMode.TEXT, init=False)
    policy_role: str = field(default="assistant", init=False)

    def __post_init__(self) -> None:
        tasks = self.setup.tasks
        for split in tasks.splits[:1]:
            for key in tasks.keys(split)[:1]:
                self.setup.extra_of(tasks.get(split, key))

    @property
    def name(self) -> str:
        """Return the setup's name."""
        return self.setup.name

    @property
    def version(self) -> str:
        """Return the setup's version."""
        return self.setup.version

    @property
    def description(self) -> str:
        """Return the setup's description."""
        return self.setup.description

    @property
    def tasks(self) -> TaskSource:
        """Return the setup's tasks."""
        return self.setup.tasks

    @property
    def traits(self) -> Traits:
        """Return its turn limit, stop strings, tools and reward."""
        setup = self.setup
        return Traits(
            max_turns=setup.limits.max_turns,
            stop=(setup.syntax.call, setup.syntax.submit),
            tools=tuple(TextTools.by_name(setup.tools)),
            reward_names=() if setup.reward is None else (setup.reward_name,),
            roles=("tool",),
            needs_session=True,
        )

    def task_from(self, question: Given) -> TaskData:
        """Return the caller's question as a task; its data may hold the answer."""
        data = dict(question.data)
        text = question.query or data.get("query", "")
        if not text:
            raise InvalidInput(
                f"The reset of {self.name} brings no query.",
                reason=Reason.DATA_KEY_MISSING,
                remedy="Send query, or data with the key 'query'.",
            )
        return TaskData(key="", question=text, answer=data.get("answer", ""), metadata=data)

    def reset(self, task: TaskData, seed: int) -> Opening:
        """Start an episode with the setup's prompt and the query."""
        text = self.setup.prompt + self.setup.query_of(task)
        episode = Episode(
            task=task,
            seed=seed,
            history=History((Message(role="user", content=text),)),
            view=TextView(text=text),
        )
        return Opening(episode=episode, info=dict(task.metadata))

    async def step(self, episode: Episode, answered: Answered) -> Outcome:
        """Let the tools answer the policy's text, or end the episode and reward it."""
        view = episode.view
        assert isinstance(view, TextView)
        if episode.done:
            raise PreconditionFailed(
                "The episode is over.", reason=Reason.EPISODE_DONE, remedy="Reset to start another."
            )
        text = text_response(view, answered)
        message = Message(role=self.policy_role, content=text)
        after = replace(
            episode,
            history=episode.history.append(message),
            step_index=episode.step_index + 1,
            answer=message,
            view=TextView(text=view.text + text),
        )
        outcome = Outcome(episode=after, response=History((message,)))
        if self.setup.syntax.submit in text:
            outcome = outcome.terminate(DoneReason.SUBMITTED)
        elif not self.setup.syntax.spans(text):
            outcome = outcome.terminate(DoneReason.NO_CALL)
        else:
            outcome = await self._answer(outcome, text)
        is_over = outcome.episode.done and outcome.is_scorable
        return outcome.with_score(await self._score(episode.task, text)) if is_over else outcome

    async def score(self, task: TaskData, trajectory: Trajectory) -> tuple[Score, ...]:
        """Return the reward of the policy's last text, at the last turn."""
        texts = [m.text for m in trajectory.history if m.role == self.policy_role]
        last = await self._score(task, texts[-1] if texts else "")
        return (*(Score() for _ in trajectory.turns[1:]), last)

    async def _answer(self, outcome: Outcome, text: str) -> Outcome:
        """Return the outcome with the tools' answers, truncated when that was the last turn."""
        setup, view = self.setup, outcome.episode.view
        assert isinstance(view, TextView)
        tools = TextTools(
            setup.tools,
            syntax=setup.syntax,
            limit=setup.limits.max_tool_response,
            timeout_s=setup.limits.tool_timeout_s,
        )
        try:
            answer = await tools.answer(text)
        except Exception as error:
            return outcome.fail(tool_failure(error))
        answer += setup.syntax.response
        outcome = outcome.append(Message(role="tool", content=answer))
        episode = replace(outcome.episode, view=TextView(text=view.text + answer))
        num_calls = len(setup.syntax.spans(text))
        outcome = replace(outcome, episode=episode, num_tool_calls=num_calls)
        is_last = episode.step_index >= setup.limits.max_turns
        return outcome.truncate(DoneReason.MAX_TURNS) if is_last else outcome

    async def _score(self, task: TaskData, text: str) -> Score:
        setup = self.setup
        if setup.reward is None:
            return Score()
        timeout_s = setup.limits.reward_timeout_s
        extra = setup.extra_of(task)
        (reward,) = await rewards_of(setup.reward, [text], extra, timeout_s=timeout_s)
        if isinstance(reward, Failure):
            return Score(failures=(reward,))
        return Score(rewards=(Reward(name=setup.reward_name, value=reward),))


def calculator(*, operations: str = "+", low: int = 10, high: int = 99) -> TextSetup:
    """Return the built-in `calculator`; rewards compare with `answers`, one per query."""
    return TextSetup(
        name="calculator",
        tasks=ArithmeticTasks(operations=operations, low=low, high=high),
        query_format="What is {question}?\n",
        tools=[Calculator()],
        reward=each(exact_result),
        prompt=_SHOTS,
        description="Arithmetic in a running text, with a calculator.",
    )


def exact_result(text: str, answers: str) -> float:
    """Return 1 when the text holds `Result=<answer><submit>`, else 0."""
    result = text.partition("Result=")[2].partition("<submit>")[0]
    return float(result.strip() == str(answers).strip())


def load_text_setup(use: str, options: Mapping[str, Any] | None = None) -> TextSetup:
    """Return the setup `calculator`, or the one at `module:attribute`, or made by that function.

    Raise InvalidConfig when it is not a TextSetup.
    """
    target = {"calculator": calculator}.get(use) or load_attribute(
        use,
        what="text environment",
        reason=Reason.ENVIRONMENT_NOT_FOUND,
        built_in=["calculator"],
    )
    setup = make_from_options(target, dict(options or {}), use)
    if not isinstance(setup, TextSetup):
        raise InvalidConfig(
            f"{use} is not a text environment.",
            reason=Reason.NOT_A_TEXT_ENVIRONMENT,
            remedy="Name a TextSetup, or a function that returns one.",
        )
    return setup
