"""Train steps by hand: plain Python, and the plain logits of transformers' own model.

Nothing here calls the trainer's losses, packing, metrics or optimisers. A `Recorder` notes which
sequences each update trained, and the weights that it began with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dialoop.sequences import Sequence
from dialoop_services.trainer.learner.learner import StepObserver
from torch import Tensor
from transformers import AutoModelForCausalLM

Weights = Mapping[str, Tensor]
TokenValues = dict[str, float]
"""What is known of one trained token."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One token sequence; its first token is its name. Values are one per sampled token."""

    ids: list[int]
    sampled: list[int]
    """Positions of the sampled tokens."""
    versions: list[int] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    advantage: float = 0.0
    temperature: float = 1.0
    trajectory: str = ""

    @property
    def name(self) -> int:
        return self.ids[0]

    @classmethod
    def of(cls, row: Sequence, *, trajectory: str = "", temperature: float = 1.0) -> Answer:
        """Take a sequence apart."""
        model = [s for s in row.segments if s.policy_version is not None]
        return cls(
            ids=row.token_ids.tolist(),
            sampled=[p for s in model for p in range(s.start, s.start + s.length)],
            versions=[s.policy_version.number for s in model for _ in range(s.length)],  # type: ignore[union-attr]
            engine=row.inference_logprobs.tolist(),
            reference=row.ref_logprobs.tolist(),
            advantage=row.advantage or 0.0,
            trajectory=trajectory,
            temperature=temperature,
        )

    def cut(self, num_tokens: int) -> Answer:
        """Its first tokens."""
        count = sum(position < num_tokens for position in self.sampled)
        return Answer(
            ids=self.ids[:num_tokens],
            sampled=self.sampled[:count],
            versions=self.versions[:count],
            engine=self.engine[:count],
            reference=self.reference[:count],
            advantage=self.advantage,
            temperature=self.temperature,
            trajectory=self.trajectory,
        )


class PlainModel:
    """transformers' model as it is, one sequence at a time."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def load(self, weights: Weights) -> PlainModel:
        self.model.load_state_dict(weights)
        return self

    def score(self, answer: Answer) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [M] of the sampled tokens, at the answer's temperature."""
        logits = self.model(input_ids=torch.tensor([answer.ids]), use_cache=False).logits[0]
        predicted = logits[[position - 1 for position in answer.sampled]] / answer.temperature
        every = predicted.log_softmax(-1)
        tokens = torch.tensor([answer.ids[position] for position in answer.sampled])
        return every.gather(-1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def logprobs(self, answer: Answer) -> list[float]:
        with torch.no_grad():
            values: list[float] = self.score(answer)[0].tolist()
        return values

    def take_gradient_norm(self) -> float:
        """The norm of the gradients of all parameters, which are cleared."""
        squares = 0.0
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                squares += float(parameter.grad.double().square().sum())
                parameter.grad = None
        return math.sqrt(squares)


@dataclass(frozen=True)
class Update:
    """The weights that an update began with, and the names of its sequences."""

    weights: Weights
    names: tuple[int, ...]


class Recorder(StepObserver):
    """Notes what each update trains; `after_backward` may spoil its gradients."""

    def __init__(self, learner: Any, clock: Callable[[], float]) -> None:
        self._learner, self._clock = learner, clock
        self.updates: list[Update] = []
        self.steps: list[list[Update]] = []
        self.began: list[float] = []
        self.ended: list[float] = []
        """When each train step began, and when its last update ended."""
        self.updating: list[float] = []
        self.differentiated: list[float] = []
        self.updated: list[float] = []
        """When each update began, had its gradients, and ended."""
        self.after_backward: Callable[[Any], None] = lambda _: None
        learner.observer = self

    def weights(self) -> Weights:
        """A copy of the learner's weights as they are now."""
        state = self._learner.state.policy.causal_lm.state_dict()
        return {name: tensor.clone() for name, tensor in state.items()}

    def begin(self, rows: Any, orders: Any) -> None:
        self.began.append(self._clock())
        self.ended.append(self._clock())
        self.steps.append([])

    def begin_update(self, rows: Any, packing: Any) -> None:
        update = Update(self.weights(), tuple(int(row.token_ids[0]) for row in rows))
        self.updates.append(update)
        self.updating.append(self._clock())
        if self.steps:
            self.steps[-1].append(update)

    def end_backward(self, loss: float, policy: Any) -> None:
        self.differentiated.append(self._clock())
        self.after_backward(policy)

    def end_update(self, step: Any) -> None:
        self.updated.append(self._clock())
        if self.ended:
            self.ended[-1] = self.updated[-1]


def mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)


def rate(update: int, *, peak: float, warmup: int, total: int) -> float:
    """A learning rate that rises, then falls linearly to a tenth."""
    if update < warmup:
        return peak * (update + 1) / warmup
    return peak * (1 - 0.9 * min(1.0, (update - warmup) / (total - warmup)))


