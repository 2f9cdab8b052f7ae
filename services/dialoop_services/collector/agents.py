"""Play tasks with agents; replicas record the runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dialoop.agents import Agent, AgentConnection, AgentHost, Recordings, load_agent, play_agent
from dialoop.clients.retry import SERVICE_AWAY, RetryPolicy, retry
from dialoop.errors import DialoopError, InvalidConfig, Unavailable
from dialoop.reasons import Reason

from dialoop_services.collector.routing import Destination, choose, rank, renewed

if TYPE_CHECKING:
    from dialoop.episode import Policy
    from dialoop.trajectory import Failure, Reward, SamplingParams, Task, Trajectory

    from dialoop_services.collector.settings import CollectorSettings


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """Plays an environment's tasks with its agent. Satisfies `player.TaskPlayer`."""

    agent: Agent
    host: AgentHost

    async def play(
        self, task: Task, *, policy: Policy, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """Run the agent once and return the recorded trajectory; it asks by its recording."""
        return await play_agent(
            task,
            agent=self.agent,
            host=self.host,
            group_id=group_id,
            # An environment's stop strings mean nothing to an agent.
            sampling=replace(sampling, stop=task.sampling.stop),
        )


_Recorder = Destination[Recordings]


class RecordingReplicas:
    """Replicas that record, those of one group together; one that is away is skipped.

    A recording stays at its replica. If that replica dies, the run is lost and played again.
    """

    def __init__(
        self, replicas: Mapping[str, Recordings] | Iterable[Recordings], retry_policy: RetryPolicy
    ) -> None:
        self._replicas: list[_Recorder] = []
        self._retry_policy = retry_policy
        self._home: dict[str, _Recorder] = {}
        self._numbers = itertools.count()
        self.update(replicas)

    def update(self, replicas: Mapping[str, Recordings] | Iterable[Recordings]) -> None:
        """Begin recordings at these from now on; one that began stays at its replica."""
        self._replicas = renewed(self._replicas, replicas, _Recorder, self._numbers)

    async def create(
        self,
        recording_id: str,
        *,
        group_id: str = "",
        task: Task | None = None,
        sampling: SamplingParams | None = None,
        time_to_live_s: float = 0.0,
    ) -> AgentConnection:
        """Begin a recording at a replica that can; raise Unavailable (SERVICE_AWAY) if none can.

        Return what the agent connects with.
        """
        attempts = itertools.count()

        async def begin() -> AgentConnection:
            if not self._replicas:
                raise Unavailable(
                    "No inference replica is in rotation.",
                    remedy="See the logs of the replicas, and of the trainer, which admits them.",
                )
            key = group_id or recording_id
            first = choose(key, self._replicas)
            others = [place for place in rank(key, self._replicas) if place is not first]
            recorder = [first, *others][next(attempts) % len(self._replicas)]
            connection = await recorder.client.create(
                recording_id,
                group_id=group_id,
                task=task,
                sampling=sampling,
                time_to_live_s=time_to_live_s,
            )
            self._home[recording_id] = recorder
            recorder.num_running += 1
            return connection

        def wait_s(attempt: int) -> float:
            return self._retry_policy.wait_s(attempt) / max(1, len(self._replicas))

        return await retry(begin, self._retry_policy, wait_s=wait_s)

    async def close(
        self,
        recording_id: str,
        *,
        rewards: Iterable[Reward] = (),
        failures: Iterable[Failure] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Trajectory:
        """End the recording at its replica and return the trajectory.

        Raise Unavailable (SERVICE_DIED) if that replica does not come back: the run may have ended
        it, so it must count.
        """
        recorder = self._home.pop(recording_id)
        recorder.num_running -= 1
        home = recorder.client
        try:
            return await retry(
                lambda: home.close(recording_id, rewards=rewards, failures=failures, labels=labels),
                self._retry_policy,
            )
        except DialoopError as error:
            if error.reason != SERVICE_AWAY:
                raise
            raise Unavailable(
                "The replica that recorded the run went away.",
                reason=Reason.SERVICE_DIED,
                remedy="See the replica's log.",
            ) from error


def load_agents(settings: CollectorSettings) -> dict[str, Agent]:
    """Load the configured agents by environment.

    Raise InvalidConfig for a path that is no agent, and where no replica can record.
    """
    is_fixed = settings.discovery == "addresses"
    num_addresses = len(settings.inference_addresses)
    if settings.agents and is_fixed and len(settings.inference_rest_addresses) != num_addresses:
        raise InvalidConfig(
            f"There are agents, {num_addresses} inference_addresses and "
            f"{len(settings.inference_rest_addresses)} inference_rest_addresses.",
            reason=Reason.NO_REST_ADDRESS,
            remedy="Give the REST address of every replica, in the same order.",
        )
    return {
        section.served_name: load_agent(section.agent, section.options)
        for section in settings.sections
        if section.agent
    }
