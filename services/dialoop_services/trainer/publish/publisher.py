"""Publishing a policy: export it, load it on every replica, probe them, announce it."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dialoop.clients.errors import is_worth_retrying
from dialoop.clients.inference import InferenceClient, PolicyStatus, WeightsManifest
from dialoop.clients.weights import WeightsKind
from dialoop.episode import UpdateMode
from dialoop.errors import DeadlineExceeded, DialoopError, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop.sequences import Floats, PolicyVersion
from dialoop_learning.lora.layers import ADAPTER
from dialoop_learning.rl.staleness import publish_order, version_of_name

from dialoop_services.config.own_data_plane import load_data_plane
from dialoop_services.runtime.durable import named_failures, write_json
from dialoop_services.trainer.learner.learner_state import WEIGHTS, CapturedWeights, ExportedWeights
from dialoop_services.trainer.publish.data_planes import (
    ChunkSender,
    FileSender,
    OwnSender,
    pointer_of,
)
from dialoop_services.trainer.publish.placement import Split
from dialoop_services.trainer.publish.vllm_transfer import VllmTransfer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from dialoop.clients.replay import ReplayClient

    from dialoop_services.trainer.learner.learner import Learner
    from dialoop_services.trainer.publish.data_planes import WeightsSender
    from dialoop_services.trainer.publish.rotation import Rotation
    from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_EVERY_S, _ANSWER_S = 2.0, 10.0
_AGAIN_S = 20.0
"""Least time until the same failure of a replica is told again."""
_STARTS_IN_S = 300.0
"""How long a replica may take to start, which does not answer then."""
_NUM_PROBES, _PROBE_TOKENS = 4, 48
_MOST_OF_ROUNDING = 0.05, 0.5
"""How far apart log-probs of the same weights lie in the mean, in nats: products in TF32 at most
the first, in 16 bits at most the second. Other weights are further away."""
_OF_ANOTHER_MODEL = frozenset({Reason.UNKNOWN_PARAMETERS, Reason.BASE_MISMATCH})
LATEST_POINTER, KEPT_POINTER = "latest.json", "kept.json"
"""Files that name the newest policy, and the newest one sent from memory whose file is on the disk.
A recovery compares the digest of the first, which is written before the policy is live. A replica
that starts later loads what it names."""
KEPT = "kept"
"""File in the folder of a policy that was evaluated: what it earned, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One publish. max_logprob_difference is in nats, over all replicas and probe tokens.

    capture_s: for how long training stood still before it; 0 where it stood still throughout.
    keep_s: from then on until its file was on the disk; 0 where the file was there before.
    num_behind: replicas that missed this publish or an earlier one and have not caught up.
    """

    policy_version: PolicyVersion
    weights: ExportedWeights
    publish_s: float
    max_logprob_difference: float
    num_replicas: int
    num_behind: int = 0
    capture_s: float = 0.0
    keep_s: float = 0.0

    @property
    def delta_bytes(self) -> int:
        """Return the bytes of what changed, which replicas got in place of the whole; 0: whole."""
        return 0 if self.weights.delta is None else self.weights.delta.num_bytes


class PolicyNotKept(PreconditionFailed):
    """A live policy whose file cannot be brought to the disk: this process must not go on.

    The next one publishes it again, before a group of it is acknowledged.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPolicy:
    """The learner's weights of one moment, and its log-probs of the probes then."""

    weights: CapturedWeights
    probes: Sequence[Floats]
    capture_s: float


