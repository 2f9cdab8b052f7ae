"""Runs of text environments and trials to protobuf and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dialoop.sequences import Source
from dialoop.text_environment.history import TextHistory, TextSegment
from dialoop.trials.trial import Action, MaskScope, PlayedEpisode, PlayedStep, Trial, TrialResult
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.wire.messages import history_from_proto, history_to_proto, message_to_proto
from dialoop.wire.records import (
    failure_from_proto,
    failure_to_proto,
    policy_version_from_proto,
    policy_version_to_proto,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.sequences import PolicyVersion

Runs = tuple[tuple[int, "PolicyVersion"], ...]


def _runs_to_proto(runs: Runs) -> list[pb.PolicyRun]:
    return [
        pb.PolicyRun(length=length, policy_version=policy_version_to_proto(version))
        for length, version in runs
    ]


def _runs_from_proto(protos: Iterable[pb.PolicyRun]) -> Runs:
    return tuple((p.length, policy_version_from_proto(p.policy_version)) for p in protos)


def text_history_to_proto(history: TextHistory) -> pb.TextHistory:
    """One episode in a running text, with its query, response and mask."""
    query, response, mask = history.split_query_response_tokens()
    return pb.TextHistory(
        segments=[
            pb.TextSegment(
                text=segment.text,
                token_ids=segment.token_ids,
                source=int(segment.source),  # type: ignore[arg-type]  # enums are ints
                turn=segment.turn,
                inference_logprobs=segment.logprobs,
                policy_runs=_runs_to_proto(segment.versions),
            )
            for segment in history.segments
        ],
        completed=history.completed,
        truncated=history.truncated,
        reward=history.reward,
        failures=[failure_to_proto(failure) for failure in history.failures],
        text=history.text,
        query_token_ids=query,
        response_token_ids=response,
        response_mask=mask,
    )


def text_history_from_proto(proto: pb.TextHistory) -> TextHistory:
    """One episode in a running text."""
    return TextHistory(
        segments=tuple(
            TextSegment(
                text=segment.text,
                token_ids=tuple(segment.token_ids),
                source=Source(segment.source),
                turn=segment.turn,
                logprobs=tuple(segment.inference_logprobs),
                versions=_runs_from_proto(segment.policy_runs),
            )
            for segment in proto.segments
        ),
        completed=proto.completed,
        truncated=proto.truncated,
        reward=proto.reward if proto.HasField("reward") else None,
        failures=tuple(failure_from_proto(failure) for failure in proto.failures),
    )


def mask_scope_to_proto(scope: MaskScope) -> pb.MaskScope:
    """Which actions a mask counts."""
    return pb.MASK_SCOPE_FINAL if scope is MaskScope.FINAL else pb.MASK_SCOPE_ALL


def mask_scope_from_proto(scope: int) -> MaskScope:
    """Which actions a mask counts; all of them unless it says otherwise."""
    return MaskScope.FINAL if scope == pb.MASK_SCOPE_FINAL else MaskScope.ALL


def trials_to_proto(result: TrialResult) -> list[pb.Trial]:
    """All trials, with the token lists of their final episodes."""
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
            episodes=[_episode_to_proto(episode) for episode in trial.episodes],
            reward=reward,
            full_token_ids=ids,
            full_attention_mask=attention,
            completion_only_mask=mask,
            final_completion_messages=[
                message_to_proto(message)
                for message in trial.final.messages
                if message.role == "assistant"
            ][-1:],
        )
        for trial, ids, attention, mask, reward in rows
    ]


def trials_from_proto(protos: Iterable[pb.Trial], *, mask_scope: MaskScope) -> TrialResult:
    """All trials; token lists are derived from the steps again."""
    return TrialResult(
        trials=tuple(
            Trial(
                session_id=proto.session_id,
                episodes=tuple(_episode_from_proto(episode) for episode in proto.episodes),
            )
            for proto in protos
        ),
        mask_scope=mask_scope,
    )


def _episode_to_proto(episode: PlayedEpisode) -> pb.TrialEpisode:
    return pb.TrialEpisode(
        steps=[_step_to_proto(step) for step in episode.steps],
        messages=history_to_proto(episode.messages),
        reward=episode.reward,
        terminated=episode.terminated,
        is_free_shot=episode.is_free_shot,
        failures=[failure_to_proto(failure) for failure in episode.failures],
    )


def _episode_from_proto(proto: pb.TrialEpisode) -> PlayedEpisode:
    return PlayedEpisode(
        steps=tuple(_step_from_proto(step) for step in proto.steps),
        messages=history_from_proto(proto.messages),
        reward=proto.reward,
        terminated=proto.terminated,
        is_free_shot=proto.is_free_shot,
        failures=tuple(failure_from_proto(failure) for failure in proto.failures),
    )


def _step_to_proto(step: PlayedStep) -> pb.TrialStep:
    return pb.TrialStep(
        prompt=step.prompt,
        prompt_token_ids=step.prompt_ids,
        action=step.action.text,
        action_token_ids=step.action.token_ids,
        inference_logprobs=step.action.logprobs,
        policy_runs=_runs_to_proto(step.action.versions),
        reward=step.reward,
        info=dict(step.info),
    )


def _step_from_proto(proto: pb.TrialStep) -> PlayedStep:
    return PlayedStep(
        prompt=proto.prompt,
        prompt_ids=tuple(proto.prompt_token_ids),
        action=Action(
            text=proto.action,
            token_ids=tuple(proto.action_token_ids),
            logprobs=tuple(proto.inference_logprobs),
            versions=_runs_from_proto(proto.policy_runs),
        ),
        reward=proto.reward,
        info=dict(proto.info),
    )
