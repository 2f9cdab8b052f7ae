"""The job config: what a TOML file may say, with defaults that train the built-in arithmetic task.

engine = "vllm"
[train]
num_steps = 50

The services' tables stand in `dialoop_services.config.tables`; here, the stack's own, and what two
tables exclude.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dialoop_services.config.engines import EngineName, facts_of_engine
from dialoop_services.config.losses import LossFacts, facts_of
from dialoop_services.config.tables import (
    CollectorSection,
    Dtype,
    EnvironmentSection,
    EvaluationSection,
    InferenceSection,
    ModelSection,
    ScorerSection,
    Section,
    SftSettings,
    TrackerSettings,
    TrainSection,
    WarmStartSection,
)

SCHEMA = 1
"""Version of the job file that this package reads."""

_HALF = "bfloat16"
_ROUNDING = 1e-2
"""Nats: below this, the largest difference of log-probs with and without bfloat16 does not stay."""


class GatesSection(Section):
    """What must hold at the end for exit code 0, beside what always must; absent: not asked."""

    heldout_greedy_before_at_most: float | None = None
    """Greedy held-out accuracy before training."""
    heldout_greedy_after_at_least: float | None = None
    """Greedy held-out accuracy after training."""
    heldout_sampled_gain_at_least: float | None = None
    """Sampled held-out accuracy after training, less that before."""
    tool_call_rate_after_at_least: float | None = None
    """Share of sampled held-out trajectories that call a tool, after training."""
    older_data_share_at_least: float | None = None
    """Share of train steps that used data of an older policy version."""
    policy_versions_at_least: int | None = None
    """Published policy versions."""
    logprob_difference_at_most: float = Field(default=1e-4, gt=0)
    """Trainer against inference after every publish, and re-scoring, in nats."""


class PortsSection(Section):
    """Fixed loopback ports; 0 for any free one."""

    redis: int = Field(default=0, ge=0, le=65535)
    """Port of the Redis that is started."""
    replay: int = Field(default=0, ge=0, le=65535)
    """Port of the replay service."""
    environment: int = Field(default=0, ge=0, le=65535)
    """Port of the environment service."""
    inference: int = Field(default=0, ge=0, le=65535)
    """Port of the first inference replica."""
    trainer: int = Field(default=0, ge=0, le=65535)
    """Port of the trainer."""
    scorer: int = Field(default=0, ge=0, le=65535)
    """Port of the scorer."""
    collector: int = Field(default=0, ge=0, le=65535)
    """Port of the collector."""
    replay_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the replay service."""
    environment_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the environment service."""
    inference_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the first inference replica."""
    trainer_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the trainer."""
    scorer_rest: int = Field(default=0, ge=0, le=65535)
    """REST port of the scorer."""
    collector_rest: int = Field(default=0, ge=0, le=65535)
    """Port of the collector's health and metrics."""


