"""Facts of modes, data loading, thinking prompts, versions, tags and shapes."""

from dataclasses import replace

import numpy as np
import pytest
from dialoop.chat import ChatHistory, History, Message
from dialoop.environments import (
    AddThinkingPrompt,
    AnswerTagReward,
    ChatEnv,
    DataCursor,
    DataLoadingPrimer,
    DataSource,
    EndOnTag,
    Episode,
    Given,
    InputMode,
    KLReward,
    MaxLength,
    MaxTurns,
    NamedReward,
    PolicyVersions,
    Rewards,
    RewardShape,
    RowTasks,
    StepCounter,
    TaskData,
    Text,
    Tokens,
    Transform,
    dataset_chat_env,
    load_environment,
    shape_rewards,
    tag_text,
)
from dialoop.errors import InvalidConfig, InvalidHistory, InvalidInput
from dialoop.rollout import play
from dialoop.sequences import Source, prefix_hash, sequence_of
from dialoop.testing import InMemoryEnvironment, ScriptedPolicy, byte_tokenizer
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import DoneReason, Reward, Task

TASK = TaskData(key="k", question="q", answer="7")
ROWS = [{"query": f"q{n}"} for n in range(3)]
BYTES = byte_tokenizer()


def env(*transforms: Transform, **options) -> ChatEnv:
    return ChatEnv(name="e", transforms=transforms, **options)


def say(text: str) -> ChatHistory:
    return ChatHistory(response=History((Message(role="assistant", content=text),)))


async def play_steps(environment: ChatEnv, *answers, task: TaskData = TASK, seed: int = 0):
    episode = environment.reset(task, seed).episode
    outcomes = []
    for answer in answers:
        outcomes.append(await environment.step(episode, answer))
        episode = outcomes[-1].episode
    return outcomes


def test_an_unknown_mode_and_a_missing_tokenizer_are_rejected():
    with pytest.raises(InvalidConfig) as caught:
        env(input_mode="speech")
    assert caught.value.reason == "UNKNOWN_MODE"
    assert "history, text, tokens" in str(caught.value)
    for mode in ("text", InputMode.TOKENS):
        with pytest.raises(InvalidConfig) as caught:
            env(input_mode=mode)
        assert caught.value.reason == "TOKENIZER_MISSING"
    with pytest.raises(InvalidConfig):
        env(input_mode="text", tokenizer=BYTES, allow_rewrite=True)


def test_text_and_tokens_that_contradict_themselves_are_rejected():
    with pytest.raises(InvalidHistory):
        Text(prompt="a", response="b", full="ac")
    with pytest.raises(InvalidHistory):
        Tokens(prompt=(1,), response=(2,), full=(2, 1))


class Batches:
    """What a torch DataLoader with its default collate_fn gives: a dict of lists per batch."""

    def __len__(self):
        return 2

    def __iter__(self):
        yield {"query": ["a", "b"], "answer": ["1", "2"]}
        yield {"query": ["c"], "answer": ["3"]}


@pytest.mark.parametrize(
    "data",
    [
        Batches(),
        [[{"query": "a", "answer": "1"}, {"query": "b"}], [{"query": "c"}]],
        [{"query": "a", "answer": "1"}, {"query": "b"}, {"query": "c"}],
    ],
)
def test_a_primer_reads_a_data_loader_or_rows(data):
    primer = DataLoadingPrimer(data)
    assert [primer.next().task.question for _ in range(4)] == ["a", "b", "c", "a"]
    assert primer.tasks.get("train", "0").answer == "1"


@pytest.mark.parametrize("data", [iter([{"query": "a"}]), "rows", 3, [["a", "b"]]])
def test_a_primer_refuses_what_has_no_end_or_no_rows(data):
    with pytest.raises(InvalidConfig):
        DataLoadingPrimer(data)


