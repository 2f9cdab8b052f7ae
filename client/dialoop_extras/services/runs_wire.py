"""Runs of text environments and trials to protobuf and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.sequences import Source
from dialoop.v1 import run_service_pb2 as pb
from dialoop.wire.codec import Codec, FieldRow, each, enum, many, submessage, wire_name
from dialoop.wire.messages import HISTORY, MESSAGE
from dialoop.wire.records import FAILURE
from dialoop.wire.sequences import POLICY_VERSION

from dialoop_extras.text_environment.history import TextHistory, TextSegment
from dialoop_extras.trials.trial import (
    Action,
    MaskScope,
    PlayedEpisode,
    PlayedStep,
    Trial,
    TrialResult,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.sequences import PolicyVersion


def _run_to_proto(run: tuple[int, PolicyVersion]) -> pb.PolicyRun:
    length, version = run
    return pb.PolicyRun(length=length, policy_version=POLICY_VERSION.to_proto(version))


def _run_from_proto(proto: pb.PolicyRun) -> tuple[int, PolicyVersion]:
    return proto.length, POLICY_VERSION.from_proto(proto.policy_version)


def _action_to_proto(action: Action) -> dict[str, Any]:
    return {
        "action": action.text,
        "action_token_ids": action.token_ids,
        "inference_logprobs": action.logprobs,
        "policy_runs": map(_run_to_proto, action.versions),
    }


def _action_from_proto(proto: pb.TrialStep) -> Action:
    return Action(
        text=proto.action,
        token_ids=tuple(proto.action_token_ids),
        logprobs=tuple(proto.inference_logprobs),
        versions=tuple(map(_run_from_proto, proto.policy_runs)),
    )


TEXT_SEGMENT = Codec(
    TextSegment,
    pb.TextSegment,
    source=enum(Source),
    logprobs=wire_name("inference_logprobs"),
    versions=each(_run_to_proto, _run_from_proto, wire="policy_runs"),
)
TEXT_HISTORY = Codec(
    TextHistory, pb.TextHistory, segments=many(TEXT_SEGMENT), failures=many(FAILURE)
)
STEP = Codec(
    PlayedStep,
    pb.TrialStep,
    prompt_ids=wire_name("prompt_token_ids"),
    action=FieldRow(_action_to_proto, _action_from_proto, spreads=True),
)
EPISODE = Codec(
    PlayedEpisode,
    pb.TrialEpisode,
    steps=many(STEP),
    messages=submessage(HISTORY),
    failures=many(FAILURE),
)
text_history_from_proto = TEXT_HISTORY.from_proto


def text_history_to_proto(history: TextHistory) -> pb.TextHistory:
    """Return one episode in a running text, with its query, response and mask."""
    query, response, mask = history.split_query_response_tokens()
    proto = TEXT_HISTORY.to_proto(history)
    proto.text = history.text
    proto.query_token_ids.extend(query)
    proto.response_token_ids.extend(response)
    proto.response_mask.extend(mask)
    return proto


def mask_scope_to_proto(scope: MaskScope) -> pb.MaskScope:
    """Return which actions a mask counts, as on the wire."""
    return pb.MASK_SCOPE_FINAL if scope is MaskScope.FINAL else pb.MASK_SCOPE_ALL


def mask_scope_from_proto(scope: int) -> MaskScope:
    """Return which actions a mask counts; all of them unless it says otherwise."""
    return MaskScope.FINAL if scope == pb.MASK_SCOPE_FINAL else MaskScope.ALL


def trials_to_proto(result: TrialResult) -> list[pb.Trial]:
    """Return all trials, with the token lists of their final episodes."""
    rows = zip(
        result.trials,
        result.full_token_ids,
        result.full_attention_mask,
        result.completion_only_mask,
        result.rewards,
        strict=True,
    )
    return [
        pb.Trial(
            session_id=trial.session_id,
            episodes=map(EPISODE.to_proto, trial.episodes),
            reward=reward,
            full_token_ids=ids,
            full_attention_mask=attention,
            completion_only_mask=mask,
            final_completion_messages=[
                MESSAGE.to_proto(message)
                for message in trial.final.messages
                if message.role == "assistant"
            ][-1:],
        )
        for trial, ids, attention, mask, reward in rows
    ]


def trials_from_proto(protos: Iterable[pb.Trial], *, mask_scope: MaskScope) -> TrialResult:
    """Read all trials; their token lists are derived from the steps again."""
    return TrialResult(
        trials=tuple(
            Trial(
                session_id=proto.session_id,
                episodes=tuple(map(EPISODE.from_proto, proto.episodes)),
            )
            for proto in protos
        ),
        mask_scope=mask_scope,
    )
