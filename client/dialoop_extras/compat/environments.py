"""torchrl's environments by name, over `ChatEnv` and the tasks.

    env = ChatEnv(batch_size=[1], system_prompt="Answer briefly.", tokenizer=tokenizer)
    env = GSM8KEnv(dataset="gsm8k.jsonl", repeats=4, seed=1)

A data set is a file or rows: Dialoop downloads none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.endings import EndOnTag
from dialoop.environments.standard import completion
from dialoop.environments.standard import dataset_chat_env as own_dataset_chat_env
from dialoop.environments.tasks.data_loading import DataLoadingPrimer
from dialoop.environments.tasks.files import file_tasks
from dialoop.environments.tasks.row_tasks import text_to_query
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.tasks.gsm8k import Gsm8kReward, gsm8k
from dialoop.tasks.ifeval import IfEvalReward, ifeval

from dialoop_extras.compat.arguments import require_neutral
from dialoop_extras.mlgym import mlgym

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dialoop.environments.transform import Transform
    from dialoop.tasks.ifeval import Aggregator


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChatEnv(ChatEnv):
    """A ChatEnv with torchrl's methods."""

    @classmethod
    def of(cls, env: ChatEnv) -> SourceChatEnv:
        """Return an environment with these methods, too."""
        return cls(**{f.name: getattr(env, f.name) for f in fields(ChatEnv) if f.init})

    def append_transform(self, *transforms: Transform | Iterable[Transform]) -> ChatEnv:
        """Return the environment with more transforms; GSM8KRewardParser() and the like are two."""
        parts = (t if isinstance(t, (list, tuple)) else (t,) for t in transforms)
        return self.with_transforms(*(transform for part in parts for transform in part))

    def set_seed(self, seed: int) -> None:
        """Raise InvalidConfig (BAD_OPTIONS): each reset has its own seed."""
        raise InvalidConfig(
            "An environment has no seed: it serves any number of episodes.",
            reason=Reason.BAD_OPTIONS,
            remedy=f"Give it to the reset: env.reset(task, seed={seed!r:.20}).",
        )


def chat_env(
    batch_size: Any = None,
    *,
    system_prompt: str | None = None,
    tokenizer: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str = "chat",
    **options: Any,
) -> ChatEnv:
    """Return a ChatEnv; `options` are its roles, input_mode, data_key and transforms.

    A tokenizer is used in text and tokens mode only: history mode shows messages.
    """
    own: dict[str, Any] = {n: options.pop(n) for n in tuple(options) if n in _CHAT_OPTIONS}
    require_neutral("ChatEnv", {"batch_size": batch_size, **options})
    if own.get("input_mode", "history") != "history":
        own["tokenizer"] = tokenizer
    return SourceChatEnv(
        name=name, system_prompt=system_prompt or "", template_kwargs=template_kwargs or {}, **own
    )


_CHAT_OPTIONS = frozenset(
    {
        *("system_role", "user_role", "policy_role", "input_mode", "data_key"),
        *("transforms", "tasks", "stop"),
    }
)


def dataset_chat_env(  # noqa: PLR0913 - the source's arguments
    *,
    dataset: Any,
    name: str | None = None,
    split: str | None = None,
    shuffle: bool = True,
    repeats: int | None = None,
    seed: int | None = None,
    group_repeats: bool = False,
    collate_fn: Any = None,
    max_steps: int | None = None,
    system_prompt: str | None = None,
    **others: Any,
) -> ChatEnv:
    """Return an environment over rows, a task source, or the path of a file of rows."""
    require_neutral("DatasetChatEnv", {k: v for k, v in others.items() if k != "tokenizer"})
    collate = collate_fn or text_to_query
    rows = file_tasks(dataset, collate=collate) if isinstance(dataset, (str, Path)) else dataset
    env = own_dataset_chat_env(
        rows,
        name=name or "dataset",
        split=split or "",
        shuffle=shuffle,
        seed=_shuffle_seed(seed),
        repeats=repeats or 1,
        group_repeats=group_repeats,
        collate=collate,
        max_steps=max_steps,
        system_prompt=system_prompt or "",
    )
    return SourceChatEnv.of(env)


