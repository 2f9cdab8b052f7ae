"""Tasks, turns, trajectories and groups: the record of what was played.

Group(group_id="arithmetic/train/0/35+40", task=task, trajectories=(t0, t1))
t0.reward            # 1.0: the sum of value * weight over all turns
t0.history           # user, assistant, tool, assistant
"""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

from dialoop.chat import History
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.representations import messages_html, messages_line, messages_text, record_html
from dialoop.sequences import PolicyVersion, Sequence

_NO_TOP_K = (0, -1)
MAX_TOP_LOGPROBS = 20
"""Most of the likeliest tokens that a sample names at each position, as in OpenAI's API."""
_NUMBER, _WHOLE = "a number", "a whole number"
_LIMITS = {
    "temperature": (_NUMBER, 0.0, math.inf),
    "top_p": (_NUMBER, 0.0, 1.0),
    "min_p": (_NUMBER, 0.0, 1.0),
    "repetition_penalty": (_NUMBER, -math.inf, math.inf),
    "top_k": (_WHOLE, 1, math.inf),
    "max_new_tokens": (_WHOLE, 1, math.inf),
    "seed": (_WHOLE, -math.inf, math.inf),
    "top_logprobs": (_WHOLE, 0, MAX_TOP_LOGPROBS),
}
"""What each number of a sampling has to be, and its bounds."""


def is_whole(value: object) -> bool:
    """Return whether it is a whole number, of Python or numpy, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """Return texts as a tuple, also a single one; InvalidInput (WRONG_TYPE) for anything else."""
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInput(
            f"{name} is {value!r:.40}.", reason=Reason.WRONG_TYPE, remedy="Give a list of texts."
        )
    return texts


class StopReason(IntEnum):
    """Why sampling ended."""

    STOP = 1
    LENGTH = 2
    CONTEXT_FULL = 3
    CANCELLED = 4


class DoneReason(IntEnum):
    """Why the episode ended."""

    NOT_DONE = 1
    SUBMITTED = 2
    NO_CALL = 3
    MAX_TURNS = 4
    MAX_LENGTH = 5
    INCOMPLETE = 6
    CONTENT = 7
    ERROR = 8


class Owner(IntEnum):
    """Whose fault a failure is; only the policy's own are scored."""

    POLICY = 1
    ENVIRONMENT = 2
    TOOL = 3
    INFERENCE = 4
    REWARD = 5
    REPLAY = 6
    COLLECTOR = 7
    AGENT = 8


class Distribution(IntEnum):
    """Which distribution a token's log-prob is of."""

    RAW = 1
    """The model's own, at temperature 1."""
    PROCESSED = 2
    """The one sampled from: after penalty, temperature, min-p, top-k and top-p."""


class Purpose(IntEnum):
    """What a task's trajectories are for."""

    TRAINING = 1
    EVALUATION = 2