@pytest.mark.parametrize("mode", ["text", "tokens"])
async def test_a_completion_is_raw_text_that_goes_on(mode):
    environment = load_environment(
        "completion", {"tokenizer": BYTES, "input_mode": mode, "max_steps": 2}
    )
    task = TaskData(key="k", question="Once upon ")
    opening = environment.reset(task, 0)
    words = ("a time", ", long ago")
    if mode == "text":
        answers = [Text(response=word) for word in words]
    else:
        answers = [Tokens(response=BYTES.encode(word).ids) for word in words]
    first, second = await play_steps(environment, *answers, task=task)
    outcomes = (opening, first, second)
    if mode == "text":
        prompts = [outcome.text.prompt for outcome in outcomes]
    else:
        prompts = [BYTES.decode(outcome.tokens.prompt) for outcome in outcomes]
    assert prompts == ["Once upon ", "Once upon a time", "Once upon a time, long ago"]
    assert second.episode.truncated


def test_a_hash_names_a_row_of_tokens_and_each_of_its_prefixes():
    sequence = sequence_of([([5, 8, 2], {"source": Source.PROMPT})])
    assert sequence.prefix_hash() == prefix_hash([5, 8, 2]) == prefix_hash(np.array([5, 8, 2]))
    assert sequence.prefix_hash(2) == prefix_hash([5, 8])
    assert len({prefix_hash(row) for row in ([], [5], [5, 8], [8, 5], [58])}) == 5
    assert prefix_hash([5, 8, 2]) == "6566eb02e726b11fd0921051c171a6d3"


def test_an_environments_rubric_is_its_reward_functions():
    named = NamedReward(brief, name="short")
    environment = env(Rewards([brief]), MaxTurns(1), Rewards([named]))
    assert environment.get_rubric() == (brief, named)


@pytest.mark.parametrize("answered", [Text(), Text(prompt="x"), Text(response="")])
async def test_text_without_a_response_is_rejected(answered):
    with pytest.raises(InvalidHistory):
        await play_steps(env(input_mode="text", tokenizer=BYTES), answered)


async def test_template_kwargs_reach_the_template():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}"
    tokenizer = byte_tokenizer()
    own = Tokenizer(
        tokenizer._trusting,
        tokenizer._literal,
        {"eos_token": "<|im_end|>", "chat_template": source},
    )
    options = {"tokenizer": own, "template_kwargs": {"mark": "!"}}
    assert env(input_mode="text", **options).reset(TASK, 0).text == Text(prompt="q!")
    outcome = env(input_mode="tokens", **options).reset(TASK, 0)
    assert outcome.tokens == Tokens(prompt=own.encode("q!").ids)


async def test_text_ends_as_the_template_ends_turns():
    plain = byte_tokenizer()
    source = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    own = Tokenizer(plain._trusting, plain._literal, {"chat_template": source})
    assert own.end_of_turn_ids == ()
    environment = env(input_mode="text", tokenizer=own)
    (outcome,) = await play_steps(environment, Text(response="7<|im_end|>"))
    assert outcome.history.prompt[-1].content == "7"


class Says(Transform):
    async def step(self, outcome):
        return outcome.append(Message(role="user", content="go on"))


class Forgetful(Tokenizer):
    """Its template shows the last message only, so that no prompt is the prefix of the next."""

    @property
    def chat_templates(self):
        return {"default": "{{ messages[-1].content }}>"}


async def test_a_template_that_rewrites_the_past_is_a_failure_and_no_silent_repair():
    for mode, answer in (("text", Text(response="a")), ("tokens", Tokens(response=(97,)))):
        plain = byte_tokenizer()
        tokenizer = Forgetful(plain._trusting, plain._literal, {"eos_token": "<|im_end|>"})
        (outcome,) = await play_steps(env(Says(), input_mode=mode, tokenizer=tokenizer), answer)
        assert [f.reason for f in outcome.failures] == ["PROMPT_NOT_PREFIX"]
        assert outcome.episode.done_reason is DoneReason.ERROR


async def test_tokens_are_never_tokenised_again():
    rare = (0xC3, 0x28)  # bytes that are no UTF-8: text would turn them into other ids
    environment = env(Says(), input_mode="tokens", tokenizer=BYTES)
    first, second = await play_steps(environment, *[Tokens(response=rare)] * 2)
    ids = second.tokens.prompt
    assert ids[: len(first.tokens.prompt)] == first.tokens.prompt
    assert sum(ids[i : i + 2] == rare for i in range(len(ids))) == 2


