from __future__ import annotations

import numpy as np
import pytest
from dialoop import testing
from dialoop.chat import ChatHistory, History, Message
from dialoop.episode import Sample
from dialoop.errors import InvalidInput, NotFound, PreconditionFailed
from dialoop.sequences import ForkCause, PolicyVersion
from dialoop.templates.parts import text_of_parts, tokens_of_parts
from dialoop.templates.registry import named_template
from dialoop.trajectory import Distribution, SamplingParams, StopReason, Trajectory, Turn
from dialoop.views.views import LogProbRow, LogProbs, Masks, Tokens, TurnView, text_of_tokens
from dialoop.wire.messages import LOG_PROBS, MASKS
from dialoop_extras.compat.names import masks_of
from dialoop_extras.padding import pad_logprobs, pad_masks, pad_tokens, padded_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples.chat_families import CHATML, THINKING, builder

V1 = PolicyVersion(lineage="main", number=1)
BUILDER = builder()
TOKENIZER = BUILDER.tokenizer
END = TOKENIZER.end_of_turn_ids[0]


def user(text: str) -> History:
    return History((Message(role="user", content=text),))


def play_turns(template: str, texts: list[str]) -> tuple[Trajectory, list[TurnView]]:
    """Return a trajectory, and each turn as it was seen when it was sampled."""
    tokens, history, sequences, seen, turns = builder(template), user("q"), [], [], []
    for turn, text in enumerate(texts):
        context = sequences[-1] if sequences else None
        covered = len(history) - 1 if context is not None else 0
        prompt = tokens.prompt(history, context=context, num_context_messages=covered, turn=turn)
        ids = [*tokens.tokenizer.encode(text).ids, END]
        logprobs = [-0.1 * (turn + 1)] * len(ids)
        answer = tokens.answer(prompt, ids, logprobs=logprobs, versions=[(len(ids), V1)])
        sample = Sample(
            history=ChatHistory(prompt=history).respond(answer.message),
            sequence=answer.appended,
            stop_reason=StopReason.STOP,
            sampling=SamplingParams(temperature=1.0),
        )
        seen.append(TurnView.of_sample(sample, context=context, tokenizer=tokens.tokenizer))
        if context is not None and prompt.fork_cause is ForkCause.NONE:
            sequences[-1] = context.extended_by(answer.appended)
        else:
            sequences.append(answer.appended)
        turns.append(Turn(message_start=len(history), num_messages=2))
        history = history.append(answer.message).extend(user("more"))
    trajectory = testing.trajectory(
        history=history,
        turns=tuple(turns),
        sequences=tuple(sequences),
        sampling=SamplingParams(temperature=1.0),
    )
    return trajectory, seen


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_a_turn_of_a_trajectory_is_seen_as_it_was_sampled(template):
    texts = ["<think>\nhm\n</think>\n\none", "two", "<think>\nso\n</think>\n\nthree"]
    trajectory, seen = play_turns(template, texts)
    for turn, then in enumerate(seen):
        now = TurnView.of_turn(trajectory, turn, TOKENIZER)
        assert now == then
        assert now.history.response[0].text == texts[turn]
        assert now.text.response == f"{texts[turn]}<|im_end|>"
        assert now.text.full == now.text.prompt + now.text.response
        assert now.tokens.response[-1] == END
    assert len(trajectory.sequences) == (2 if template == THINKING else 1)


def test_masks_and_log_probs_stand_where_the_sampled_tokens_do():
    trajectory, _ = play_turns(CHATML, ["one", "two"])
    view = TurnView.of_turn(trajectory, 1, TOKENIZER)
    mask = view.masks.all_assistant_mask
    assert len(mask) == len(view.tokens.full)
    ids = np.array(view.tokens.full)[mask].tolist()
    assert ids == [*TOKENIZER.encode("one").ids, END, *TOKENIZER.encode("two").ids, END]
    assert view.masks.all_attention_mask.all()
    start, length = len(view.tokens.prompt), len(view.tokens.response)
    assert view.log_probs.response.start == 0
    assert view.log_probs.full.start == start
    aligned = view.log_probs.full.align(start + length)
    assert np.isnan(aligned[:start]).all()
    assert aligned[start:] == pytest.approx([-0.2] * length)


def test_log_probs_that_nobody_took_are_absent():
    trajectory, _ = play_turns(CHATML, ["one"])
    (sequence,) = trajectory.sequences
    prompt = BUILDER.prompt(user("q"))
    bare = BUILDER.answer(prompt, sequence.token_ids[-3:].tolist(), versions=[(3, V1)]).appended
    history = ChatHistory(prompt=user("q")).respond(Message(role="assistant", content="x"))
    sample = Sample(history=history, sequence=bare, stop_reason=StopReason.STOP)
    view = TurnView.of_sample(sample)
    assert view.log_probs.response is None
    assert view.log_probs.full is None
    assert view.text is None


def test_the_first_token_of_a_conversation_has_no_log_prob():
    values = np.array([0.0, -1.0], dtype=np.float32)
    with pytest.raises(InvalidInput, match="first token of full"):
        LogProbs(full=LogProbRow(values=values, start=0))
    assert LogProbs(response=LogProbRow(values=values)).temperature_scaled is False


def test_log_probs_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInput, match="do not fit 3 tokens"):
        LogProbRow(values=np.zeros(3, dtype=np.float32), start=1).align(3)


