"""The shapes of what an environment reads and writes.

spec_of(arithmetic()).observation[0]   # FieldSpec(name="history.prompt", dtype="message", ...)
shape_rewards(rewards, RewardShape.SPARSE)    # float32 [1, 1]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dialoop.chat import ToolDefinition
from dialoop.environments.environment import Environment, Stateless
from dialoop.environments.modes import InputMode, RewardShape
from dialoop.episode import Redo
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.trajectory import Reward

# dtype and shape of one message, text or row of ids; -1 is a length that varies.
_CONTENT = {
    InputMode.HISTORY: ("message", (-1,)),
    InputMode.TEXT: ("string", ()),
    InputMode.TOKENS: ("int32", (-1,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """FieldSpec(name="tokens.prompt", dtype="int32", shape=(-1,)); -1 is a length that varies."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """What a caller needs to know to build a policy or a buffer for an environment."""

    input_mode: InputMode = InputMode.HISTORY
    reward_shape: RewardShape = RewardShape.SPARSE
    observation: tuple[FieldSpec, ...] = ()
    action: tuple[FieldSpec, ...] = ()
    reward: tuple[FieldSpec, ...] = ()
    policy_role: str = "assistant"
    data_key: str = "query"
    tool_definitions: tuple[ToolDefinition, ...] = ()
    is_stateless: bool = False
    redo: Redo = Redo.NEVER
    facts: Mapping[str, str] = field(default_factory=dict)


def spec_of(environment: Environment) -> EnvironmentSpec:
    """Return the spec of an environment; defaults stand for what it does not define."""
    traits = environment.traits
    mode = InputMode.parse(getattr(environment, "input_mode", InputMode.HISTORY))
    dtype, shape = _CONTENT[mode]
    view = mode.name.lower()
    flags = tuple(FieldSpec(name=name, dtype="bool") for name in ("terminated", "truncated"))
    tokens = (-1, 1) if traits.reward_shape is RewardShape.DENSE else (1, 1)
    is_stateless = (
        isinstance(environment, Stateless)
        and not traits.needs_session
        and mode is InputMode.HISTORY
    )
    return EnvironmentSpec(
        input_mode=mode,
        reward_shape=traits.reward_shape,
        observation=(FieldSpec(name=f"{view}.prompt", dtype=dtype, shape=shape), *flags),
        action=tuple(
            FieldSpec(name=f"{view}.{part}", dtype=dtype, shape=shape)
            for part in ("response", "full")
        ),
        reward=tuple(
            FieldSpec(name=name, dtype="float32", shape=tokens) for name in traits.reward_names
        ),
        policy_role=getattr(environment, "policy_role", "assistant"),
        data_key=getattr(environment, "data_key", "query"),
        tool_definitions=traits.tool_definitions,
        is_stateless=is_stateless,
        redo=Redo.parse(getattr(environment, "redo", Redo.NEVER)),
        facts=traits.facts,
    )


def shape_rewards(
    rewards: Iterable[Reward], shape: RewardShape, *, num_tokens: int | None = None
) -> NDArray[np.float32]:
    """Return the sum of value * weight: [1, 1] for SPARSE and TURN, [num_tokens, 1] for DENSE.

    The dtype is float32. In DENSE, a reward with a single number counts at the last token.
    """
    rewards = tuple(rewards)
    if shape is not RewardShape.DENSE:
        total = sum(reward.value * reward.weight for reward in rewards)
        return np.array([[total]], dtype=np.float32)
    if not num_tokens:
        raise InvalidInput(
            "`num_tokens` is missing, and a DENSE reward needs it.",
            remedy="Pass `num_tokens`, the number of tokens in the response.",
        )
    dense = np.zeros((num_tokens, 1), dtype=np.float32)
    for reward in rewards:
        if not reward.per_token:
            dense[-1, 0] += reward.value * reward.weight
        elif len(reward.per_token) == num_tokens:
            dense[:, 0] += np.array(reward.per_token, dtype=np.float32) * reward.weight
        else:
            raise InvalidInput(
                f"Reward {reward.name} has {len(reward.per_token)} numbers, not {num_tokens}.",
                reason=Reason.RAGGED,
                remedy="Give one number for each token of the response.",
            )
    return dense
