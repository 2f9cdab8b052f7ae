"""Check a config in seconds before anything starts: all that it names is there and fits.

check(config, folder=Path("."))            # InvalidConfig for the first mistake
mistakes_in(config, folder=Path("."))      # all of them
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.chat import History
from dialoop.errors import DialoopError, InvalidConfig, PreconditionFailed
from dialoop.messages import Message
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.loss.facts import LOSSES, TINY_MODEL_POSITIONS
from dialoop_learning.model.vllm_readings import require_same_reading
from dialoop_learning.model.weight_files import holds_known_decoder, weight_files
from dialoop_services.config.engines import facts_of_engine, has_experts
from dialoop_services.config.memory import BYTES_OF
from dialoop_services.config.tables import DEVICE_PLANES
from dialoop_services.replay.redis_program import redis_program

from dialoop_ops.stack.devices import DevicePlan, needs_elsewhere, nodes_of, plan_devices
from dialoop_ops.stack.estimates import (
    card_needs,
    fields_in,
    has_weights,
    require_memory,
    require_targets,
    what_fits,
)
from dialoop_ops.stack.gpus import driver_lists, hold, require_room
from dialoop_ops.stack.layout import ports_of
from dialoop_ops.stack.processes.redis_server import FoundRedis, find_redis, is_listening
from dialoop_ops.stack.template_checks import check_template, confined_template
from dialoop_ops.stack.user_code import (
    check_demonstrations,
    check_functions,
    check_loss,
    check_sources,
    load_environments,
    working_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dialoop_services.config.job import JobConfig


_MEASURED_S = 0.2
_ANSWER = "Paris, on the Seine."
_CONVERSATION = History(
    (
        Message(role="user", content="What is the capital of France?"),
        Message(role="assistant", content=_ANSWER),
        Message(role="user", content="And of Italy?"),
    )
)


def check(config: JobConfig, *, folder: Path | None = None) -> JobConfig:
    """Return the config with the name of each environment; InvalidConfig for the first mistake.

    It has the environments' stop strings too, where the file has none and they agree. `folder` is
    where modules and relative paths of the config are looked up; None: as in this process.
    """
    checks = _Checks(config)
    for error in checks.run(folder):
        raise error
    return checks.config


def mistakes_in(config: JobConfig, *, folder: Path | None = None) -> list[InvalidConfig]:
    """Return every mistake in the config, each a sentence with a remedy."""
    mistakes, _ = findings_in(config, folder=folder)
    return mistakes


def findings_in(
    config: JobConfig, *, folder: Path | None = None
) -> tuple[list[InvalidConfig], list[str]]:
    """Return every mistake in the config, and warnings that its data and functions need for."""
    checks = _Checks(config)
    return list(checks.run(folder)), checks.warnings


class _Checks:
    """The checks of a config, which they complete with the names of its environments."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.warnings: list[str] = []
        self._is_model_sound = False

    def run(self, folder: Path | None) -> Iterator[InvalidConfig]:
        """Run one check after the other and yield what is wrong."""
        config = self.config
        for step in (
            _check_engine,
            _check_adapters,
            self._check_models,
            self._check_environments,
            check_functions,
            _check_loss,
            check_sources,
            _check_packages,
            _check_devices,
            _check_memory,
            _check_queue_and_ports,
        ):
            try:
                with working_in(folder):
                    step(config)
            except InvalidConfig as error:
                yield error
            except DialoopError as error:  # of a file that the config names
                yield InvalidConfig(error.message, reason=error.reason, remedy=error.remedy)

    def _check_models(self, config: JobConfig) -> None:
        _check_models(config)
        self._is_model_sound = True

    def _check_environments(self, config: JobConfig) -> None:
        environments = load_environments(config)
        first, *others = (
            section.model_copy(update={"name": environment.name})
            for section, environment in zip(config.all_environments, environments, strict=True)
        )
        collector, sections = config.collector, config.all_environments
        own = {environment.traits.stop for environment in environments}
        plays = config.train.mode == "rl" and all(each.play == "chat" for each in sections)
        if plays and collector.stop is None and len(own) == 1 and any(own):
            collector = collector.model_copy(update={"stop": own.pop()})  # exports have it too
        named = {"environment": first, "environments": tuple(others), "collector": collector}
        self.config = config.model_copy(update=named)
        check_demonstrations(config, environments[0])
        traits = environments[0].traits
        has_tools = (
            traits.tools or traits.needs_tool_template or first.agent or first.play != "chat"
        )
        if config.gates.tool_call_rate_after_at_least and not has_tools:
            raise InvalidConfig(
                "tool_call_rate_after_at_least in [gates] cannot hold, since the environment "
                f"{first.name} has no tools.",
                remedy="Leave the gate out, or give the environment tools.",
            )
        if self._is_model_sound:
            self.warnings += check_template(config, environments)


