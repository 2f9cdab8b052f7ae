"""BlockingDialoop: Dialoop for scripts and threads that have no event loop.

with BlockingDialoop(environment="127.0.0.1:50051", inference="127.0.0.1:50052") as dialoop:
    trajectory = dialoop.play(dialoop.task("arithmetic", "35+40"))
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from dialoop.clients.blocking.loop import BackgroundLoop, blocking, twin_of
from dialoop.clients.blocking.twins import (
    BlockingEnvironmentClient,
    BlockingInferenceClient,
    BlockingRecordingClient,
    BlockingReplayClient,
    BlockingScorerClient,
    BlockingTemplateClient,
    BlockingTrainerClient,
)
from dialoop.clients.channel import Channel
from dialoop.clients.connection import Dialoop
from dialoop.collection import CollectedBatch
from dialoop.environments import Environment
from dialoop.episode import Policy
from dialoop.running_stacks import require_addresses

T = TypeVar("T")


class BlockingDialoop:
    """Clients by service name, all on one background event loop; any thread may use it."""

    def __init__(
        self,
        *,
        environment: str | Environment = "",
        inference: str | Policy = "",
        replay: str = "",
        scorer: str = "",
        trainer: str = "",
        token: str = "",
    ) -> None:
        self._client = Dialoop(
            environment=environment,
            inference=inference,
            replay=replay,
            scorer=scorer,
            trainer=trainer,
            token=token,
        )
        self._loop = BackgroundLoop()
        self._finalizer = weakref.finalize(self, self._loop.close)

    @classmethod
    def of_run(cls, run_dir: str | Path, *, token: str = "") -> Self:
        """Connect to the stack that `dialoop up` or `dialoop train` runs in `run_dir` here."""
        addresses = require_addresses(Path(run_dir), token=token)
        names = ("environment", "inference", "replay", "scorer", "trainer")
        return cls(**{name: addresses[name] for name in names}, token=token)

    @classmethod
    def of_dialoop(cls, dialoop: Dialoop, loop: BackgroundLoop) -> Self:
        """Return the twin of a Dialoop that lives on `loop`; closing the twin closes both."""
        twin = cls.__new__(cls)
        twin._client, twin._loop = dialoop, loop
        twin._finalizer = weakref.finalize(twin, loop.close)
        return twin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and end the background loop; closing twice does no harm."""
        if self._finalizer.alive:
            self._loop.run(self._client.close())
            self._finalizer()

    @property
    def environment(self) -> BlockingEnvironmentClient:
        """Return the client of environments, tasks, sessions and episodes."""
        return BlockingEnvironmentClient(self._get(lambda d: d.environment), self._loop)

    @property
    def inference(self) -> BlockingInferenceClient:
        """Return the inference client; InvalidConfig where the policy is in this process."""
        return BlockingInferenceClient(self._get(lambda d: d.inference), self._loop)

    @property
    def templates(self) -> BlockingTemplateClient:
        """Return the client of the inference service's chat templates."""
        return BlockingTemplateClient(self._get(lambda d: d.templates), self._loop)

    def recordings(self, rest_url: str) -> BlockingRecordingClient:
        """Return the client of agents' recordings; `rest_url` is the inference's REST server."""
        return BlockingRecordingClient(self._get(lambda d: d.recordings(rest_url)), self._loop)

    @property
    def replay(self) -> BlockingReplayClient:
        """Return the client of the task ledger and the queue of groups."""
        return BlockingReplayClient(self._get(lambda d: d.replay), self._loop)

    @property
    def scorer(self) -> BlockingScorerClient:
        """Return the client of reference log-probs and scored groups."""
        return BlockingScorerClient(self._get(lambda d: d.scorer), self._loop)

    @property
    def trainer(self) -> BlockingTrainerClient:
        """Return the client of training's state and controls."""
        return BlockingTrainerClient(self._get(lambda d: d.trainer), self._loop)

    def client(self, name: str, kind: Callable[[Channel], Any]) -> Any:
        """Return the blocking twin of a client of any kind, such as `RunsClient`."""
        client = self._get(lambda d: d.client(name, kind))
        return twin_of(type(client))(client, self._loop)

    task = blocking(Dialoop.task)
    play = blocking(Dialoop.play)
    play_group = blocking(Dialoop.play_group)

    def collect(self, environment: str = "", **options: Any) -> Iterator[CollectedBatch]:
        """Yield batches of played turns; `options` are those of `dialoop.collect`.

        The name may be left out where there is one environment.
        """
        collection = self._get(lambda d: d.collect(environment, **options))
        return self._loop.iterate(aiter(collection))

    def _get(self, client: Callable[[Dialoop], T]) -> T:
        # A connection belongs to the loop that it is made in.
        async def make() -> T:
            return client(self._client)

        return self._loop.run(make())
