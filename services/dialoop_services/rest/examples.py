"""Example requests of the OpenAPI document, one for each rpc that takes a body."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_CALL = {"role": "assistant", "content": "<request><Calculator>12+34<call>"}
_STEP = {"episode": 1, "step_index": 0, "history": {"response": {"messages": [_CALL]}}}
_RESET = {"episode": 1, "split": "train", "task_key": "12+34"}
_PROMPT = {"messages": [{"role": "user", "content": "12+34"}]}
_TASK = {
    "task_id": "arithmetic/0",
    "environment": "arithmetic",
    "split": "train",
    "key": "12+34",
    "purpose": "PURPOSE_TRAINING",
    "num_trajectories": 8,
}
_SEQUENCE = {
    "columns": [
        {"name": "token_ids", "data": [12, 7, 9]},
        {"name": "inference_logprobs", "data": [-0.5, -1.25]},
    ],
    "segments": [
        {"length": 1, "source": "SOURCE_PROMPT"},
        {
            "start": 1,
            "length": 2,
            "source": "SOURCE_MODEL",
            "message_index": 1,
            "policy_version_index": 0,
        },
    ],
    "policy_versions": [{"lineage": "a", "number": 3}],
}
_TRAJECTORY = {
    "trajectory_id": "t-1",
    "group_id": "arithmetic/0",
    "task_key": "12+34",
    "environment": "arithmetic",
    "history": {"messages": [_PROMPT["messages"][0], {"role": "assistant", "content": "46"}]},
    "sequences": [_SEQUENCE],
    "terminated": True,
}
_GROUP = {"group_id": "arithmetic/0", "task": _TASK, "trajectories": [_TRAJECTORY]}
_LEASE = "task/1/arithmetic/0"
_INSTANCE = {
    "role": "inference",
    "name": "gpu-0",
    "address": "127.0.0.1:7002",
    "policy_version": {"lineage": "a", "number": 3},
    "is_ready": True,
}

EXAMPLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "EnvironmentService.CreateSession": {"session_id": "s-1", "environment": "arithmetic"},
        "EnvironmentService.Reset": _RESET,
        "EnvironmentService.Step": _STEP,
        "EnvironmentService.StepAndReset": {
            "step": _STEP,
            "next_split": "train",
            "next_task_key": "56+78",
        },
        "EnvironmentService.BatchReset": {"items": [{"session_id": "s-1", **_RESET}]},
        "EnvironmentService.BatchStep": {"items": [{"session_id": "s-1", **_STEP}]},
        "RunService.RunText": {
            "environment": "calculator",
            "queries": ["What is 12+34?\n"],
            "extra_json": '{"answers": ["46"]}',
        },
        "RunService.RunTrial": {
            "environment": "twenty_questions",
            "inputs": [{"data": {"solution": "apple"}}],
            "episodes_per_trial": 2,
            "free_shots": 1,
        },
        "EnvironmentService.StepHistory": {
            "environment": "arithmetic",
            "task": {"split": "train", "task_key": "12+34"},
            "history": {"prompt": _PROMPT, "response": {"messages": [_CALL]}},
        },
        "EnvironmentService.CreateGroup": {
            "group_id": "g-1",
            "environment": "arithmetic",
            "num_sessions": 8,
            "task": {"split": "train", "task_key": "12+34"},
        },
        "EnvironmentService.Score": {"split": "train", "trajectory": _TRAJECTORY},
        "InferenceService.Generate": {
            "history": {"prompt": _PROMPT},
            "sampling": {"temperature": 1.0, "max_new_tokens": 24, "stop": ["<call>"]},
        },
        "InferenceService.GenerateStream": {"request": {"history": {"prompt": _PROMPT}}},
        "InferenceService.LogProb": {"token_ids": [{"values": [12, 7, 9]}]},
        "InferenceService.Sleep": {"drain_s": 10.0},
        "TemplateService.Render": {"history": _PROMPT},
        "InferenceService.CreateRecording": {"recording_id": "r-1", "task": _TASK},
        "InferenceService.CloseRecording": {"labels": {"agent": "mine"}},
        "TemplateService.RegisterTemplate": {
            "name": "plain",
            "source": (
                "{% for message in messages %}{% generation %}{{ message.content }}"
                "{% endgeneration %}{% endfor %}"
            ),
        },
        "TemplateService.Parse": {"text": "<|im_start|>user\n12+34<|im_end|>\n"},
        "ReplayService.OfferTasks": {"tasks": [_TASK]},
        "ReplayService.LeaseTasks": {"worker": "me", "max_tasks": 4, "wait_s": 1.0},
        "ReplayService.AppendMembers": {
            "items": [{"lease_id": _LEASE, "member": 0, "trajectory": _TRAJECTORY}]
        },
        "ReplayService.AppendTurns": {
            "items": [
                {
                    "lease_id": _LEASE,
                    "member": 0,
                    "turn": {
                        "trajectory_id": "t-1",
                        "session_id": "s-1",
                        "sampled": {"samples": [{"stop_reason": "STOP_REASON_STOP"}]},
                    },
                }
            ]
        },
        "ReplayService.AppendGroups": {
            "stage": "STAGE_UNSCORED",
            "items": [{"group": _GROUP, "lease_id": _LEASE}],
        },
        "ReplayService.LeaseGroups": {
            "stage": "STAGE_SCORED",
            "worker": "me",
            "max_groups": 16,
            "wait_s": 1.0,
        },
        "ReplayService.Acknowledge": {
            "items": [{"lease_id": "group/1/g", "outcome": "OUTCOME_CONSUMED"}]
        },
        "ReplayService.Return": {"items": [{"lease_id": _LEASE, "reason": "shutdown"}]},
        "ReplayService.Extend": {"lease_ids": [_LEASE], "lease_s": 60.0},
        "ReplayService.ReopenLeases": {"lease_ids": ["scored/1/arithmetic/0"], "lease_s": 60.0},
        "ReplayService.AdvancePolicy": {
            "policy_version": {"lineage": "a", "number": 3},
            "max_outstanding_groups": 48,
        },
        "ReplayService.Requeue": {"group_ids": ["arithmetic/0"]},
        "ReplayService.Purge": {"confirm": "demo"},
        "RegistryService.Announce": {"instance": _INSTANCE, "lease_s": 10.0},
        "RegistryService.Withdraw": {"role": "inference", "name": "gpu-0", "epoch": 7},
        "RegistryService.Admit": {
            "role": "inference",
            "name": "gpu-0",
            "epoch": 7,
            "is_admitted": True,
        },
        "ScorerService.LogProb": {"token_ids": [{"values": [12, 7, 9]}]},
        "ScorerService.RetrieveKl": {
            "trajectories": [_TRAJECTORY],
            "estimator": "KL_ESTIMATOR_K3",
        },
        "ScorerService.Score": {"group": _GROUP},
        "TrainerService.Evaluate": {"split": "heldout", "max_tasks": 32, "label": "by_hand"},
    }
)
