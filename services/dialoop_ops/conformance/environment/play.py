"""How the conformance kit plays an environment: cases, episodes, and what of them must not vary."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.environment import Environment, Given, Managed, OpensSlowly, Stateless
from dialoop.environments.episode import Opening, Outcome
from dialoop.environments.modes import Answered, InputMode, Text, Tokens
from dialoop.environments.spec import spec_of
from dialoop.environments.tasks.choosing import TaskChoice, choose_task
from dialoop.episode import ResetResult, StepResult
from dialoop.errors import Unsupported
from dialoop.local.client import LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.representations import content_of
from dialoop.tokens.tokenizer import Tokenizer

MAX_TURNS = 64
_TIME_OUTS = (Reason.TOOL_TIMEOUT, Reason.REWARD_TIMEOUT, Reason.STEP_TIMEOUT)
_QUESTION = "What is 1+2?"


class Broken(Exception):
    """An environment does not do what it must."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task and the policy's answers; the last one is repeated."""

    split: str
    key: str
    lines: tuple[Message, ...]

    def __str__(self) -> str:
        return f"{self.split} '{self.key}'" if self.key else f"question '{_QUESTION}'"

    @property
    def choice(self) -> TaskChoice:
        """Return what a reset asks for."""
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
    def hangs(self) -> bool:
        """Return whether a tool, a reward or the environment took longer than its time-out."""
        return any(f.reason in _TIME_OUTS for o in self.outcomes for f in o.failures)

    @property
    def last_answer(self) -> str:
        """Return what the policy said last."""
        lines = self.case.lines
        return content_of(lines[min(len(self.outcomes), len(lines)) - 1])

    @property
    def speakers(self) -> set[str]:
        """Return the roles of all messages."""
        history = self.outcomes[-1].history.prompt or ()
        return {message.role for message in history}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retaken:
    """The outcomes of one step, and the name of what it changed of the state in place, or ""."""

    changed: str
    line: Message
    outcomes: list[Outcome]