class JobConfig(Section):
    """A whole job."""

    run: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Name of the run; its state is under runs/<name>/."""
    seed: int = Field(default=0, ge=0)
    """Seed of the tiny model, demonstrations, task order and sampling; SEED overrides it."""
    engine: EngineName = "vllm"
    """What samples: vllm, transformers, or the import path of an engine, module:Class."""
    dtype: Dtype = "float32"
    """Number format of the trainer's weights; log-probs agree to 1e-4 in float32 only."""
    store: Literal["redis", "memory"] = "redis"
    """Where the queue lives; memory forgets when the replay service ends."""
    placement: Literal["split", "shared"] = "split"
    """Engine and trainer on devices of their own, or on one device by turns."""
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    environments: tuple[EnvironmentSection, ...] = ()
    """Further environments to train on, by weight; the warm start and evaluations use the first."""
    inference: InferenceSection = InferenceSection()
    collector: CollectorSection = CollectorSection()
    scorer: ScorerSection = ScorerSection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    sft: SftSettings = SftSettings()
    evaluation: EvaluationSection = EvaluationSection()
    trackers: TrackerSettings = TrackerSettings()
    gates: GatesSection = GatesSection()
    ports: PortsSection = PortsSection()

    @property
    def all_environments(self) -> tuple[EnvironmentSection, ...]:
        """What is trained on, [environment] first."""
        return (self.environment, *self.environments)

    @model_validator(mode="after")
    def _require_names(self) -> JobConfig:
        names = [section.served_name for section in self.all_environments]
        if len(set(names)) != len(names):
            raise ValueError(
                f"two environments have one name: {', '.join(names)}; give each its own"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _require_known_schema(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "schema" not in given:
            return given
        values = dict(given)
        schema = values.pop("schema")
        if schema != SCHEMA:
            raise ValueError(
                f"schema is {schema!r}, and this version of Dialoop reads schema {SCHEMA}: install "
                f"the version that the file was written for, or set schema = {SCHEMA} and compare "
                "the keys with `dialoop config print`"
            )
        return values

    @model_validator(mode="after")
    def _require_what_is_trained_to_be_published(self) -> JobConfig:
        self.model.require_publishable(self.inference.data_plane)
        self.train.require_optimizer_for(self.model)
        return self

    @model_validator(mode="after")
    def _require_one_device(self) -> JobConfig:
        """What two who take turns on one device cannot do."""
        if self.placement == "split":
            return self
        train, inference = self.train, self.inference
        train.require_turns(inference.data_plane)
        if inference.tensor_parallel_size > 1:
            raise ValueError(
                'placement = "shared" is for one device, and tensor_parallel_size is '
                f"{inference.tensor_parallel_size}; set it to 1, or placement to split"
            )
        if train.num_processes > 1:
            raise ValueError(
                'placement = "shared" is for one process of the trainer, and num_processes is '
                f"{train.num_processes}; set it to 1, or placement to split"
            )
        if facts_of_engine(self.engine).cpu_only and train.device == "cuda":
            raise ValueError(
                f'placement = "shared" with engine = "{self.engine}", which samples on the CPU, '
                'and device = "cuda": they have a device each; set placement to split'
            )
        return self

    @model_validator(mode="after")
    def _require_rows_for_what_is_sampled(self) -> JobConfig:
        longest = self.inference.max_model_len
        row_tokens = self.train.row_tokens(longest)
        is_asked = self.train.mode == "rl" and self.train.oversize == "error"
        if is_asked and row_tokens < longest:
            raise ValueError(
                f"max_row_tokens is {row_tokens}, below max_model_len {longest} in [inference]: a "
                "longer sequence could not be trained; leave it out, raise it, or set oversize"
            )
        return self

    @model_validator(mode="after")
    def _require_a_baseline(self) -> JobConfig:
        size = self.collector.group_size
        if self.train.mode == "rl" and self.train.num_steps and size < 2:
            raise ValueError(
                f"group_size is {size}: advantages compare the trajectories of a group, so that no "
                "group of one is ever trained; set it to 2 or more in [collector]"
            )
        return self

    @model_validator(mode="after")
    def _require_a_choice_to_imitate(self) -> JobConfig:
        train = self.train
        is_trained = train.mode == "rl" and train.num_steps
        if is_trained and facts_of(train.loss).imitates and not self.scorer.top_k:
            raise ValueError(
                f"loss {train.loss} imitates bad trajectories like good ones: set top_k in "
                "[scorer], which chooses the best of each group"
            )
        return self

    @model_validator(mode="after")
    def _require_reference_for_the_loss(self) -> JobConfig:
        objective, loss = self.train.objective, self.train.loss
        asked = {
            f"loss {loss}": facts_of(loss).needs_reference,
            f"kl_coeff {objective.kl_coeff:g}": objective.kl_coeff and objective.kl_to == "ref",
            "correction_to ref": objective.correction and objective.correction_to == "ref",
        }
        askers = [name for name, asks in asked.items() if asks]
        if self.train.mode == "rl" and askers and not self.scorer.reference_logprobs:
            raise ValueError(
                f"{' and '.join(askers)} needs log-probs of a reference model: set "
                "reference_logprobs = true in [scorer]"
            )
        if self.scorer.top_k > self.collector.group_size:
            raise ValueError(
                f"top_k is {self.scorer.top_k}, above group_size {self.collector.group_size}"
            )
        return self


def warnings_for_formats(config: JobConfig) -> tuple[str, ...]:
    """Return a sentence for each number format that rounds away what the job is about."""
    trains = config.train.num_steps or config.train.mode == "sft" or config.warm_start.num_steps
    bound = config.gates.logprob_difference_at_most
    warnings: list[str] = []
    if trains and config.dtype == _HALF:
        warnings.append(
            "dtype bfloat16 rounds away updates below a 256th of a weight; float32 with "
            f'autocast = "{_HALF}" in [train] and dtype = "{_HALF}" in [inference] keeps them'
        )
    if trains and _HALF in (config.dtype, config.inference.dtype) and bound < _ROUNDING:
        warnings.append(
            f"log-probs in bfloat16 differ by more than logprob_difference_at_most = {bound:g} in "
            "[gates]: set it to 0.1 or so"
        )
    return tuple(warnings)


def warnings_for_advantages(config: JobConfig) -> tuple[str, ...]:
    """Return a sentence for each way in which the config departs from what its loss is meant for.

    A loss with GRPO's advantages is as good with others.
    """
    if config.train.mode != "rl" or not config.train.num_steps:
        return ()
    loss, given = config.train.loss, config.scorer.baseline_for(config.train.loss)
    facts, plain = facts_of(loss), LossFacts()
    meant = {name: getattr(facts, name) for name in given}
    if all(meant[name] == getattr(plain, name) for name in meant):
        meant = {}
    departures = {name: value for name, value in meant.items() if value != given[name]}
    if facts.drop_uniform and not config.scorer.drop_uniform:
        departures["drop_uniform"] = True
    return tuple(
        f"loss {loss} is meant for [scorer] {name} = {str(value).lower()}, which is not what "
        "this config has"
        for name, value in departures.items()
    )