class Stage(IntEnum):
    """Where in the queue a group stands."""

    UNSCORED = 1
    SCORED = 2
    EVALUATION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample; `None` is neutral (temperature 1, nothing truncated, engine's own limit).

    A top_k of 0 or -1, which is "off" in transformers and in vLLM, is read as `None`. `constraint`
    is JSON text of what the answer must be; empty: free. {"type": "json_object"}, {"type":
    "json_schema", "schema": {...}}, or {"type": "tagged", "is_single": false, "tags": [...]} for
    JSON between two texts, each tag as {"begin": "<a>", "schema": {...}, "end": "</a>"}.
    top_logprobs: how many of the likeliest tokens a sample names at each position, at most 20.
    seed: of a group's first member in its first turn. Member m draws turn t of its episode with the
    seed + m + 1,000,003 t.
    stop_in_reasoning: whether a stop string ends an answer inside a thought too, where the model's
    template has a form of thoughts; by default it ends what comes after them.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    repetition_penalty: float | None = None
    constraint: str = ""
    top_logprobs: int = 0
    stop_in_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.top_k in _NO_TOP_K:
            object.__setattr__(self, "top_k", None)
        object.__setattr__(self, "stop", texts_of(self.stop, "stop"))
        for name, (kind, low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name != "top_logprobs":
                continue
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_whole(value) if kind == _WHOLE else is_number):
                raise InvalidInput(
                    f"{name} is {value!r:.40}.",
                    reason=Reason.INVALID_SAMPLING,
                    remedy=f"Give {name} as {kind}, or leave it out for 'off'.",
                )
            if not low <= value <= high:
                raise InvalidInput(
                    f"{name} is {value}.",
                    reason=Reason.INVALID_SAMPLING,
                    remedy=f"Give {name} between {low} and {high}, or leave it out for 'off'.",
                )
        self._require_penalty()

    @property
    def truncates(self) -> bool:
        """Return whether sampling cut the distribution, so that log-probs are not the policy's."""
        is_neutral = self.top_p in (None, 1.0) and self.min_p in (None, 0.0)
        return not is_neutral or self.top_k is not None

    @property
    def penalizes(self) -> bool:
        """Return whether sampling made tokens that are there already less likely, or likelier."""
        return self.repetition_penalty not in (None, 1.0)

    @property
    def alters(self) -> bool:
        """Return whether no temperature explains the log-probs: the trainer cannot compute them."""
        return self.truncates or self.penalizes or bool(self.constraint)

    @property
    def distribution(self) -> Distribution:
        """Return what the sampled tokens' log-probs are of; greedy ones are at temperature 1."""
        is_greedy = self.temperature == 0
        is_scaled = self.temperature not in (None, 0, 1)
        is_constrained = self.penalizes or bool(self.constraint)
        is_changed = is_constrained or is_scaled or (self.truncates and not is_greedy)
        return Distribution.PROCESSED if is_changed else Distribution.RAW

    def _require_penalty(self) -> None:
        penalty = self.repetition_penalty
        if penalty is not None and not 0 < penalty < float("inf"):
            raise InvalidInput(
                f"repetition_penalty is {penalty}.",
                reason=Reason.INVALID_SAMPLING,
                remedy="Give more than 0; 1 is none.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an environment needs to start an episode, and how many trajectories to play of it.

    With `min_trajectories` the group is used with so many if its other members fail for good; 0:
    only the whole group is used.
    """

    task_id: str
    environment: str
    split: str
    key: str
    epoch: int = 0
    seed: int = 0
    purpose: Purpose = Purpose.TRAINING
    num_trajectories: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_trajectories: int = 0

    @property
    def least_trajectories(self) -> int:
        """Return the fewest trajectories with which its group is used."""
        return self.min_trajectories or self.num_trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One component of a turn's reward: value * weight counts.

    A dense reward has one number per token of the response, and their sum as its value:
    Reward.dense("kl", (-0.5, 0.25)).value == -0.25

    feedback says in words which checks the answer failed; it is empty where none did. absent: the
    function gave no reward, which is not a reward of 0. Its value is 0 and counts nowhere.
    """

    name: str
    value: float
    weight: float = 1.0
    success: bool | None = None
    per_token: tuple[float, ...] = ()
    feedback: str = ""
    absent: bool = False

    def __post_init__(self) -> None:
        if self.absent and (self.value or self.per_token):
            raise InvalidInput(
                f"Reward {self.name} is absent, and {self.value}.",
                reason=Reason.RAGGED,
                remedy="Leave out its value, or absent.",
            )
        if not self.per_token:
            return
        total, size = sum(self.per_token), sum(map(abs, self.per_token))
        if abs(total - self.value) > 1e-4 * max(1.0, size):  # the wire rounds to float32
            raise InvalidInput(
                f"Reward {self.name} is {self.value}, and its values per token sum to {total}.",
                reason=Reason.RAGGED,
                remedy="Make it with Reward.dense, which sums them.",
            )

    @property
    def recorded(self) -> float:
        """Return value * weight; with weight 0, which counts nowhere, the value for the records."""
        return self.value * self.weight if self.weight else self.value

    @classmethod
    def dense(cls, name: str, per_token: Iterable[float], *, weight: float = 1.0) -> Reward:
        """Make a reward with one number per sampled token of the response, in order."""
        values = tuple(map(float, per_token))
        return cls(name=name, value=sum(values), weight=weight, per_token=values)


def sums_by_name(rewards: Iterable[Reward]) -> dict[str, float]:
    """Return the sum of the rewards of each name, as they are recorded; without absent ones."""
    sums: dict[str, float] = {}
    for reward in (reward for reward in rewards if not reward.absent):
        sums[reward.name] = sums.get(reward.name, 0.0) + reward.recorded
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error while the trajectory was made, and whose it is."""

    owner: Owner
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generate and one step, and the messages they added."""

    message_start: int
    num_messages: int
    rewards: tuple[Reward, ...] = ()
    stop_reason: StopReason = StopReason.STOP
    generate_s: float = 0.0
    step_s: float = 0.0
    num_tool_calls: int = 0

    @property
    def reward(self) -> float:
        """Return the sum of value * weight."""
        return sum(r.value * r.weight for r in self.rewards)


def are_unrewarded(rewards: Collection[Reward]) -> bool:
    """Return whether reward functions were asked, and none that counts gave a reward."""
    is_given = any(reward.weight and not reward.absent for reward in rewards)
    return not is_given and any(reward.absent for reward in rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one episode: one history, its turns, one or more token sequences."""

    trajectory_id: str
    group_id: str
    task_key: str
    seed: int
    environment: str
    environment_version: str
    history: History
    turns: tuple[Turn, ...]
    sequences: tuple[Sequence, ...]
    failures: tuple[Failure, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tokenizer_digest: str = ""
    template_digest: str = ""
    terminated: bool = False
    truncated: bool = False
    done_reason: DoneReason = DoneReason.NOT_DONE
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_failures(
        cls, task: Task, *failures: Failure, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """Return the trajectory of a task that could not be played, with the failures."""
        return cls(
            trajectory_id=uuid.uuid4().hex,
            group_id=group_id,
            task_key=task.key,
            seed=task.seed,
            environment=task.environment,
            environment_version="",
            history=History(),
            turns=(),
            sequences=(),
            failures=failures,
            sampling=sampling,
            truncated=True,
            done_reason=DoneReason.ERROR,
        )

    def __repr__(self) -> str:
        failures = f", {len(self.failures)} failures" if self.failures else ""
        return (
            f"Trajectory({self.trajectory_id!r}, task {self.task_key!r}, reward {self.reward:g}, "
            f"{len(self.turns)} turns, {self.num_model_tokens} sampled tokens, "
            f"{self.done_reason.name}{failures}: {messages_line(self.history)})"
        )

    def __rich__(self) -> Any:
        head = repr(self).partition(": ")[0].removeprefix("Trajectory(")
        return messages_text(self.history).append(f"({head})", style="dim")

    def _repr_html_(self) -> str:
        line = repr(self).partition(": ")[0] + ")"
        rows = [("failure", f.owner.name, f.reason, f.message) for f in self.failures]
        return record_html(line, rows) + messages_html(self.history)

    @property
    def reward(self) -> float:
        """Return the sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool | None:
        """Return whether its rewards that state a success all state one; None if none states it."""
        stated = [r.success for turn in self.turns for r in turn.rewards if r.success is not None]
        return all(stated) if stated else None

    @property
    def feedback(self) -> str:
        """Return the words of its rewards on failed checks, turn by turn, each once."""
        words = (reward.feedback for turn in self.turns for reward in turn.rewards)
        return "\n".join(dict.fromkeys(text for text in words if text.strip()))

    @property
    def is_unrewarded(self) -> bool:
        """Return whether reward functions were asked, and none that counts gave a reward."""
        return are_unrewarded([reward for turn in self.turns for reward in turn.rewards])

    @property
    def num_model_tokens(self) -> int:
        """Return how many tokens the policy sampled."""
        return sum(sequence.num_model_tokens for sequence in self.sequences)

    @property
    def num_tool_calls(self) -> int:
        """Return how many tool calls were run."""
        return sum(turn.num_tool_calls for turn in self.turns)

    @property
    def policy_versions(self) -> tuple[PolicyVersion, ...]:
        """Return the versions of its sampled tokens, without repeats."""
        versions = (v for sequence in self.sequences for v in sequence.policy_versions)
        return tuple(dict.fromkeys(versions))

    @property
    def is_scorable(self) -> bool:
        """Return whether nothing but the policy failed and there is something to train."""
        is_blameless = all(failure.owner is Owner.POLICY for failure in self.failures)
        return is_blameless and self.num_model_tokens > 0

    def part(self, start: int, end: int) -> Trajectory:
        """Return turns [start, end) of it; what came before them is context.

        Parts that tile the turns hold each sampled token, with its log-prob and version, and each
        reward once. Only the part with the last turn has the episode's end and its failures. The
        history goes on to the part's last message, and the trajectory_id stays.
        """
        num_turns = len(self.turns)
        if not 0 <= start <= end <= num_turns:
            raise InvalidInput(
                f"Turns {start} to {end} of a trajectory of {num_turns} turns.",
                reason=Reason.BAD_OPTIONS,
                remedy=f"Give 0 <= start <= end <= {num_turns}.",
            )
        if (start, end) == (0, num_turns):
            return self
        is_last = end == num_turns
        # The last part also has what was sampled for a turn whose step failed.
        rows = (row.of_turns(start, sys.maxsize if is_last else end) for row in self.sequences)
        part = replace(
            self,
            turns=self.turns[start:end],
            sequences=tuple(row for row in rows if row is not None),
        )
        if is_last:
            return part
        last = self.turns[end - 1] if end else Turn(message_start=0, num_messages=0)
        return replace(
            part,
            history=self.history[: last.message_start + last.num_messages],
            failures=(),
            terminated=False,
            truncated=False,
            done_reason=DoneReason.NOT_DONE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one task: what the queue moves and advantages are computed on."""

    group_id: str
    task: Task
    trajectories: tuple[Trajectory, ...]

    def __repr__(self) -> str:
        rewards = ", ".join(f"{trajectory.reward:g}" for trajectory in self.trajectories)
        return f"Group({self.group_id!r}, {len(self.trajectories)} trajectories, rewards {rewards})"

    def _repr_html_(self) -> str:
        rows = [
            (t.trajectory_id, f"{t.reward:g}", t.done_reason.name, messages_line(t.history[-1:]))
            for t in self.trajectories
        ]
        return record_html(repr(self), [("trajectory", "reward", "ended", "last message"), *rows])

    @property
    def num_trajectories(self) -> int:
        """Return how many trajectories it holds."""
        return len(self.trajectories)

    @property
    def policy_versions(self) -> tuple[PolicyVersion, ...]:
        """Return the versions of all sampled tokens, without repeats."""
        versions = (v for trajectory in self.trajectories for v in trajectory.policy_versions)
        return tuple(dict.fromkeys(versions))