def test_a_turn_that_nobody_sampled_is_not_found():
    trajectory, _ = play_turns(CHATML, ["one"])
    with pytest.raises(NotFound, match="turn 7"):
        TurnView.of_turn(trajectory, 7)


IDS = st.lists(st.integers(0, 313), max_size=6).map(tuple)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4), pad=st.integers(0, 313))
def test_padding_comes_off_whatever_the_pad_id_is(rows, pad):
    batch = [Tokens(prompt=p, response=r, full=p + r) for p, r in rows]
    padded = pad_tokens(batch, pad_token_id=pad)
    assert padded.unpad() == batch
    width = padded.prompt.values.shape[1]
    for index, (prompt, response) in enumerate(rows):
        assert padded.full.values[index, :width].tolist() == padded.prompt.values[index].tolist()
        assert padded.full.values[index, width:].tolist()[: len(response)] == list(response)
        assert padded.full.starts[index] == width - len(prompt)


def test_padding_that_is_also_the_end_of_a_turn_is_safe():
    batch = [Tokens(full=(5, END)), Tokens(full=(5, 6, END, END))]
    left = pad_tokens(batch, pad_token_id=END)
    right = pad_tokens(batch, pad_token_id=END, padding_side="right")
    assert left.full.values.tolist() == [[END, END, 5, END], [5, 6, END, END]]
    assert right.full.values.tolist() == [[5, END, END, END], [5, 6, END, END]]
    assert left.unpad() == right.unpad() == batch
    assert left.full.mask().tolist() == [[False, False, True, True], [True] * 4]


def test_padded_masks_and_log_probs_stand_over_their_tokens():
    trajectory, _ = play_turns(CHATML, ["one", "two three"])
    views = [TurnView.of_turn(trajectory, turn) for turn in range(2)]
    tokens = pad_tokens([v.tokens for v in views], pad_token_id=END)
    masks = pad_masks([v.masks for v in views], tokens)
    rows = pad_logprobs([v.log_probs for v in views], tokens)
    assert masks.all_attention_mask.tolist() == tokens.full.mask().tolist()
    assert set(rows) == {"response", "full"}
    for index, view in enumerate(views):
        row = masks.all_assistant_mask[index][tokens.full.mask()[index]]
        assert row.tolist() == view.masks.all_assistant_mask.tolist()
        is_known = ~np.isnan(rows["full"].values[index])
        assert tokens.full.values[index][is_known].tolist() == list(view.tokens.response)


def test_padded_rows_without_lengths_are_refused():
    values = np.array([[5, END, END]])
    with pytest.raises(InvalidInput) as refused:
        padded_rows(values, None, padding_side="right")
    assert refused.value.reason == "LENGTHS_MISSING"
    (row,) = padded_rows(values, [2], padding_side="right").rows()
    assert TOKENIZER.decode(row.tolist()).endswith("<|im_end|>")
    with pytest.raises(InvalidInput, match="do not fit"):
        padded_rows(values, [4], padding_side="right")


def test_history_text_and_tokens_turn_into_each_other():
    template = named_template("chatml")
    history = ChatHistory(prompt=user("3+4?")).respond(Message(role="assistant", content=" 7 "))
    text = text_of_parts(history.prompt, history.full, template)
    tokens = tokens_of_parts(history.prompt, history.full, template, TOKENIZER)
    assert text.response == " 7 <|im_end|>\n"
    assert text_of_tokens(tokens, TOKENIZER) == text
    assert History(template.parse(text.full)) == history.full
    assert History(template.parse_tokens(tokens.full, TOKENIZER)) == history.full


def test_a_prompt_that_is_rendered_otherwise_once_answered_is_no_prefix():
    tokens = builder(THINKING)
    full = user("q").extend(
        (
            Message(role="assistant", content="<think>\nhm\n</think>\n\nx"),
            Message(role="user", content="y"),
        )
    )
    for convert in (
        lambda: text_of_parts(full[:2], full, tokens.template),
        lambda: tokens_of_parts(full[:2], full, tokens.template, TOKENIZER),
    ):
        with pytest.raises(PreconditionFailed) as refused:
            convert()
        assert refused.value.reason == "PROMPT_NOT_PREFIX"


def test_masks_are_known_by_their_older_names_too():
    masks = masks_of({"attention_mask_all": [1, 1], "all_assistant_mask": [False, True]})
    assert masks == Masks(
        all_attention_mask=np.array([True, True]), all_assistant_mask=np.array([False, True])
    )
    with pytest.raises(InvalidInput, match="no mask 'mask'"):
        masks_of({"mask": [1]})
    with pytest.raises(InvalidInput, match="twice"):
        masks_of({"attention_mask_all": [1], "all_attention_mask": [1]})


def test_log_probs_and_masks_survive_the_wire():
    row = LogProbRow(values=np.array([-1.5, -0.25], dtype=np.float32), start=3)
    log_probs = LogProbs(full=row, temperature_scaled=True, distribution=Distribution.PROCESSED)
    assert LOG_PROBS.from_proto(LOG_PROBS.to_proto(log_probs)) == log_probs
    masks = Masks(all_assistant_mask=np.array([True, False]))
    assert MASKS.from_proto(MASKS.to_proto(masks)) == masks
