"""A trial as a trajectory, token by token: what is masked, what is rewarded, whose fault it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from dialoop.chat import History
from dialoop.errors import Unavailable
from dialoop.sequences import ForkCause, Source
from dialoop.trajectory import DoneReason, Group, Owner, SamplingParams, StopReason, Trajectory
from dialoop_extras.trials.agents import DirectOutputAgent, ScriptedAgent
from dialoop_extras.trials.game import Move
from dialoop_extras.trials.playing import play_trial
from dialoop_extras.trials.trial import Action, MaskScope, TrialOptions
from dialoop_learning.rl.advantages import with_advantages

from tests.support.samples.scripted_tokens import (
    BYTES,
    LOGPROB,
    MAIN_7,
    TASK,
    ScriptedTokens,
    ids_of,
)


@dataclass(frozen=True)
class Count:
    """Say the next number, twice; 1 for each right one."""

    max_steps: int = 2

    def begin(self, task: Mapping[str, Any], *, seed: int) -> int:
        return int(task.get("from", 0))

    def prompt(self, state: int, step: int) -> str:
        return f"{state}?"

    async def play(self, state: int, action: str) -> Move[int]:
        return Move(state=state + 1, reward=float(action == str(state + 1)))


GROUP = Group(group_id="g", task=replace(TASK, num_trajectories=2), trajectories=())


def count(prompt: str) -> str:
    """The next number after the last question."""
    return str(int(prompt.removesuffix("?")[-1]) + 1)


async def play(policy: Any, *, game: Any = None, **options: Any) -> Trajectory:
    inputs = options.pop("inputs", {})
    return await play_trial(
        TASK,
        game=game or Count(),
        inputs=inputs,
        policy=policy,
        tokenizer=BYTES,
        group_id="g",
        sampling=SamplingParams(max_new_tokens=4),
        **options,
    )


async def test_prompts_are_masked_actions_are_trained_and_each_turn_has_its_reward() -> None:
    trajectory = await play(ScriptedTokens(lambda p: "1" if p.endswith("0?") else "7"))
    assert trajectory.failures == ()
    (sequence,) = trajectory.sequences
    assert sequence.token_ids.tolist() == ids_of("0?11?7")
    assert sequence.response_mask().tolist() == [False, False, True, False, False, True]
    assert sequence.inference_logprobs.tolist() == [LOGPROB, LOGPROB]
    assert sequence.policy_versions == (MAIN_7,)
    assert [(s.source, s.turn, s.start, s.length) for s in sequence.segments] == [
        (Source.PROMPT, 0, 0, 2),
        (Source.MODEL, 0, 2, 1),
        (Source.ENVIRONMENT, 1, 3, 2),
        (Source.MODEL, 1, 5, 1),
    ]
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.0]
    assert trajectory.reward == 1.0
    assert [(t.message_start, t.num_messages, t.generate_s) for t in trajectory.turns] == [
        (1, 2, 0.5),
        (3, 1, 0.5),
    ]
    assert [message.text for message in trajectory.history] == ["0?", "1", "1?", "7"]
    assert (trajectory.done_reason, trajectory.truncated) == (DoneReason.MAX_TURNS, True)
    assert (trajectory.group_id, trajectory.task_key, trajectory.seed) == ("g", "k", 5)
    assert trajectory.tokenizer_digest == BYTES.digest
    assert trajectory.sampling.max_new_tokens == 4


async def test_the_last_episode_alone_is_trained_and_what_the_others_earned_is_recorded() -> None:
    policy = ScriptedTokens(count)
    options = TrialOptions(episodes_per_trial=3, free_shots=1)
    trajectory = await play(policy, options=options, inputs={"from": 4})
    assert len(policy.prompts) == 6
    (sequence,) = trajectory.sequences
    assert sequence.token_ids.tolist() == ids_of("4?55?6")
    assert trajectory.reward == 2.0
    assert trajectory.labels == {"trial_rewards": "2 2 2"}


async def test_scope_final_trains_the_last_action_alone() -> None:
    options = TrialOptions(mask_scope=MaskScope.FINAL)
    (sequence,) = (await play(ScriptedTokens(count), options=options)).sequences
    assert sequence.token_ids.tolist() == ids_of("0?11?2")
    assert sequence.response_mask().tolist() == [False] * 5 + [True]
    assert sequence.inference_logprobs.tolist() == [LOGPROB]


@pytest.mark.parametrize(
    ("split", "scope", "dense"),
    [
        ("turn", MaskScope.ALL, [(), ()]),
        ("even", MaskScope.ALL, [(1 / 2,) * 2, (1 / 3,) * 3]),
        ("last", MaskScope.ALL, [(0.0, 1.0), (0.0, 0.0, 1.0)]),
        ("terminal", MaskScope.ALL, [(2 / 5,) * 2, (2 / 5,) * 3]),
        # The first action is context: what it earned belongs to the tokens that are trained.
        ("last", MaskScope.FINAL, [(), (0.0, 0.0, 2.0)]),
    ],
)
async def test_rewards_are_split_over_the_tokens_that_are_trained(
    split: str, scope: MaskScope, dense: list[tuple[float, ...]]
) -> None:
    options = TrialOptions(episodes_per_trial=2, free_shots=1, reward_split=split, mask_scope=scope)
    answers = ScriptedTokens(lambda prompt: str(int(prompt[-3:-1]) + 1))
    trajectory = await play(answers, options=options, inputs={"from": 98})
    assert [turn.rewards[0].per_token for turn in trajectory.turns] == list(
        map(pytest.approx, dense)
    )
    assert trajectory.reward == pytest.approx(2.0)
    scored = with_advantages(replace(GROUP, trajectories=(trajectory, await worse(options))))
    ours, theirs = (t.sequences[0] for t in scored.trajectories)
    if split == "turn":
        assert ours.advantage > 0 > theirs.advantage
    else:
        assert len(ours.token_advantages) == trajectory.num_model_tokens
        assert (ours.token_advantages > 0).all()
        assert (theirs.token_advantages < 0).all()


async def worse(options: TrialOptions) -> Trajectory:
    """A trial that earns nothing."""
    return await play(ScriptedTokens(lambda _: "xx"), options=options, inputs={"from": 98})


async def test_an_action_without_tokens_keeps_its_reward_in_the_split() -> None:
    class Half:
        """Ask the policy in the first turn alone; the second action is the agent's own."""

        def __init__(self, policy: Any, *_: Any) -> None:
            self.policy = policy

        async def get_action(self, messages: History, state: Any) -> tuple[str, Any]:
            text = messages[-1].text
            if state is None:
                await self.policy.generate(token_ids=ids_of(text), sampling=SamplingParams())
            return count(text), "asked"

    options = TrialOptions(reward_split="even")
    trajectory = await play(ScriptedTokens(count), make_agent=Half, options=options)
    assert [turn.rewards[0].per_token for turn in trajectory.turns] == [(2.0,), ()]
    assert trajectory.reward == 2.0


