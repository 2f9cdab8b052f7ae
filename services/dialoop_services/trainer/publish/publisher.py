"""Publishing a policy: export it, load it on every replica, probe them, announce it."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from dialoop.clients.errors import is_worth_retrying
from dialoop.clients.inference import WeightsManifest
from dialoop.episode import UpdateMode
from dialoop.errors import DialoopError, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop.sequences import PolicyVersion

from dialoop_services.learning.lora.layers import ADAPTER
from dialoop_services.runtime.durable import write_json
from dialoop_services.trainer.job.placement import Split
from dialoop_services.trainer.learner.learner_state import WEIGHTS
from dialoop_services.trainer.publish.data_planes import pointer_of, weights_sender_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dialoop.clients.inference import InferenceClient
    from dialoop.clients.replay import ReplayClient
    from dialoop.sequences import Floats

    from dialoop_services.trainer.job.placement import Placement
    from dialoop_services.trainer.learner.learner import Learner
    from dialoop_services.trainer.learner.learner_state import ExportedWeights
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_EVERY_S = 2.0
_NUM_PROBES, _PROBE_TOKENS = 4, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One publish. max_logprob_difference is in nats, over all replicas and probe tokens."""

    policy_version: PolicyVersion
    weights: ExportedWeights
    publish_s: float
    max_logprob_difference: float
    num_replicas: int