def _check_queue_and_ports(config: JobConfig) -> None:
    # The stack looks for both again when it starts. By then it may have deleted an old run.
    redis = find_redis(os.environ) if config.store == "redis" else FoundRedis()
    if config.store == "memory":
        redis_program()  # which the replay service starts
    if redis.url and not is_listening(redis.url):
        raise InvalidConfig(
            "No server answers at REDIS_URL.",
            reason=Reason.NO_REDIS,
            remedy='Start it, unset REDIS_URL, or set store = "memory".',
        )
    ports_of(config, with_redis=bool(redis.program))


def _check_engine(config: JobConfig) -> None:
    facts = facts_of_engine(config.engine)
    for package in facts.packages:
        if importlib.util.find_spec(package) is None:
            raise InvalidConfig(
                f'engine is "{config.engine}", and {package} is not installed.',
                reason=facts.reason,
                remedy=facts.install,
            )
    if not facts.loads_weights:
        raise InvalidConfig(
            f'engine is "{config.engine}", whose weights are on a server that no job can train.',
            reason=Reason.MODEL_NOT_PUBLISHABLE,
            remedy='Set engine = "vllm" or "transformers". To evaluate what the server has, run '
            f"`dialoop eval ... --engine {config.engine}`; as a teacher, name it as "
            "reference_server in [scorer].",
        )


def _check_models(config: JobConfig) -> None:
    directory, reference = config.model.directory, config.scorer.reference_model
    model_config: Mapping[str, Any] = {}
    positions: int | None = TINY_MODEL_POSITIONS
    if directory:
        check_model(Path(directory))
        _check_checkpoint(directory)
        model_config = fields_in(Path(directory))
        positions = model_config.get("max_position_embeddings")
        _check_experts(config, model_config)
        require_targets(config)
    if reference:
        check_model(Path(reference), key="scorer.reference_model")
        _check_checkpoint(reference)
    _check_record_of_experts(config, model_config)
    longest = config.inference.max_model_len
    most = positions and positions - facts_of_engine(config.engine).num_spare_positions
    if most and longest > most:
        raise InvalidConfig(
            f"max_model_len is {longest} in [inference], and the model has {positions} positions.",
            remedy=f"Set max_model_len to {most} or less.",
        )
    if directory and config.engine == "vllm":
        require_same_reading(model_config, longest=longest, where=directory)
        _check_cache(config, model_config)


def _check_cache(config: JobConfig, model_config: Mapping[str, Any]) -> None:
    """Raise InvalidConfig where the longest row has no room in vLLM's cache of keys and values.

    It needs 2 x layers x key-value heads x head width x bytes for each token; layers with a sliding
    window are not counted. A model of latent attention is left to vLLM.
    """
    heads = model_config.get("num_attention_heads")
    layers, hidden = model_config.get("num_hidden_layers"), model_config.get("hidden_size")
    if "kv_lora_rank" in model_config or not (heads and layers and hidden):
        return
    kinds = model_config.get("layer_types")
    if kinds:
        layers = kinds.count("full_attention")
    elif model_config.get("sliding_window"):
        layers = 0
    width = (model_config.get("num_key_value_heads") or heads) * (
        model_config.get("head_dim") or hidden // heads
    )
    inference = config.inference
    each = 2 * layers * width * BYTES_OF[inference.dtype or config.dtype]
    needed = each * inference.max_model_len / inference.num_devices
    if inference.has_fixed_cache and needed > inference.kv_cache_mib << 20:
        raise InvalidConfig(
            f"A row of max_model_len = {inference.max_model_len} tokens needs "
            f"{needed / 2**20:.0f} MiB of keys and values, and kv_cache_mib in [inference] is "
            f"{inference.kv_cache_mib}.",
            reason=Reason.ROW_LARGER_THAN_CACHE,
            remedy=f"Set kv_cache_mib to {math.ceil(needed / 2**20)} or more, or a shorter "
            "max_model_len.",
        )


