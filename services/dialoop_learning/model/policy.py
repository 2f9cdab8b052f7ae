"""The policy model: a causal language model of transformers that scores packed rows.

policy = load_policy(directory)
scores = policy(batch, temperature=1.0)     # log-probs [M] of the batch's M trained tokens
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from dialoop.errors import InvalidConfig, Unsupported
from dialoop.reasons import Reason
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from dialoop_learning.model.attention import (
    PACKED_ATTENTION,
    AttentionPlan,
    plan_attention,
    share_prefixes,
)
from dialoop_learning.model.checkpoint import save_model
from dialoop_learning.model.context_parallel import Context, ContextShare
from dialoop_learning.model.experts import (
    ExpertReplay,
    ReplayCounts,
    balance_of,
    routers_of,
    routing_in,
    watch_routers,
)
from dialoop_learning.model.fused_head import (
    LogprobKernel,
    cut_kernel,
    require_half,
    require_plain_head,
)
from dialoop_learning.model.logprobs import DistinctTokens, TokenScores, token_logprobs
from dialoop_learning.model.products import linear_products
from dialoop_learning.model.weight_files import is_tied
from dialoop_learning.packing.rows import PackedBatch, TokenRow, pack_rows
from dialoop_learning.rl.routed_experts import Routing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes that a setting may name."""

_LONGEST_PROBE = 256
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


