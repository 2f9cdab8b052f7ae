"""A whole collector's surroundings on loopback: replay in memory, arithmetic, a scripted policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.replay import LedgerCounts, ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.episode import Sample
from dialoop.sequences import PolicyVersion, Sequence, Source, sequence_of
from dialoop.trajectory import Purpose, SamplingParams, StopReason, Task
from dialoop.v1 import inference_service_pb2 as inference_pb
from dialoop.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from dialoop.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server
from dialoop.v1.replay_service_pb2_grpc import add_ReplayServiceServicer_to_server
from dialoop.wire.messages import CHAT_HISTORY
from dialoop.wire.records import SAMPLING
from dialoop.wire.sequences import sequence_from_proto, sequence_to_proto
from dialoop_services.collector.collector import Collector
from dialoop_services.collector.counters import Counters, path_of_counts
from dialoop_services.collector.player import GroupPlayer
from dialoop_services.collector.replicas import RetryingSessions
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.collector.task_supply import TaskSupply
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.hosting import GrpcServer
from dialoop_services.replay.registry_servicer import RegistryServicer
from dialoop_services.replay.servicer import ReplayServicer
from dialoop_services.replay.store import QueueLimits
from dialoop_services.runtime import ServerSettings

from tests.support.queue_model.store import ModelStore
from tests.support.waiting import PATIENCE_S

MAIN_0 = PolicyVersion(lineage="main", number=0)
RUN = "r"


@dataclass
class ScriptedPolicy:
    """Answers every prompt with `answer(number of the call)`; what raises there, fails."""

    answer: Callable[[int], str] = lambda number: f"Result={number}<submit>"
    version: PolicyVersion = MAIN_0
    delay_s: float = 0.0
    sampling_log: list[SamplingParams] = field(default_factory=list)

    async def generate(
        self,
        history: History,
        *,
        context: Sequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        texts = []
        for _ in range(num_samples):
            self.sampling_log.append(sampling or SamplingParams())
            texts.append(self.answer(len(self.sampling_log)))
        await asyncio.sleep(self.delay_s)
        source = Source.PROMPT if context is None else Source.TEMPLATE
        model = {"source": Source.MODEL, "turn": turn, "policy_version": self.version}
        sequence = sequence_of(
            [([1, 2, 3], {"source": source, "turn": turn}), ([4, 5], model)], logprobs=[-0.5, -1.5]
        )
        return tuple(
            Sample(
                history=ChatHistory(prompt=history).respond(
                    Message(role="assistant", content=text)
                ),
                sequence=sequence,
                stop_reason=StopReason.STOP,
                sampling=sampling or SamplingParams(),
            )
            for text in texts
        )


class ScriptedInference(InferenceServiceServicer):
    """A policy as an inference replica."""

    def __init__(self, policy: ScriptedPolicy) -> None:
        self.policy = policy

    async def Generate(self, request, context):  # noqa: N802
        sampling = SAMPLING.from_proto(request.sampling)
        samples = await self.policy.generate(
            CHAT_HISTORY.from_proto(request.history).require_prompt(),
            context=sequence_from_proto(request.context) if request.HasField("context") else None,
            sampling=sampling,
            turn=request.turn,
            num_samples=max(1, request.num_samples),
        )
        return inference_pb.GenerateResponse(
            samples=[
                inference_pb.Sample(
                    history=CHAT_HISTORY.to_proto(sample.history),
                    sequence=sequence_to_proto(sample.sequence),
                    stop_reason=int(sample.stop_reason),
                )
                for sample in samples
            ],
            sampling=SAMPLING.to_proto(sampling),
        )


def serving_policy(policy: ScriptedPolicy, port: int = 0) -> GrpcServer:
    """An inference replica that is still to be entered."""
    server = GrpcServer(ServerSettings(port=port, drain_s=0))
    server.add(
        add_InferenceServiceServicer_to_server,
        ScriptedInference(policy),
        "dialoop.v1.InferenceService",
    )
    return server


@asynccontextmanager
async def serving_replay(
    limits: QueueLimits | None = None, port: int = 0, store: ModelStore | None = None
) -> AsyncIterator[GrpcServer]:
    """A replay service in memory."""
    store = store or ModelStore(limits or QueueLimits(lease_s=60))
    servicer = ReplayServicer(store, poll_s=0.02)
    server = GrpcServer(ServerSettings(port=port, drain_s=0))
    server.add(add_ReplayServiceServicer_to_server, servicer, "dialoop.v1.ReplayService")
    registry = RegistryServicer(store)
    server.add(add_RegistryServiceServicer_to_server, registry, "dialoop.v1.RegistryService")
    async with server:
        yield server
        servicer.stop_waiting()
        registry.stop_waiting()


def serving_arithmetic(port: int = 0):
    """An environment service."""
    return serving(EnvironmentSettings(port=port, drain_s=0), Catalogue([arithmetic()]))


@dataclass
class World:
    """Clients of what runs, and where it listens."""

    replay: ReplayClient
    environment: EnvironmentClient
    replay_address: str
    environment_address: str

    async def allow(self, groups: int) -> None:
        """Give credits."""
        await self.replay.advance_policy(RUN, MAIN_0, max_outstanding_groups=groups)

    async def training(self) -> LedgerCounts:
        """The training ledger."""
        return (await self.replay.get_stats(RUN)).training

    async def until(self, condition: Callable[[LedgerCounts], bool]) -> None:
        """Wait until the training ledger is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(await self.training()):
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def collecting(
        self, policy, *, players=MappingProxyType({}), **overrides
    ) -> AsyncIterator[Counters]:
        """A collector at work until leaving; `players` play where they are named."""
        settings = CollectorSettings(
            **{"run": RUN, "worker": "w", "group_size": 2, "page_size": 4, "wait_s": 0.2}
            | overrides
        )
        retry_policy = RetryPolicy(
            max_attempts=None, total_s=settings.patience_s, first_wait_s=0.02, max_wait_s=0.2
        )
        folder = settings.run_dir
        path = folder and path_of_counts(folder, settings.worker)
        counters = Counters(settings.worker, path=path)
        player = GroupPlayer(
            RetryingSessions(self.environment, retry_policy),
            policy,
            counters,
            member_retries=settings.member_retries,
            max_turns=settings.max_turns,
            retry_policy=retry_policy,
            players=players,
        )
        collector = Collector(
            settings,
            replay=self.replay,
            environment=self.environment,
            player=player,
            task_supply=TaskSupply(settings, self.replay, self.environment, retry_policy),
            counters=counters,
        )
        running = asyncio.create_task(collector.run())
        try:
            yield counters
        finally:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.result()


