"""Against the real packages, where they are installed: pip install 'dialoop-extras[tensordict]'."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from dialoop.chat import ChatHistory, History, Message, ToolCall
from dialoop.episode import Sample
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import SamplingParams, StopReason
from dialoop.views.views import LogProbs, TurnView
from dialoop_extras.torchrl_view import from_torchrl, to_torchrl

from tests.support.samples.chat_families import builder

V1 = PolicyVersion(lineage="main", number=1)
is_missing = importlib.util.find_spec("torchrl") is None
needs_torchrl = pytest.mark.skipif(
    is_missing, reason="tensordict and torchrl are optional (the SDK's extra 'tensordict')"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # torchrl's own


def view(question: str, answer: str) -> TurnView:
    tokens = builder()
    prompt = tokens.prompt(History((Message(role="user", content=question),)))
    ids = [*tokens.tokenizer.encode(answer).ids, tokens.tokenizer.end_of_turn_ids[0]]
    answered = tokens.answer(prompt, ids, logprobs=[-0.25] * len(ids), versions=[(len(ids), V1)])
    sample = Sample(
        history=ChatHistory(prompt=prompt.history).respond(answered.message),
        sequence=answered.appended,
        stop_reason=StopReason.STOP,
        sampling=SamplingParams(temperature=1.0),
    )
    return TurnView.of_sample(sample, tokenizer=tokens.tokenizer)


@needs_torchrl
def test_turns_of_different_lengths_come_back_as_they_were():
    views = [view("q", "a"), view("a longer question", "and 世 longer")]
    assert from_torchrl(to_torchrl(views)) == views


@needs_torchrl
def test_the_containers_are_torchrls_and_hold_what_was_sampled():
    from torchrl.modules.llm.policies.common import ChatHistory as Theirs
    from torchrl.modules.llm.policies.common import Tokens

    (expected,) = views = [view("q", "a")]
    row = to_torchrl(views)[0]
    assert isinstance(row["tokens"], Tokens)
    assert isinstance(row["history"], Theirs)
    assert row["tokens"].response.tolist() == list(expected.tokens.response)
    assert row["masks"].all_assistant_mask.sum() == len(expected.tokens.response)
    assert np.isnan(row["log_probs"].full.numpy()[: len(expected.tokens.prompt)]).all()
    assert row["log_probs"].prompt is None
    assert row["history"].full.unbind(-1)[-1].content == "a"


@needs_torchrl
def test_what_is_unknown_stays_unknown():
    bare = replace(view("q", "a"), log_probs=LogProbs(), text=None, history=None)
    assert from_torchrl(to_torchrl([bare])) == [bare]


@needs_torchrl
def test_padded_rows_and_messages_with_calls_are_refused():
    import tensordict

    row = to_torchrl([view("q", "a")])[0]
    row["tokens"].padded = True
    with pytest.raises(InvalidInput, match="padded"):
        from_torchrl(tensordict.lazy_stack([row]))
    call = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments_json="{}"),))
    calling = replace(view("q", "a"), history=ChatHistory(prompt=History((call,))))
    with pytest.raises(InvalidInput, match="more than text"):
        to_torchrl([calling])


@pytest.mark.skipif(not is_missing, reason="torchrl is installed")
def test_without_the_extra_the_error_says_what_to_install():
    with pytest.raises(InvalidConfig, match=r"dialoop-extras\[tensordict\]"):
        to_torchrl([view("q", "a")])