def _check_experts(config: JobConfig, model_config: Mapping[str, Any]) -> None:
    """Raise InvalidConfig where the engine would sample with experts that are never trained."""
    trains = config.train.num_steps or config.train.mode == "sft" or config.warm_start.num_steps
    keeps = facts_of_engine(config.engine).keeps_experts_on_cpu
    if trains and keeps and has_experts(model_config) and not _num_gpus(config):
        raise InvalidConfig(
            f'engine = "{config.engine}" takes no new weights of experts on a CPU, so it would go '
            "on with those that the model started with.",
            reason=Reason.MODEL_NOT_PUBLISHABLE,
            remedy='Set engine = "transformers", or run the job on a machine with a GPU.',
        )


def _check_adapters(config: JobConfig) -> None:
    """Raise InvalidConfig where vLLM would end in mid-start: adapters in float32 on a GPU."""
    inference, dtype = config.inference, config.inference.dtype or config.dtype
    is_on_gpu = config.resources.inference.devices != 0 and _num_gpus(config)
    if config.engine == "vllm" and inference.max_adapters and dtype == "float32" and is_on_gpu:
        raise InvalidConfig(
            f"max_adapters is {inference.max_adapters} in [inference], and vLLM on a GPU has "
            "adapters for 16-bit weights alone, not for float32.",
            reason=Reason.ADAPTERS_NEED_16_BITS,
            remedy='Set dtype = "bfloat16" in [inference], or leave max_adapters out.',
        )


def _check_record_of_experts(config: JobConfig, model_config: Mapping[str, Any]) -> None:
    """Raise InvalidConfig where record_routed_experts asks for what engine or model do not have."""
    if not config.inference.record_routed_experts:
        return
    problem = ""
    if facts_of_engine(config.engine).records_experts is False:
        problem = f'engine = "{config.engine}" does not say which experts computed a token'
    elif not has_experts(model_config):
        problem = "the model has no experts"
    if problem:
        raise InvalidConfig(
            f"record_routed_experts is set in [inference], and {problem}.",
            reason=Reason.NO_ROUTED_EXPERTS,
            remedy="Set record_routed_experts = false, or train a mixture of experts with engine = "
            '"transformers".',
        )


def check_model(directory: Path, *, key: str = "model.directory") -> None:
    """Raise InvalidConfig unless a directory has configuration, weights, tokenizer, template."""
    if not directory.is_dir():
        raise InvalidConfig(
            f"There is no model directory {directory}.",
            reason=Reason.MODEL_MISSING,
            remedy=f"{_fetch(directory)}Set {key} to a Hugging Face model directory, or leave it "
            "empty.",
        )
    weight_files(directory)
    if not (directory / "config.json").is_file():
        raise InvalidConfig(
            f"The model directory {directory} has no config.json.",
            reason=Reason.MODEL_INCOMPLETE,
            remedy="Save the model there with model.save_pretrained(directory).",
        )
    model_config = fields_in(directory)
    tokenizer = Tokenizer.from_directory(directory)
    num_rows = model_config.get("vocab_size")
    if isinstance(num_rows, int) and tokenizer.vocab_size > num_rows:
        raise InvalidConfig(
            f"The tokenizer of {directory} has {tokenizer.vocab_size} ids, and the model embeds "
            f"{num_rows}.",
            reason=Reason.TOKENIZER_LARGER,
            remedy="Save the model's own tokenizer there, or resize the model with "
            "model.resize_token_embeddings.",
        )
    try:
        with confined_template(tokenizer) as template:
            text = template.render(_CONVERSATION)
    except DialoopError as error:
        if error.reason == Reason.TEMPLATE_MISSING:
            raise
        raise InvalidConfig(
            f"The chat template of {directory} does not render a message: {error.message}",
            reason=Reason.TEMPLATE_INVALID,
            remedy="Correct chat_template.jinja or tokenizer_config.json there.",
        ) from error
    if _ANSWER not in text:
        raise InvalidConfig(
            f"The chat template of {directory} renders a conversation without the assistant's "
            f'words: "{_ANSWER}" is not in it.',
            reason=Reason.TEMPLATE_HIDES_ANSWERS,
            remedy="Correct chat_template.jinja or tokenizer_config.json there.",
        )


