"""torchrl's LLMCollector over `dialoop.collect`: it plays an environment in this process.

    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=64)
    async for trajectories in collector: ...

A training job collects with the collector service instead, which also leases tasks and recovers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.collection import collect
from dialoop.environments.chat_env import ChatEnv
from dialoop.environments.tasks.data_loading import DataSource
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.trajectory import Task
from dialoop.user_functions import call, call_now

from dialoop_extras.compat.arguments import require_neutral
from dialoop_extras.compat.sampling import read_generate_options
from dialoop_extras.compat.transforms import VersionStamp
from dialoop_extras.compat.wrappers import PolicyWrapper

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from dialoop.environments.tasks.data_loading import Loaded
    from dialoop.trajectory import Trajectory


class StampedTrajectories(list[Any]):
    """Trajectories, and under the key "policy_version" the version that ended each, one for each.

    The turns of a batch are played under one version, unless the weights change meanwhile: each
    token's own version is in `trajectory.policy_versions`.
    """

    def __init__(self, trajectories: list[Any], version: int | str) -> None:
        super().__init__(trajectories)
        self.policy_version = version

    def __getitem__(self, index: Any) -> Any:
        if index == "policy_version":
            return [self.policy_version] * len(self)
        return super().__getitem__(index)


class TrajectoryCollector:
    """Yields lists of trajectories, with `for` or, inside an event loop, `async for`.

    Without yield_completed_trajectories a list has exactly dialog_turns_per_batch turns, and parts
    of trajectories (`Trajectory.part`). With it, a list has whole trajectories of at least so many
    turns, or without dialog_turns_per_batch one. yield_only_last_steps: of each the last turn.
    flatten_data: a trajectory for each turn, as usual with a replay_buffer, whose `extend` takes
    each list as well; `queue` gets each by its `put`. postproc: changes each list.
    total_dialog_turns: -1 means endless. policy_factory: makes the policy, instead of `policy`.
    track_policy_version: a VersionStamp or True, which reports the version in each step's info;
    `data["policy_version"]` of what is yielded then has it for each trajectory.
    """

    def __init__(  # noqa: PLR0913 - the source's arguments
        self,
        env: ChatEnv | Callable[[], ChatEnv],
        *,
        policy: Any = None,
        policy_factory: Callable[[], Any] | None = None,
        dialog_turns_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        yield_completed_trajectories: bool | None = None,
        yield_only_last_steps: bool | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        postproc: Callable[[list[Trajectory]], Any] | None = None,
        replay_buffer: Any = None,
        queue: Any = None,
        track_policy_version: bool | VersionStamp = False,
        generate_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        require_neutral("LLMCollector", others)
        _require_one(policy=policy, policy_factory=policy_factory)
        if queue is not None:
            _require_one(queue=queue, replay_buffer=replay_buffer)
        policy = policy if policy_factory is None else call_now(policy_factory)
        self.policy, options = _sampled_model(policy, dict(generate_kwargs or {}))
        self.env: ChatEnv = env if isinstance(env, ChatEnv) else call_now(env)
        stamp = VersionStamp() if track_policy_version is True else track_policy_version
        self.policy_version_tracker = stamp or None
        if self.policy_version_tracker is not None:
            self.env = self.env.with_transforms(self.policy_version_tracker)
        self.replay_buffer = replay_buffer
        self.total_dialog_turns = total_dialog_turns
        self._deliver = queue.put if queue is not None else getattr(replay_buffer, "extend", None)
        self._postproc = postproc
        only_last = bool(yield_only_last_steps)
        completed = (
            only_last if yield_completed_trajectories is None else yield_completed_trajectories
        )
        if only_last:
            _require_whole(completed, flatten_data, reset_at_each_iter)
        if dialog_turns_per_batch is None and not completed:
            dialog_turns_per_batch = 1
        if flatten_data is None:
            flatten_data = self._deliver is not None and not only_last
        self.dialog_turns_per_batch = dialog_turns_per_batch
        primer = self.env.primer
        source = DataSource(self.env.tasks, split="") if primer is None else primer.source
        self._collection = collect(
            self.env,
            self.policy,
            turns_per_batch=dialog_turns_per_batch,
            total_turns=total_dialog_turns,
            completed_only=bool(completed),
            last_turn_only=only_last,
            flatten=bool(flatten_data),
            reset_each_batch=bool(reset_at_each_iter),
            tasks=(_task_of(item, self.env.name, source.split) for item in source),
            sampling=read_generate_options(options).sampling,
        )

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for batch in self._collection:
            trajectories = list(batch.trajectories)
            if self._postproc is not None:
                trajectories = await call(self._postproc, trajectories)
            if self._deliver is not None:
                await call(self._deliver, trajectories)
            yield self._stamped(trajectories)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._collection:
            trajectories = list(batch.trajectories)
            if self._postproc is not None:
                trajectories = call_now(self._postproc, trajectories)
            if self._deliver is not None:
                call_now(self._deliver, trajectories)
            yield self._stamped(trajectories)

    def _stamped(self, trajectories: Any) -> Any:
        version = self.policy_version
        if version is None or not isinstance(trajectories, list):
            return trajectories
        return StampedTrajectories(trajectories, version)

    @property
    def policy_version(self) -> int | str | None:
        """Return the version that the steps report; None without track_policy_version."""
        stamp = self.policy_version_tracker
        return None if stamp is None else stamp.version

    def increment_version(self) -> None:
        """Count the policy's version up, if it is tracked."""
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.increment_version()

    async def update_policy_weights_(self, manifest: Any, chunks: Any = ()) -> Any:
        """Load published weights into the policy, and count the version up once they are loaded."""
        loaded = await call(self.policy.load_weights, manifest, chunks)
        self.increment_version()
        return loaded


def _sampled_model(policy: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a wrapper's model, and its sampling under the options; another policy as it is.

    Raise InvalidConfig (BAD_OPTIONS) for a wrapper that does not answer chats.
    """
    if not isinstance(policy, PolicyWrapper):
        return policy, options
    if not policy.generate or policy.input_mode != "history" or policy.num_samples not in (1, None):
        raise InvalidConfig(
            "The policy's wrapper does not give one answer to a history.",
            reason=Reason.BAD_OPTIONS,
            remedy='Wrap it with generate=True, input_mode="history" and no num_samples.',
        )
    return policy.model, {**(policy.generate_kwargs or {}), **options}


def _require_one(**arguments: Any) -> None:
    """Raise InvalidConfig (BAD_OPTIONS) unless exactly one of two arguments is not None."""
    if sum(value is not None for value in arguments.values()) != 1:
        raise InvalidConfig(
            f"LLMCollector got both or none of {' and '.join(arguments)}.",
            reason=Reason.BAD_OPTIONS,
            remedy="Give one of them.",
        )


def _require_whole(completed: bool, flatten_data: bool | None, reset_at_each_iter: bool) -> None:
    """Raise InvalidConfig (BAD_OPTIONS) where last steps would not be those of whole episodes."""
    if not completed or flatten_data or reset_at_each_iter:
        raise InvalidConfig(
            "LLMCollector: yield_only_last_steps was set together with flatten_data, "
            "reset_at_each_iter or yield_completed_trajectories=False.",
            reason=Reason.BAD_OPTIONS,
            remedy="Set one of them: last steps are those of completed trajectories.",
        )


def _task_of(item: Loaded, environment: str, split: str) -> Task:
    """Return the task of one copy; copies share their group id."""
    return Task(
        task_id=item.group_id,
        environment=environment,
        split=split,
        key=item.task.key,
        epoch=item.epoch,
        seed=item.seed,
    )