async def test_a_cut_off_response_in_tokens_mode_is_incomplete():
    environment = env(input_mode="tokens", tokenizer=BYTES, stop=("<call>",))
    end = BYTES.end_of_turn_ids[:1]
    answers = (BYTES.encode("a").ids, BYTES.encode("a<call>").ids, (*BYTES.encode("a").ids, *end))
    for ids, complete in zip(answers, (False, True, True), strict=True):
        (outcome,) = await play_steps(environment, Tokens(response=ids))
        assert outcome.episode.answer.is_complete is complete


def test_a_source_goes_on_from_a_kept_cursor():
    source = DataSource(RowTasks(ROWS), shuffle_seed=3, repeats=2)
    first = [source.take() for _ in range(5)]
    kept = source.cursor
    rest = [source.take() for _ in range(9)]
    other = DataSource(RowTasks(ROWS), shuffle_seed=3, repeats=2)
    other.cursor = kept
    assert [other.take() for _ in range(9)] == rest
    assert [loaded.repeat for loaded in first] == [0, 1, 0, 1, 0]
    other.cursor = DataCursor()
    assert [other.take() for _ in range(5)] == first


def test_a_primer_repeats_items_or_whole_groups():
    items = DataLoadingPrimer(RowTasks(ROWS), repeats=2).batch(2)
    assert [loaded.task.question for loaded in items] == ["q0", "q0"]
    primer = DataLoadingPrimer(RowTasks(ROWS), repeats=2, group_repeats=True)
    assert [loaded.task.question for loaded in primer.batch(2)] == ["q0", "q0", "q1", "q1"]
    primer.reset_dataloader()
    assert primer.next().task.question == "q0"


def test_a_primer_needs_exactly_one_source():
    assert DataLoadingPrimer(factory=lambda: RowTasks(ROWS)).next().task.key == "0"
    for arguments in (
        {},
        {"tasks": RowTasks(ROWS), "factory": lambda: RowTasks(ROWS)},
        {"tasks": iter(ROWS)},
        {"tasks": RowTasks([])},
        {"tasks": RowTasks(ROWS), "repeats": 0},
    ):
        with pytest.raises(InvalidConfig):
            DataLoadingPrimer(**arguments)


@pytest.mark.parametrize("rows", [["text"], [{"answer": "1"}], [{"query": ""}], [{"query": 3}]])
def test_a_row_that_asks_nothing_is_named(rows):
    with pytest.raises(InvalidConfig, match="Row 0 of train"):
        RowTasks(rows)


def test_rows_keep_the_rest_as_metadata_and_rename_what_documents_call_text():
    tasks = RowTasks({"train": [{"text": "q", "answer": 7, "ids": [1]}], "test": ROWS})
    task = tasks.get("train", "0")
    assert (task.question, task.answer, task.metadata) == ("q", "7", {"ids": "[1]"})
    assert tasks.splits == ("train", "test")


def test_an_environment_of_a_dataset_takes_train_if_there_is_one():
    environment = dataset_chat_env({"test": ROWS, "train": ROWS[:1]}, seed=3, max_steps=2)
    assert environment.primer.source.split == "train"
    assert environment.max_turns == 2
    with pytest.raises(InvalidConfig):
        dataset_chat_env(ROWS, seed=0)


THINK = AddThinkingPrompt(lambda episode: True, prompt="Wait.")


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("<think>t</think><answer>1</answer>", "<think>t</think>\nWait."),
        ("<answer>1</answer> or <answer>2</answer>", "<answer>1</answer> or\nWait."),
        ("<answer>1</answer><|im_end|>", "Wait."),
        ("<answer>1</answer> \n", "Wait."),
        ("<answer>1", "<answer>1\nWait."),
        ("<answer>1<answer>2</answer>", "<answer>1\nWait."),
        ("no answer", "no answer\nWait."),
    ],
)
async def test_the_last_answer_block_makes_room_for_the_thinking_prompt(text, edited):
    (outcome,) = await play_steps(env(EndOnTag(), THINK), say(text))
    assert outcome.episode.history[-1].text == edited
    assert not outcome.episode.done


