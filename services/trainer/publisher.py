"""Publishing a policy: export, load on every replica, prove it, tell the queue."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from dialoop.clients.inference import WeightsManifest
from dialoop.errors import DialoopError, PreconditionFailed, Unavailable
from dialoop.sequences import PolicyVersion

from services.trainer.records import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dialoop.clients.inference import InferenceClient
    from dialoop.clients.replay import ReplayClient

    from services.trainer.learner import ExportedWeights, Learner
    from services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_NUM_PROBES, _PROBE_TOKENS = 4, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One publish: the largest log-prob difference is over all replicas and probe tokens."""

    policy_version: PolicyVersion
    weights: ExportedWeights
    publish_s: float
    max_logprob_difference: float
    num_replicas: int


class Publisher:
    """Owns the policies on disk and the way to the replicas."""

    def __init__(
        self,
        settings: TrainerSettings,
        learner: Learner,
        replicas: Sequence[InferenceClient],
        replay: ReplayClient,
    ) -> None:
        self._settings = settings
        self._learner = learner
        self._replicas = tuple(replicas)
        self._replay = replay
        self._root = settings.run_dir / "policies"
        # Random ids visit the whole vocabulary, so no part of the weights goes unnoticed.
        generator = np.random.default_rng(0)
        shape = (_NUM_PROBES, _PROBE_TOKENS)
        self._probes = generator.integers(0, learner.vocab_size, size=shape).tolist()

    async def publish(
        self, version: PolicyVersion, *, trained_lease_ids: Sequence[str] = ()
    ) -> Published:
        """Make the learner's present weights the policy `version`, everywhere.

        Waits for a first replica to be there; a replica that fails later is reported and left to
        reload the newest policy by itself.
        """
        started = time.perf_counter()
        path = self._root / str(version) / "model.safetensors"
        weights = await asyncio.to_thread(self._learner.export, path)
        # Announced first: its tokens may reach the queue before the last replica has loaded it.
        await self._advance(version, ())
        self._point_to(version, weights)
        num_replicas = await self._load_everywhere(version, weights)
        difference = await self._probe(version)
        # And now that it is live, what it was trained on gives its credits back.
        await self._advance(version, trained_lease_ids)
        self._forget_old(version)
        return Published(
            policy_version=version,
            weights=weights,
            publish_s=time.perf_counter() - started,
            max_logprob_difference=difference,
            num_replicas=num_replicas,
        )

    async def _advance(self, version: PolicyVersion, trained_lease_ids: Sequence[str]) -> None:
        await self._replay.advance_policy(
            self._settings.run,
            version,
            trained_lease_ids=tuple(trained_lease_ids),
            max_outstanding_groups=self._settings.max_outstanding_groups,
        )

    def _point_to(self, version: PolicyVersion, weights: ExportedWeights) -> None:
        """Say which policy a replica that starts now is to load."""
        pointer = {
            "lineage": version.lineage,
            "number": version.number,
            "path": str(weights.path.relative_to(self._root)),
            "sha256": weights.sha256,
            "num_bytes": weights.num_bytes,
        }
        write_json(self._root / "latest.json", pointer)

    async def _load_everywhere(self, version: PolicyVersion, weights: ExportedWeights) -> int:
        while True:
            loads = (self._load(replica, version, weights) for replica in self._replicas)
            num_loaded = sum(await asyncio.gather(*loads))
            if num_loaded:
                return num_loaded
            await asyncio.sleep(_RETRY_S)

    async def _load(
        self, replica: InferenceClient, version: PolicyVersion, weights: ExportedWeights
    ) -> bool:
        try:
            await replica.load_weights(
                WeightsManifest(
                    policy_version=version,
                    path=str(weights.path.relative_to(self._root)),
                    sha256=weights.sha256,
                    num_bytes=weights.num_bytes,
                )
            )
        except PreconditionFailed as error:
            # A replica that started a moment ago has it from latest.json.
            if error.reason == "VERSION_NOT_NEWER":
                return (await replica.get_policy()).policy_version == version
            raise
        except Unavailable:
            return False
        except DialoopError as error:
            log.warning("A replica did not load the policy.", extra={"reason": error.reason})
            return False
        return True

    async def _probe(self, version: PolicyVersion) -> float:
        """Largest difference in log-prob between the learner and any replica, in nats."""
        own = await asyncio.to_thread(self._learner.logprobs, self._probes)
        worst = 0.0
        for replica in self._replicas:
            try:
                theirs = await replica.logprobs(self._probes)
            except Unavailable:
                continue
            if theirs.policy_version != version:
                continue
            pairs = zip(own, theirs.logprobs, strict=True)
            worst = max(worst, *(float(np.abs(a - b).max()) for a, b in pairs))
        if not worst <= self._settings.max_logprob_difference:
            log.error(
                "After a publish, trainer and inference disagree on the probe prompts.",
                extra={"policy_version": str(version), "max_logprob_difference": worst},
            )
        return worst

    def _forget_old(self, version: PolicyVersion) -> None:
        keep = self._settings.keep_policies
        if keep and version.number > keep:
            old = PolicyVersion(lineage=version.lineage, number=version.number - keep)
            shutil.rmtree(self._root / str(old), ignore_errors=True)
