"""What the routers of a mixture of experts choose: watched, held to evenness, or replayed.

`watch_routers` notes what the routers of a forward pass chose, and `balance_of` makes one number of
it: k, the experts of a token, where all are used alike. `ExpertReplay` has them choose again what
an engine chose.

Source of the balance: Switch Transformer (arXiv 2101.03961), equations 4 to 6, over all layers
together as in transformers' `load_balancing_loss_func`. The experts counted are those that the
router chose, also where it chooses by groups or with a bias. Source of the replay: Rollout Routing
Replay (arXiv 2510.11370). The weights of the replayed experts are the model's own, so gradients
reach the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from dialoop.errors import InvalidConfig, Unsupported
from dialoop.reasons import Reason
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dialoop_learning.rl.routed_experts import Routing

_ROUTER = "topkrouter"  # the end of the names of transformers' classes, in small letters
_NUM_OUTPUTS = 3


class Routed(NamedTuple):
    """What one layer's router said: logits [T, E], and the experts it chose, int64 [T, k]."""

    logits: Tensor
    experts: Tensor


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model's layers, in order; none where it has no experts."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith(_ROUTER)]


@contextmanager
def watch_routers(routers: Sequence[nn.Module]) -> Iterator[list[Routed]]:
    """Yield a list that gets what each router says while the block runs."""
    routed: list[Routed] = []

    def note(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        choice = _routed_by(outputs)
        if choice is not None:
            routed.append(choice)

    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield routed
    finally:
        for handle in handles:
            handle.remove()


def _routed_by(outputs: Any) -> Routed | None:
    """Return the logits and the experts in a router's outputs; None for outputs of another form.

    Most routers return logits, weights and experts; those of Granite and Aria the other way round.
    """
    if not isinstance(outputs, tuple) or len(outputs) != _NUM_OUTPUTS:
        return None
    first, _, last = outputs
    logits, experts = (first, last) if first.is_floating_point() else (last, first)
    if experts.is_floating_point() or not logits.is_floating_point():
        return None
    return Routed(logits, experts)


def balance_of(routed: Sequence[Routed]) -> Tensor:
    """Return E times the sum over experts of their share of tokens times their mean probability.

    A token counts once for each of its k experts. The shares carry no gradient.
    """
    num_experts = routed[0].logits.shape[-1]
    counts = torch.zeros(num_experts, device=routed[0].logits.device)
    chances = torch.zeros_like(counts)
    num_rows = 0
    for logits, experts in routed:
        counts = counts + torch.bincount(experts.reshape(-1), minlength=num_experts)
        chances = chances + logits.float().softmax(-1).sum(0)
        num_rows += logits.shape[0]
    return num_experts * (counts / num_rows * (chances / num_rows)).sum()


def chosen_experts(routed: Sequence[Routed]) -> Tensor:
    """Return what the layers chose for each token, int64 [T, layers, k]."""
    return torch.stack([each.experts for each in routed], dim=1)


def routing_in(routed: Sequence[Routed], routers: Sequence[nn.Module]) -> Routing | None:
    """Return what the routers of a pass choose from; None without any, and for unequal layers."""
    shapes = {(each.logits.shape[-1], each.experts.shape[-1]) for each in routed}
    if len(shapes) != 1 or len(routed) != len(routers):
        return None
    ((num_experts, top_k),) = shapes
    return Routing(num_layers=len(routed), top_k=top_k, num_experts=num_experts)


@torch.no_grad()
def routing_of(model: Any, routers: Sequence[nn.Module]) -> Routing:
    """Return what a model's routers choose from, as a pass over one token shows it.

    Raises InvalidConfig (NO_ROUTED_EXPERTS) where it has none, or some that say something else, or
    that a trainer could not have choose again.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    one_token = {"input_ids": ids, "use_cache": False}
    with watch_routers(routers) as routed:
        if routers:
            model(**one_token)
    routing = routing_in(routed, routers)
    kind = f"routers of the class {type(routers[0]).__name__}" if routers else "no experts"
    if routing is not None:
        with suppress(Unsupported):
            with ExpertReplay(routers, routing, chosen_experts(routed)).running(counts=False):
                model(**one_token)
            return routing
        kind += ", which do not choose by one top-k"
    raise InvalidConfig(
        f"record_routed_experts is set, and the model has {kind}.",
        reason=Reason.NO_ROUTED_EXPERTS,
        remedy="Set record_routed_experts = false in [inference].",
    )


class ReplayCounts(NamedTuple):
    """Choices of k experts, by a layer for a token, that are recorded; and that would differ."""

    num_recorded: Tensor
    num_differing: Tensor


class ExpertReplay:
    """Has routers choose recorded experts, int64 [T, layers, k]; below 0 they choose themselves."""

    def __init__(self, routers: Sequence[nn.Module], routing: Routing, experts: Tensor) -> None:
        self._routers = routers
        self._routing = routing
        self._experts = experts
        self._num_differing: list[Tensor] = []

    @contextmanager
    def running(self, *, counts: bool = True) -> Iterator[None]:
        """Replay while the block runs; without `counts` where it repeats a pass."""
        with ExitStack() as undo:
            for layer, router in enumerate(self._routers):
                choose = partial(self._choose, router.forward, self._experts[:, layer], counts)
                vars(router)["forward"] = choose
                undo.callback(vars(router).pop, "forward")
            yield

    @property
    def counts(self) -> ReplayCounts:
        """Return how often a router would have chosen otherwise, after the layers before it."""
        num_recorded = (self._experts[..., 0] >= 0).sum()
        return ReplayCounts(num_recorded, torch.stack(self._num_differing).sum())

    def _choose(
        self, forward: Callable[..., Any], recorded: Tensor, counts: bool, *inputs: Any
    ) -> Any:
        if counts:
            with torch.no_grad():
                own = _routed_by(forward(*inputs))
            assert own is not None  # else there is no routing that a record was compared with
            differs = (own.experts.sort(-1).values != recorded.sort(-1).values).any(-1)
            self._num_differing.append((differs & (recorded[:, 0] >= 0)).sum())
        with _Choice(recorded, self._routing.num_experts) as choice:
            outputs = forward(*inputs)
        if not choice.was_made:
            raise Unsupported(
                "This model's routers do not choose by one top-k over all experts.",
                reason=Reason.NO_ROUTED_EXPERTS,
                remedy="Set replay_routed_experts = false in [train].",
            )
        return outputs


class _Choice(TorchFunctionMode):
    """Makes the `topk` over all experts choose the recorded ones, with the values that they have.

    A `topk` over groups of experts, before it, chooses the groups of the recorded ones first.
    """

    def __init__(self, recorded: Tensor, num_experts: int) -> None:
        super().__init__()
        self.was_made = False
        self._recorded = recorded
        self._num_experts = num_experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, with another choice where it is `topk`."""
        named = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2:
            return func(*args, **named)
        scores, *rest = args
        is_recorded = self._recorded >= 0
        width = scores.shape[-1]
        if width < self._num_experts:
            groups = self._recorded.clamp_min(0) // (self._num_experts // width)
            first = torch.zeros_like(scores).scatter_add_(-1, groups, is_recorded.to(scores.dtype))
            return func(scores.masked_fill(first > 0, torch.inf), *rest, **named)
        self.was_made = True
        own = func(*args, **named).indices
        experts = torch.where(is_recorded, self._recorded, own)
        return torch.return_types.topk((scores.gather(-1, experts), experts))