async def test_a_thinking_prompt_of_the_user_is_a_message_and_keeps_rewards():
    asks = AddThinkingPrompt(lambda e: True, role="user", edit_last_turn=False)
    environment = env(MaxTurns(3), asks, Rewards([brief], every_turn=True))
    first, second = await play_steps(environment, say("a"), say("b"))
    assert [m.role for m in first.episode.history] == ["user", "assistant", "user"]
    assert first.rewards
    assert len(second.episode.history) == 4  # once per episode


def brief(episode) -> float:
    return 1.0


async def test_an_edited_step_is_not_rewarded_and_done_can_be_kept():
    keeps = AddThinkingPrompt(lambda e: True, undo_done=False)
    environment = env(EndOnTag(), keeps, Rewards([brief], every_turn=True))
    (outcome,) = await play_steps(environment, say("<answer>1</answer>"))
    assert outcome.episode.done
    assert outcome.rewards == ()


async def test_rewards_read_the_message_that_the_policy_sent_and_not_the_edited_one():
    seen = []

    def right(episode: Episode) -> float:
        seen.append([message.text for message in episode.history])
        return float("<answer>75</answer>" in episode.answer_text)

    edits = AddThinkingPrompt(lambda e: True, prompt="Wait.", zero_reward=False)
    environment = env(EndOnTag(), edits, Rewards([right], every_turn=True))
    (outcome,) = await play_steps(environment, say("<answer>75</answer>"))
    assert outcome.episode.history[-1].text == "Wait."
    assert [reward.value for reward in outcome.rewards] == [1.0]
    assert seen == [["q", "<answer>75</answer>"]]


async def test_a_thinking_prompt_of_the_assistant_can_be_a_message_of_its_own():
    own = AddThinkingPrompt(lambda e: True, prompt="Wait.", edit_last_turn=False)
    environment = env(EndOnTag(), own, Rewards([brief]))
    task = Task(task_id="t", environment=environment.name, split="train", key="0")
    policy = ScriptedPolicy(["<answer>1</answer>", "<answer>2</answer>"])
    environment = replace(environment, tasks=RowTasks([{"query": "x"}]))
    played = await play(task, sessions=InMemoryEnvironment(environment), policy=policy)
    assert [(m.role, m.text) for m in played.history] == [
        ("user", "x"),
        ("assistant", "<answer>1</answer>"),
        ("assistant", "Wait."),
        ("assistant", "<answer>2</answer>"),
    ]
    (sequence,) = played.sequences
    sampled = sequence.token_ids[sequence.response_mask()].tolist()
    assert BYTES.decode(sampled) == "<answer>1</answer><|im_end|><answer>2</answer><|im_end|>"
    assert played.reward == 1.0


def test_thinking_prompts_that_make_no_sense_are_rejected():
    for options in (
        {"role": "user", "edit_last_turn": True},
        {"role": "system"},
    ):
        with pytest.raises(InvalidConfig):
            AddThinkingPrompt(lambda e: True, **options)


def test_versions_are_numbers_or_names_and_keep_their_past():
    versions = PolicyVersions(clock=iter((1.0, 2.0, 3.0)).__next__)
    assert [versions.current, versions.advance(), versions.advance()] == ["0", "1", "2"]
    assert [change.at_s for change in versions.history] == [1.0, 2.0, 3.0]
    names = PolicyVersions("uuid")
    assert len({names.current, names.advance(), names.advance()}) == 3
    assert PolicyVersions().set("main/7") == "main/7"
    with pytest.raises(InvalidConfig):
        PolicyVersions("float")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 7 </answer>", "7"),
        ("<answer>1</answer><answer>2</answer>", "1"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>7", None),
        ("7</answer>", None),
        ("<answer></answer>", None),
        ("<answer> \n</answer>", None),
    ],
)
def test_tags(text, content):
    assert tag_text(text, "answer") == content


