"""AdamW, Muon or your own, with a schedule, gradient clipping, and no step on what is not finite.

def sgd(parameters, *, lr, weight_decay):        # [train] optimizer = "my_optimizers:sgd"
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)

`parameters` are pairs of name and parameter, which torch's optimisers take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from dialoop.errors import InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from dialoop_learning.loss.facts import OPTIMIZERS


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An optimiser and its schedule.

    name: AdamW (arXiv 1711.05101), or Muon (Jordan et al., 2024) for the matrices between embedding
    and head with AdamW for the rest. Muon's updates are scaled to AdamW's size (arXiv 2502.16982),
    so both take one learning rate. Otherwise the import path of a function that is called as
    torch's optimisers are, `make(named_parameters, lr=..., weight_decay=...)`. betas, eps: AdamW's.

    The rate rises linearly to `learning_rate` over `warmup_steps`, then falls (schedule "linear" or
    "cosine") to `final_share` of it at `total_steps`. Without total_steps it stays constant after
    the warm-up.
    """

    name: str = "adamw"
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    total_steps: int | None = None
    final_share: float = 0.1
    schedule: Literal["linear", "cosine"] = "linear"

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.learning_rate
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        if self.schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.learning_rate * (1 - (1 - self.final_share) * progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one update; grad_norm is the norm before clipping."""

    applied: bool
    grad_norm: float
    learning_rate: float


class GuardedOptimizer:
    """An optimiser that clips, follows the schedule, and refuses a step that is not finite.

    `parameters` may be pairs of name and parameter, as an optimiser of the user's own gets them.
    `matrices` are those that Muon updates, if the settings name Muon. Weight decay of the built-in
    optimisers leaves `undecayed` alone. num_steps counts applied updates, which the schedule
    follows. num_refused counts the others.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        *,
        matrices: Iterable[nn.Parameter] = (),
        undecayed: Iterable[nn.Parameter] = (),
    ) -> None:
        self.settings = settings
        pairs = [pair if isinstance(pair, tuple) else ("", pair) for pair in parameters]
        trained = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        if self.is_built_in:
            parts = _parts(self.parameters, list(matrices), settings)
            without = {id(parameter) for parameter in undecayed}
            made = [(_built_in(name, part, settings, without), part) for name, part in parts]
        else:
            own = _own_optimizer(trained, settings)
            made = [(own, list(_flat(own)))]
        self._optimizers = [optimizer for optimizer, _ in made]
        self.orders = [order for _, order in made]
        """The parameters of each of torch's optimisers, as `state_dict` numbers them."""
        self.num_steps = 0
        self.num_refused = 0
        self._has_whole_state = False

    @property
    def torch_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return torch's optimisers, in the order of `state_dict`."""
        return tuple(self._optimizers)

    def step(self, loss: float) -> StepReport:
        """Apply the gradients (already summed over rows and ranks), then clear them.

        `loss` is the value that they are of. No weight changes when it or the norm is not finite.
        """
        grad_norm = self._clip()
        rate = self.settings.learning_rate_at(self.num_steps)
        applied = math.isfinite(grad_norm) and math.isfinite(loss)
        if applied:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            self.num_steps += 1
            self._require_whole_state()
        else:
            self.num_refused += 1
        for parameter in self.parameters:
            parameter.grad = None
        return StepReport(applied=applied, grad_norm=grad_norm, learning_rate=rate)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the optimisers and the counts."""
        return {
            "name": self.settings.name,
            "optimizers": [
                _numbered(optimizer.state_dict(), _places(optimizer, order))
                for optimizer, order in zip(self._optimizers, self.orders, strict=True)
            ],
            "num_steps": self.num_steps,
            "num_refused": self.num_refused,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; raise InvalidConfig when it is of another optimiser.

        Of the built-in ones only the state is taken: rates and decay are those of the settings.
        """
        states = state["optimizers"]
        own = self.settings.name
        name = state.get("name", own)  # checkpoints of earlier versions have none
        fits = name == own and [_count(saved) for saved in states] == [*map(len, self.orders)]
        try:
            if not fits:
                raise ValueError("another optimiser")
            for optimizer, order, saved in zip(self._optimizers, self.orders, states, strict=True):
                if self.is_built_in:
                    back = {place: number for number, place in _places(optimizer, order).items()}
                    groups = optimizer.state_dict()["param_groups"]
                    saved = {**_numbered(saved, back), "param_groups": groups}
                optimizer.load_state_dict(saved)
        except ValueError as error:  # torch's, of other groups
            raise InvalidConfig(
                f"The checkpoint was written by another optimiser than {own}"
                f"{'' if name == own else f', by {name}'}.",
                reason=Reason.OPTIMIZER_MISMATCH,
                remedy="Resume with the optimiser the run was started with.",
            ) from error
        self.num_steps = int(state["num_steps"])
        self.num_refused = int(state["num_refused"])

    @property
    def is_built_in(self) -> bool:
        """Return whether the optimiser is one of `OPTIMIZERS`."""
        return self.settings.name in OPTIMIZERS

    def _require_whole_state(self) -> None:
        """Refuse state of a user's optimiser that a checkpoint could not hold for all ranks."""
        if self.is_built_in or self._has_whole_state:
            return
        for optimizer in self._optimizers:
            for parameter, values in optimizer.state.items():
                wrong = [key for key, value in values.items() if not _is_storable(value, parameter)]
                if wrong:
                    raise _unfit(
                        self.settings.name,
                        f"keeps a state '{wrong[0]}' that is neither a number, a text nor a tensor "
                        "(with several processes: nor a tensor that is sharded as its parameter)",
                    )
        self._has_whole_state = True

    def _clip(self) -> float:
        norm: Any = clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        # Under FSDP2 the norm is a DTensor, which full_tensor sums over the ranks.
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _parts(
    parameters: list[nn.Parameter], matrices: list[nn.Parameter], settings: OptimizerSettings
) -> Iterator[tuple[str, list[nn.Parameter]]]:
    """Yield which built-in optimiser updates which parameters."""
    for_muon = {id(matrix) for matrix in matrices} if settings.name == "muon" else set()
    rest = [p for p in parameters if id(p) not in for_muon]
    if rest:
        yield "adamw", rest
    if for_muon:
        yield "muon", [p for p in parameters if id(p) in for_muon]