def gsm8k_env(  # noqa: PLR0913 - the source's arguments
    dataset: str | Path,
    *,
    shuffle: bool = True,
    repeats: int | None = None,
    seed: int | None = None,
    group_repeats: bool = False,
    compute_reward: bool = True,
    max_steps: int = 1,
    **others: Any,
) -> ChatEnv:
    """Return GSM8K's environment over a file of its rows; a reset loads the next question."""
    require_neutral("GSM8KEnv", {k: v for k, v in others.items() if k != "tokenizer"})
    env = gsm8k(path=dataset, max_steps=max_steps)
    if not compute_reward:
        env = replace(
            env, transforms=tuple(t for t in env.transforms if not isinstance(t, Gsm8kReward))
        )
    return _load_tasks(env, shuffle, seed, repeats, group_repeats)


def ifeval_env(
    dataset: str | Path,
    *,
    shuffle: bool = True,
    repeats: int | None = None,
    seed: int | None = None,
    group_repeats: bool = False,
    max_steps: int = 1,
    **others: Any,
) -> ChatEnv:
    """Return IFEval's environment over a file of its rows; a reset loads the next instruction."""
    require_neutral("IFEvalEnv", {k: v for k, v in others.items() if k != "tokenizer"})
    env = ifeval(path=dataset, max_steps=max_steps)
    return _load_tasks(env, shuffle, seed, repeats, group_repeats)


def _shuffle_seed(seed: int | None) -> int | None:
    """Return the seed as one that shuffles: ours keeps the order with 0."""
    return 2**31 if seed == 0 else seed


def _load_tasks(
    env: ChatEnv, shuffle: bool, seed: int | None, repeats: int | None, group_repeats: bool
) -> ChatEnv:
    """Return the environment with a primer first, which loads the next task at each reset."""
    primer = DataLoadingPrimer(
        env.tasks,
        split=env.tasks.splits[0],
        shuffle_seed=_shuffle_seed(seed) or random.randrange(1, 2**31) if shuffle else 0,
        repeats=repeats or 1,
        group_repeats=group_repeats,
    )
    return SourceChatEnv.of(replace(env, transforms=(primer, *env.transforms)))


def gsm8k_reward_parser(
    tokenizer: Any = None, *, set_done_if_answer: bool = True, reward_contained: float = 0.0
) -> tuple[Transform, ...]:
    """Return the transforms that end on an answer and reward it: `env.with_transforms(*these)`.

    The tokenizer has no use: rewards read messages. reward_contained: weight of that component.
    """
    del tokenizer
    ends = (EndOnTag(),) if set_done_if_answer else ()
    return (*ends, Gsm8kReward(contained=reward_contained))


def ifeval_scorer(
    *,
    aggregate_reward: bool | str | Aggregator = True,
    set_done_if_answer: bool = True,
) -> tuple[Transform, ...]:
    """Return the transforms that end on an answer and reward it: `env.with_transforms(*these)`.

    aggregate_reward: weighted_v3 (True), tiered_v2, additive_v1 as in torchrl's first
    documentation, or a function of `dialoop.tasks.ifeval.Followed`.
    """
    if aggregate_reward is False:
        raise InvalidConfig(
            "aggregate_reward is False, and an episode needs one reward.",
            reason=Reason.BAD_OPTIONS,
            remedy="Leave it out: the scores stand beside the reward as strict and loose.",
        )
    if aggregate_reward is True:
        aggregate_reward = "weighted_v3"
    ends = (EndOnTag(),) if set_done_if_answer else ()
    return (*ends, IfEvalReward(aggregator=aggregate_reward))


def llm_env(
    *, tokenizer: Any, from_text: bool = True, max_steps: int | None = None, **others: Any
) -> ChatEnv:
    """Return an environment whose prompt is the raw text or ids so far, without a template."""
    require_neutral("LLMEnv", others)
    input_mode = "text" if from_text else "tokens"
    env = completion(tokenizer=tokenizer, input_mode=input_mode, max_steps=max_steps)
    return SourceChatEnv.of(env)


def make_mlgym(
    *, task: str | None = None, tasks: Sequence[str] = (), max_steps: int = 10, **options: Any
) -> ChatEnv:
    """Return MLGym's environment of one task or several; `options` are those of `mlgym`."""
    names = [*tasks, *([task] if task else [])]
    return SourceChatEnv.of(mlgym(tasks=names, max_steps=max_steps, **options))
