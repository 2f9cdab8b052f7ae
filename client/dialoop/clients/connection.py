"""Dialoop: every service of a stack behind one object, or environments in this process.

async with Dialoop(environment="127.0.0.1:50051", inference="127.0.0.1:50052") as dialoop:
    trajectory = await dialoop.play(await dialoop.task("arithmetic", "35+40"))

Without servers: an environment of this process and any policy; or, where dialoop-services is
installed, every service in this process with `dialoop_ops.stack.in_process`.

async with Dialoop(environment=arithmetic(), inference=ScriptedPolicy([text])) as dialoop: ...
async with in_process() as dialoop: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from dialoop.clients.channel import Channel
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.recordings import RecordingClient
from dialoop.clients.replay import ReplayClient
from dialoop.clients.scorer import ScorerClient
from dialoop.clients.template import TemplateClient
from dialoop.clients.trainer import TrainerClient
from dialoop.collection import Collection, collect
from dialoop.environments import Environment
from dialoop.episode import Policy
from dialoop.errors import InvalidConfig, NotFound
from dialoop.local.client import Environments, LocalEnvironmentClient
from dialoop.reasons import Reason
from dialoop.rollout import play, play_group
from dialoop.running_stacks import SERVICES_VARIABLE, named_stack, require_addresses
from dialoop.trajectory import Group, SamplingParams, Task, Trajectory

C = TypeVar(
    "C",
    EnvironmentClient,
    InferenceClient,
    RecordingClient,
    ReplayClient,
    ScorerClient,
    TemplateClient,
    TrainerClient,
)


class Dialoop:
    """Clients by service name; each connects when it is first used.

    A service is its host:port, or a Channel to it, which the caller closes. Those that are left out
    are on the machine that DIALOOP_SERVICES names, such as 127.0.0.1 for containers, and `token` is
    DIALOOP_TOKEN then.
    `environment` may also be an environment to play in this process; `inference` any policy.
    """

    def __init__(
        self,
        *,
        environment: str | Channel | Environment = "",
        inference: str | Channel | Policy = "",
        replay: str | Channel = "",
        scorer: str | Channel = "",
        trainer: str | Channel = "",
        token: str = "",
    ) -> None:
        self._services: dict[str, str | Channel] = {
            "replay": replay,
            "scorer": scorer,
            "trainer": trainer,
        }
        self._local: LocalEnvironmentClient | None = None
        self._policy: Policy | None = None
        if isinstance(environment, (str, Channel)):
            self._services["environment"] = environment
        else:
            self._local = LocalEnvironmentClient(environment)
        if isinstance(inference, (str, Channel)):
            self._services["inference"] = inference
        else:
            self._policy = inference
        self._token = token or os.environ.get("DIALOOP_TOKEN", "")
        self._channels: dict[str, Channel] = {}
        self._exits = AsyncExitStack()
        if self._local is not None:
            self._exits.push_async_exit(self._local)

    @classmethod
    def of_run(cls, run_dir: str | Path, *, token: str = "") -> Self:
        """Connect to the stack that `dialoop up` or `dialoop train` runs in `run_dir` here."""
        addresses = require_addresses(Path(run_dir), token=token)
        names = ("environment", "inference", "replay", "scorer", "trainer")
        return cls(**{name: addresses[name] for name in names}, token=token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        self._channels.clear()
        await self._exits.aclose()

    @property
    def environment(self) -> Environments:
        """Return the client of environments, tasks, sessions and episodes."""
        return self._local or self.client("environment", EnvironmentClient)

    @property
    def inference(self) -> InferenceClient:
        """Return the inference client; InvalidConfig where the policy is in this process."""
        return self.client("inference", InferenceClient)

    @property
    def templates(self) -> TemplateClient:
        """Return the client of the inference service's chat templates."""
        return self.client("inference", TemplateClient)

    def recordings(self, rest_url: str) -> RecordingClient:
        """Return the client of agents' recordings; `rest_url` is the inference's REST server."""
        return self.client("inference", partial(RecordingClient, rest_url=rest_url))

    @property
    def policy(self) -> Policy:
        """Return what answers prompts: the inference client, or the policy in this process."""
        return self._policy or self.inference

    @property
    def replay(self) -> ReplayClient:
        """Return the client of the task ledger and the queue of groups."""
        return self.client("replay", ReplayClient)

    @property
    def scorer(self) -> ScorerClient:
        """Return the client of reference log-probs and scored groups."""
        return self.client("scorer", ScorerClient)

    @property
    def trainer(self) -> TrainerClient:
        """Return the client of training's state and controls."""
        return self.client("trainer", TrainerClient)

    async def task(
        self,
        environment: str,
        key: str = "",
        *,
        split: str = "train",
        num_trajectories: int = 1,
        sampling: SamplingParams | None = None,
    ) -> Task:
        """Return a task to play (without a key, the split's first) with its stop texts."""
        info = await self.environment.get_environment(environment)
        if not key:
            page = await self.environment.list_tasks(environment, split=split, page_size=1)
            if not page.tasks:
                raise NotFound(f"Split {split} of {environment} is empty.", reason=Reason.NO_TASKS)
            key = page.tasks[0].key
        return Task(
            task_id=f"{environment}/{split}/{key}",
            environment=environment,
            split=split,
            key=key,
            num_trajectories=num_trajectories,
            sampling=sampling or SamplingParams(stop=info.stop),
        )

    async def play(self, task: Task) -> Trajectory:
        """Play one episode of the task; failures are on the trajectory, with their owner."""
        return await play(task, sessions=self.environment, policy=self.policy)

    async def play_group(self, task: Task, *, group_id: str = "") -> Group:
        """Play all of the task's trajectories at the same time."""
        return await play_group(
            task,
            sessions=self.environment,
            policy=self.policy,
            group_id=group_id or task.task_id,
        )

    def collect(self, environment: str = "", **options: Any) -> Collection:
        """Return batches of played turns for `async for`; `options` are those of `dialoop.collect`.

        The name may be left out where there is one environment.
        """
        return collect(self.environment, self.policy, name=environment, **options)

    def client(self, name: str, kind: Callable[[Channel], C]) -> C:
        """Return a client of any kind on the channel of a service, such as `RunsClient`.

        Raise InvalidConfig (NO_ADDRESS) for a service that was not named.
        """
        named = named_stack(Path())
        address = self._services.get(name) or (named.addresses[name] if named else "")
        if isinstance(address, Channel):
            return kind(address)
        if not address:
            raise InvalidConfig(
                f"No {name} service was named.",
                reason=Reason.NO_ADDRESS,
                remedy=f'Give Dialoop({name}="host:port"), or set {SERVICES_VARIABLE}.',
            )
        if name not in self._channels:
            self._channels[name] = channel = Channel(address, token=self._token)
            self._exits.push_async_callback(channel.close)
        return kind(self._channels[name])
