"""Define [scorer]: which rewards groups get, and how they become advantages."""

from __future__ import annotations

from typing import Any, Literal, Self

from dialoop_learning.loss.facts import facts_of
from pydantic import Field, model_validator

from dialoop_services.config.outside import OutsideServer
from dialoop_services.config.tables import Dtype
from dialoop_services.config.values import FilePath, Section

REFERENCE = "reference"
"""The id of the scorer's reference model."""


class ScorerModel(Section):
    """A model that ScorerService can be asked about, loaded at its first use."""

    id: str = Field(min_length=1)
    """Name of the model in requests; "reference" is taken."""
    directory: FilePath = Field(min_length=1)
    """Hugging Face model directory; with `server`, that of its tokenizer."""
    server: OutsideServer | None = None
    """Server of OpenAI's API that has the model, as {url, model}; absent: it is loaded here."""


class RewardSpec(Section):
    """A reward computed on whole groups: {"name": "brief", "use": "mine:brief", "weight": 0.1}."""

    name: str = Field(min_length=1)
    """Name of the reward in trajectories and metrics; "kl" is taken."""
    use: str
    """Function that computes the reward, as "module:function"."""
    weight: float = 1.0
    """Factor by which the reward is multiplied."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that the reward may take for one group."""


class ScorerFields(Section):
    """How groups are scored."""

    divide_by_std: bool | None = None
    """Divide advantages by the standard deviation of rewards; absent: as the loss needs."""
    leave_one_out: bool | None = None
    """Compare each trajectory with the mean of the others; absent: as the loss needs."""
    advantage_estimator: str = ""
    """Function of your own that computes the advantages of a group from its rewards, as
    "module:function"; empty: the built-in formula."""
    advantages_of: Literal["trajectory", "turn"] = "trajectory"
    """What gets an advantage: each "trajectory", or each "turn" among all turns of the group."""
    advantage_aggregate: Literal["sum", "max", "mean"] = "sum"
    """How the rewards of a trajectory's turns become one number: "sum", "max" or "mean"."""
    top_k: int = Field(default=0, ge=0)
    """Largest number of trajectories of a group that get advantage 1; the others get 0. Only
    trajectories above the group's median are chosen. Losses that imitate (sft, minor_sft) train
    those alone. 0 turns this off: advantages are computed from the rewards as usual."""
    drop_uniform: bool = False
    """Whether groups whose rewards are all the same are dropped; RL learns nothing from them."""
    reference_logprobs: bool = False
    """Whether sampled tokens get log-probs of the reference model, for KL or distillation."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Coefficient c of the reward -c * KL(policy, reference model) of each token; 0: none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How the KL in the reward is estimated from sampled tokens: "k1", "k2" or "k3"."""
    reference_server: OutsideServer | None = None
    """Server of OpenAI's API that has the reference or teacher model, as {url, model}; absent: it
    is loaded here. It scores at temperature 1 alone."""
    models: tuple[ScorerModel, ...] = ()
    """Models beside the reference model whose log-probs and KL ScorerService gives: {id,
    directory} or {id, directory, server}."""
    dtype: Dtype = "float32"
    """Number format of the reference model: "float32" or "bfloat16"."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the reference model: "cpu", "cuda", one of several as "cuda:1", or "auto" for that
    of the trainer, where a GPU is left."""
    num_threads: int = Field(default=1, ge=1)
    """Number of CPU threads of the reference model."""
    rewards: tuple[RewardSpec, ...] = ()
    """Rewards added to the environment's: {name, use = "module:function", weight, timeout_s}."""
    advantage_eps: float = Field(default=1e-6, gt=0)
    """Smallest divisor of advantages, and largest spread of rewards that counts as uniform."""
    advantage_divisor: Literal["max", "sum"] = "max"
    """Divisor of advantages: "max" is max(std, advantage_eps), "sum" is std + advantage_eps."""
    max_row_tokens: int = Field(default=4096, ge=16)
    """Largest number of tokens in a packed row; a longer sequence has a row of its own."""
    max_groups: int = Field(default=16, ge=1)
    """Largest number of groups that are scored at the same time, each by its own reward calls."""
    lease_s: float = Field(default=60.0, ge=1)
    """Seconds after which the queue takes groups back from a scorer that has gone away."""
    wait_s: float = Field(default=5.0, gt=0)
    """Longest time that one request for groups waits, in seconds."""
    patience_s: float = Field(default=120.0, gt=0)
    """Seconds that the queue may be away before groups are left to a later delivery."""

    @property
    def needs_reference(self) -> bool:
        """Return whether the queue's groups need the reference model."""
        return self.reference_logprobs or self.kl_coefficient > 0

    def baseline_for(self, loss: str) -> dict[str, bool]:
        """Return divide_by_std and leave_one_out: as this table says, else as `loss` needs."""
        facts = facts_of(loss)
        return {
            name: getattr(facts, name) if getattr(self, name) is None else getattr(self, name)
            for name in ("divide_by_std", "leave_one_out")
        }

    def advantage_rule(self, loss: str) -> dict[str, Any]:
        """Return the fields of `rl.advantages.AdvantageSettings`, for the trainer's `loss`."""
        return self.baseline_for(loss) | {
            "eps": self.advantage_eps,
            "divisor": self.advantage_divisor,
            "aggregate": self.advantage_aggregate,
        }

    @model_validator(mode="after")
    def _require_one_way_to_score(self) -> Self:
        fields = ScorerFields.model_fields
        rules = ("divide_by_std", "leave_one_out", "advantages_of", "advantage_eps", "top_k")
        changed = [name for name in rules if getattr(self, name) != fields[name].default]
        if self.advantage_estimator and changed:
            raise ValueError(
                f"advantage_estimator is {self.advantage_estimator}, which computes the "
                f"advantages, so {', '.join(changed)} would have no effect: leave that out"
            )
        if self.advantages_of == "turn" and self.advantage_aggregate != "sum":
            raise ValueError(
                f"advantage_aggregate is {self.advantage_aggregate}, which has no effect when "
                "advantages_of is turn: leave it out, or set advantages_of to trajectory"
            )
        if self.advantages_of == "turn" and self.top_k:
            raise ValueError(
                "top_k chooses whole trajectories, and advantages_of is turn: set advantages_of to "
                "trajectory, or leave top_k out"
            )
        if self.kl_coefficient and self.advantage_aggregate != "sum":
            raise ValueError(
                f"advantage_aggregate is {self.advantage_aggregate}, which would lose or shrink "
                "the KL penalty, since that counts by its sum: set kl_coefficient to 0, "
                "or advantage_aggregate to sum"
            )
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names) or "kl" in names:
            raise ValueError(
                f"the rewards {names} need different names, and none may be 'kl': rename them"
            )
        ids = [model.id for model in self.models]
        if len(set(ids)) < len(ids) or REFERENCE in ids:
            raise ValueError(
                f"the models {ids} need different ids, and none may be {REFERENCE!r}: rename them"
            )
        return self


class ScorerSection(ScorerFields):
    """How groups are scored."""

    reference_model: FilePath = ""
    """Directory of the reference or teacher model; empty: the model that training starts from."""