def _built_in(
    name: str, parameters: list[nn.Parameter], settings: OptimizerSettings, undecayed: set[int]
) -> torch.optim.Optimizer:
    decayed = [p for p in parameters if id(p) not in undecayed]
    rest = [p for p in parameters if id(p) in undecayed]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    if not (settings.weight_decay and decayed and rest):
        groups = [{"params": parameters, "weight_decay": settings.weight_decay if decayed else 0.0}]
    shared: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if name == "muon":
        return torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw", **shared)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, **shared)


def _flat(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _places(optimizer: torch.optim.Optimizer, order: list[nn.Parameter]) -> dict[int, int]:
    """Return for each number of torch's state the place of its parameter in the order.

    Groups are a matter of the settings, so a checkpoint does not know of them.
    """
    places = {id(parameter): place for place, parameter in enumerate(order)}
    return {number: places[id(parameter)] for number, parameter in enumerate(_flat(optimizer))}


def _numbered(saved: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any]:
    """Return a state of torch's under other numbers of its parameters."""
    groups = [{**g, "params": [numbers[n] for n in g["params"]]} for g in saved["param_groups"]]
    state = {numbers[number]: values for number, values in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def _count(saved: dict[str, Any]) -> int:
    return sum(len(group["params"]) for group in saved["param_groups"])


def _own_optimizer(
    trained: list[tuple[str, nn.Parameter]], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in trained]
    named: list[Any] = trained if all(name for name, _ in trained) else parameters
    make: Any = load_attribute(
        settings.name, what="optimiser", reason=Reason.OPTIMIZER_NOT_FOUND, built_in=OPTIMIZERS
    )
    try:
        optimizer = make(named, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    except Exception as error:
        raise _unfit(settings.name, f"raised {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _unfit(settings.name, "returned no torch.optim.Optimizer")
    held = [id(p) for p in _flat(optimizer)]
    if sorted(held) != sorted(map(id, parameters)):
        raise _unfit(
            settings.name, f"holds {len(held)} parameters, not the {len(parameters)} it was given"
        )
    return optimizer


def _is_storable(value: object, parameter: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (int, float, str, type(None)))
    if value.ndim == 0 or not isinstance(parameter, DTensor):
        return True
    return isinstance(value, DTensor) and value.shape == parameter.shape


def _unfit(name: str, problem: str) -> InvalidConfig:
    return InvalidConfig(
        f"The optimiser {name} {problem}.",
        reason=Reason.OPTIMIZER_NOT_FOUND,
        remedy="Name a function that takes (named_parameters, lr=..., weight_decay=...) and "
        "returns a torch.optim.Optimizer over all of them.",
    )
