"""`python -m dialoop_services.collector`: collect until told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from itertools import zip_longest
from typing import Any

from dialoop.agents import AgentHost
from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.recordings import RecordingClient
from dialoop.clients.registry import RegistryClient, ServiceMember
from dialoop.clients.replay import ReplayClient
from dialoop.clients.retry import RetryPolicy

from dialoop_services.collector.agents import Agents, RecordingReplicas, load_agents
from dialoop_services.collector.collector import Collector
from dialoop_services.collector.counters import Counters, path_of_counts, read_training_turns
from dialoop_services.collector.player import GroupPlayer
from dialoop_services.collector.replicas import CautiousGroups, Replicas, RetryingSessions
from dialoop_services.collector.settings import CollectorSettings
from dialoop_services.collector.task_supply import TaskSupply
from dialoop_services.collector.token_episodes import TokenEpisodes
from dialoop_services.runtime import Connect, Host, OwnProcess, load, run
from dialoop_services.runtime.fleet import Fleet, follow


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
        collector = await make_collector(settings, counters, host.connect, exits)
        server = await exits.enter_async_context(host.server)
        await collect(collector, counters, server.stopping)


async def make_collector(
    settings: CollectorSettings, counters: Counters, connect: Connect, exits: AsyncExitStack
) -> Collector:
    """Return a collector; `exits` closes its connections."""

    async def channel(address: str, retry: RetryPolicy | None = None) -> Channel:
        return await exits.enter_async_context(connect(address, retry=retry))

    retry_policy = RetryPolicy(max_attempts=None, total_s=settings.patience_s)
    environment = EnvironmentClient(await channel(settings.environment_address))
    replay = ReplayClient(await channel(settings.replay_address))
    # One attempt per replica: the second one goes to the next replica. And the groups' player tries
    # again itself, so its channel must not add attempts to what may end the service.
    once = RetryPolicy(max_attempts=1)
    groups = EnvironmentClient(await channel(settings.environment_address, once))
    sessions = RetryingSessions(environment, retry_policy)
    agents = load_agents(settings)
    policy, recordings = Replicas((), retry_policy), RecordingReplicas((), retry_policy)
    fleet = Fleet(lambda m: connect(m.address, retry=once, epoch=m.epoch), _clients_of)
    exits.push_async_callback(fleet.close)

    async def send_to(members: tuple[ServiceMember, ...]) -> None:
        clients = await fleet.update(member for member in members if member.is_admitted)
        policy.update(inference for inference, _ in clients.values())
        recordings.update(recording for _, recording in clients.values() if recording is not None)

    beside: tuple[partial[Coroutine[Any, Any, None]], ...] = ()
    if settings.discovery == "registry":
        registry = RegistryClient(await channel(settings.replay_address))
        beside = (partial(follow, registry, settings.run, "inference", send_to),)
    else:
        await send_to(_members_of(settings))
    host = AgentHost(
        recordings=recordings,
        api_key=settings.token.get_secret_value() or "none",
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
        players=(Agents(agents, host), TokenEpisodes.of(settings, policy)),
        groups=CautiousGroups(groups),
    )
    return Collector(
        settings,
        replay=replay,
        environment=environment,
        player=player,
        task_supply=TaskSupply(settings, replay, environment, retry_policy),
        counters=counters,
        beside=beside,
    )


def _members_of(settings: CollectorSettings) -> tuple[ServiceMember, ...]:
    """Return the replicas that the settings name; only agents need the REST addresses."""
    pairs = zip_longest(
        settings.inference_addresses, settings.inference_rest_addresses, fillvalue=""
    )
    return tuple(
        ServiceMember(
            role="inference",
            name=address,
            address=address,
            rest_address=rest_address,
            is_admitted=True,
        )
        for address, rest_address in pairs
    )


def _clients_of(
    channel: Channel, member: ServiceMember
) -> tuple[InferenceClient, RecordingClient | None]:
    rest_url = f"http://{member.rest_address}"
    recording = RecordingClient(channel, rest_url=rest_url) if member.rest_address else None
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
    run(serve, name="collector")
