"""Every snippet in a public docstring of the services runs, or is run by the test that is named.

What a snippet takes from its reader (a model, a server, groups) is in CONTEXTS, by the snippet's
place; it also has its own module's names. Snippets that need torch share this process.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop_services.config.file import parse_config

from tests.support.samples.docstring_snippets import module_of, run_snippet, snippets
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
SNIPPETS = snippets(of_services=True)
# The tests that play these: each starts all services, or needs a package that tests do without.
RUN_ELSEWHERE = {
    "dialoop_learning.model.gguf": "tests/unit/learning/test_gguf.py::"
    "test_weights_tokens_and_template_are_those_of_the_file",
    "dialoop_extras.services.openenv_server": "tests/extras/contract/compat/test_openenv_server.py"
    "::test_their_client_plays_an_environment_of_ours_to_its_end",
    "dialoop_ops.stack.in_process": "tests/e2e/test_docs.py::"
    "test_every_service_runs_in_one_process_as_printed",
    "dialoop_ops.stack.running": "tests/e2e/test_loop.py::"
    "test_the_whole_loop_runs_exactly_and_leaves_nothing_behind",
}
HEAVY = {"dialoop_services.inference.vllm_engine.constraints": "imports vLLM: 10 s of CPU"}

Names = dict[str, Any]
CONTEXTS: dict[str, Callable[[Path], Names]] = {}


def context(*places: str) -> Callable[[Callable[[Path], Names]], Callable[[Path], Names]]:
    """Give the snippets of these places the names that a function returns."""

    def register(make: Callable[[Path], Names]) -> Callable[[Path], Names]:
        CONTEXTS.update(dict.fromkeys(places, make))
        return make

    return register


@context(
    "dialoop_services.config.file",
    "dialoop_services.config.settings",
    "dialoop_services.config.values",
)
def of_config(folder: Path) -> Names:
    from dialoop_learning.loss.facts import LOSSES
    from dialoop_services.config import tables
    from dialoop_services.config.job import EvaluationSection
    from pydantic_settings import SettingsConfigDict

    (folder / "job.toml").write_text("[train]\nnum_steps = 3\n")
    named = {"TrainFields": tables.TrainFields, "TrainSection": tables.TrainSection}
    named |= {"os": os, "LOSSES": LOSSES, "FilePath": str, "EvaluationSection": EvaluationSection}
    return named | {"SettingsConfigDict": SettingsConfigDict}


@context(
    "dialoop_services.inference.engine",
    "dialoop_services.inference.generate",
    "dialoop_services.inference.replica.batching",
)
def of_an_engine(folder: Path) -> Names:
    from dialoop.chat import History
    from dialoop.trajectory import SamplingParams

    from tests.support.rest_world import TwinEngine

    class Engine(TwinEngine):
        async def sample(self, *arguments: Any, **options: Any) -> Any:
            (sampled,) = await super().sample(*arguments, **options)
            span = replace(sampled.versions[0], length=4)
            ids, logprobs = (17, 9, 4, 262), (-0.1,) * 4
            return (replace(sampled, token_ids=ids, logprobs=logprobs, versions=(span,)),)

    renderer = renderer_of_bytes()
    return {
        "engine": Engine(),
        "prompt_ids": [1, 2],
        "sampling": SamplingParams(max_new_tokens=24),
        "stop": None,
        "num_samples": 8,
        "model_dir": folder,
        "Renderer": SimpleNamespace(of=lambda _: renderer),
        "history": History([{"role": "user", "content": "3+4"}]),
    }


def renderer_of_bytes() -> Any:
    from dialoop.templates.chat_template import ChatTemplate
    from dialoop.testing import byte_tokenizer
    from dialoop_services.inference.rendering import Renderer

    tokenizer = byte_tokenizer()
    return Renderer(tokenizer, ChatTemplate.of(tokenizer))


@context(
    "dialoop_services.inference.wires.base",
    "dialoop_services.inference.wires.openai.routes",
    "dialoop_services.inference.recordings.store",
)
def of_a_wire(_: Path) -> Names:
    from dialoop.trajectory import SamplingParams
    from dialoop_services.hosting import GrpcServer
    from dialoop_services.inference.recordings.store import RecordingLimits, RecordingStore
    from dialoop_services.inference.replica.replica import Replica
    from dialoop_services.inference.wires.base import WireHost
    from dialoop_services.runtime import ServerSettings

    from tests.support.rest_world import TwinEngine

    async def report(_: bool) -> None:
        """Nobody asks."""

    host = WireHost(
        replica=Replica(TwinEngine(), weights_root=None, report=report),
        renderer=renderer_of_bytes(),
        store=RecordingStore(RecordingLimits()),
        model_name="policy",
        max_new_tokens=8,
    )
    return {
        "host": host,
        "store": host.store,
        "server": GrpcServer(ServerSettings(rest_port=0)),
        "call_id": "call",
        "prompt": host.prompts.completion("3+4=", None),
        "sampling": SamplingParams(max_new_tokens=8),
        "recording": None,
        "request": SimpleNamespace(),
        "choices": (),
    }


@context("dialoop_extras.collates")
def of_a_group(_: Path) -> Names:
    from tests.support.samples.scorer_samples import make_group

    return {"group": make_group(0.0, 1.0)}


def tiny_model(folder: Path) -> Path:
    from dialoop_learning.model.tiny import make_tiny_model

    directory = folder.parent / "model"  # of all snippets of this process
    return directory if directory.exists() else make_tiny_model(directory, seed=0)


@context("dialoop_learning.model.weight_files", "dialoop_services.config.derived")
def of_a_model(folder: Path) -> Names:
    directory = tiny_model(folder)
    return {"directory": directory, "values": {"model": {"directory": str(directory)}}}


@context("dialoop_learning.model.weight_delta", "dialoop_learning.model.weight_writer")
def of_two_files(folder: Path) -> Names:
    import torch
    from safetensors.torch import save_file

    old, new, copy_of_old = (folder / name for name in ("old", "new", "copy"))
    for file, number in ((old, 0.0), (new, 1.0), (copy_of_old, 0.0)):
        tensor = torch.zeros(1000)
        tensor[7] = number
        save_file({"w": tensor}, file)
    names = {"old": old, "new": new, "copy_of_old": copy_of_old, "out": folder / "out"}
    tensors = {"w": torch.ones(3)}
    like = {name: tensor.to("meta") for name, tensor in tensors.items()}
    return names | {"digest": "", "path": folder / "path", "like": like, "buckets": [tensors]}


@context("dialoop_learning.lora.base_weights")
def of_an_adapter(folder: Path) -> Names:
    from dialoop_learning.lora.layers import adapter_tensors, add_lora
    from dialoop_learning.model.policy import load_policy
    from safetensors.torch import load_file, save_file

    model_dir = tiny_model(folder)
    policy = load_policy(model_dir)
    add_lora(policy.causal_lm, rank=2, alpha=4.0)
    save_file(adapter_tensors(policy.causal_lm), folder / "adapter.safetensors")
    path = folder / "adapter.safetensors"
    return {"model_dir": model_dir, "path": path, "load_file": load_file}


@context(
    "dialoop_learning.lora.layers",
    "dialoop_learning.model.policy",
    "dialoop_learning.model.products",
    "dialoop_learning.parallel.parallel_state",
    "dialoop_learning.parallel.ranks",
)
def of_a_policy(folder: Path) -> Names:
    import torch
    from dialoop_learning.loss.loss_loading import load_loss
    from dialoop_learning.model.policy import load_policy
    from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
    from dialoop_learning.packing.rows import TokenRow, pack_rows
    from dialoop_learning.parallel.parallel_state import policy_tensors
    from dialoop_learning.parallel.ranks import ALONE
    from dialoop_learning.training import update
    from safetensors.torch import load_file, save_file

    directory = tiny_model(folder)
    policy = load_policy(directory)
    row = TokenRow.from_demonstration([1, 2, 3, 4], [False, True, True, True])
    settings = OptimizerSettings(learning_rate=1e-3)
    optimizer = GuardedOptimizer(policy.parameters(), settings)
    path = folder / "state"
    loss = load_loss("sft")
    names = {"load_policy": load_policy, "GuardedOptimizer": GuardedOptimizer, "update": update}

    def load(file: Path, **options: Any) -> Any:
        return optimizer.state_dict() if options else load_file(file)

    update(policy, optimizer, [pack_rows([row])], loss)
    save_file({name: weights.clone() for name, weights in policy_tensors(policy).items()}, path)
    return names | {
        "directory": directory,
        "policy": policy,
        "batch": pack_rows([row]),
        "my_rows": [pack_rows([row])],
        "optimizer": optimizer,
        "settings": settings,
        "loss": loss,
        "rank": 0,
        "size": 1,
        "ranks": ALONE,
        "path": path,
        "device": torch.device("cpu"),
        "model": torch.nn.Linear(4, 4),
        "hidden": torch.ones(2, 4),
        "load_file": load_file,
        "torch": SimpleNamespace(load=load),
    }


@context("dialoop_learning.parallel.loading")
def of_weights_that_ranks_read(folder: Path) -> Names:
    from dialoop_learning.model.policy import blank_policy
    from dialoop_learning.parallel.ranks import ALONE

    directory = tiny_model(folder)
    names = {"directory": directory, "checkpoint": directory, "ranks": ALONE}
    return names | {"blank_policy": blank_policy}


@context("dialoop_learning.parallel.step_plan")
def of_rows_of_two_updates(_: Path) -> Names:
    from dialoop_learning.packing.rows import TokenRow
    from dialoop_learning.parallel.ranks import ALONE

    row = TokenRow.from_demonstration([1, 2, 3, 4], [False, True, True, True])
    return {"rows": [row] * 4, "ranks": ALONE}


@context("dialoop_services.trainer.learner.meeting")
def of_a_first_node(folder: Path) -> Names:
    from dialoop_services.trainer.learner.meeting import NodePlace
    from dialoop_services.trainer.settings import TrainerSettings

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{probe.getsockname()[1]}"
    place = NodePlace(num_processes=1, rendezvous=here, address="127.0.0.1", interface="lo")
    return {"place": place, "settings": TrainerSettings(run_dir=folder)}


@context("dialoop_learning.parallel.group_commands")
def of_one_rank(_: Path) -> Names:
    from dialoop_learning.parallel.ranks import join_ranks

    names = {"rank": 0, "size": 1, "device": "cpu", "facts": "", "run_the_service": lambda _: None}
    make = lambda facts, group: SimpleNamespace(group=group)  # noqa: E731
    return names | {"join_ranks": join_ranks, "closing": closing, "make": make}


@context("dialoop_learning.loss.loss_loading")
def of_ones_own_loss(folder: Path) -> Names:
    (folder / "my_project").mkdir()
    (folder / "my_project" / "losses.py").write_text("def mine(inputs):\n    return inputs\n")
    return {}


@context("dialoop_learning.loss.objective", "dialoop_extras.source_names")
def of_a_loss(_: Path) -> Names:
    import torch
    from dialoop_learning.loss import losses

    logprobs = torch.tensor([-1.0, -2.0])
    inputs = losses.LossInputs(
        policy_logprobs=logprobs.clone().requires_grad_(),
        inference_logprobs=logprobs,
        ref_logprobs=logprobs,
        entropy=torch.ones(2),
        advantages=torch.tensor([1.0, -1.0]),
        sequence_index=torch.tensor([0, 0]),
        loss_mask=torch.tensor([True, True]),
        num_tokens=2,
        num_sequences=1,
    )
    return {"losses": losses, "inputs": inputs}


@context("dialoop_extras.seed_interface")
def of_a_pack(_: Path) -> Names:
    import torch

    prompt, response = torch.tensor([5, 6]), torch.tensor([7, 8, 9])
    logprobs, scores = -torch.ones(3), -torch.ones(512)
    return {"prompt": prompt, "response": response, "logprobs": logprobs, "scores": scores}


@context("dialoop_services.replay.store.QueueStore.apply", "dialoop_services.replay.validation")
def of_the_queue(_: Path) -> Names:
    from dialoop.v1 import replay_service_pb2 as pb
    from dialoop_services.replay.store import QueueLimits

    from tests.support.queue_model.store import ModelStore
    from tests.support.samples.replay_samples import make_group, make_task

    group = make_group(make_task("a"))
    return {"pb": pb, "apply": ModelStore(QueueLimits()).apply, "group": group}


@context(
    "dialoop_services.rest.app",
    "dialoop_services.rest.schema",
    "dialoop_services.rest.socket_routes",
)
@context(
    "dialoop_services.runtime.handlers",
    "dialoop_services.hosting.in_process",
    "dialoop_services.hosting.server",
)
def of_a_service(_: Path) -> Names:
    import pydantic_core
    from dialoop.clients.environment import EnvironmentClient
    from dialoop.environments import arithmetic
    from dialoop.environments.sessions.catalogue import Catalogue
    from dialoop.environments.sessions.engine import SessionEngine
    from dialoop.environments.sessions.records import SessionLimits
    from dialoop.v1 import environment_service_pb2 as pb
    from dialoop.v1 import environment_service_pb2_grpc, scope_pb2
    from dialoop_services.environment.servicer import EnvironmentServicer
    from dialoop_services.hosting import GrpcServer
    from dialoop_services.rest.app import RestOptions
    from dialoop_services.rest.requests import BodyLimits
    from dialoop_services.runtime import ServerSettings
    from dialoop_services.runtime.access.auth import Token
    from dialoop_services.runtime.calls import CallLimits, Calls
    from dialoop_services.runtime.handlers import Handlers
    from dialoop_services.runtime.metrics import Metrics
    from google.protobuf import descriptor_pool

    class Stopped(GrpcServer):
        """Is told to stop as soon as it waits for that."""

        async def wait_until_stopped(self) -> None:
            self.stop()
            await super().wait_until_stopped()

    catalogue = Catalogue([arithmetic()])
    sessions: Any = SessionEngine(catalogue, SessionLimits())
    facts: Names = {"token": Token(""), "bodies": BodyLimits(CallLimits()), "serving": dict}
    settings = ServerSettings(drain_s=1)
    register = "add_EnvironmentServiceServicer_to_server"
    return {
        register: getattr(environment_service_pb2_grpc, register),
        "servicer": EnvironmentServicer(catalogue, sessions),
        "options": RestOptions(calls=Calls(), metrics=Metrics(), **facts),
        "pool": descriptor_pool.Default(),
        "calls": Calls(),
        "Token": Token,
        "settings": settings,
        "server": SimpleNamespace(add_socket=print),
        "handlers": Handlers(Calls(), Token("")),
        "SCOPE_ENV": scope_pb2.SCOPE_ENV,
        "GrpcServer": Stopped,
        "EnvironmentClient": EnvironmentClient,
        "pb": pb,
        "body": b'{"session_id": "s", "episode": 1}',
        "response": pb.StepResponse(),
        "pydantic_core": pydantic_core,
    }


@context("dialoop_learning.rl.staleness.is_stale", "dialoop_learning.rl.turn_tokens")
def of_two_turns(_: Path) -> Names:
    from dialoop import testing
    from dialoop.sequences import PolicyVersion, Source, sequence_of
    from dialoop.trajectory import Turn

    version = PolicyVersion(lineage="main", number=1)
    sequences = tuple(
        sequence_of(
            [
                ([1], {"source": Source.PROMPT}),
                (ids, {"source": Source.MODEL, "policy_version": version, "turn": turn}),
            ]
        )
        for turn, ids in enumerate(([5, 6, 7], [8, 9]))
    )
    turns = (Turn(message_start=1, num_messages=1),) * 2
    played = testing.trajectory(sequences=sequences, turns=turns)
    return {"trajectory": played, "PolicyVersion": PolicyVersion}


@context("dialoop_services.runtime.device_lock")
def of_a_run(folder: Path) -> Names:
    return {"run_dir": folder}


@context("dialoop_services.runtime.logs")
def of_a_log(_: Path) -> Names:
    return {"log": logging.getLogger("dialoop_services.snippet")}


@context("dialoop_services.scorer.reference_batches")
def of_two_groups(_: Path) -> Names:
    from tests.support.rest_world import FlatReference
    from tests.support.samples.scorer_samples import make_sequence

    groups = [([make_sequence()] * 2, [1.0, 1.0])] * 2
    return {"model": FlatReference, "groups": groups, "asyncio": asyncio}


@context("dialoop_ops.stack.preflight", "dialoop_services.config.advice")
def of_a_job(_: Path) -> Names:
    from dialoop_services.config.job import JobConfig

    return {"config": JobConfig.model_validate({"store": "memory", "engine": "transformers"})}


@context("dialoop_ops.stack.processes.supervisor")
def of_two_processes(folder: Path) -> Names:
    from dialoop_ops.stack.processes.child import ServiceSpec
    from dialoop_ops.stack.processes.log_stream import LogStream
    from rich.console import Console

    async def is_ready() -> bool:
        return True

    specs = {
        name: ServiceSpec(name=name, command=("sleep", "60"), is_ready=is_ready)
        for name in ("redis", "replay")
    }
    return {"log": LogStream(Console(quiet=True), folder / "logs"), **specs}


@context(
    "dialoop_services.trainer.data.demonstrations",
    "dialoop_services.trainer.data.self_teacher",
    "dialoop_services.trainer.learner.learner",
)
def of_a_learner(folder: Path) -> Names:
    from dialoop_services.trainer.data.batches import TrainedSequence
    from dialoop_services.trainer.learner.learner import Learner
    from dialoop_services.trainer.settings import TrainerSettings

    from tests.support.samples.scorer_samples import MAIN_0, make_sequence

    shown = '{"messages": [{"role": "user", "content": "1+1"}, '
    (folder / "chats.jsonl").write_text(shown + '{"role": "assistant", "content": "2"}]}\n')
    settings = TrainerSettings(model_dir=tiny_model(folder), loss="grpo")
    sequence = replace(make_sequence(), advantage=1.0)
    (folder / "checkpoint").mkdir()
    return {
        "settings": settings,
        "render": lambda _: (make_sequence(),),
        "learner": Learner(settings),
        "sequences": [TrainedSequence(sequence=sequence, group_index=0)],
        "row": TrainedSequence(sequence=sequence, group_index=0),
        "version": MAIN_0,
        "directory": folder / "checkpoint",
    }


def names_of(place: str, folder: Path) -> Names:
    """Return the module's own names, and over them those of the snippet's context."""
    module = importlib.import_module(module_of(place))
    own = {name: value for name, value in vars(module).items() if name[:2] != "__"}
    return own | CONTEXTS.get(place, lambda _: {})(folder)


@contextmanager
def kept_logging() -> Iterator[None]:
    """Put the logging of this process back: a snippet may configure it, as a service does."""
    kept, level = list(logging.root.handlers), logging.root.level
    own = {name: logging.getLogger(name).level for name in ("dialoop", "dialoop_services")}
    try:
        yield
    finally:
        logging.root.handlers[:] = kept
        logging.root.setLevel(level)
        for name, of_name in own.items():
            logging.getLogger(name).setLevel(of_name)


def is_a_table(code: str) -> bool:
    """Say whether a snippet is of a job file, with a table in brackets."""
    return any(line[:1] == "[" for line in code.splitlines())


PLACES = [
    pytest.param(place, marks=[pytest.mark.heavy(reason=HEAVY[place])] if place in HEAVY else [])
    for place in SNIPPETS
    if place not in RUN_ELSEWHERE
]


@pytest.mark.parametrize("place", PLACES)
async def test_a_snippet_of_the_services_runs(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if is_a_table(SNIPPETS[place]):
        parse_config(tomllib.loads(SNIPPETS[place]), source=place)
        return
    with kept_logging():
        async with asyncio.timeout(PATIENCE_S):
            await run_snippet(place, SNIPPETS[place], names_of(place, tmp_path))


def test_what_runs_elsewhere_or_has_a_context_is_a_snippet() -> None:
    assert {*RUN_ELSEWHERE, *HEAVY, *CONTEXTS} <= set(SNIPPETS)
    for test in RUN_ELSEWHERE.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text("utf-8"), test