class Publisher:
    """The policies on disk and the calls that bring them to the replicas."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        settings: TrainerSettings,
        learner: Learner,
        replicas: Sequence[InferenceClient],
        replay: ReplayClient,
        placement: Split | None = None,
        rotation: Rotation | None = None,
        tokenizer_digest: str = "",
    ) -> None:
        self._tokenizer_digest = tokenizer_digest
        self._settings = settings
        self.max_outstanding_groups = settings.max_outstanding_groups
        """How many groups may be outstanding once the next policy is announced."""
        self._learner = learner
        self._replicas = tuple(replicas)
        self._replay = replay
        self._placement = placement or Split()
        self._rotation = rotation
        self._root = settings.run_dir / "policies"
        self._sender = weights_sender_of(settings)
        self._file = ADAPTER if settings.publishes_adapters else WEIGHTS
        self._publishing = asyncio.Lock()
        # Replicas that missed a publish: others do not wait for them until they have caught up.
        self._behind: set[InferenceClient] = set()
        self._missed: set[InferenceClient] = set()  # of these, all but those that have just joined
        # Replicas of the job's tokenizer, and those that can never serve its policy.
        self._fit: set[InferenceClient] = set()
        self._unfit: set[InferenceClient] = set()
        # Since when a replica fails, and when each message about it is due again.
        self._failing: dict[InferenceClient, tuple[float, dict[str, float]]] = {}
        self._newest: tuple[WeightsManifest, ExportedWeights, Sequence[Floats]] | None = None
        # Random ids come from the whole vocabulary, so the probes touch every part of the weights.
        generator = np.random.default_rng(0)
        shape = (_NUM_PROBES, _PROBE_TOKENS)
        self._probes = generator.integers(0, learner.vocab_size, size=shape).tolist()

    async def capture(self, version: PolicyVersion) -> CapturedPolicy:
        """Write the learner's weights and take its probes, for a publish beside the next step."""
        started = time.perf_counter()
        first = self._sender.first_place(version, self._file)
        weights = await asyncio.to_thread(self._learner.capture, self._path(version), first)
        probes = await asyncio.to_thread(self._learner.logprobs, self._probes)
        taken_s = time.perf_counter() - started
        return CapturedPolicy(weights=weights, probes=probes, capture_s=taken_s)

    def _path(self, version: PolicyVersion) -> Path:
        return self._root / str(version) / self._file

    async def publish(
        self,
        version: PolicyVersion,
        *,
        trained_lease_ids: Sequence[str] = (),
        captured: CapturedPolicy | None = None,
    ) -> Published:
        """Publish the learner's current weights, or captured ones, as the policy `version`.

        It is live when every replica has it and answered the probes, or failed, or took longer than
        `publish_deadline_s`. This returns when its file is on the disk, too. Later publishes do not
        wait for those that failed, until they have loaded the newest one. Raise DeadlineExceeded
        (PUBLISH_TIMED_OUT) when no replica has it in that time; a call with the same version goes
        on. Raise PreconditionFailed (OTHER_WEIGHTS), before it is live, where a replica of the
        config has loaded something else under its version. Raise PolicyNotKept once it is live.
        """
        started = time.perf_counter()
        path = self._path(version)
        with named_failures(path):
            path.parent.mkdir(parents=True, exist_ok=True)  # `keep` may mark it from now on
        first = self._sender.first_place(version, self._file)
        if captured is None:
            weights = await asyncio.to_thread(self._learner.export, path, first)
            own: Sequence[Floats] = await asyncio.to_thread(self._learner.logprobs, self._probes)
        else:
            weights = await asyncio.to_thread(captured.weights.measured)
            own = captured.probes
        weights = await asyncio.to_thread(self._with_delta, weights)
        await self._placement.leave()  # replicas wake on the device that the trainer used
        # Announced first: its tokens may reach the queue before all replicas have loaded it. Before
        # the first policy is live there are no credits: an answer that began now would begin with
        # the weights of the model directory, whose version is never announced.
        await self.announce(version, has_credits=self._newest is not None)
        async with self._publishing:
            manifest = self._manifest(version, weights)
            await self._sender.offer(manifest, weights)
            self._point_to(version, weights, LATEST_POINTER)
            loading = self._load_and_prove(manifest, weights, own)
            if first is None:  # the disk writes meanwhile
                (num_replicas, difference), _ = await asyncio.gather(
                    loading, asyncio.to_thread(weights.keep)
                )
            else:
                num_replicas, difference = await loading
            self._supersede(manifest, weights, own)
        await self.announce(version, trained_lease_ids)  # live: their credits may return
        lived = time.perf_counter()
        if first is not None:
            await self._keep_live(version, weights)
        self._delete_old()
        return Published(
            policy_version=version,
            weights=weights,
            publish_s=lived - started,
            keep_s=0.0 if first is None else time.perf_counter() - lived,
            max_logprob_difference=difference,
            num_replicas=num_replicas,
            num_behind=len(self._missed),
            capture_s=0.0 if captured is None else captured.capture_s,
        )

    def _supersede(
        self, manifest: WeightsManifest, weights: ExportedWeights, own: Sequence[Floats]
    ) -> None:
        """Note the newest proved policy; whoever missed the delta before gets the whole."""
        if self._newest is not None and (old := self._newest[1].delta) is not None:
            old.path.unlink(missing_ok=True)
        self._newest = manifest, weights, own

    def _with_delta(self, weights: ExportedWeights) -> ExportedWeights:
        """Return the weights with what changed since the last proved ones, where that is sent."""
        if not self._sender.sends_deltas or weights.kind is not WeightsKind.WHOLE:
            return weights
        if self._newest is None:
            return weights
        try:
            return weights.since(self._newest[1])
        except PreconditionFailed as error:  # no room for it; the whole has been written
            log.warning("A publish goes whole.", extra={"reason": error.reason})
            return weights

    async def announce(
        self,
        version: PolicyVersion,
        trained_lease_ids: Sequence[str] = (),
        *,
        has_credits: bool = True,
    ) -> None:
        """Announce the live policy to the queue; a repeated call changes nothing.

        Without credits the queue leases no training tasks.
        """
        await self._replay.advance_policy(
            self._settings.run,
            version,
            trained_lease_ids=tuple(trained_lease_ids),
            max_outstanding_groups=self.max_outstanding_groups if has_credits else 0,
        )

    async def _keep_live(self, version: PolicyVersion, weights: ExportedWeights) -> None:
        """Bring a live policy's file to the disk, and write that it is there.

        Until then no group is acknowledged whose tokens this policy sampled.
        """
        try:
            await asyncio.to_thread(weights.keep)
            self._point_to(version, weights, KEPT_POINTER)
        except PreconditionFailed as error:
            raise PolicyNotKept(
                error.message, reason=Reason(error.reason), remedy=error.remedy
            ) from error

    def _point_to(self, version: PolicyVersion, weights: ExportedWeights, name: str) -> None:
        path = str(weights.path.relative_to(self._root))
        write_json(self._root / name, pointer_of(version, path, weights))

    async def _load_and_prove(
        self, manifest: WeightsManifest, weights: ExportedWeights, own: Sequence[Floats]
    ) -> tuple[int, float]:
        """Return how many replicas have it, and the largest difference of their answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.publish_deadline_s
        while (left_s := deadline - loop.time()) > 0:
            waited_for = [r for r in self._replicas if r not in self._behind] or self._replicas
            differences = await asyncio.gather(
                *(self._bring(replica, manifest, weights, own, left_s) for replica in waited_for)
            )
            await self._note_service(dict(zip(waited_for, differences, strict=True)))
            answered = [difference for difference in differences if difference is not None]
            proven = [difference for difference in answered if difference <= self._bound]
            if proven:
                return len(proven), max(answered)
            await asyncio.sleep(_RETRY_S)
        off = f" It answers {max(answered):.3g} nats away from the trainer." if answered else ""
        raise DeadlineExceeded(
            f"No replica has loaded policy {manifest.policy_version} within "
            f"{self._settings.publish_deadline_s:g} s.{off}",
            reason=Reason.PUBLISH_TIMED_OUT,
            remedy="Read the logs of the inference replicas. One that comes back loads the policy.",
        )

    async def _note_service(self, differences: Mapping[InferenceClient, float | None]) -> None:
        """Note which replicas serve the policy, by how far their answers were off; None: not."""
        well = {r for r, off in differences.items() if off is not None and off <= self._bound}
        missed = differences.keys() - well
        self._behind = (self._behind - well) | missed
        self._missed = (self._missed - well) | missed
        for replica in well:
            self._note_well(replica)
        if self._rotation is not None:
            await self._rotation.put(well, is_in=True)
            await self._rotation.put(missed, is_in=False)

    @property
    def _bound(self) -> float:
        """Return how far off a replica may be that is kept out where it is not well."""
        return math.inf if self._rotation is None else self._settings.max_logprob_difference

    def take_replicas(
        self, replicas: Collection[InferenceClient], in_rotation: Collection[InferenceClient]
    ) -> None:
        """Publish to these from now on; those out of rotation have to prove themselves first."""
        self._replicas = tuple(replicas)
        self._behind = set(replicas) - set(in_rotation)
        self._missed &= self._behind
        self._fit &= set(replicas)
        self._unfit &= set(replicas)
        self._failing = {r: each for r, each in self._failing.items() if r in self._replicas}

    async def _bring(
        self,
        replica: InferenceClient,
        manifest: WeightsManifest,
        weights: ExportedWeights,
        own: Sequence[Floats],
        within_s: float,
    ) -> float | None:
        """Load the policy on one replica and probe it.

        Return the largest log-prob difference in nats; None if it failed or took too long.
        """
        try:
            async with asyncio.timeout(within_s):
                if await self._is_fit(replica) and await self._load(
                    replica, manifest, weights, deadline_s=within_s
                ):
                    return await self._probe(manifest.policy_version, replica, own, within_s)
        except TimeoutError:
            self._warn(replica, "A replica did not load the policy in time.", within_s=within_s)
        return None

    async def _load(
        self,
        replica: InferenceClient,
        manifest: WeightsManifest,
        weights: ExportedWeights,
        *,
        deadline_s: float,
    ) -> bool:
        version = manifest.policy_version
        try:
            await self._sender.send(replica, manifest, weights, deadline_s=deadline_s)
        except PreconditionFailed as error:
            # A replica that just started may have loaded it by latest.json.
            if error.reason == Reason.VERSION_NOT_NEWER:
                return await self._serves(replica, version)
            if self._rotation is None or error.reason in _OF_ANOTHER_MODEL:
                self._refuse(replica, error)
            else:
                self._warn(replica, "A replica did not load the policy.", reason=error.reason)
            return False
        except DialoopError as error:
            self._warn(replica, "A replica did not load the policy.", reason=error.reason)
            return False
        return True

    async def _is_fit(self, replica: InferenceClient) -> bool:
        """Return whether the replica may have the job's policy: not with another tokenizer."""
        if replica in self._fit or not self._tokenizer_digest:
            return replica not in self._unfit
        try:
            status = await replica.get_policy()
        except DialoopError as error:
            text = "A replica does not say what it serves."
            self._warn(replica, text, after_s=_STARTS_IN_S, reason=error.reason)
            return False
        return self._has_same_tokenizer(replica, status)

    def _has_same_tokenizer(self, replica: InferenceClient, status: PolicyStatus) -> bool:
        own = self._tokenizer_digest
        if not own or status.tokenizer_digest == own:
            self._fit.add(replica)
            return replica not in self._unfit
        self._refuse(
            replica,
            PreconditionFailed(
                "A replica has another tokenizer than the job's model: its token ids would mean "
                "other texts.",
                reason=Reason.TOKENIZER_MISMATCH,
                remedy="Start it with the model directory of the job.",
            ),
        )
        return False

    def _refuse(self, replica: InferenceClient, error: DialoopError) -> None:
        """Keep a replica out that cannot serve the policy; raise where the job's config names it.

        Whoever joins the registry with another model must not end the job.
        """
        if self._rotation is None:
            raise error
        if replica not in self._unfit:
            self._unfit.add(replica)
            name = self._name_of(replica)
            log.error("The replica %s gets no requests: %s", name, error)
        self._behind.add(replica)
        self._missed.add(replica)

    def _warn(
        self, replica: InferenceClient, message: str, *, after_s: float = 0.0, **facts: object
    ) -> None:
        """Tell what has failed for so long, and again only when it has lasted twice."""
        now = time.monotonic()
        since, due_at = self._failing.setdefault(replica, (now, {}))
        if now >= due_at.get(message, since + after_s):
            due_at[message] = now + max(now - since, _AGAIN_S)
            log.warning(message, extra={"replica": self._name_of(replica), **facts})

    def _note_well(self, replica: InferenceClient) -> None:
        """Tell that a replica serves the newest policy, if it was told that it fails."""
        failing = self._failing.pop(replica, None)
        if failing is not None and failing[1]:
            seconds = round(time.monotonic() - failing[0], 1)
            facts = {"replica": self._name_of(replica), "seconds": seconds}
            log.warning("A replica serves the newest policy.", extra=facts)

    def _name_of(self, replica: InferenceClient) -> str:
        if self._rotation is not None:
            return self._rotation.name_of(replica)
        return str(self._replicas.index(replica))

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
        """Bring replicas that missed a publish back to the newest policy, until cancelled.

        One that hangs keeps neither a publish nor another replica waiting.
        """
        looks: dict[InferenceClient, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                for replica in [replica for replica, look in looks.items() if look.done()]:
                    looks.pop(replica).result()
                candidates = self._behind if self._sender.is_fetched else self._replicas
                for replica in set(candidates) - looks.keys():
                    looks[replica] = asyncio.create_task(self._catch_up(replica))
        finally:
            for look in looks.values():
                look.cancel()

    async def _catch_up(self, replica: InferenceClient) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await replica.get_policy()
            if replica in self._unfit or not self._has_same_tokenizer(replica, status):
                return
            began, newest = time.perf_counter(), self._newest
            if newest is None or not await self._bring_up(replica, status, *newest[:2]):
                return
            # What it loaded just now bounds how long it may keep a publish waiting.
            quickly_s = max(_ANSWER_S, 2 * (time.perf_counter() - began))
            async with self._publishing:
                manifest, weights, own = self._newest or newest
                if manifest is not newest[0] and not await self._load(
                    replica, manifest, weights, deadline_s=quickly_s
                ):
                    return
                if self._rotation is None:
                    self._behind.discard(replica)
                    self._missed.discard(replica)
                    self._note_well(replica)
                elif replica in self._behind:
                    off = await self._probe(manifest.policy_version, replica, own, _ANSWER_S)
                    await self._note_service({replica: off})
        except (DialoopError, TimeoutError) as error:
            if self._newest is None:
                return  # it starts; there is no policy that it could lack
            reason = error.reason if isinstance(error, DialoopError) else "TIMED_OUT"
            self._warn(replica, "A replica lacks the newest policy.", reason=reason)

    async def _bring_up(
        self,
        replica: InferenceClient,
        status: PolicyStatus,
        manifest: WeightsManifest,
        weights: ExportedWeights,
    ) -> bool:
        """Load the policy if the replica lacks it; return whether it has it then."""
        is_asleep = status.reason == Reason.ASLEEP
        if status.policy_version == manifest.policy_version and (status.ready or is_asleep):
            return True
        # A replica asleep has given its device to the trainer. One that can fetch the policy does
        # so when it wakes.
        if is_asleep and self._sender.is_fetched:
            return False
        deadline_s = self._settings.publish_deadline_s
        return await self._load(replica, manifest, weights, deadline_s=deadline_s)

    async def _serves(self, replica: InferenceClient, version: PolicyVersion) -> bool:
        try:
            return (await replica.get_policy()).policy_version == version
        except Unavailable:
            return False

    async def _probe(
        self,
        version: PolicyVersion,
        replica: InferenceClient,
        own: Sequence[Floats],
        deadline_s: float,
    ) -> float | None:
        """Return the largest log-prob difference in nats between the learner and the replica.

        Returns None when the replica does not answer, or has another version by now.
        """
        try:
            theirs = await replica.logprobs(self._probes, deadline_s=deadline_s)
        except DialoopError as error:
            if not is_worth_retrying(error):
                raise
            self._warn(replica, "A replica did not answer the probes.", reason=error.reason)
            return None
        if theirs.policy_version != version:
            return None
        mine, its = np.concatenate(own), np.concatenate(theirs.logprobs)
        worst, mean = _differences(mine, its)
        least, most = _MOST_OF_ROUNDING
        bound = min(max(self._settings.max_logprob_difference, least), most)
        if self._rotation is None and mean > bound and np.isfinite(mine).all():
            raise PreconditionFailed(
                f"Replica {self._name_of(replica)} says that it has loaded policy {version}, and "
                f"its log-probs are {mean:.3g} nats from the trainer's in the mean, {worst:.3g} at "
                "the most: it has other weights, or computes another model with them.",
                reason=Reason.OTHER_WEIGHTS,
                remedy="Compare engine, config.json and data_plane with docs/troubleshooting.md.",
            )
        if worst > self._settings.max_logprob_difference:
            log.error(
                "After a publish, trainer and inference disagree on the probe prompts.",
                extra={"policy_version": str(version), "max_logprob_difference": worst},
            )
        return worst

    def keep(self, version: PolicyVersion, reward: float | None = None) -> None:
        """Keep this policy among the milestones, if it is still there, with what it earned."""
        directory = self._root / str(version)
        if directory.is_dir():
            (directory / KEPT).touch()
            if reward is not None:
                (directory / KEPT).write_text(repr(reward), "utf-8")

    def _delete_old(self) -> None:
        """Delete policies that no setting keeps, of all lineages."""
        if not self._settings.keep_policies:
            return
        policies = [path for path in self._root.iterdir() if path.is_dir()]
        settings = self._settings
        for old in policies_to_delete(
            policies,
            newest=settings.keep_policies,
            every=settings.keep_policies_every,
            milestones=settings.keep_milestones,
        ):
            shutil.rmtree(old, ignore_errors=True)


def weights_sender_of(settings: TrainerSettings) -> WeightsSender:
    """Return the configured sender.

    Raise InvalidConfig: NEEDS_CUDA if it lacks a device, DATA_PLANE_NOT_FOUND for a data plane of
    the user's own that is none.
    """
    own = load_data_plane(settings.data_plane)
    deltas = settings.deltas
    if own is not None:
        return OwnSender(own, sends_deltas=deltas != "never")
    if settings.data_plane == "chunks":
        return ChunkSender(sends_deltas=deltas != "never")
    if settings.data_plane == "shared_memory":
        policies, memory = settings.run_dir / "policies", settings.shared_memory_dir
        return FileSender(policies, memory, sends_deltas=deltas == "always")
    backend: Any = settings.data_plane
    return VllmTransfer(backend, num_workers=settings.inference_world_size)


def policies_to_delete(
    policies: Iterable[Path], *, newest: int, every: int, milestones: int
) -> list[Path]:
    """Return which policies go: all but the first, the `newest`, and the milestones.

    Those are every n-th and those that were evaluated: the newest of both, so many as `milestones`
    says (0: all), and the one that earned most.
    """
    older = sorted(policies, key=_export_order)[1:-newest]
    marked = [p for p in older if (p / KEPT).exists() or _is_every(p.name, every)]
    judged = {path: earned for path in marked if (earned := _earned(path)) is not None}
    stay = {*marked[-milestones:], max(judged, key=judged.__getitem__, default=None)}
    return [path for path in older if path not in stay]


def _earned(policy: Path) -> float | None:
    """Return the mean reward of an evaluated policy; None where none is known."""
    try:
        reward = float((policy / KEPT).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return None if math.isnan(reward) else reward


def _is_every(name: str, every: int) -> bool:
    number = name.rpartition("-")[2]
    return bool(every) and number.isdecimal() and int(number) % every == 0


def _differences(own: Floats, theirs: Floats) -> tuple[float, float]:
    """Return the largest and the mean difference of log-probs; inf if one is not a number."""
    differences = np.abs(own - theirs)
    if np.isnan(differences).any():
        return math.inf, math.inf
    return float(differences.max()), float(differences.mean())


def _export_order(policy: Path) -> tuple[bool, tuple[int, int]]:
    """Return the policy's place among all of its run; one that was cut short comes first."""
    is_whole = any((policy / name).is_file() for name in (WEIGHTS, ADAPTER))
    return is_whole, publish_order(version_of_name(policy.name))
