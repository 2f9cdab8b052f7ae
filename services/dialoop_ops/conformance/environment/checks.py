"""Check what every environment must do: a kit for its author, behind `dialoop env check`.

    findings = await check_environment(environment, answers=["[apple]", "Is it alive?"])
    assert all(finding.is_ok for finding in findings)

The kit plays the environment in this process: its own demonstrations where it has some, the
caller's answers, and a few answers that fit many environments. It shows the environment's
exceptions as they are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from dialoop.environments.environment import Environment, Stateless
from dialoop.environments.modes import InputMode
from dialoop.environments.tools.tool_use import TOO_LONG
from dialoop.errors import DialoopError, NotFound
from dialoop.failures import REPEATS
from dialoop.representations import content_of
from dialoop.trajectory import Owner

from dialoop_ops.conformance.environment.play import (
    MAX_TURNS,
    Bench,
    Broken,
    comparable,
)
from dialoop_ops.conformance.environment.play import Case as Case

_MANY_KEYS = 1000
_SPEAKERS = ("system", "user")
_CALLABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: Finding(check="reset", problem="", note="6 episodes").

    problem: what is wrong, empty when all is well; note: what was looked at.
    """

    check: str
    problem: str = ""
    remedy: str = ""
    note: str = ""

    @property
    def is_ok(self) -> bool:
        """Return whether the environment does what it must."""
        return not self.problem


async def check_environment(
    environment: Environment, *, answers: Sequence[str] = (), num_tasks: int = 3
) -> tuple[Finding, ...]:
    """Run every check in order; `answers` are further texts to send to the environment.

    The log shows each error of the environment once. Cases in which something hangs are played
    once, at the same time, so that their time-out passes only once.
    """
    REPEATS.forget()
    async with Bench(environment, answers=answers, num_tasks=num_tasks) as bench:
        await bench.set_hanging_cases_aside()
        return tuple([await finding_of(name, check(bench)) for name, check in CHECKS.items()])


async def finding_of(name: str, check: Awaitable[str]) -> Finding:
    """Return what a check finds, whatever it raises."""
    try:
        return Finding(check=name, note=await check)
    except Broken as broken:
        return Finding(check=name, problem=broken.problem, remedy=broken.remedy)
    except DialoopError as error:
        description = error.__cause__ or error.message
        kind = type(error.__cause__ or error).__name__
        return Finding(check=name, problem=f"It raises {kind}: {description}", remedy=error.remedy)
    except Exception as error:
        return Finding(check=name, problem=f"It raises {type(error).__name__}: {error}")


async def _tasks(bench: Bench) -> str:
    """Check that splits have tasks, keys are unique and stay, and an unknown one is NotFound."""
    tasks = bench.environment.tasks
    notes = []
    for split in tasks.splits:
        keys = list(tasks.keys(split)[:_MANY_KEYS])
        if not keys:
            raise Broken(f"Split '{split}' has no task.", "Leave the split out, or fill it.")
        if len(set(keys)) < len(keys):
            raise Broken(f"Split '{split}' has two tasks of one key.", "Make keys unique.")
        if keys != list(tasks.keys(split)[:_MANY_KEYS]):
            raise Broken(
                f"The keys of '{split}' differ each time.",
                "Choose keys once, where the source is made, and shuffle with ListTasks.",
            )
        if tasks.get(split, keys[0]) != tasks.get(split, keys[0]):
            raise Broken(f"Task '{keys[0]}' differs each time.", "Let the key decide the task.")
        notes.append(f"{split} {tasks.num_tasks(split)}")
        try:
            tasks.get(split, "no such task: dialoop env check")
        except NotFound:
            continue
        raise Broken(
            f"Split '{split}' has a task for any key.", "Raise task_not_found for an unknown key."
        )
    return ", ".join(notes) or "questions come from the caller"


async def _resets(bench: Bench) -> str:
    """Check that the same task and seed open the same episode."""
    for case in bench.cases:
        for seed in (0, 1):
            first, second = [await bench.open_case(case, seed=seed) for _ in "ab"]
            if comparable(first) != comparable(second):
                raise Broken(
                    f"{case}: two resets with seed {seed} open differently.",
                    "Draw chance from the seed alone: random.Random(seed), or episode.rng(...).",
                )
    return f"{len(bench.cases)} tasks, two seeds each"