@dataclass
class Thinker:
    """Thinks on rows of its own before each answer, with tokens that the trial never sees."""

    policy: Any
    sampling: SamplingParams

    async def get_action(self, messages: History, state: Any) -> tuple[str, Any]:
        thought = [*(state or ids_of("think:"))]
        (sample,) = await self.policy.generate(token_ids=thought, sampling=self.sampling)
        ids = sample.sequence.token_ids.tolist()
        question = ids_of(f"so {messages[-1].text}")
        (answer,) = await self.policy.generate(token_ids=question, sampling=self.sampling)
        return BYTES.decode(answer.sequence.token_ids[len(question) :]), [*ids, *ids_of(";")]


async def test_an_agents_calls_are_trained_on_exactly_the_tokens_they_were_sampled_on() -> None:
    def script(prompt: str) -> str:
        return "hm" if prompt.startswith("think") else count(prompt)

    def make_agent(policy: Any, tokenizer: Any, sampling: SamplingParams) -> Thinker:
        return Thinker(policy, sampling)

    trajectory = await play(ScriptedTokens(script), make_agent=make_agent)
    thoughts, first, second = trajectory.sequences
    assert thoughts.token_ids.tolist() == ids_of("think:hm;hm")
    assert thoughts.response_mask().tolist() == [False] * 6 + [True] * 2 + [False] + [True] * 2
    assert [s.turn for s in thoughts.segments] == [0, 0, 1, 1]
    assert first.token_ids.tolist() == ids_of("so 0?1")
    assert second.token_ids.tolist() == ids_of("so 1?2")
    causes = [s.fork_cause for s in trajectory.sequences]
    assert causes == [ForkCause.NONE, ForkCause.BRANCHED, ForkCause.BRANCHED]
    assert trajectory.num_model_tokens == 2 * 2 + 2
    assert trajectory.reward == 2.0


async def test_an_opponent_that_is_no_policy_is_context() -> None:
    class Rivals:
        """The policy and a script take turns; the script's moves are the policy's context."""

        def __init__(self, policy: Any, tokenizer: Any, sampling: Any) -> None:
            self.own = DirectOutputAgent(policy, tokenizer, sampling)
            self.script = ScriptedAgent(["1"])

        async def get_action(self, messages: History, state: Any) -> Action | tuple[str, Any]:
            if len(messages) == 1:
                return await self.script.get_action(messages, None)
            return await self.own.get_action(messages, None)

    (sequence,) = (await play(ScriptedTokens(count), make_agent=Rivals)).sequences
    assert sequence.token_ids.tolist() == ids_of("0?11?2")
    assert sequence.response_mask().tolist() == [False] * 5 + [True]