class Publisher:
    """The policies on disk and the calls that bring them to the replicas."""

    def __init__(
        self,
        settings: TrainerSettings,
        learner: Learner,
        replicas: Sequence[InferenceClient],
        replay: ReplayClient,
        placement: Placement | None = None,
    ) -> None:
        self._settings = settings
        self._learner = learner
        self._replicas = tuple(replicas)
        self._replay = replay
        self._placement = placement or Split()
        self._root = settings.run_dir / "policies"
        self._sender = weights_sender_of(settings)
        self._file = ADAPTER if settings.publishes_adapters else WEIGHTS
        self._publishing = asyncio.Lock()
        self._newest: tuple[WeightsManifest, ExportedWeights] | None = None
        # Random ids come from the whole vocabulary, so the probes touch every part of the weights.
        generator = np.random.default_rng(0)
        shape = (_NUM_PROBES, _PROBE_TOKENS)
        self._probes = generator.integers(0, learner.vocab_size, size=shape).tolist()

    async def publish(
        self, version: PolicyVersion, *, trained_lease_ids: Sequence[str] = ()
    ) -> Published:
        """Publish the learner's current weights as the policy `version` to all replicas.

        It waits until at least one replica has the policy and answered the probes. It logs replicas
        that failed or took longer than `publish_deadline_s`; they load the newest policy later.
        """
        started = time.perf_counter()
        path = self._root / str(version) / self._file
        weights = await asyncio.to_thread(self._learner.export, path)
        own = await asyncio.to_thread(self._learner.logprobs, self._probes)
        await self._placement.leave()  # replicas wake on the device that the trainer used
        # Announced first: its tokens may reach the queue before all replicas have loaded it.
        await self.announce(version)
        async with self._publishing:
            manifest = self._manifest(version, weights)
            await self._sender.offer(manifest, weights)
            self._point_to(version, weights)
            num_replicas, difference = await self._load_and_prove(manifest, weights, own)
            self._newest = manifest, weights
        # The policy is live now, so the queue may return the credits of the trained groups.
        await self.announce(version, trained_lease_ids)
        self._delete_old()
        return Published(
            policy_version=version,
            weights=weights,
            publish_s=time.perf_counter() - started,
            max_logprob_difference=difference,
            num_replicas=num_replicas,
        )

    async def announce(self, version: PolicyVersion, trained_lease_ids: Sequence[str] = ()) -> None:
        """Announce the live policy to the queue; a repeated call changes nothing."""
        await self._replay.advance_policy(
            self._settings.run,
            version,
            trained_lease_ids=tuple(trained_lease_ids),
            max_outstanding_groups=self._settings.max_outstanding_groups,
        )

    def _point_to(self, version: PolicyVersion, weights: ExportedWeights) -> None:
        """Write latest.json, from which a replica that starts later loads the policy."""
        path = str(weights.path.relative_to(self._root))
        write_json(self._root / "latest.json", pointer_of(version, path, weights))

    async def _load_and_prove(
        self, manifest: WeightsManifest, weights: ExportedWeights, own: Sequence[Floats]
    ) -> tuple[int, float]:
        """Return how many replicas loaded it, and the largest difference of those that answered."""
        version = manifest.policy_version
        while True:
            loads = (self._load(replica, manifest, weights) for replica in self._replicas)
            results = await asyncio.gather(*loads)
            loaded = [r for r, is_loaded in zip(self._replicas, results, strict=True) if is_loaded]
            difference = await self._probe(version, loaded, own) if loaded else None
            if difference is not None:
                return len(loaded), difference
            await asyncio.sleep(_RETRY_S)

    async def _load(
        self, replica: InferenceClient, manifest: WeightsManifest, weights: ExportedWeights
    ) -> bool:
        version, deadline_s = manifest.policy_version, self._settings.publish_deadline_s
        try:
            await self._sender.send(replica, manifest, weights, deadline_s=deadline_s)
        except PreconditionFailed as error:
            # A replica that just started may have loaded it by latest.json.
            if error.reason == Reason.VERSION_NOT_NEWER:
                return await self._serves(replica, version)
            raise
        except Unavailable:
            return False
        except DialoopError as error:
            log.warning("A replica did not load the policy.", extra={"reason": error.reason})
            return False
        return True

    def _manifest(self, version: PolicyVersion, weights: ExportedWeights) -> WeightsManifest:
        return WeightsManifest(
            policy_version=version,
            sha256=weights.sha256,
            num_bytes=weights.num_bytes,
            update_mode=UpdateMode[self._settings.update_mode.upper()],
            kind=weights.kind,
            adapter_config_json=weights.adapter_config_json,
            base_digest=weights.base_digest,
        )

    async def keep_up(self) -> None:
        """Send the newest policy to replicas that lack it and cannot fetch it, until cancelled."""
        while not self._sender.is_fetched:
            await asyncio.sleep(_LOOK_EVERY_S)
            async with self._publishing:
                if self._newest is not None:
                    sends = (self._send_if_missing(replica) for replica in self._replicas)
                    await asyncio.gather(*sends)

    async def _send_if_missing(self, replica: InferenceClient) -> None:
        assert self._newest is not None
        manifest, weights = self._newest
        try:
            status = await replica.get_policy()
            lacks_it = status.policy_version != manifest.policy_version
            # A replica asleep has given its device to the trainer; it needs no second load.
            if lacks_it or not (status.ready or status.reason == Reason.ASLEEP):
                await self._load(replica, manifest, weights)
        except DialoopError as error:
            log.warning("A replica lacks the newest policy.", extra={"reason": error.reason})

    async def _serves(self, replica: InferenceClient, version: PolicyVersion) -> bool:
        try:
            return (await replica.get_policy()).policy_version == version
        except Unavailable:
            return False

    async def _probe(
        self,
        version: PolicyVersion,
        replicas: Sequence[InferenceClient],
        own: Sequence[Floats],
    ) -> float | None:
        """Return the largest log-prob difference in nats between the learner and any replica.

        Returns None when no replica that has the version answered.
        """
        differences: list[float] = []
        deadline_s = self._settings.publish_deadline_s
        for replica in replicas:
            try:
                theirs = await replica.logprobs(self._probes, deadline_s=deadline_s)
            except DialoopError as error:
                if not is_worth_retrying(error):
                    raise
                continue
            if theirs.policy_version == version:
                pairs = zip(own, theirs.logprobs, strict=True)
                differences.extend(_largest_difference(mine, its) for mine, its in pairs)
        if not differences:
            return None
        worst = max(differences)
        if worst > self._settings.max_logprob_difference:
            log.error(
                "After a publish, trainer and inference disagree on the probe prompts.",
                extra={"policy_version": str(version), "max_logprob_difference": worst},
            )
        return worst

    def _delete_old(self) -> None:
        """Delete all but the newest `keep_policies` policies, of all lineages."""
        if not self._settings.keep_policies:
            return
        policies = [path for path in self._root.iterdir() if path.is_dir()]
        policies.sort(key=_exported_at, reverse=True)
        for old in policies[self._settings.keep_policies :]:
            shutil.rmtree(old, ignore_errors=True)


def _largest_difference(own: Floats, theirs: Floats) -> float:
    """Return the largest absolute difference of log-probs; inf if one is not a number."""
    difference = float(np.abs(own - theirs).max())
    return math.inf if math.isnan(difference) else difference


def _exported_at(policy: Path) -> float:
    """Return when the policy's weights were written; 0 if its export was cut short."""
    files = (policy / name for name in (WEIGHTS, ADAPTER))
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
