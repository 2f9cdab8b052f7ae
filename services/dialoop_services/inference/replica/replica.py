"""One replica: an engine, whether it may take traffic, and the policies it loads."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dialoop.clients.retry import RetryPolicy
from dialoop.clients.weights import Content, WeightsKind, WeightsManifest
from dialoop.episode import UpdateMode
from dialoop.errors import DialoopError, PreconditionFailed, Unavailable, Unsupported
from dialoop.reasons import Reason

from dialoop_services.inference.answer_ends import sample_with
from dialoop_services.inference.engine import (
    Engine,
    LoadTimes,
    OnBegin,
    OnTokens,
    OutsideWeights,
    Sampled,
    Scored,
    StopTokens,
    SupportsBegin,
    SupportsConstraints,
    SupportsPause,
    SupportsPolicyAdapters,
    SupportsStreaming,
    SupportsTopLogprobs,
    SupportsTransfer,
    context_full,
    loads_refused,
    require_ids,
    require_one_stream,
    require_sampling,
    room_for,
)
from dialoop_services.inference.replica.batching import RequestBatches
from dialoop_services.inference.replica.device_lease import DeviceLease, to_the_end
from dialoop_services.inference.replica.sleeper import Sleeper
from dialoop_services.inference.replica.time_limit import TimeLimit
from dialoop_services.inference.weights.data_planes import Arrived, DataPlanes
from dialoop_services.inference.weights.publications import (
    BaseDigest,
    ModelDigests,
    Publications,
    policy_adapter,
    require_intact,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from dialoop.sequences import PolicyVersion
    from dialoop.trajectory import SamplingParams

    from dialoop_services.config.own_data_plane import OwnDataPlane
    from dialoop_services.inference.weights.loadable import Adapter, PolicyAdapter

log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_LONGEST_PAUSE_S = 60.0


class Replica(Sleeper):
    """Owns the engine. After a failed load it takes no requests until a load succeeds.

    The trainer pushes policies; the replica loads by itself those that it missed.
    """

    def __init__(  # noqa: PLR0913 - its parts
        self,
        engine: Engine,
        *,
        weights_root: Path | None,
        report: Callable[[bool], Awaitable[None]],
        update_mode: UpdateMode = UpdateMode.RECOMPUTE,
        lease: DeviceLease | None = None,
        batches: RequestBatches | None = None,
        time_limit: TimeLimit | None = None,
        own_data_plane: OwnDataPlane | None = None,
        takes_deltas: bool = True,
        awaits_policy: bool = False,
        model_digests: ModelDigests | None = None,
    ) -> None:
        super().__init__(engine, Publications(weights_root), lease or DeviceLease(), report)
        self._default_mode = self._last_mode = update_mode
        # Loads that keep old keys, begun and ended: samples that overlap with one are labelled.
        self._num_begun = self._num_ended = 0
        self._is_held = False
        self._awaits_policy = awaits_policy
        # What latest.json named when it was last loaded.
        self._followed: WeightsManifest | None = None
        base = engine.base_weights if isinstance(engine, SupportsPolicyAdapters) else None
        self._base_digest = None if base is None else BaseDigest(base)
        self._batches = batches or RequestBatches()
        self._time_limit = time_limit or TimeLimit()
        backend = engine.transfer_backend if isinstance(engine, SupportsTransfer) else ""
        self._data_planes = DataPlanes(
            self._publications,
            transfer_backend=backend,
            own=own_data_plane,
            takes_deltas=takes_deltas,
        )
        self._model_digests = model_digests or ModelDigests()
        self._model_digests.begin(engine.policy_version)
        self.num_sampled_tokens = 0
        self.num_requests_running = 0
        self.prompt_tokens = {"cached": 0, "computed": 0}
        self.queue_s: dict[str, float] = {}
        self.num_samples: Counter[str] = Counter()

    def model_digest(self, adapter: str = "", version: PolicyVersion | None = None) -> str:
        """Return the digest of the model of this version, by default the newest; empty if unknown.

        An adapter's versions are its own.
        """
        newest = self.adapters.get(adapter, self.engine.policy_version)
        return self._model_digests.find(adapter, version or newest)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopTokens,
        num_samples: int = 1,
        on_tokens: OnTokens | None = None,
        adapter: str = "",
    ) -> tuple[Sampled, ...]:
        """Sample; Unavailable while the replica is out of rotation.

        Raises DeadlineExceeded (ANSWER_TIMED_OUT) when sampling takes longer than the time limit of
        the tokens that an answer may have. Waiting to begin does not count.
        """
        self._require_ready()
        # Requests that will be refused, or that have no room for one token, skip batching and are
        # not counted.
        self._adapters.require(adapter)
        require_ids(prompt_ids, vocab_size=self.engine.vocab_size)
        require_sampling(
            sampling,
            constrains=isinstance(self.engine, SupportsConstraints),
            gives_top_logprobs=isinstance(self.engine, SupportsTopLogprobs),
        )
        if on_tokens is not None:
            require_one_stream(num_samples)
            if not isinstance(self.engine, SupportsStreaming):
                raise self._unsupported_error("stream", "Send the request without streaming")
        room = room_for(prompt_ids, sampling, self.engine.max_model_len)
        if room <= 0:
            return context_full(num_samples)
        self.num_requests_running += 1
        tells_begin = isinstance(self.engine, SupportsBegin)
        try:
            async with (
                self._batches.place(num_samples),
                self._time_limit.around(room, from_begin=tells_begin) as begin,
            ):
                self._require_ready()  # the wait for a batch may have been long
                num_ended = self._num_ended  # loads during the wait do not concern it
                call = partial(
                    self._engine_sample,
                    prompt_ids,
                    sampling,
                    stop=stop,
                    num_samples=num_samples,
                    on_begin=begin if tells_begin else None,
                )
                sampled = await self._lease.run(
                    self._adapters.sample(adapter, call, on_tokens=on_tokens)
                )
        finally:
            self.num_requests_running -= 1
        self._count(len(prompt_ids), sampled)
        mode = self._mode_since(num_ended)
        return tuple(replace(output, update_mode=mode) for output in sampled)

    def _count(self, num_prompt_tokens: int, sampled: Sequence[Sampled]) -> None:
        """Count an answered request: samples of one prompt share its tokens."""
        if not self.num_samples:
            log.info("The first request is answered.")
        self.num_sampled_tokens += sum(len(output.token_ids) for output in sampled)
        num_cached = min(num_prompt_tokens, max(output.num_cached_tokens for output in sampled))
        self.prompt_tokens["cached"] += num_cached
        self.prompt_tokens["computed"] += num_prompt_tokens - num_cached
        for output in sampled:
            reason = output.stop_reason.name.lower()
            self.num_samples[reason] += 1
            self.queue_s[reason] = self.queue_s.get(reason, 0.0) + output.queue_s

    async def _engine_sample(  # noqa: PLR0913 - a request
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: Adapter | None,
        on_tokens: OnTokens | None,
        *,
        stop: StopTokens,
        num_samples: int,
        on_begin: OnBegin | None,
    ) -> tuple[Sampled, ...]:
        # Only an engine that supports one of these is ever given it.
        options = {"adapter": adapter, "on_begin": on_begin}
        extra: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        return await sample_with(
            self.engine,
            prompt_ids,
            sampling,
            stop=stop,
            num_samples=num_samples,
            on_tokens=on_tokens,
            **extra,
        )

    def _unsupported_error(self, verb: str, remedy: str) -> Unsupported:
        return Unsupported(
            f"The engine {self.engine.name} does not {verb}.",
            reason=Reason.UNSUPPORTED,
            remedy=f"{remedy}, or serve with another engine.",
        )

    def release(self) -> None:
        """Begin all requests that wait for a batch, and let none wait again."""
        self._batches.release()

    def _mode_since(self, num_ended: int) -> UpdateMode:
        """Return how loads since then treated requests in flight; KEEP_KV if one kept old keys."""
        if self._num_begun > num_ended:
            return UpdateMode.KEEP_KV
        waits = self._last_mode is UpdateMode.WAIT
        return UpdateMode.WAIT if waits else UpdateMode.RECOMPUTE

    async def logprobs(
        self, rows: Sequence[Sequence[int]], *, adapter: str = ""
    ) -> tuple[Scored, ...]:
        """Score rows under one policy version; if a load came between them, score all again."""
        while True:
            self._require_ready()
            scored = await self._lease.run(self._adapters.logprobs(adapter, rows))
            if len({row.policy_version for row in scored}) <= 1:
                return tuple(scored)

    async def load(self, manifest: WeightsManifest, contents: AsyncIterator[Content]) -> LoadTimes:
        """Load what the manifest announces as the policy or an adapter, over any data plane.

        Unsupported where the weights are on a server that Dialoop does not run.
        """
        if isinstance(self.engine, OutsideWeights):
            raise loads_refused(self.engine.name)
        async with self._data_planes.arriving(manifest, contents) as arrived:
            return await self._load(arrived, arrived.manifest)

    @property
    def data_planes(self) -> tuple[str, ...]:
        """Return the data planes over which this replica takes weights."""
        return self._data_planes.names

    async def unload_adapter(self, name: str) -> bool:
        """Unload an adapter; its samples in flight still end. Return whether there was one."""
        async with self._loading:
            return await self._adapters.unload(name)

    @property
    def adapters(self) -> dict[str, PolicyVersion]:
        """Return the versions of the loaded adapters by name."""
        return self._adapters.versions

    async def load_latest(self) -> None:
        """Load the newest published policy, if there is one; after a bad one wait for the next.

        A replica that awaits a policy takes no requests until it has one.
        """
        if isinstance(self.engine, OutsideWeights):
            return
        manifest = self._followed = self._publications.latest()
        if manifest is None:
            if self._awaits_policy:
                await self._leave_rotation(Reason.NOT_READY)
            return
        try:
            await self._load(self._arrived_file(manifest), manifest)
        except DialoopError as error:
            if self._is_served(error):
                return
            log.warning("The latest policy does not load.", extra={"reason": error.reason})
            await self._leave_rotation(Reason.WEIGHTS_BAD)

    async def follow_latest(self, *, look_every_s: float = 2.0) -> None:
        """Load what latest.json names whenever that was missed or failed; run until cancelled.

        A policy is loaded only if latest.json named it at the look before too: until then the
        trainer has pushed it, if all went well.
        """
        looks = RetryPolicy(first_wait_s=look_every_s, max_wait_s=_LONGEST_PAUSE_S)
        if isinstance(self.engine, OutsideWeights):
            await asyncio.Event().wait()  # there is nothing to load until the service ends
        seen, num_failed = self._followed, 0
        while True:
            await asyncio.sleep(looks.wait_s(num_failed + 1, chance=1.0))
            manifest, before = await asyncio.to_thread(self._latest_manifest), seen
            seen = manifest
            is_due = (manifest != self._followed or self._fault) and not self._lease.is_over
            if manifest is None or manifest != before or not is_due:
                num_failed = 0
            elif await self._catch_up_with(manifest):
                self._followed, num_failed = manifest, 0
            else:
                num_failed += 1

    async def _catch_up_with(self, manifest: WeightsManifest) -> bool:
        """Load that policy; return whether the replica now serves it or a newer one."""
        if manifest.policy_version == self.engine.policy_version and not self._fault:
            return True
        try:
            await self._load(self._arrived_file(manifest), manifest)
        except DialoopError as error:
            if self._is_served(error):
                return True
            log.warning("The latest policy does not load.", extra={"reason": error.reason})
            return False
        except Exception:
            log.exception("The latest policy does not load.")
            return False
        return True

    def _is_served(self, error: DialoopError) -> bool:
        """Return whether the load was refused because the trainer pushed that policy meanwhile."""
        return error.reason == Reason.VERSION_NOT_NEWER and not self._fault

    async def pause(self) -> None:
        """Hold generation; requests keep their place. Unsupported where the engine cannot."""
        if not isinstance(self.engine, SupportsPause):
            raise self._unsupported_error("pause", "Leave that out")
        self._is_held = True
        await self.engine.pause()

    async def resume(self) -> None:
        """Continue generation."""
        if not isinstance(self.engine, SupportsPause):
            raise self._unsupported_error("pause", "Leave that out")
        self._is_held = False
        await self.engine.resume()

    async def until_engine_dies(self) -> None:
        """Return once the engine is dead for good: only a new process helps."""
        while self.engine.is_alive:  # noqa: ASYNC110 - vLLM has only a flag for it
            await asyncio.sleep(_HEARTBEAT_S)
        await self._leave_rotation(Reason.NOT_READY)

    async def _load(self, arrived: Arrived, manifest: WeightsManifest) -> LoadTimes:
        load = self._load_adapter_locked if manifest.adapter else self._load_policy_locked
        # If the caller leaves, the load still runs to its end: no half policy stays.
        return await to_the_end(load(arrived, manifest))

    async def _load_adapter_locked(self, arrived: Arrived, manifest: WeightsManifest) -> LoadTimes:
        """Load an adapter; a failure leaves the policy and the replica as they were."""
        async with self._loading:
            self._require_ready()
            self._adapters.require_room(manifest)
            path = arrived.require_file()
            await asyncio.to_thread(require_intact, path, manifest)
            times = await self._adapters.load(path, manifest)
            self._model_digests.publish(manifest, self.engine.policy_version)
        version = f"{manifest.adapter} {manifest.policy_version}"
        log.info("Adapter loaded.", extra={"policy": version, "load_s": times.load_s})
        return times

    async def _load_policy_locked(self, arrived: Arrived, manifest: WeightsManifest) -> LoadTimes:
        version, mode = manifest.policy_version, manifest.update_mode or self._default_mode
        async with self._loading:
            self._require_newer(version)
            self._require_drainable(mode)
            # An adapter that does not fit is refused before anything has changed.
            adapter = await self._policy_adapter(arrived, manifest)
            await self._require_device()
            keeps_keys = mode is UpdateMode.KEEP_KV
            try:
                if arrived.path is not None and adapter is None and not arrived.is_proved:
                    await asyncio.to_thread(require_intact, arrived.path, manifest)
                self._num_begun += keeps_keys
                await self._adapters.clear()
                times = await self._engine_load(arrived, adapter, version, mode)
            except BaseException:
                await self._leave_rotation(Reason.WEIGHTS_BAD)
                self._resolve_lease()
                raise
            finally:
                self._num_ended = self._num_begun
            self._model_digests.publish(manifest, version)
            self._fault, self._last_mode = "", mode
            await self._be_awake()
        log.info("Policy loaded.", extra={"policy": str(version), "pause_s": times.pause_s})
        return times

    async def _policy_adapter(
        self, arrived: Arrived, manifest: WeightsManifest
    ) -> PolicyAdapter | None:
        """Return the adapter that is the policy, checked; None for whole weights."""
        if manifest.kind is WeightsKind.WHOLE:
            return None
        if self._base_digest is None or not isinstance(self.engine, SupportsPolicyAdapters):
            remedy = 'Set publish = "merged" in [model]'
            raise self._unsupported_error("load a policy that is an adapter", remedy)
        await self._base_digest.require(manifest.base_digest)
        path, base = arrived.require_file(), self.engine.base_weights
        return await asyncio.to_thread(policy_adapter, path, manifest, base)

    async def _engine_load(
        self,
        arrived: Arrived,
        adapter: PolicyAdapter | None,
        version: PolicyVersion,
        mode: UpdateMode,
    ) -> LoadTimes:
        if self._lease.is_over:
            mode = UpdateMode.RECOMPUTE  # nothing is under way while it sleeps
        engine = self.engine
        if adapter is not None and isinstance(engine, SupportsPolicyAdapters):
            return await engine.load_onto_base(adapter, version, mode=mode)
        if arrived.steps is not None and isinstance(engine, SupportsTransfer):
            return await engine.transfer_weights(arrived.steps, version, mode=mode)
        return await engine.load_weights(arrived.require_file(), version, mode=mode)

    def _require_ready(self) -> None:
        if self.fault:
            raise Unavailable(
                "This replica takes no requests now.",
                reason=Reason(self.fault),
                remedy="Try another replica, or wait for the next publish.",
            )

    def _require_drainable(self, mode: UpdateMode) -> None:
        if mode is UpdateMode.WAIT and self._is_held and not self._lease.is_over:
            raise PreconditionFailed(
                "The replica is paused, so samples under way cannot end.",
                reason=Reason.PAUSED,
                remedy="Resume it, or publish with UPDATE_MODE_RECOMPUTE.",
            )

    def _require_newer(self, version: PolicyVersion) -> None:
        """Refuse an older version; the same one is allowed out of rotation, to recover or wake."""
        current = self.engine.policy_version
        same_lineage = current.lineage == version.lineage
        comes_back = bool(self._fault) or self._lease.is_over
        oldest = current.number if comes_back else current.number + 1
        if same_lineage and version.number < oldest:
            raise PreconditionFailed(
                f"Policy {version} is not newer than {current}, which is loaded.",
                reason=Reason.VERSION_NOT_NEWER,
                remedy="Publish with a higher number, or in a new lineage.",
            )