async def _retries(bench: Bench) -> str:
    """Check that a retried reset or step works once, also while the first is under way."""
    for case in bench.cases:
        counted, answers = await bench.retry_first_step(case)
        if counted.num_resets != 1 or counted.num_steps != 1:
            raise Broken(
                f"{case}: one reset and one step, retried, made {counted.num_resets} resets and "
                f"{counted.num_steps} steps.",
                "Answers must equal themselves: give messages as dialoop.chat makes them.",
            )
        if any(comparable(answer) != comparable(answers[0]) for answer in answers):
            raise Broken(f"{case}: a retry got another answer.", "Return values, not live objects.")
    return f"{len(bench.cases)} episodes; no tool ran twice"


async def _ends(bench: Bench) -> str:
    """Check that every episode ends, and no later than max_turns says."""
    limit = bench.environment.traits.max_turns
    most = 0
    for played in await bench.play_all():
        if not played.outcomes[-1].done:
            turns = len(played.outcomes)
            limit_text = f"max_turns says {limit}" if limit else "it names no max_turns"
            raise Broken(
                f"{played.case}: it is not over after {turns} turns of "
                f"{played.case.lines[-1].text!r}; {limit_text}.",
                "Add OneTurn, MaxTurns or StepCounter to the transforms.",
            )
        most = max(most, len(played.outcomes))
    num_episodes = len(await bench.play_all())
    return f"{num_episodes} episodes of at most {most} turns (limit {limit or MAX_TURNS})"


async def _rewards(bench: Bench) -> str:
    """Check that rewards are finite and named as declared, and that their functions do not fail."""
    declared = bench.environment.traits.reward_names
    seen: set[str] = set()
    given: set[str] = set()
    for played in (*bench.hanging, *await bench.play_all()):
        for outcome in played.outcomes:
            for failure in outcome.failures:
                if failure.owner is Owner.REWARD:
                    raise Broken(
                        f"{played.case}: after {played.last_answer!r}: {failure.message}",
                        "If it raised, the exception is logged above. Return a finite number; in "
                        "a chat, None is no reward.",
                    )
            seen |= {reward.name for reward in outcome.rewards}
            given |= {reward.name for reward in outcome.rewards if not reward.absent}
    if not seen <= set(declared):
        raise Broken(
            f"Rewards {', '.join(sorted(seen - set(declared)))} are not in traits.reward_names.",
            "Declare each name there.",
        )
    silent = ", ".join(name for name in declared if name not in given)
    if silent and any(played.outcomes[-1].done for played in await bench.play_all()):
        raise Broken(
            f"No episode got the reward {silent}: its function returned None each time.",
            "Return a number. If only some answers earn it, check with one: --say 'ANSWER'.",
        )
    return ", ".join(sorted(seen)) or "none"


async def _traits(bench: Bench) -> str:
    """Check that the roles and the tools are as declared, and that no tool fails."""
    environment = bench.environment
    for name in environment.traits.tools:
        if not _CALLABLE_NAME.fullmatch(name):
            raise Broken(
                f"The policy cannot call a tool by the name '{name}'.",
                "Name it: tools={'search': function}, or FunctionTool(function, name='search').",
            )
    roles = {*environment.traits.roles, *_SPEAKERS, *bench.own_roles}
    for played in (*bench.hanging, *await bench.play_all()):
        if strangers := played.speakers - roles:
            raise Broken(
                f"{played.case}: {', '.join(sorted(strangers))} speaks and is not in traits.roles.",
                "Declare the roles of the messages that a transform adds.",
            )
        if any(o.num_tool_calls for o in played.outcomes) and not environment.traits.tools:
            raise Broken(
                f"{played.case}: a tool ran and traits.tools is empty.", "Declare its name there."
            )
        for failure in (f for o in played.outcomes for f in o.failures):
            if failure.owner in (Owner.TOOL, Owner.ENVIRONMENT):
                raise Broken(
                    f"{played.case}: after {played.last_answer!r}: {failure.message}",
                    "The exception is logged above. Raise ToolInputError for a mistake of the "
                    "policy, and correct the others.",
                )
    if told := await _told_alone(bench):
        raise Broken(
            f"Tool {told} failed each time, and the policy is told so.",
            "The exception is logged above. If only some calls work, check with one: --say 'CALL'.",
        )
    return f"roles {', '.join(sorted(roles))}; stop {list(environment.traits.stop)}"