def _fetch(directory: Path) -> str:
    """Return how to fetch a model whose name on a hub stands where its directory should."""
    name = "/".join(directory.parts[-2:])
    if directory.parent.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return ""
    return (
        f"If {name} is a model of the Hugging Face Hub, fetch it first: "
        f"`hf download {name} --local-dir models/{directory.name}`. "
    )


def _check_checkpoint(directory: str) -> None:
    """Raise InvalidConfig where a checkpoint is not what its architecture needs.

    Where it is no decoder of a known kind, a process of its own looks: torch stays out of this one.
    """
    if holds_known_decoder(Path(directory)):
        return
    answer = _look(directory)
    if answer.returncode:
        raise InvalidConfig(
            f"The model in {directory} could not be looked at: {_last_line(answer.stderr)}",
            reason=Reason.MODEL_INCOMPLETE,
            remedy="Load it with transformers' AutoModelForCausalLM to see the whole error.",
        )
    _raise_problem(answer.stdout)


def _check_loss(config: JobConfig) -> None:
    """Raise InvalidConfig for a loss of the user's own that is no loss; a process calls it once."""
    check_loss(config)
    name, options = config.train.loss, json.dumps(config.train.loss_options)
    if name in LOSSES:
        return
    answer = _look(name, options, module="dialoop_learning.loss.loss_loading")
    if answer.returncode:
        raise InvalidConfig(
            f"The loss '{name}' could not be called: {_last_line(answer.stderr)}",
            reason=Reason.UNKNOWN_LOSS,
            remedy="Correct its module.",
        )
    _raise_problem(_last_line(answer.stdout.strip()))


def _raise_problem(text: str) -> None:
    """Raise the InvalidConfig that a process found; nothing for {}."""
    problem = json.loads(text)
    if problem:
        reason = Reason(problem["reason"])
        raise InvalidConfig(problem["message"], reason=reason, remedy=problem["remedy"])


