"""MLGym's research tasks as an environment: a container per episode, shell commands as answers.

use = "dialoop_extras.mlgym:mlgym"
options = { tasks = ["prisonersDilemma"], format_penalty = 0.1 }

The policy writes one command in a code block, reads its output, and submits with `submit`. The
reward is the score of the last evaluation minus the baseline's. MLGym is not on PyPI: install it
from its repository and register its tasks, or pass `make`, a function of a task's name.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dialoop.chat import History, Message
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndWhenIncomplete, MaxTurns
from dialoop.environments.episode import Episode, Opening, Outcome, Score, TaskData
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig, Unavailable
from dialoop.failures import failure_of
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.trajectory import DoneReason, Failure, Owner, Reward
from dialoop.user_functions import call, call_now

SYSTEM_PROMPT = (
    "You improve machine learning code in a shell. Answer with your thoughts and one command in a "
    "code block, between lines of ```. `validate` evaluates your work, `submit` hands it in."
)
_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_BENCH, _SCORE, _BASELINE, _ILL_FORMED = "mlgym", "mlgym_score", "mlgym_baseline", "mlgym_ill"


class MlgymBench(Protocol):
    """The used part of an MLGymEnv; `task` has its baseline scores after a reset."""

    task_args: Any
    task: Any

    def reset(self, *, seed: int | None = None) -> Any:
        """Set the task's workspace up; building a container takes minutes."""
        ...

    def step(self, action: str) -> tuple[str | None, float, bool, Mapping[str, Any]]:
        """Return the output, 0, whether it is over, and {"score": [...]} after an evaluation."""
        ...

    def close(self) -> None:
        """End the container."""
        ...