async def _told_alone(bench: Bench) -> str:
    """Return a tool that never answered but with its failure (ToolUse's "tell"); else ""."""
    failed, worked = set[str](), set[str]()
    for played in await bench.play_all():
        for message in played.outcomes[-1].history.prompt or ():
            is_told = message.text.endswith((f"Tool {message.name} failed.", TOO_LONG))
            (failed if is_told else worked).add(message.name)
    alone = failed & set(bench.environment.traits.tools) - worked
    return min(alone, default="")


async def _state(bench: Bench) -> str:
    """Check that an episode remembers in its state alone, and never changes that in place."""
    environment = bench.environment
    is_stateless = isinstance(environment, Stateless) and not environment.traits.needs_session
    is_stateless &= bench.mode is InputMode.HISTORY
    for case in bench.cases:
        async for step in bench.step_twice(case, is_stateless=is_stateless):
            first, second, *resumed = map(comparable, step.outcomes)
            said = content_of(step.line)
            if step.changed:
                raise Broken(
                    f"{case}: after {said!r}: a step changes state[{step.changed!r}] of an episode "
                    "in place.",
                    "Remember a new value: outcome.remember(name=[*old, more]) in a transform, "
                    "episode.remember(name=[*old, more]) in a tool.",
                )
            if is_stateless and first != second:
                raise Broken(
                    f"{case}: after {said!r}: the same step of the same episode gives another "
                    "answer the second time.",
                    "Keep what is remembered in the episode, or declare "
                    "Traits(needs_session=True).",
                )
            if any(first != other for other in resumed):
                raise Broken(
                    f"{case}: after {said!r}: a step from the messages alone gives another answer "
                    "than in its session.",
                    "Declare that it needs its session: Traits(needs_session=True) of a "
                    "transform, or remembers=True of ToolUse, ToolCalls or tool_environment.",
                )
    return "a step needs nothing but its episode" if is_stateless else "steps need their session"


async def _demonstrations(bench: Bench) -> str:
    """Check that a demonstration shows what the environment says to its answers."""
    shown = bench.demonstrations
    if not shown:
        return "none"
    for case, history in shown:
        played = await bench.play_case(case)
        if bench.mode is not InputMode.HISTORY:  # they are messages, which nobody sees here
            if len(played.outcomes) != len(case.lines) or not played.outcomes[-1].done:
                raise Broken(
                    f"{case}: the demonstration does not end where its episode does.",
                    "Let it run to the message that ends the episode.",
                )
            continue
        after = played.outcomes[-1].history.require_prompt()
        for number, (ours, theirs) in enumerate(zip(after, history, strict=False)):
            said, shows = content_of(ours), content_of(theirs)
            if (ours.role, said) != (theirs.role, shows):
                raise Broken(
                    f"{case}: message {number} of the demonstration is {theirs.role} "
                    f"{shows!r}, and the environment says {ours.role} {said!r}.",
                    "Demonstrate what the environment and its tools say.",
                )
        if len(after) != len(history) or not played.outcomes[-1].done:
            raise Broken(
                f"{case}: the demonstration does not end where its episode does.",
                "Let it run to the message that ends the episode.",
            )
    return f"{len(shown)} play to their end"


async def _sessions(bench: Bench) -> str:
    """Check that episodes played at the same time go as they do alone."""
    alone = await bench.play_all()
    async with asyncio.TaskGroup() as playing:
        tasks = [playing.create_task(bench.play_case(played.case)) for played in alone]
    for expected, task in zip(alone, tasks, strict=True):
        actual = task.result()
        if [comparable(o) for o in expected.outcomes] != [comparable(o) for o in actual.outcomes]:
            raise Broken(
                f"{expected.case}: it plays differently beside other sessions, or a second time.",
                "Keep what belongs to an episode in its state, and draw chance from its seed.",
            )
    return f"{len(alone)} at the same time"


CHECKS: Mapping[str, Callable[[Bench], Awaitable[str]]] = {
    "tasks": _tasks,
    "reset": _resets,
    "retry": _retries,
    "end": _ends,
    "rewards": _rewards,
    "traits": _traits,
    "state": _state,
    "demonstrations": _demonstrations,
    "sessions": _sessions,
}