async def test_an_agent_that_is_not_async_asks_too() -> None:
    class Plain:
        def __init__(self, policy: Any, sampling: Any) -> None:
            self.policy, self.sampling = policy, sampling

        def get_action(self, messages: History, state: Any) -> tuple[str, Any]:
            prompt = ids_of(messages[-1].text)
            (sample,) = self.policy.generate_now(token_ids=prompt, sampling=self.sampling)
            return BYTES.decode(sample.sequence.token_ids[len(prompt) :]), None

    async def make_agent(policy: Any, tokenizer: Any, sampling: Any) -> Plain:
        return Plain(policy, sampling)

    trajectory = await play(ScriptedTokens(count), make_agent=make_agent)
    assert trajectory.reward == 2.0
    assert [s.token_ids.tolist() for s in trajectory.sequences] == [ids_of("0?1"), ids_of("1?2")]


class Broken(Count):
    """A game whose author made a mistake."""

    async def play(self, state: int, action: str) -> Move[int]:
        raise KeyError("a secret")


def no_agent(policy: Any, tokenizer: Any, sampling: Any) -> Any:
    raise KeyError("a secret")


@dataclass(frozen=True)
class Pays(Count):
    """A game with a reward of its own."""

    reward: Any = None

    async def play(self, state: int, action: str) -> Move[int]:
        return Move(state=state + 1, reward=self.reward)


class Silent(Count):
    """A game that forgets to return a move."""

    async def play(self, state: int, action: str) -> Any:
        return None


@dataclass(frozen=True)
class Blocking:
    """An async agent that waits for the policy as one in a thread does."""

    policy: Any

    async def get_action(self, messages: History, state: Any) -> tuple[str, Any]:
        self.policy.generate_now(token_ids=ids_of("0?"), sampling=SamplingParams())
        return "1", None


def blocking(policy: Any, tokenizer: Any, sampling: Any) -> Blocking:
    return Blocking(policy)


def mute(policy: Any, tokenizer: Any, sampling: Any) -> Any:
    return ScriptedAgent(["1", "2"])


def away(prompt: str) -> str:
    raise Unavailable("No replica answers.", reason="SERVICE_AWAY")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "options", "owner", "reason", "says"),
    [
        (count, {"game": Broken()}, Owner.ENVIRONMENT, "TRIAL_FAILED", "KeyError at test_playing"),
        (count, {"game": Silent()}, Owner.ENVIRONMENT, "TRIAL_FAILED", "`play` returned None"),
        *(
            (count, {"game": Pays(reward=value)}, Owner.REWARD, "REWARD_NOT_FINITE", repr(value))
            for value in (float("nan"), float("inf"), "much", None)
        ),
        (count, {"make_agent": blocking}, Owner.AGENT, "TRIAL_FAILED", "await policy.generate"),
        (count, {"make_agent": no_agent}, Owner.AGENT, "AGENT_FAILED", "no_agent"),
        (count, {"make_agent": mute}, Owner.AGENT, "NOTHING_SAMPLED", "never asked"),
        (away, {}, Owner.INFERENCE, "SERVICE_AWAY", "No replica"),
        (lambda _: "", {}, Owner.ENVIRONMENT, "CONTEXT_FULL", "max_model_len"),
    ],
)
async def test_what_goes_wrong_has_an_owner_and_is_no_reward(
    policy: Any, options: dict[str, Any], owner: Owner, reason: str, says: str
) -> None:
    trajectory = await play(ScriptedTokens(policy), **options)
    failure = trajectory.failures[-1]
    assert (failure.owner, failure.reason) == (owner, reason)
    assert says in failure.message
    assert "secret" not in failure.message
    assert not trajectory.is_scorable


async def test_a_full_context_ends_the_episode_and_what_was_played_counts() -> None:
    trajectory = await play(ScriptedTokens(lambda p: "1" if p == "0?" else ""))
    assert trajectory.failures == ()
    assert [turn.reward for turn in trajectory.turns] == [1.0]
    assert (trajectory.done_reason, trajectory.truncated) == (DoneReason.MAX_LENGTH, True)
    assert trajectory.sequences[0].token_ids.tolist() == ids_of("0?1")
    assert trajectory.turns[0].stop_reason is StopReason.STOP


async def test_a_trial_that_takes_too_long_fails() -> None:
    trajectory = await play(ScriptedTokens(count, delay_s=30), time_limit_s=0.05)
    assert trajectory.failures[0].reason == "EPISODE_TIMED_OUT"
    assert "0.05 s" in trajectory.failures[0].message


async def test_another_tokenizer_than_the_services_is_named() -> None:
    trajectory = await play(ScriptedTokens(count, digest="another"))
    assert trajectory.failures[0].reason == "TOKENIZER_MISMATCH"


async def test_a_cancelled_trial_is_cancelled() -> None:
    playing = asyncio.create_task(play(ScriptedTokens(count, delay_s=30)))
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
