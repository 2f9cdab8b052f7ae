"""Seed 002's trials, and twenty questions."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndOnText
from dialoop.environments.episode import Episode, Score, TaskData
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.transform import Transform
from dialoop.episode import Sample
from dialoop.reasons import Reason
from dialoop.rollout import play
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy, byte_tokenizer
from dialoop.trajectory import (
    DoneReason,
    Owner,
    Reward,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
)
from dialoop_extras.compat.trials import trial_keys
from dialoop_extras.games import Play, twenty_questions
from dialoop_extras.trials.agents import DirectOutputAgent, ScriptedAgent
from dialoop_extras.trials.game import Move
from dialoop_extras.trials.trial import (
    Action,
    MaskScope,
    PlayedEpisode,
    PlayedStep,
    TrialOptions,
    run_trial,
    split_reward,
)
from dialoop_extras.trials.twenty_questions import Hidden, TwentyQuestions

TOKENIZER = byte_tokenizer()
VERSION = PolicyVersion(lineage="main", number=1)


@dataclass(frozen=True)
class Count:
    """Say the next number, three times; reward 1 each."""

    max_steps: int = 3

    def begin(self, task: Mapping[str, Any], *, seed: int) -> int:
        return int(task.get("from", 0))

    def prompt(self, state: int, step: int) -> str:
        return f"{state}?"

    async def play(self, state: int, action: str) -> Move[int]:
        right = action == str(state + 1)
        return Move(state=state + 1, reward=float(right), done=not right)


def _counting(messages: History) -> str:
    return str(int(messages[-1].text.rstrip("?")) + 1)


async def test_a_trials_rubric_finds_rewards_by_session_id() -> None:
    result = await run_trial(Count(), [{}, {"from": 5}], ScriptedAgent(["1", "2", "9"]))
    (reward,) = result.get_rubric()
    first, second = result.session_ids
    messages = result.final_completion_messages
    assert reward(completions=messages, session_ids=[second, first]) == [0.0, 2.0]
    with pytest.raises(ValueError, match="1 of them unknown"):
        reward(completions=messages, session_ids=[first, "?"])


async def test_a_trial_joins_prompts_and_actions_and_masks_the_actions() -> None:
    result = await run_trial(
        Count(), [{}, {"from": 8}], ScriptedAgent(_counting), tokenizer=TOKENIZER
    )
    assert TOKENIZER.decode(result.full_token_ids[0]) == "0?11?22?3"
    assert result.completion_only_mask[0] == [0, 0, 1] * 3
    assert TOKENIZER.decode(result.full_token_ids[1]) == "8?99?1010?11"
    assert result.full_attention_mask[1] == [1] * len(result.full_token_ids[1])
    assert result.rewards == [3.0, 3.0]
    assert len(set(result.session_ids)) == 2
    message = result.final_completion_messages[0][0]
    assert (message["content"], message["session_id"]) == ("3", result.session_ids[0])


async def test_every_key_of_the_seed_has_its_alias() -> None:
    keys = trial_keys(await run_trial(Count(), [{}], ScriptedAgent(_counting), tokenizer=TOKENIZER))
    assert keys["ids"] == keys["full_token_ids"]
    assert keys["messages"] == keys["final_completion_messages"]
    assert keys["mask"] == keys["completion_only_mask"]
    assert all(len(value) == 1 for value in keys.values())


async def test_without_a_tokenizer_token_lists_are_empty_and_nothing_breaks() -> None:
    result = await run_trial(Count(), [{}], ScriptedAgent(_counting))
    assert result.full_token_ids == [[]]
    assert result.rewards == [3.0]


async def test_final_scope_counts_the_last_action_alone() -> None:
    options = TrialOptions(mask_scope=MaskScope.FINAL)
    agent = ScriptedAgent(_counting)
    result = await run_trial(Count(), [{}], agent, tokenizer=TOKENIZER, options=options)
    assert result.completion_only_mask[0] == [0] * 8 + [1]


async def test_free_shots_are_played_and_earn_nothing() -> None:
    options = TrialOptions(episodes_per_trial=3, free_shots=2)
    result = await run_trial(Count(), [{}], ScriptedAgent(_counting), options=options)
    assert [e.reward for e in result.trials[0].episodes] == [0.0, 0.0, 3.0]
    assert [e.is_free_shot for e in result.trials[0].episodes] == [True, True, False]
    assert all(len(e.steps) == 3 for e in result.trials[0].episodes)


@pytest.mark.parametrize(
    "fields",
    [{"episodes_per_trial": 0}, {"free_shots": -1}, {"episodes_per_trial": 2, "free_shots": 2}],
)
def test_impossible_numbers_of_episodes_are_value_errors(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="free_shots"):
        TrialOptions(**fields)


async def test_an_agent_remembers_through_a_trial_and_forgets_between_trials() -> None:
    options = TrialOptions(episodes_per_trial=2)
    result = await run_trial(
        Count(), [{}, {}], ScriptedAgent(["1", "x", "1", "y"]), options=options
    )
    answers = [
        [m.text for e in trial.episodes for m in e.messages if m.role == "assistant"]
        for trial in result.trials
    ]
    assert answers == [["1", "x", "1", "y"]] * 2


async def test_an_agent_that_fails_is_a_failure_and_no_reward() -> None:
    class Broken:
        async def get_action(self, messages: History, state: Any) -> Action:
            raise RuntimeError("secret")

    result = await run_trial(Count(), [{}], Broken())
    assert result.rewards == [None]
    failure = result.trials[0].final.failures[0]
    assert failure.owner is Owner.AGENT
    assert "secret" not in failure.message


@pytest.mark.parametrize("answer", ["1", ("1",), ("1", None, 3), None])
async def test_an_agent_that_returns_something_else_is_told_what_to_return(answer: Any) -> None:
    class Odd:
        def get_action(self, messages: History, state: Any) -> Any:
            return answer

    result = await run_trial(Count(), [{}], Odd())
    failure = result.trials[0].final.failures[0]
    assert failure.owner is Owner.AGENT
    assert "(text, state)" in failure.message


async def test_a_games_own_limit_ends_an_episode_that_is_never_done() -> None:
    result = await run_trial(Count(max_steps=5), [{}], ScriptedAgent(_counting))
    assert len(result.trials[0].final.steps) == 5
    assert not result.trials[0].final.terminated


class _Policy:
    """Answers with a byte that is no text, and remembers what it was fed."""

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    async def generate(
        self, *, token_ids: Iterable[int], sampling: SamplingParams, turn: int
    ) -> tuple[Sample, ...]:
        prompt = list(token_ids)
        self.fed.append(prompt)
        model = {"source": Source.MODEL, "turn": turn, "policy_version": VERSION}
        sequence = sequence_of(
            [(prompt, {"source": Source.PROMPT}), ([200], model)], logprobs=[-0.25]
        )
        return (Sample(history=ChatHistory(), sequence=sequence, stop_reason=StopReason.STOP),)


async def test_sampled_ids_are_fed_back_as_they_were_and_trained_as_they_were() -> None:
    class Endless(Count):
        async def play(self, state: int, action: str) -> Move[int]:
            return Move(state=state + 1)

    policy = _Policy()
    agent = DirectOutputAgent(policy, TOKENIZER)
    result = await run_trial(Endless(), [{}], agent, tokenizer=TOKENIZER)
    prompts = [list(TOKENIZER.encode(f"{n}?").ids) for n in range(3)]
    assert policy.fed[2] == [*prompts[0], 200, *prompts[1], 200, *prompts[2]]
    sequence = result.trials[0].final.sequence()
    assert sequence.token_ids.tolist() == [*policy.fed[2], 200]
    assert sequence.inference_logprobs.tolist() == [-0.25] * 3
    assert sequence.num_model_tokens == 3


async def test_rewards_are_split_over_tokens_without_loss() -> None:
    result = await run_trial(Count(), [{"from": 98}], ScriptedAgent(_counting), tokenizer=TOKENIZER)
    final = result.trials[0].final
    third = pytest.approx(1 / 3)
    assert split_reward(final, how="even") == [[0.5] * 2, [third] * 3, [third] * 3]
    assert split_reward(final, how="last") == [[0, 1], [0, 0, 1], [0, 0, 1]]
    assert sum(map(sum, split_reward(final, how="terminal"))) == pytest.approx(final.reward)


@pytest.mark.parametrize("how", ["even", "last", "terminal"])
async def test_a_free_shot_has_no_reward_to_split(how: str) -> None:
    options = TrialOptions(episodes_per_trial=2, free_shots=1)
    agent = ScriptedAgent(_counting)
    result = await run_trial(Count(), [{}], agent, tokenizer=TOKENIZER, options=options)
    free, scored = result.trials[0].episodes
    assert sum(map(sum, split_reward(free, how=how))) == 0.0
    assert sum(map(sum, split_reward(scored, how=how))) == pytest.approx(3.0)


@pytest.mark.parametrize("how", ["even", "last", "terminal"])
async def test_without_tokens_there_is_nothing_to_split_over(how: str) -> None:
    result = await run_trial(Count(), [{}], ScriptedAgent(_counting))
    assert split_reward(result.trials[0].final, how=how) == [[], [], []]


@pytest.mark.parametrize("how", ["even", "last", "terminal"])
@pytest.mark.parametrize("texts", [("", "ab", ""), ("ab", "", "c"), ("", "", "abc")])
def test_an_action_without_tokens_loses_no_reward(how: str, texts: tuple[str, ...]) -> None:
    steps = tuple(
        PlayedStep(
            prompt="?",
            prompt_ids=(1,),
            action=Action(text=text, token_ids=TOKENIZER.encode(text).ids),
            reward=float(number),
        )
        for number, text in enumerate(texts, start=1)
    )
    rows = split_reward(PlayedEpisode(steps=steps, reward=6.0), how=how)
    assert [len(row) for row in rows] == [len(text) for text in texts]
    assert sum(map(sum, rows)) == pytest.approx(6.0)


async def _play(*lines: str, **options: Any) -> Any:
    return await run_trial(
        TwentyQuestions(**options), [{"solution": "key"}], ScriptedAgent(list(lines))
    )


async def test_a_right_guess_wins() -> None:
    result = await _play("Is it alive?", "Is it made of metal?", "[key]")
    final = result.trials[0].final
    assert [step.prompt for step in final.steps[1:]] == ["No", "Yes"]
    assert final.reward == 1.0
    assert final.terminated


async def test_the_first_wrong_guess_is_tolerated_and_the_second_ends_the_game() -> None:
    final = (await _play("[lamp]", "[saw]", "[key]")).trials[0].final
    assert (len(final.steps), final.reward, final.terminated) == (2, 0.0, True)
    strict = (await _play("[lamp]", "[key]", error_allowance=0)).trials[0].final
    assert len(strict.steps) == 1


async def test_a_longer_guess_that_contains_the_word_does_not_win() -> None:
    final = (await _play("[key board]", "[KEY]")).trials[0].final
    assert [step.reward for step in final.steps] == [0.0, 1.0]


async def test_a_guess_with_a_question_mark_is_a_question() -> None:
    final = (await _play("Is it [key]?", "[key]")).trials[0].final
    assert final.steps[0].info["move"] == "question"


async def test_no_prompt_shows_the_word() -> None:
    final = (await _play(*["Is it alive?"] * 20)).trials[0].final
    assert all("key" not in step.prompt for step in final.steps)
    assert "guess now" in final.steps[-1].prompt


async def test_a_gamemaster_who_says_something_else_makes_the_player_ask_again() -> None:
    class Vague:
        async def answer(self, word: str, question: str) -> str:
            return "Perhaps"

    final = (await _play("Is it alive?", "[key]", gamemaster=Vague())).trials[0].final
    assert "Ask otherwise" in final.steps[1].prompt


def test_no_word_is_in_both_splits() -> None:
    for hardcore in (False, True):
        game = TwentyQuestions(hardcore=hardcore)
        assert not set(game.words("train")) & set(game.words("heldout"))
        assert game.words("heldout")


def test_the_same_seed_hides_the_same_word() -> None:
    game = TwentyQuestions()
    assert game.begin({}, seed=3).word == game.begin({}, seed=3).word
    assert game.begin({"prompt": "oak"}, seed=0).word == "oak"
    assert "oak" not in repr(Hidden(word="oak"))


async def test_games_played_at_the_same_time_do_not_collide() -> None:
    words = ["key", "cat", "oak", "ship"]
    agent = ScriptedAgent(lambda messages: "Is it alive?" if len(messages) == 1 else "[key]")
    result = await run_trial(TwentyQuestions(), [{"solution": w} for w in words], agent)
    assert [trial.final.steps[1].prompt for trial in result.trials] == ["No", "Yes", "Yes", "No"]
    assert [trial.final.reward for trial in result.trials] == [1.0, 0.0, 0.0, 0.0]


async def test_the_environment_plays_the_same_game_and_sessions_do_not_collide() -> None:
    environment = twenty_questions()

    async def solve(key: str) -> tuple[float, str]:
        task = environment.tasks.get("train", key)
        opening = environment.reset(task, seed=0)
        answered = opening.history.respond(Message(role="assistant", content="Is it alive?"))
        first = await environment.step(opening.episode, answered)
        guess = Message(role="assistant", content=f"[{task.answer}]")
        last = await environment.step(first.episode, first.history.respond(guess))
        assert last.episode.done_reason is DoneReason.SUBMITTED
        return last.rewards[0].value, first.history.require_prompt()[-1].text

    keys = environment.tasks.keys("train")
    results = await asyncio.gather(*(solve(key) for key in keys))
    assert {reward for reward, _ in results} == {1.0}
    assert {reply for _, reply in results} == {"Yes", "No"}


async def test_a_chat_episode_has_as_many_turns_and_the_same_prompts_as_a_trial() -> None:
    game = TwentyQuestions(max_turns=4)
    agent = ScriptedAgent(["Is it alive?"])
    trial = (await run_trial(game, [{"solution": "key"}], agent)).trials[0].final
    environment = twenty_questions(max_turns=4)
    task = TaskData(key="k", question="?", answer="key")
    episode = environment.reset(task, 0).episode
    prompts = []
    while not episode.done:
        prompts.append(episode.history[-1].text)
        answered = ChatHistory(
            response=History((Message(role="assistant", content="Is it alive?"),))
        )
        episode = (await environment.step(episode, answered)).episode
    assert prompts == [step.prompt for step in trial.steps]
    assert len(prompts) == 4
    assert episode.done_reason is DoneReason.MAX_TURNS


def _count_environment(*transforms: Transform) -> ChatEnv:
    tasks = RowTasks([{"query": "Count.", "from": "0"}])
    return ChatEnv(name="count", tasks=tasks, transforms=(*transforms, Play(Count())))


async def _trajectory(environment: ChatEnv, policy: ScriptedPolicy) -> Trajectory:
    task = Task(task_id="t", environment="count", split="train", key="0")
    return await play(task, sessions=InMemoryEnvironment(environment), policy=policy)


async def test_a_game_as_a_chat_environment_gives_each_reward_once() -> None:
    trajectory = await _trajectory(_count_environment(), ScriptedPolicy(_counting))
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.0, 1.0]
    trial = await run_trial(Count(), [{}], ScriptedAgent(_counting))
    assert trajectory.reward == trial.rewards[0] == 3.0


async def test_a_message_that_the_game_did_not_play_earns_nothing() -> None:
    environment = _count_environment(EndOnText("!"))
    trajectory = await _trajectory(environment, ScriptedPolicy(["1", "2!"]))
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.0]


async def test_the_messages_of_a_game_do_not_hold_its_rewards() -> None:
    environment = _count_environment()
    trajectory = await _trajectory(environment, ScriptedPolicy(_counting))
    task = environment.tasks.get("train", "0")
    scores = await environment.score(task, trajectory)
    assert not any(score.rewards for score in scores)
    assert {f.owner for score in scores for f in score.failures} == {Owner.REWARD}


class Total(Transform):
    """The length of all answers so far, although its traits say that the episode earns it."""

    async def score(self, episode: Episode) -> Score:
        answers = [m for m in episode.history if m.role == "assistant"]
        return Score(rewards=(Reward(name="total", value=float(len(answers))),))


async def test_an_episode_reward_before_the_end_is_a_failure_and_never_summed() -> None:
    environment = _count_environment(Total())
    trajectory = await _trajectory(environment, ScriptedPolicy(_counting))
    (failure,) = trajectory.failures
    assert failure.reason == Reason.REWARD_BEFORE_END
    assert "total after step 1" in failure.message
    assert "RewardShape.TURN" in failure.message