@pytest.mark.parametrize(
    ("text", "value", "thought"),
    [
        ("<think>so</think><answer>$7.0</answer>", 1.0, 0.2),
        ("<answer>72 clips</answer>", 0.1, 0.0),
        ("<answer>7", 0.0, 0.0),
    ],
)
async def test_the_answer_block_is_rewarded(text, value, thought):
    environment = env(EndOnTag(), MaxTurns(1), AnswerTagReward(think=0.2))
    (outcome,) = await play_steps(environment, say(text))
    assert [r.value for r in outcome.rewards] == pytest.approx([value, thought])
    task = TaskData(key="k", question="q")
    (outcome,) = await play_steps(environment, say(text), task=task)
    assert [f.reason for f in outcome.failures] == ["TRANSFORM_FAILED"]
    assert outcome.rewards == ()


def test_dense_rewards_have_one_number_per_token():
    dense = Reward.dense("kl", [0.5, -1.0], weight=2.0)
    assert dense.value == -0.5
    dense_rewards = shape_rewards(
        [dense, Reward(name="end", value=1.0)], RewardShape.DENSE, num_tokens=2
    )
    assert np.array_equal(dense_rewards, np.array([[1.0], [-1.0]], dtype=np.float32))
    assert shape_rewards([dense], RewardShape.SPARSE).tolist() == [[-1.0]]
    for num_tokens in (None, 3):
        with pytest.raises(InvalidInput):
            shape_rewards([dense], RewardShape.DENSE, num_tokens=num_tokens)


def test_a_kl_reward_needs_tokens_mode():
    async def logprobs(rows):
        return []

    with pytest.raises(InvalidConfig) as caught:
        env(KLReward(policy=logprobs, reference=logprobs))
    assert caught.value.reason == "TOKENS_MODE_ONLY"


async def test_a_kl_reward_whose_models_disagree_on_lengths_is_a_failure():
    async def short(rows):
        return [[-1.0] for _ in rows]

    kl = KLReward(policy=short, reference=short)
    environment = env(kl, input_mode="tokens", tokenizer=BYTES)
    (outcome,) = await play_steps(environment, Tokens(response=(97,)))
    assert outcome.rewards == ()
    assert outcome.failures


def test_limits_that_are_not_positive_are_rejected():
    for make in (StepCounter, MaxLength):
        with pytest.raises(InvalidConfig):
            make(0)


def test_what_the_caller_gives_is_told_apart_from_what_is_missing():
    environment = env(data_key="problem")
    task = environment.task_from(Given(data={"problem": "3+4", "answer": "7"}))
    assert (task.question, task.answer) == ("3+4", "7")
    with pytest.raises(InvalidInput) as caught:
        environment.task_from(Given(data={"query": "3+4"}))
    assert caught.value.reason == "DATA_KEY_MISSING"
    assert "'problem'" in str(caught.value)
    assert "query" in str(caught.value)


def test_a_seed_and_a_purpose_decide_chance():
    episode = env().reset(TASK, 3).episode
    assert episode.rng("a").random() == episode.rng("a").random()
    assert episode.rng("a").random() != episode.rng("b").random()


class Held(Transform):
    def __init__(self, log, name, fails=False):
        self.log, self.name, self.fails = log, name, fails

    async def acquire(self):
        self.log.append(f"+{self.name}")
        if self.fails:
            raise InvalidConfig("no", remedy="none")

    async def release(self):
        self.log.append(f"-{self.name}")

    async def close(self, episode):
        self.log.append(f"x{self.name}")

    def problem(self):
        return f"{self.name} is ill." if self.fails else ""


async def test_what_transforms_hold_is_released_in_reverse_and_after_a_failed_start():
    log = []
    environment = env(Held(log, "a"), Held(log, "b"))
    await environment.acquire()
    await environment.close(environment.reset(TASK, 0).episode)
    await environment.release()
    assert log == ["+a", "+b", "xa", "xb", "-b", "-a"]
    assert environment.problem() == ""
    log.clear()
    broken = env(Held(log, "a"), Held(log, "b", fails=True))
    with pytest.raises(InvalidConfig):
        await broken.acquire()
    assert log == ["+a", "+b", "-a"]
    assert broken.problem() == "b is ill."


async def test_more_transforms_follow_those_an_environment_has():
    base = dataset_chat_env(ROWS, shuffle=False, input_mode="text", tokenizer=BYTES)
    longer = base.with_transforms(StepCounter(1))
    assert longer.primer is base.primer
    (outcome,) = await play_steps(longer, Text(response="a"))
    assert outcome.episode.done