def _look(
    *arguments: str, module: str = "dialoop_learning.model.checkpoint"
) -> subprocess.CompletedProcess[str]:
    """Ask a process that has torch, since this one has not."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _check_packages(config: JobConfig) -> None:
    """Raise InvalidConfig for a switch whose package is not installed."""
    needed = (
        ("trackers.trackio", config.trackers.trackio, "trackio", "trackio"),
        ("trackers.wandb", config.trackers.wandb, "wandb", "wandb"),
        ("trackers.tensorboard", config.trackers.tensorboard, "tensorboardX", "tensorboard"),
        ("logprob_kernel cut", config.train.logprob_kernel == "cut", "cut_cross_entropy", "gpu"),
    )
    for what, is_on, package, extra in needed:
        if is_on and importlib.util.find_spec(package) is None:
            raise InvalidConfig(
                f"{what} needs the package {package}, which is not installed.",
                reason=Reason.TRACKER_MISSING if what.startswith("trackers") else None,
                remedy=f"Install it with `pip install 'dialoop-services[{extra}]'`, or leave that "
                "out of the config.",
            )


def _check_devices(config: JobConfig) -> None:
    """Raise InvalidConfig where the processes need more GPUs than the machines have."""
    train = config.train
    if config.launch.on != "local":
        needs_elsewhere(config)  # the launcher compares it with the cluster's machines
        if not config.resources.is_for_other_machines:
            return
    wanted = {
        "scorer.device": int(config.scorer.device != "cpu"),
        "train.device": train.num_processes if train.device == "cuda" else 0,
        "train.logprob_kernel": int(train.logprob_kernel == "cut"),
        "inference.device": int(config.inference.device == "cuda"),
        "inference.data_plane": int(config.inference.data_plane in DEVICE_PLANES),
    }
    num_gpus = _num_gpus(config) if any(wanted.values()) else 0
    for key, number in wanted.items():
        if number > num_gpus:
            if not config.resources.is_for_other_machines:
                driver_lists()  # it says why there is none, where a driver is installed
            raise InvalidConfig(
                f"{key} needs {number} GPU{'s' if number > 1 else ''}, and this machine has "
                f"{num_gpus or 'none'}.",
                reason=Reason.NEEDS_CUDA,
                remedy=f"Leave {key} out to use the CPU, or run the job on a machine with an "
                "NVIDIA driver.",
            )
    plan = plan_devices(config, nodes_of(config, os.environ))
    if not config.resources.is_for_other_machines:
        _check_gpus(config, plan)
    elif config.resources.gpu_memory_gib is not None:
        _check_cards(config, plan, config.resources.gpu_memory_gib * 2**30)


def _check_cards(config: JobConfig, plan: DevicePlan, room: float) -> None:
    """Raise InvalidConfig where a GPU of the machines that are planned for is too small."""
    for (node, gpu), processes in card_needs(config, plan, total=room).items():
        if sum(processes.values()) <= room:
            continue
        parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in processes.items())
        raise InvalidConfig(
            f"The job needs {sum(processes.values()) / 2**30:.1f} GiB of GPU {gpu} of node {node}: "
            f"{parts}; gpu_memory_gib is {room / 2**30:g} in [resources].",
            reason=Reason.GPU_MEMORY_TAKEN,
            remedy=what_fits(config, plan, processes, room),
        )


def _check_gpus(config: JobConfig, plan: DevicePlan) -> None:
    """Raise InvalidConfig where a GPU of this machine is not there, too full, or another stack's.

    torch is asked in a process of its own, which initialises CUDA.
    """
    entries = plan.gpus
    gpus = driver_lists() if entries else None
    if gpus is None:
        return
    size = max((gpu.total or 0 for gpu in gpus), default=0)
    cards = card_needs(config, plan, total=size)
    try:
        require_room({entry: processes for (_, entry), processes in cards.items()}, gpus)
    except InvalidConfig as error:
        largest = max(cards.values(), key=lambda processes: sum(processes.values()))
        if not size or sum(largest.values()) <= size:
            raise
        remedy = what_fits(config, plan, largest, size)
        raise InvalidConfig(error.message, reason=error.reason, remedy=remedy) from error
    with hold(entries, gpus, run=config.run, shares=config.resources.overlap):
        pass
    answer = _look("--cuda")
    problem = _last_line(answer.stderr) if answer.returncode else answer.stdout.strip()
    if problem:
        raise InvalidConfig(
            f"The driver lists {', '.join(map(str, gpus))}, and torch reaches none: {problem}",
            reason=Reason.NO_DEVICE,
            remedy="Install a torch that was built for CUDA and fits the driver, or set "
            "CUDA_VISIBLE_DEVICES= to compute on the CPU.",
        )


def _num_gpus(config: JobConfig) -> int:
    """Return how many GPUs there are on the machines that the config is planned for."""
    return sum(len(node.gpus) for node in nodes_of(config, os.environ))


def _check_memory(config: JobConfig) -> None:
    """Raise InvalidConfig where the job does not fit into a machine's memory."""
    (node, *_) = nodes_of(config, os.environ)
    if not has_weights(config.model.directory) or node.memory_gib is None:
        return  # the tiny model, one that is refused already, or machines of unknown memory
    try:
        require_memory(config, node.memory_gib * 2**30)
    except PreconditionFailed as error:
        raise InvalidConfig(
            f"{error.message} It is in the model directory {config.model.directory}.",
            reason=Reason.MODEL_INCOMPLETE,
            remedy="Save the model there with model.save_pretrained(directory).",
        ) from error


def gflops_of_this_machine() -> float:
    """Return how many billion operations a second float32 products take here on one thread.

    numpy measures it for a fifth of a CPU second: torch stays out of this process.
    """
    left, right = np.ones((512, 1024), np.float32), np.ones((1024, 1024), np.float32)
    num_products, started, elapsed = 0, time.process_time(), 0.0
    while elapsed < _MEASURED_S:
        left @ right
        num_products += 1
        elapsed = time.process_time() - started  # of all its threads
    return num_products * 2 * 512 * 1024 * 1024 / elapsed / 1e9
