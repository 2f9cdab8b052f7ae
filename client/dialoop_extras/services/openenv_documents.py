"""Documents for OpenEnv's clients: observations, schemas, and the routes in OpenAPI."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dialoop.environments.modes import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.environments import Episode, Outcome

_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {}},
    "required": ["role", "content"],
}
SCHEMAS: dict[str, Any] = {
    "observation": {
        "type": "object",
        "properties": {
            "messages": {"type": "array", "items": _MESSAGE},
            "text": {"type": "string"},
            "rewards": {"type": "object", "additionalProperties": {"type": "number"}},
            "failures": {"type": "array", "items": {"type": "object"}},
            "done_reason": {"type": "string"},
            "truncated": {"type": "boolean"},
            "info": {"type": "object", "additionalProperties": {"type": "string"}},
            "episode_id": {"type": "string"},
            "step_index": {"type": "integer"},
        },
    },
    "state": {
        "type": "object",
        "properties": {
            "episode_id": {"type": ["string", "null"]},
            "step_count": {"type": "integer"},
        },
    },
}
_SUMMARIES = {
    "reset": "Begin an episode in a session of its own.",
    "step": "Take the policy's message in the session of `episode_id`.",
    "state": "The state without a session: no episode.",
    "state/{episode_id}": "The state of a session.",
    "metadata": "Name, description and version of the environment.",
    "schema": "JSON schemas of action, observation and state.",
    "health": "Whether the environment can work.",
}


def reply_of(
    episode: Episode,
    episode_id: str | None,
    *,
    info: Mapping[str, str],
    outcome: Outcome | None = None,
) -> dict[str, Any]:
    """Return OpenEnv's reply: observation, reward and done.

    The reward is None where a reward function failed or the sum is not finite.
    """
    rewards = outcome.rewards if outcome else ()
    failures = outcome.failures if outcome else ()
    total = sum(reward.value * reward.weight for reward in rewards)
    is_text = episode.view is not None and isinstance(episode.view.prompt, Text)
    last = episode.history[-1].text if len(episode.history) else ""
    text = episode.view.prompt.prompt if is_text and episode.view else last
    observation = {
        "messages": [message.to_chat() for message in episode.history],
        "text": text,
        "rewards": {r.name: r.recorded for r in rewards if not r.absent},
        "failures": [
            {"owner": f.owner.name, "reason": f.reason, "message": f.message} for f in failures
        ],
        "done_reason": episode.done_reason.name,
        "truncated": episode.truncated,
        "info": dict(info),
        "episode_id": episode_id,
        "step_index": episode.step_index,
    }
    is_rewarded = bool(rewards) and not failures and math.isfinite(total)
    return {
        "observation": observation,
        "reward": total if is_rewarded else None,
        "done": episode.done,
    }


def operation(name: str) -> dict[str, Any]:
    """Return a route as OpenAPI describes it."""
    places = ["environment", *(["episode_id"] if "{" in name else [])]
    body = {"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}}
    return {
        "tags": ["OpenEnv"],
        "summary": _SUMMARIES[name],
        "parameters": [
            {"name": place, "in": "path", "required": True, "schema": {"type": "string"}}
            for place in places
        ],
        **(body if name in ("reset", "step") else {}),
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            "default": {
                "description": "A refusal: `detail` and `reason`.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
        },
    }