class PolicyModel(nn.Module):
    """A causal language model whose forward returns log-probs of trained tokens.

    All computation is inside `forward`, so that FSDP2 can shard this module as a whole.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.autocast: torch.dtype | None = None
        self.offloads = False
        """Whether what the layers keep for the backward pass waits in the host's memory."""
        self.logprob_kernel: LogprobKernel = "chunked"
        self.balance_coeff = 0.0
        """Coefficient of the loss that holds a mixture of experts to using all of them alike."""
        self.routing: Routing | None = None
        """What the routers choose from; None for a model without experts. `load_policy` sets it."""
        self.context: Context | None = None
        """The ranks that compute each row together with this one; `shard` sets it."""
        self._replay: ExpertReplay | None = None
        head, embedding = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
        self.ties_head = head.weight is embedding.weight
        """Whether head and embedding are one parameter, as they were loaded."""
        config = causal_lm.config.get_text_config()
        self._logits_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logits_divisor = float(getattr(config, "logits_scaling", 1.0))  # Granite's

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float | Tensor = 1.0,
        with_entropy: bool = False,
    ) -> TokenScores:
        """Return the scores of the M tokens under the batch's loss mask, in packed order.

        Experts that the batch records are chosen again, and other tokens are routed as ever.
        """
        positions = batch.trained_positions
        scale = temperature * self._logits_divisor
        share = None if self.context is None else self.context.share(batch)
        if share is None:
            shared = share_prefixes(
                batch.packed_tokens, batch.attention_lengths, batch.routed_experts
            )
            plan: AttentionPlan | ContextShare = plan_attention(
                shared, batch.attention_lengths, device=positions.device
            )
            kept, places = shared.kept.to(positions.device), shared.places.to(positions.device)
            distinct = DistinctTokens.of(places[positions], scale)
            positions, scale = distinct.once(positions), distinct.once(scale)
            predictors = places[positions - 1]
        else:
            plan, kept, distinct = share, share.kept, DistinctTokens()
            owners = share.owners(positions - 1)
            own = owners == share.context.rank
            positions = positions[own]
            scale = scale[own] if isinstance(scale, Tensor) and scale.numel() > 1 else scale
            predictors = share.own_places(positions - 1)
        routers = routers_of(self.causal_lm) if self.balance_coeff else []
        replay = self._begin_replay(batch, kept)
        with (
            nullcontext() if replay is None else replay.running(),
            watch_routers(routers) as routed,
        ):
            hidden = self._hidden_states(batch, plan, kept).index_select(0, predictors)
        scores = token_logprobs(
            hidden,
            self.head_weight,
            batch.packed_tokens[positions],
            temperature=scale,
            with_entropy=with_entropy,
            kernel=self.logprob_kernel,
            bias=self.causal_lm.get_output_embeddings().bias,
            softcap=self._logits_softcap,
        )._replace(
            balance=balance_of(routed) if routed else None,
            replayed=None if replay is None else replay.counts,
            num_forwarded=len(kept),
        )
        return distinct.expand(scores) if share is None else _whole(scores, share, owners)

    def _begin_replay(self, batch: PackedBatch, kept: Tensor) -> ExpertReplay | None:
        """Return the replay of the batch's recorded experts, if it has any, and keep it.

        The backward pass of recomputed layers needs the replay of its own forward pass.
        """
        self._replay = None
        if batch.routed_experts is not None:
            assert self.routing is not None  # recorded experts were compared with it
            experts = batch.routed_experts[kept].long()
            self._replay = ExpertReplay(routers_of(self.causal_lm), self.routing, experts)
        return self._replay

    def take_balance(self, coeff: float) -> None:
        """Add `coeff` times the balance of experts to the loss; InvalidConfig without experts."""
        if coeff and not routers_of(self.causal_lm):
            raise InvalidConfig(
                f"router_balance_coeff is {coeff:g}, and the model has no routed experts.",
                remedy="Leave it out of [train.objective].",
            )
        self.balance_coeff = coeff

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices between embedding and head, which Muon is made for."""
        outer = {
            id(module.weight)
            for module in (
                self.causal_lm.get_input_embeddings(),
                self.causal_lm.get_output_embeddings(),
            )
        }
        return [p for p in self.parameters() if p.ndim == 2 and id(p) not in outer]

    def norms_and_biases(self) -> list[nn.Parameter]:
        """Return what weight decay leaves alone, as transformers' Trainer chooses it."""
        of_norms = {
            id(parameter)
            for module in self.modules()
            if isinstance(module, nn.LayerNorm)
            for parameter in module.parameters()
        }
        named = self.causal_lm.named_parameters()
        return [p for name, p in named if id(p) in of_norms or _UNDECAYED.search(name.lower())]

    def take_kernel(self, kernel: LogprobKernel, *, device: torch.device) -> None:
        """Compute log-probs by this kernel from now on; raise InvalidConfig where it cannot run.

        `device` is where the model will compute, which may differ from where it was loaded.
        """
        if kernel == "cut":
            cut_kernel(device)
            require_half(self.autocast or self.head_weight.dtype)
            require_plain_head(self.causal_lm.get_output_embeddings().bias, self._logits_softcap)
        self.logprob_kernel = kernel

    def checkpoint_activations(self) -> None:
        """Keep only what enters each layer, and compute the rest anew in the backward pass."""

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _again(self._replay, self.head_weight.device)

        self.causal_lm.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": contexts}
        )
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # The layer checks its own flag. Modules inside stay in eval mode, without dropout.
                module.training = True

    def save(self, directory: Path) -> None:
        """Write config.json and model.safetensors, which transformers and vLLM load."""
        save_model(self.causal_lm, directory)

    def _hidden_states(
        self, batch: PackedBatch, plan: AttentionPlan | ContextShare, kept: Tensor
    ) -> Tensor:
        """Return the states [K, H] of the computed tokens, after the last layer and its norm."""
        device = batch.packed_tokens.device
        # Autocast excludes the head, so that log-probs use its weights in their own precision.
        # Without its cache: a weight is used once, and the cast of a whole model would be kept.
        half = torch.autocast(
            device.type,
            dtype=self.autocast,
            enabled=self.autocast is not None,
            cache_enabled=False,
        )
        host = save_on_cpu(pin_memory=device.type == "cuda") if self.offloads else nullcontext()
        with half, linear_products(device), host:
            output = self.causal_lm.base_model(
                input_ids=batch.packed_tokens[kept][None],
                position_ids=batch.position_ids[kept][None],
                attention_plan=plan,
                use_cache=False,
            )
        states: Tensor = output.last_hidden_state[0]
        if self.autocast is None:
            return states
        # The last norm leaves autocast in float32, and the kernel cut takes half precision alone.
        is_cut = self.logprob_kernel == "cut"
        return states.to(self.autocast if is_cut else self.head_weight.dtype)

    @property
    def head_weight(self) -> Tensor:
        """Return the weight of the head, [V, H]."""
        weight: Tensor = self.causal_lm.get_output_embeddings().weight
        return weight


def _whole(scores: TokenScores, share: ContextShare, owners: Tensor) -> TokenScores:
    """Return the scores of all trained tokens of a row, of which this rank computed some."""
    replayed = scores.replayed
    if replayed is not None:
        counts = share.context.sum(torch.stack(replayed))
        replayed = ReplayCounts(*counts.unbind())
    entropy = scores.entropy
    return scores._replace(
        logprobs=share.gather_scores(scores.logprobs, owners),
        entropy=None if entropy is None else share.gather_scores(entropy, owners),
        replayed=replayed,
    )