def k3(sampler: float, policy: float) -> float:
    """KL(sampler, policy) by the sampler's token: r - 1 - log r."""
    return math.exp(policy - sampler) - 1 - (policy - sampler)


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """GRPO by sequence with icepop, a KL to the reference and to the engine, and an entropy."""

    clip: float
    kl: float
    kl_inference: float
    entropy: float
    band: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class UpdateByHand:
    parts: dict[str, float]
    grad_norm: float
    tokens: list[TokenValues]

    @property
    def loss(self) -> float:
        return sum(self.parts.values())


def grpo_update(
    model: PlainModel,
    answers: list[Answer],
    proximal: Mapping[int, list[float]],
    coefficients: Coefficients,
    *,
    current: int,
) -> UpdateByHand:
    """One update: min(r A w, clip(r) A w) by trajectory, k2 to both others, and the entropy."""
    c = coefficients
    terms: dict[str, list[tuple[str, Tensor]]] = {}
    tokens: list[TokenValues] = []
    for answer in answers:
        logprobs, entropies = model.score(answer)
        for index, position in enumerate(answer.sampled):
            policy, entropy = logprobs[index], entropies[index]
            engine, reference = answer.engine[index], answer.reference[index]
            start = proximal[answer.name][index]
            low, high = c.band
            weight = moved if low <= (moved := math.exp(start - engine)) <= high else 0.0
            advantage = answer.advantage * weight
            ratio = (policy - start).exp()
            bounded = ratio.clamp(1 - c.clip, 1 + c.clip)
            of_token = {
                "loss_objective": -torch.minimum(ratio * advantage, bounded * advantage),
                "loss_kl": c.kl * (reference - policy) ** 2 / 2,
                "loss_kl_to_inference": c.kl_inference * (engine - policy) ** 2 / 2,
                "loss_entropy": -c.entropy * entropy,
            }
            for name, term in of_token.items():
                terms.setdefault(name, []).append((answer.trajectory, term))
            now, r = float(policy.detach()), float(ratio.detach())
            beyond = r > 1 + c.clip if advantage > 0 else r < 1 - c.clip
            tokens.append(
                {
                    "age": current - answer.versions[index],
                    "depth": position,
                    "ratio": math.exp(now - engine),
                    "mismatch_kl": k3(engine, now),
                    "entropy": float(entropy.detach()),
                    "clip_fraction": float(beyond and advantage != 0),
                    "correction_weight": weight,
                    "correction_masked": float(weight == 0),
                    "kl_to_ref": (reference - now) ** 2 / 2,
                    "kl_to_inference": (engine - now) ** 2 / 2,
                }
            )
    parts = {name: _by_trajectory(of_tokens) for name, of_tokens in terms.items()}
    total = torch.stack(list(parts.values())).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return UpdateByHand(
        parts={name: float(part.detach()) for name, part in parts.items()},
        grad_norm=model.take_gradient_norm(),
        tokens=tokens,
    )


def _by_trajectory(terms: list[tuple[str, Tensor]]) -> Tensor:
    """The mean over trajectories of the means over their tokens."""
    own: dict[str, list[Tensor]] = {}
    for trajectory, term in terms:
        own.setdefault(trajectory, []).append(term)
    return torch.stack([torch.stack(each).mean() for each in own.values()]).mean()


def table(tokens: list[TokenValues], *names: str) -> dict[str, float]:
    """A row of `by_staleness` or `by_depth`: means over tokens, and what their ratios make."""
    row = {name: mean(token[name] for token in tokens) for name in names}
    squared = mean(token["ratio"] ** 2 for token in tokens)
    return {**row, "num_tokens": float(len(tokens)), "ess": row["ratio"] ** 2 / squared}


@dataclass
class Routed:
    """What the router of a Qwen3-MoE of one layer said about the tokens of a sequence."""

    chosen: Tensor = field(default_factory=lambda: torch.empty(0))
    used: Tensor = field(default_factory=lambda: torch.empty(0))
    chances: Tensor = field(default_factory=lambda: torch.empty(0))


@contextmanager
def forced_experts(model: PlainModel, recorded: Tensor) -> Iterator[Routed]:
    """Have the router use these experts [T, k], or its own choice where one is below 0.

    Their weights are the router's probabilities of them, made to sum to 1 where the model does so.
    """
    (gate,) = [m for m in model.model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
    routed = Routed()

    def choose(module: Any, _: Any, outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, routed.chosen = outputs
        routed.used = torch.where(recorded >= 0, recorded, routed.chosen)
        routed.chances = logits.softmax(-1)
        weights = routed.chances.gather(-1, routed.used)
        if module.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, routed.used

    handle = gate.register_forward_hook(choose)
    try:
        yield routed
    finally:
        handle.remove()
