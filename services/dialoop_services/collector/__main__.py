"""`python -m dialoop_services.collector`: collect until told to stop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import zip_longest

from dialoop.agents import AgentHost
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.recordings import RecordingClient
from dialoop.clients.registry import RegistryClient, ServiceInstance
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.tls import rest_scheme
from dialoop.errors import InvalidConfig
from dialoop.extras import offered_paths
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason

from dialoop_services.collector.agents import AgentPlayer, RecordingReplicas, load_agents
from dialoop_services.collector.collector import Beside, Collector
from dialoop_services.collector.counters import Counters, path_of_counts, read_training_turns
from dialoop_services.collector.player import GroupPlayer, MakePlayer, TaskPlayer
from dialoop_services.collector.replicas import Replicas, RetryingSessions
from dialoop_services.collector.routing import RoutingCounts
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.collector.task_supply import TaskSupply
from dialoop_services.collector.window import Window
from dialoop_services.hosting import Connect, Host, OwnProcess
from dialoop_services.runtime import load, run
from dialoop_services.runtime.fleet import Fleet, follow, membership, reachable_address

ENVIRONMENT, REPLAY = "environment", "replay"


async def serve() -> None:
    """Collect and serve health checks until told to stop."""
    settings = load(CollectorSettings)
    await serve_in(OwnProcess(settings), settings)


async def serve_in(host: Host, settings: CollectorSettings) -> None:
    """Collect until the host stops the service."""
    async with AsyncExitStack() as exits:
        counters = Counters(
            settings.worker,
            num_turns_before=read_training_turns(settings.run_dir),
            path=settings.run_dir and path_of_counts(settings.run_dir, settings.worker),
        )
        routing = RoutingCounts()
        routing.show_on(host.server)
        collector = await make_collector(settings, counters, host.connect, exits, routing)
        server = await exits.enter_async_context(host.server)
        if settings.discovery == "registry":
            announcing = await exits.enter_async_context(_membership(host, settings, collector))
            announcing.add_done_callback(lambda _: server.stop())
        await collect(collector, counters, server.stopping)
        if settings.discovery == "registry" and announcing.done():
            announcing.result()  # another collector has its name


async def make_collector(
    settings: CollectorSettings,
    counters: Counters,
    connect: Connect,
    exits: AsyncExitStack,
    routing: RoutingCounts | None = None,
) -> Collector:
    """Return a collector; `exits` closes its connections."""

    async def channel(address: str, role: str, retry: RetryPolicy | None = None) -> Channel:
        return await exits.enter_async_context(connect(address, role, retry=retry))

    retry_policy = RetryPolicy(max_attempts=None, total_s=settings.patience_s)
    environment = EnvironmentClient(await channel(settings.environment_address, ENVIRONMENT))
    replay = ReplayClient(await channel(settings.replay_address, REPLAY))
    # RetryingSessions try again themselves: their channel must not add attempts to what may end the
    # service.
    once = RetryPolicy(max_attempts=1)
    tried_once = EnvironmentClient(await channel(settings.environment_address, ENVIRONMENT, once))
    sessions = RetryingSessions(tried_once, retry_policy)
    window = Window(settings.max_groups_in_flight)
    policy = Replicas((), retry_policy, routing, window)
    recordings = RecordingReplicas((), retry_policy)
    registry = RegistryClient(await channel(settings.replay_address, REPLAY))
    beside = await _follow_replicas(settings, policy, recordings, registry, connect, exits)
    host = AgentHost(
        recordings=recordings,
        sessions=sessions,
        scores=environment,
        time_limit_s=settings.agent_time_limit_s,
    )
    player = GroupPlayer(
        sessions,
        policy,
        counters,
        member_retries=settings.member_retries,
        max_turns=settings.max_turns,
        retry_policy=retry_policy,
        players=task_players(settings, host),
    )
    return Collector(
        settings,
        replay=replay,
        environment=environment,
        player=player,
        task_supply=TaskSupply(settings, replay, environment, retry_policy),
        counters=counters,
        beside=beside,
        window=window,
    )


def task_players(settings: CollectorSettings, host: AgentHost) -> dict[str, TaskPlayer]:
    """Return the player of each environment whose tasks are not played as chats."""
    players = {
        section.served_name: _maker_of(section.play)(section, settings)
        for section in settings.sections
        if section.play != "chat"
    }
    agents = load_agents(settings)
    return players | {name: AgentPlayer(agent, host) for name, agent in agents.items()}


def _maker_of(kind: str) -> MakePlayer:
    """Return what makes players of a kind; InvalidConfig (PACKAGE_MISSING) where nothing does."""
    path = offered_paths("task_players").get(kind)
    if path is None:
        raise InvalidConfig(
            f'play is "{kind}" in [environment], and no installed package plays that.',
            reason=Reason.PACKAGE_MISSING,
            remedy="Run: pip install dialoop-extras",
        )
    maker: MakePlayer = load_attribute(path, what="player", reason=Reason.PACKAGE_MISSING)
    return maker


async def _follow_replicas(
    settings: CollectorSettings,
    policy: Replicas,
    recordings: RecordingReplicas,
    registry: RegistryClient,
    connect: Connect,
    exits: AsyncExitStack,
) -> tuple[Beside, ...]:
    """Send requests to the replicas of the settings; return what follows the registry instead."""
    once = RetryPolicy(max_attempts=1)  # the second attempt goes to the next replica
    fleet = Fleet(lambda each: connect(each.address, each, retry=once), _clients_of)
    exits.push_async_callback(fleet.close)

    async def send_to(instances: tuple[ServiceInstance, ...]) -> None:
        clients = await fleet.update(each for each in instances if each.is_admitted)
        policy.update({each.name: inference for each, (inference, _) in clients.items()})
        recordings.update({m.name: recording for m, (_, recording) in clients.items() if recording})

    if settings.discovery == "registry":
        return (partial(follow, registry, settings.run, "inference", send_to),)
    await send_to(_instances_of(settings))
    return ()


@asynccontextmanager
async def _membership(
    host: Host, settings: CollectorSettings, collector: Collector
) -> AsyncIterator[asyncio.Task[None]]:
    """Keep the collector in the registry, with the episodes that it plays as its load."""
    address = reachable_address(host.server.address)
    name = host.ticket_name or settings.worker
    instance = ServiceInstance(role="collector", name=name, address=address, is_ready=True)

    def state(instance: ServiceInstance) -> ServiceInstance:
        return dataclasses.replace(instance, load=float(collector.num_playing))

    async with host.connect(settings.replay_address, REPLAY) as channel:
        registry, incarnation = RegistryClient(channel), host.server.incarnation
        async with membership(registry, settings.run, instance, state, incarnation) as announcing:
            yield announcing


def _instances_of(settings: CollectorSettings) -> tuple[ServiceInstance, ...]:
    """Return the replicas that the settings name; only agents need the REST addresses."""
    pairs = zip_longest(
        settings.inference_addresses, settings.inference_rest_addresses, fillvalue=""
    )
    return tuple(
        ServiceInstance(
            role="inference",
            name=address,
            address=address,
            rest_address=rest_address,
            is_admitted=True,
        )
        for address, rest_address in pairs
    )


def _clients_of(
    channel: Channel, instance: ServiceInstance
) -> tuple[InferenceClient, RecordingClient | None]:
    rest_url = f"{rest_scheme()}://{instance.rest_address}"
    recording = RecordingClient(channel, rest_url=rest_url) if instance.rest_address else None
    return InferenceClient(channel), recording


async def collect(collector: Collector, counters: Counters, stopping: asyncio.Event) -> None:
    """Run the collector until `stopping`, and keep its counts on disk."""
    try:
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(collector.run()),
                tasks.create_task(counters.keep_saved()),
            ]
            await stopping.wait()
            for task in working:
                task.cancel()
    finally:
        counters.save()


if __name__ == "__main__":
    run(serve, name="collector", settings=CollectorSettings)
