"""torchrl's LLMCollector over `dialoop.play`: it plays an environment in this process.

    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=64)
    async for trajectories in collector: ...

A training job collects with the collector service instead, which also leases tasks and recovers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.compat.arguments import require_neutral
from dialoop.compat.sampling import read_generate_options
from dialoop.compat.transforms import VersionStamp
from dialoop.environments.tasks.data_loading import DataSource
from dialoop.errors import InvalidConfig
from dialoop.local.client import LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.rollout import play
from dialoop.trajectory import Task
from dialoop.user_functions import call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from dialoop.environments.chat_env import ChatEnv
    from dialoop.trajectory import Trajectory


class TrajectoryCollector:
    """Plays whole episodes and yields them in lists of at least dialog_turns_per_batch turns.

    total_dialog_turns: stop after so many turns; -1 means never. replay_buffer: its `extend`
    takes each list as well. track_policy_version: a VersionStamp or True, which reports the version
    in each step's info. Iterate with `async for`.
    """

    def __init__(  # noqa: PLR0913 - the source's arguments
        self,
        env: ChatEnv,
        *,
        policy: Any,
        dialog_turns_per_batch: int = 1,
        total_dialog_turns: int = -1,
        replay_buffer: Any = None,
        track_policy_version: bool | VersionStamp = False,
        generate_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        require_neutral("LLMCollector", others)
        if dialog_turns_per_batch < 1 or total_dialog_turns < -1:
            raise InvalidConfig(
                f"dialog_turns_per_batch is {dialog_turns_per_batch}, and total_dialog_turns "
                f"{total_dialog_turns}.",
                reason=Reason.BAD_OPTIONS,
                remedy="Give 1 turn or more per batch, and -1 or a number of turns in all.",
            )
        stamp = track_policy_version
        if isinstance(stamp, bool):
            self.policy_version_tracker = VersionStamp() if stamp else None
        else:
            self.policy_version_tracker = stamp
        if self.policy_version_tracker is not None:
            env = env.with_transforms(self.policy_version_tracker)
        self.env = env
        self.policy = policy
        self.replay_buffer = replay_buffer
        self._batch_turns = dialog_turns_per_batch
        self._total_turns = total_dialog_turns
        self._sampling = read_generate_options(generate_kwargs or {}).sampling
        primer = env.primer
        self._source = DataSource(env.tasks, split="") if primer is None else primer.source

    async def __aiter__(self) -> AsyncIterator[list[Trajectory]]:
        """Yield lists of trajectories; the last one may be shorter."""
        num_turns, batch, turns_of_batch = 0, list[Any](), 0
        async with LocalEnvironmentClient(self.env) as sessions:
            while self._total_turns < 0 or num_turns < self._total_turns:
                trajectory = await self._play(sessions)
                batch.append(trajectory)
                # An episode that failed before its first turn counts too, so that this ends.
                num_turns += max(1, len(trajectory.turns))
                turns_of_batch += max(1, len(trajectory.turns))
                if turns_of_batch >= self._batch_turns:
                    yield await self._deliver(batch)
                    batch, turns_of_batch = [], 0
        if batch:
            yield await self._deliver(batch)

    async def update_policy_weights_(self, manifest: Any, chunks: Any = ()) -> Any:
        """Load published weights into the policy, and count the version up once they are loaded."""
        loaded = await call(self.policy.load_weights, manifest, chunks)
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.increment_version()
        return loaded

    async def _play(self, sessions: LocalEnvironmentClient) -> Trajectory:
        item = self._source.take()
        task = Task(
            task_id=f"{item.group_id}/{item.repeat}",
            environment=self.env.name,
            split=self._source.split,
            key=item.task.key,
            epoch=item.epoch,
            seed=item.seed,
        )
        return await play(
            task,
            sessions=sessions,
            policy=self.policy,
            group_id=item.group_id,
            sampling=self._sampling,
        )

    async def _deliver(self, batch: list[Trajectory]) -> list[Trajectory]:
        if self.replay_buffer is not None:
            await call(self.replay_buffer.extend, batch)
        return batch