@asynccontextmanager
async def world(
    limits: QueueLimits | None = None, store: ModelStore | None = None
) -> AsyncIterator[World]:
    """Replay and environment, and clients of both."""
    async with AsyncExitStack() as exits:
        replay = await exits.enter_async_context(serving_replay(limits, store=store))
        environment = await exits.enter_async_context(serving_arithmetic())
        once = RetryPolicy(max_attempts=1)
        channels = [
            await exits.enter_async_context(Channel(address, retry=once))
            for address in (replay.address, environment.address)
        ]
        yield World(
            replay=ReplayClient(channels[0]),
            environment=EnvironmentClient(channels[1]),
            replay_address=replay.address,
            environment_address=environment.address,
        )


async def make_tasks(world: World, count: int, *, purpose: Purpose, **fields) -> list[Task]:
    """Tasks of the arithmetic environment."""
    page = await world.environment.list_tasks("arithmetic", split="heldout", page_size=count)
    return [
        Task(
            task_id=f"arithmetic/heldout/0/{ref.key}",
            environment="arithmetic",
            split="heldout",
            key=ref.key,
            seed=ref.seed,
            purpose=purpose,
            **fields,
        )
        for ref in page.tasks
    ]


def adds_up(counts: LedgerCounts) -> bool:
    """Every trajectory the ledger knows of is in exactly one place."""
    placed = counts.num_trajectories_consumed + counts.num_trajectories_live
    return counts.num_trajectories_generated == placed + sum(
        counts.num_trajectories_dropped.values()
    )