@dataclass(slots=True)
class CountingEnvironment:
    """An environment whose resets and steps are counted."""

    environment: Any
    num_resets: int = 0
    num_steps: int = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.environment, name)
        return self._open if name == "open" else attribute

    async def _open(self, task: Any, seed: int) -> Opening:
        self.num_resets += 1
        opening: Opening = await self.environment.open(task, seed)
        return opening

    async def acquire(self) -> None:
        """Do nothing: the bench holds the environment."""

    async def release(self) -> None:
        """Do nothing: the bench still holds the environment."""

    def reset(self, task: Any, seed: int) -> Opening:
        """Count and reset."""
        self.num_resets += 1
        opening: Opening = self.environment.reset(task, seed)
        return opening

    async def step(self, episode: Any, answered: Any) -> Outcome:
        """Count and step."""
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
        self.hanging: tuple[Played, ...] = ()
        self._answers, self._num_tasks = answers, num_tasks
        self.demonstrations: list[tuple[Case, History]] = []
        self.cases: list[Case] = []

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        self.demonstrations = self._find_demonstrations()
        self.cases = [case for case, _ in self.demonstrations] + self._usual_cases()
        return self

    async def __aexit__(self, *ended: Any) -> None:
        await self._client.__aexit__(*ended)

    async def open_case(self, case: Case, *, seed: int = 0) -> ResetResult:
        """Open an episode in a session of its own."""
        session_id = f"check-{next(self._numbers)}"
        opening = await self._open(self._client, case, session_id, seed)
        await self._client.close_session(session_id)
        return opening

    async def play_case(self, case: Case) -> Played:
        """Play a whole episode in a session of its own."""
        session_id = f"check-{next(self._numbers)}"
        opening = await self._open(self._client, case, session_id, 0)
        outcomes: list[StepResult] = []
        limit = self.environment.traits.max_turns or MAX_TURNS
        while len(outcomes) < limit and not (outcomes and outcomes[-1].done):
            line = case.lines[min(len(outcomes), len(case.lines) - 1)]
            outcome = await self._client.step(
                session_id, episode=1, step_index=len(outcomes), history=self._answer_of(line)
            )
            outcomes.append(outcome)
        await self._client.close_session(session_id)
        return Played(case=case, opening=opening, outcomes=tuple(outcomes))

    async def set_hanging_cases_aside(self) -> None:
        """Play all cases at the same time; those that ran into a time-out are not played again."""
        async with asyncio.TaskGroup() as playing:
            tasks = [playing.create_task(self._try_case(case)) for case in self.cases]
        self.hanging = tuple(p for p in (task.result() for task in tasks) if p and p.hangs)
        hanging = [played.case for played in self.hanging]
        self.cases = [case for case in self.cases if case not in hanging]
        self.demonstrations = [shown for shown in self.demonstrations if shown[0] not in hanging]

    async def _try_case(self, case: Case) -> Played | None:
        try:
            return await self.play_case(case)
        except Exception:  # the check whose case it is plays it again, and says so
            return None

    async def play_all(self) -> tuple[Played, ...]:
        """Play every case, one after the other; a second call returns the same episodes."""
        if not self._plays:
            self._plays = tuple([await self.play_case(case) for case in self.cases])
        return self._plays

    async def retry_first_step(self, case: Case) -> tuple[CountingEnvironment, list[StepResult]]:
        """Send the first step twice at once and once more; return the counts and the answers."""
        counted = CountingEnvironment(self.environment)
        async with LocalEnvironmentClient(counted) as client:
            await self._open(client, case, "s", 0)
            choice = case.choice
            fields = {
                "split": choice.split,
                "task_key": choice.task_key,
                "question": choice.question,
            }
            await client.reset("s", episode=1, **fields)  # type: ignore[arg-type]

            async def step() -> StepResult:
                answer = self._answer_of(case.lines[0])
                return await client.step("s", episode=1, step_index=0, history=answer)

            answers = [*await asyncio.gather(step(), step()), await step()]
        return counted, answers

    async def step_twice(self, case: Case, *, is_stateless: bool) -> AsyncIterator[Retaken]:
        """Take each step of an episode twice, and once more from its messages if it is stateless.

        So it is a later step that tells whether messages alone hold what the steps before changed.
        """
        task, seed = choose_task(self.environment, case.choice)
        if isinstance(self.environment, OpensSlowly):
            episode = (await self.environment.open(task, seed)).episode
        else:
            episode = self.environment.reset(task, seed).episode
        lines = case.lines if len(case.lines) > 1 else case.lines * 2
        for line in lines:
            state, held = episode.state, _held(episode.state)
            answer = self._answer_of(line)
            outcomes = [await self.environment.step(episode, answer) for _ in "ab"]
            if is_stateless and isinstance(self.environment, Stateless):
                resumed = self.environment.resume(task, seed, episode.history)
                outcomes.append(await self.environment.step(resumed, answer))
            changed = [k for k, v in _held(state).items() if k not in held or held[k] != v]
            yield Retaken(changed=changed[0] if changed else "", line=line, outcomes=outcomes)
            episode = outcomes[0].episode
            if episode.done:
                break
        if isinstance(self.environment, Managed):
            await self.environment.close(episode)

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
            question=choice.question,
        )

    def _answer_of(self, message: Message) -> Answered:
        if self.mode is InputMode.TEXT:
            return Text(response=message.text)
        if self.mode is InputMode.TOKENS:
            tokenizer = getattr(self.environment, "tokenizer", None)
            if not isinstance(tokenizer, Tokenizer):
                raise Broken("It has no tokenizer to encode answers.", "Give ChatEnv a Tokenizer.")
            return Tokens(response=tokenizer.encode(message.text).ids)
        return ChatHistory(response=History((message,)))

    def _tasks(self) -> list[tuple[str, str]]:
        source = self.environment.tasks
        tasks = [(s, key) for s in source.splits for key in source.keys(s)[: self._num_tasks]]
        return tasks or [("", "")]

    def _find_demonstrations(self) -> list[tuple[Case, History]]:
        demonstrate = getattr(self.environment, "demonstration", None)
        demonstrations: list[tuple[Case, History]] = []
        for number, (split, key) in enumerate(self._tasks()):
            if demonstrate is None or not key:
                break
            task = self.environment.tasks.get(split, key)
            try:
                history = demonstrate(task, random.Random(number))
            except Unsupported:
                break
            lines = tuple(message for message in history if message.role == self.policy_role)
            demonstrations.append((Case(split=split, key=key, lines=lines), history))
        return demonstrations

    def _usual_cases(self) -> list[Case]:
        cases = []
        for split, key in self._tasks():
            answer = self.environment.tasks.get(split, key).answer if key else "3"
            texts = (*self._answers, "I do not know.", f"<answer>{answer}</answer>")
            calls = self._sample_calls()
            submit = f"Result={answer}<submit>"
            lines = [self._say(text) for text in texts] + [*calls, self._say(submit)]
            cases += [Case(split=split, key=key, lines=(line,)) for line in lines]
            cases.append(Case(split=split, key=key, lines=tuple(reversed(lines))))
            if len(calls) > 1:  # a tool may read what another has changed
                cases.append(Case(split=split, key=key, lines=(*calls, *reversed(calls))))
        return cases

    def _sample_calls(self) -> list[Message]:
        """Return messages that call each tool in the syntax that its transform declares."""
        transforms = getattr(self.environment, "transforms", ())
        calls = [call for t in transforms for call in t.sample_calls(self.policy_role)]
        return calls or [
            self._say(f"<request><{tool}>1<call>") for tool in self.environment.traits.tools
        ]

    def _say(self, text: str) -> Message:
        return Message(role=self.policy_role, content=text)


# What can be compared; an interpreter, say, cannot.
_COMPARED = (list, dict, set, bytearray, tuple, str, bytes, int, float, type(None))


def _held(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what of the state a step could change in place."""
    return {k: copy.deepcopy(v) for k, v in state.items() if isinstance(v, _COMPARED)}


def comparable(answer: Any) -> Any:
    """Return what must be the same each time; of failures owner and reason: messages carry ids."""
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