Make = Callable[[str], MlgymBench | Awaitable[MlgymBench]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlgymCommands(Transform):
    """Run the command of each answer; reward the last evaluation minus the baseline.

    metric: the number of an evaluation that counts; empty means its only one. format_penalty: the
    cost of each answer without exactly one code block, of which no command runs; with 0 there is no
    such reward.
    """

    metric: str = ""
    format_penalty: float = 0.0
    max_steps: int = 10

    @property
    def traits(self) -> Traits:
        """Return its rewards, and that steps need a session."""
        names = ("mlgym", *(("format",) if self.format_penalty else ()))
        return Traits(
            max_turns=self.max_steps,
            tools=("shell",),
            reward_names=names,
            roles=("user",),
            needs_messages=True,
            needs_session=True,
        )

    async def step(self, outcome: Outcome) -> Outcome:
        """Run the command and add its output."""
        episode = outcome.episode
        if episode.done:
            return outcome
        blocks = _BLOCK.findall(episode.answer_text)
        if len(blocks) != 1:
            ill = episode.state.get(_ILL_FORMED, 0) + 1
            return outcome.remember(**{_ILL_FORMED: ill}).append(
                _user_message(f"Write one command in a code block; your answer has {len(blocks)}.")
            )
        outcome = replace(outcome, num_tool_calls=outcome.num_tool_calls + 1)
        try:
            printed, _, done, info = await call(episode.state[_BENCH].step, blocks[0].strip())
            outcome = self._record_score(outcome, info)
        except Exception as error:
            failure = failure_of(
                error, owner=Owner.ENVIRONMENT, reason=Reason.MLGYM_FAILED, what="MLGym"
            )
            return outcome.fail(failure)
        if info.get("exit_status") == "early_exit":
            return outcome.fail(
                Failure(
                    owner=Owner.ENVIRONMENT,
                    reason=Reason.CONTAINER_LOST,
                    message="MLGym restarted the container, so the episode's work is lost.",
                )
            )
        if done:
            is_submitted = info.get("exit_status") == "submitted"
            return outcome.terminate(DoneReason.SUBMITTED if is_submitted else DoneReason.CONTENT)
        left = self.max_steps - episode.step_index
        return outcome.append(
            _user_message(f"{printed or '(nothing printed)'}\n({left} steps left)")
        )

    async def score(self, episode: Episode) -> Score:
        """Reward an episode that is over; without an evaluation the reward is 0."""
        if not episode.done or _BENCH not in episode.state:
            return Score()
        evaluated = episode.state.get(_SCORE)
        gained = 0.0 if evaluated is None else evaluated - episode.state[_BASELINE]
        rewards = [Reward(name="mlgym", value=gained, success=gained > 0)]
        if self.format_penalty:
            cost = -self.format_penalty * episode.state.get(_ILL_FORMED, 0)
            rewards.append(Reward(name="format", value=cost))
        return Score(rewards=tuple(rewards))

    async def close(self, episode: Episode) -> None:
        """End the episode's container."""
        if _BENCH in episode.state:
            await call(episode.state[_BENCH].close)

    def number(self, scores: Mapping[str, Any]) -> float:
        """Return the metric's value in an evaluation."""
        if not self.metric and len(scores) != 1:
            raise InvalidConfig(
                f"`metric` is not set, and the evaluation has {', '.join(scores) or 'no number'}.",
                remedy="Set `metric` to the name of the one that counts.",
            )
        return float(scores[self.metric or next(iter(scores))])

    def _record_score(self, outcome: Outcome, info: Mapping[str, Any]) -> Outcome:
        scores = info.get("score")
        return outcome.remember(**{_SCORE: self.number(scores[-1])}) if scores else outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class MlgymEnv(ChatEnv):
    """A ChatEnv that makes a bench for each episode."""

    make: Make = field(repr=False)
    commands: MlgymCommands

    async def open(self, task: TaskData, seed: int) -> Opening:
        """Make the task's bench; Unavailable (MLGYM_FAILED) when that fails."""
        opening = ChatEnv.reset(self, task, seed)
        try:
            bench, text, baseline = await call(self._make_bench, task.key, seed)
        except InvalidConfig:
            raise
        except Exception as error:
            failure = failure_of(
                error, owner=Owner.ENVIRONMENT, reason=Reason.MLGYM_FAILED, what="MLGym"
            )
            raise Unavailable(
                failure.message,
                reason=Reason.MLGYM_FAILED,
                remedy="See the service's log; often there is no container runtime.",
            ) from error
        history = opening.episode.history
        shown = History((*history[: len(history) - 1], _user_message(text)))
        opening = replace(opening, episode=replace(opening.episode, history=shown))
        return opening.remember(**{_BENCH: bench, _BASELINE: baseline})

    def _make_bench(self, task: str, seed: int) -> tuple[MlgymBench, str, float]:
        bench = call_now(self.make, task)
        try:
            bench.reset(seed=seed)
            baseline = self.commands.number(bench.task.args.baseline_scores[0])
            return bench, str(bench.task_args.description), baseline
        except BaseException:
            bench.close()
            raise


def mlgym(
    *,
    tasks: Sequence[str],
    make: Make | str | None = None,
    metric: str = "",
    format_penalty: float = 0.0,
    max_steps: int = 10,
    system_prompt: str = SYSTEM_PROMPT,
) -> MlgymEnv:
    """Return the environment of MLGym tasks by name; `make` may be "module:function"."""
    maker = make or _make_registered
    if isinstance(maker, str):
        maker = load_attribute(maker, what="MLGym environment", reason=Reason.ENVIRONMENT_NOT_FOUND)
    commands = MlgymCommands(metric=metric, format_penalty=format_penalty, max_steps=max_steps)
    rows = [{"key": task, "query": f"MLGym's {task}."} for task in tasks]
    return MlgymEnv(
        name="mlgym",
        description="Machine learning tasks of MLGym, in a container.",
        tasks=RowTasks(rows),
        transforms=(EndWhenIncomplete(), commands, MaxTurns(max_steps)),
        system_prompt=system_prompt,
        make=maker,
        commands=commands,
    )


def _make_registered(task: str) -> MlgymBench:
    """Make the task that MLGym registered with gymnasium."""
    try:
        import gymnasium
        import mlgym.environment  # noqa: F401  # registers the tasks with gymnasium
    except ImportError as error:
        raise InvalidConfig(
            "MLGym is not installed.",
            reason=Reason.PACKAGE_MISSING,
            remedy="Install it from its repository, or pass `make`.",
        ) from error
    bench: MlgymBench = gymnasium.make(f"mlgym/{task}", devices=["cpu_0"]).unwrapped
    return bench


def _user_message(text: str) -> Message:
    return Message(role="user", content=text)
