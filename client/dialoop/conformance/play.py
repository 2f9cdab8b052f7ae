"""How the conformance kit plays an environment: cases, episodes, and what they told."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.environment import Given, Managed, OpensSlowly
from dialoop.environments.modes import InputMode, Text, Tokens
from dialoop.environments.spec import spec_of
from dialoop.environments.tasks.choosing import TaskChoice, choose_task
from dialoop.errors import Unsupported
from dialoop.local.client import LocalEnvironmentClient
from dialoop.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import Self

    from dialoop.environments.environment import Environment
    from dialoop.environments.episode import Opening, Outcome
    from dialoop.environments.modes import Answered
    from dialoop.episode import ResetResult, StepResult

MAX_TURNS = 64
_QUESTION = "What is 1+2?"


class Broken(Exception):
    """An environment does not do what it must."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task, and what the policy says to it, the last line again and again."""

    split: str
    key: str
    lines: tuple[Message, ...]

    def __str__(self) -> str:
        return f"{self.split} '{self.key}'" if self.key else f"question '{_QUESTION}'"

    @property
    def choice(self) -> TaskChoice:
        """What a reset asks for."""
        if self.key:
            return TaskChoice(split=self.split, task_key=self.key)
        return TaskChoice(question=Given(query=_QUESTION, data={"answer": "3"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One episode."""

    case: Case
    opening: ResetResult
    outcomes: tuple[StepResult, ...]

    @property
    def said(self) -> str:
        """What the policy said last."""
        lines = self.case.lines
        return lines[min(len(self.outcomes), len(lines)) - 1].text

    @property
    def speakers(self) -> set[str]:
        """Roles of all messages."""
        history = self.outcomes[-1].history.prompt or ()
        return {message.role for message in history}


@dataclass(slots=True)
class Counted:
    """An environment whose resets and steps are counted."""

    environment: Any
    num_resets: int = 0
    num_steps: int = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.environment, name)
        return self._opened if name == "open" else found

    async def _opened(self, task: Any, seed: int) -> Opening:
        self.num_resets += 1
        opening: Opening = await self.environment.open(task, seed)
        return opening

    async def acquire(self) -> None:
        """Held by the bench already."""

    async def release(self) -> None:
        """Held by the bench still."""

    def reset(self, task: Any, seed: int) -> Opening:
        """Count, and reset."""
        self.num_resets += 1
        opening: Opening = self.environment.reset(task, seed)
        return opening

    async def step(self, episode: Any, answered: Any) -> Outcome:
        """Count, and step."""
        self.num_steps += 1
        outcome: Outcome = await self.environment.step(episode, answered)
        return outcome


class Bench:
    """An environment in this process, and the cases to play it with."""

    def __init__(self, environment: Environment, *, answers: Sequence[str], num_tasks: int) -> None:
        self.environment = environment
        self.mode = InputMode.parse(spec_of(environment).input_mode)
        self.policy_role = spec_of(environment).policy_role
        self.own_roles = {
            self.policy_role,
            getattr(environment, "system_role", "system"),
            getattr(environment, "user_role", "user"),
        }
        self._client = LocalEnvironmentClient(environment)
        self._numbers = count()
        self._plays: tuple[Played, ...] = ()
        self._answers, self._num_tasks = answers, num_tasks
        self.demonstrated: list[tuple[Case, History]] = []
        self.cases: list[Case] = []

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        self.demonstrated = self._demonstrated()
        self.cases = [case for case, _ in self.demonstrated] + self._canned()
        return self

    async def __aexit__(self, *ended: Any) -> None:
        await self._client.__aexit__(*ended)

    async def opened(self, case: Case, *, seed: int = 0) -> ResetResult:
        """The opening of an episode in a session of its own."""
        session_id = f"check-{next(self._numbers)}"
        opening = await self._open(self._client, case, session_id, seed)
        await self._client.close_session(session_id)
        return opening

    async def played(self, case: Case) -> Played:
        """The whole episode, in a session of its own."""
        session_id = f"check-{next(self._numbers)}"
        opening = await self._open(self._client, case, session_id, 0)
        outcomes: list[StepResult] = []
        limit = self.environment.traits.max_turns or MAX_TURNS
        while len(outcomes) < limit and not (outcomes and outcomes[-1].done):
            line = case.lines[min(len(outcomes), len(case.lines) - 1)]
            outcome = await self._client.step(
                session_id, episode=1, step_index=len(outcomes), history=self._said(line)
            )
            outcomes.append(outcome)
        await self._client.close_session(session_id)
        return Played(case=case, opening=opening, outcomes=tuple(outcomes))

    async def plays(self) -> tuple[Played, ...]:
        """Every case, one after the other; played once."""
        if not self._plays:
            self._plays = tuple([await self.played(case) for case in self.cases])
        return self._plays

    async def retried(self, case: Case) -> tuple[Counted, list[StepResult]]:
        """The first step, asked for twice at once and once more, and what was done for it."""
        counted = Counted(self.environment)
        async with LocalEnvironmentClient(counted) as client:
            await self._open(client, case, "s", 0)
            choice = case.choice
            fields = {"split": choice.split, "task_key": choice.task_key, "given": choice.question}
            await client.reset("s", episode=1, **fields)  # type: ignore[arg-type]

            async def step() -> StepResult:
                said = self._said(case.lines[0])
                return await client.step("s", episode=1, step_index=0, history=said)

            answers = [*await asyncio.gather(step(), step()), await step()]
        return counted, answers

    async def stepped_twice(self, case: Case) -> tuple[str, list[Outcome]]:
        """The same step of the same episode twice; which of its state changed, if any."""
        task, seed = choose_task(self.environment, case.choice)
        if isinstance(self.environment, OpensSlowly):
            episode = (await self.environment.open(task, seed)).episode
        else:
            episode = self.environment.reset(task, seed).episode
        held = {k: v for k, v in episode.state.items() if isinstance(v, _CONTAINERS)}
        kept = copy.deepcopy(held)
        outcomes = [await self.environment.step(episode, self._said(case.lines[0])) for _ in "ab"]
        if isinstance(self.environment, Managed):
            await self.environment.close(outcomes[-1].episode)
        return next((name for name, old in kept.items() if held[name] != old), ""), outcomes

    async def _open(
        self, client: LocalEnvironmentClient, case: Case, session_id: str, seed: int
    ) -> ResetResult:
        choice = case.choice
        await client.create_session(session_id, self.environment.name)
        return await client.reset(
            session_id,
            episode=1,
            split=choice.split,
            task_key=choice.task_key,
            seed=seed,
            given=choice.question,
        )

    def _said(self, message: Message) -> Answered:
        if self.mode is InputMode.TEXT:
            return Text(response=message.text)
        if self.mode is InputMode.TOKENS:
            tokenizer = getattr(self.environment, "tokenizer", None)
            if not isinstance(tokenizer, Tokenizer):
                raise Broken("Its tokenizer is not at hand.", "Give ChatEnv a Tokenizer.")
            return Tokens(response=tokenizer.encode(message.text).ids)
        return ChatHistory(response=History((message,)))

    def _tasks(self) -> list[tuple[str, str]]:
        source = self.environment.tasks
        found = [(s, key) for s in source.splits for key in source.keys(s)[: self._num_tasks]]
        return found or [("", "")]

    def _demonstrated(self) -> list[tuple[Case, History]]:
        demonstrate = getattr(self.environment, "demonstration", None)
        found: list[tuple[Case, History]] = []
        for number, (split, key) in enumerate(self._tasks()):
            if demonstrate is None or not key:
                break
            task = self.environment.tasks.get(split, key)
            try:
                history = demonstrate(task, random.Random(number))
            except Unsupported:
                break
            lines = tuple(message for message in history if message.role == self.policy_role)
            found.append((Case(split=split, key=key, lines=lines), history))
        return found

    def _canned(self) -> list[Case]:
        cases = []
        for split, key in self._tasks():
            answer = self.environment.tasks.get(split, key).answer if key else "3"
            said = (
                *self._answers,
                "I do not know.",
                f"<answer>{answer}</answer>",
                *(f"<request><{tool}>1<call>" for tool in self.environment.traits.tools),
                f"Result={answer}<submit>",
            )
            role = self.policy_role
            lines = [Message(role=role, content=text) for text in said]
            cases += [Case(split=split, key=key, lines=(line,)) for line in lines]
            cases.append(Case(split=split, key=key, lines=tuple(reversed(lines))))
        return cases


# What may be changed in place and can be compared; an interpreter, say, is neither.
_CONTAINERS = (list, dict, set, bytearray)


def told(answer: Any) -> Any:
    """What must be the same each time; failures by owner and reason, as messages carry ids."""
    if not hasattr(answer, "rewards"):
        return (answer.history, answer.text, answer.tokens, dict(answer.info))
    done = getattr(answer, "episode", answer)
    return (
        answer.history,
        answer.text,
        answer.tokens,
        answer.rewards,
        [(failure.owner, failure.reason) for failure in answer.failures],
        (done.terminated, done.truncated, done.done_reason),
        answer.num_tool_calls,
    )