@contextmanager
def _again(replay: ExpertReplay | None, device: torch.device) -> Iterator[None]:
    """Compute a layer a second time as the first: with the same kernels and the same experts."""
    replaying = nullcontext() if replay is None else replay.running(counts=False)
    with linear_products(device), replaying:
        yield


def load_policy(
    directory: Path | str,
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
) -> PolicyModel:
    """Load the model in `directory`, without dropout, and check that it scores packed rows.

    Raises Unsupported (MODEL_NOT_PACKABLE) for a model whose packed log-probs differ from those of
    its own forward, and InvalidConfig for a directory that `weight_files` or `is_tied` refuse.
    """
    with _checked(Path(directory), dtype):
        causal_lm = AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[dtype], attn_implementation=PACKED_ATTENTION
        )
    policy = PolicyModel(causal_lm.to(device))
    policy.eval()
    require_packable(policy)
    return policy


def blank_policy(directory: Path | str, *, dtype: str = "float32") -> PolicyModel:
    """Return the model in `directory` without its weights, which are on the meta device.

    `dialoop_learning.parallel.loading.spread` shards it and reads the weights. Errors are those of
    `load_policy`.
    """
    from accelerate import init_empty_weights  # imported late: one process does not need it

    # Buffers, such as those of rotary embeddings, are in no file: they are made here.
    with _checked(Path(directory), dtype), init_empty_weights(include_buffers=False):
        causal_lm = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory),
            dtype=DTYPES[dtype],
            attn_implementation=PACKED_ATTENTION,
        )
    causal_lm.tie_weights()
    policy = PolicyModel(causal_lm)
    policy.eval()
    return policy


@contextmanager
def _checked(directory: Path, dtype: str) -> Iterator[None]:
    if dtype not in DTYPES:
        raise InvalidConfig(
            f"dtype {dtype!r} is unknown.", remedy=f"Use one of {', '.join(DTYPES)}."
        )
    is_tied(directory)
    try:
        yield
    except ValueError as error:
        raise _not_packable(str(error)) from error


@torch.no_grad()
def require_packable(policy: PolicyModel) -> None:
    """Compare a packed row with the model's own logits, one sequence at a time; note its routing.

    One sequence is longer than the model's windows, where they are short enough to try. This
    notices state-space layers, altered logits that the head here does not know, and attention
    across sequences. With them the trainer would train another policy than the engines serve.
    """
    weight = policy.causal_lm.get_output_embeddings().weight
    routers = routers_of(policy.causal_lm)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in _probe_lengths(policy.causal_lm.config.get_text_config()):
        ids = torch.randint(weight.shape[0], (length,), generator=generator).tolist()
        rows.append(TokenRow.from_demonstration(ids, [False] + [True] * (length - 1)))
    with watch_routers(routers) as routed:
        packed = policy(pack_rows(rows).to(weight.device)).logprobs
    policy.routing = routing_in(routed, routers)
    if isinstance(policy, FSDPModule):  # below the model's own forward does not gather them
        policy.unshard()
    own = _own_logprobs(policy.causal_lm, [row.token_ids.to(weight.device) for row in rows])
    differences = (packed - own).abs()
    # In 16 bits rounding alone moves single tokens of a real model by half a nat, and not the mean.
    is_exact = weight.dtype is torch.float32
    difference = float(differences.max() if is_exact else differences.mean())
    if not difference <= (1e-3 if is_exact else 0.25):
        raise _not_packable(f"its packed log-probs are off by {difference:.2g} nat")


def _probe_lengths(config: Any) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and 9 <= window <= _LONGEST_PROBE:
        return 5, window + 3, 2
    return 5, 9, 2


def _own_logprobs(causal_lm: Any, rows: list[Tensor]) -> Tensor:
    """Return log-probs [sum of L - 1] by the model's unpacked forward and head."""
    causal_lm.set_attn_implementation("eager")
    try:
        parts = []
        for ids in rows:
            logits = causal_lm(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            parts.append(logprobs.gather(-1, ids[1:, None]).squeeze(-1))
        return torch.cat(parts)
    finally:
        causal_lm.set_attn_implementation(PACKED_ATTENTION)


def _not_packable(why: str) -> Unsupported:
    return Unsupported(
        f"This model cannot be trained on packed rows: {why}.",
        reason=Reason.MODEL_NOT_PACKABLE,
        remedy="Use a decoder of one of the families in docs/families.md.",
    )
