"""`python -m dialoop_services.scorer`: score a run's groups and serve ScorerService."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from dialoop.clients.replay import ReplayClient
from dialoop.v1.scorer_service_pb2_grpc import add_ScorerServiceServicer_to_server

from dialoop_services.config.outside import OutsideServer
from dialoop_services.config.scorer_tables import REFERENCE
from dialoop_services.hosting import Host, OwnProcess
from dialoop_services.runtime import load, run
from dialoop_services.scorer.estimator import load_estimator
from dialoop_services.scorer.outside_reference import load_outside_reference
from dialoop_services.scorer.reference_batches import Reference, ReferenceBatches
from dialoop_services.scorer.rewards import KlPenalty, load_rewards
from dialoop_services.scorer.scoring import Scoring
from dialoop_services.scorer.servicer import Scorer, ScorerServicer
from dialoop_services.scorer.settings import ScorerSettings
from dialoop_services.scorer.worker import ScorerWorker


async def serve() -> None:
    """Score until told to stop."""
    settings = load(ScorerSettings)
    await serve_in(OwnProcess(settings), settings)


async def serve_in(host: Host, settings: ScorerSettings) -> None:
    """Score until the host stops the service."""
    settings = settings.require_consistent()
    scorer = make_scorer(settings)
    server = host.server
    server.add(
        add_ScorerServiceServicer_to_server, ScorerServicer(scorer), "dialoop.v1.ScorerService"
    )
    async with host.connect(settings.replay_address, "replay") as channel:
        worker = ScorerWorker(settings, ReplayClient(channel), scorer)
        async with server, asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run(server.stopping))
            await server.wait_until_stopped()


def make_scorer(settings: ScorerSettings) -> Scorer:
    """Return the scorer that the settings describe; load the reference now if scoring needs it."""
    places = {model.id: (Path(model.directory), model.server) for model in settings.models}
    if settings.model_dir is not None:
        places[REFERENCE] = settings.model_dir, settings.reference_server
    models = {
        name: ReferenceBatches(partial(_load_model, directory, server, settings))
        for name, (directory, server) in places.items()
    }
    reference = models.get(REFERENCE)
    if reference is not None and settings.needs_reference:
        reference.load()
    penalty = KlPenalty(coefficient=settings.kl_coefficient, estimator=settings.kl_estimator)
    scoring = Scoring(
        rewards=load_rewards(settings.rewards),
        advantages=settings.advantages,
        reference=reference if settings.needs_reference else None,
        kl_penalty=penalty if settings.kl_coefficient else None,
        drop_uniform=settings.drop_uniform,
        per_turn=settings.advantages_of == "turn",
        top_k=settings.top_k,
        estimator=load_estimator(settings.advantage_estimator),
    )
    return Scorer(scoring, models, max_groups=settings.max_groups)


def _load_model(
    directory: Path, server: OutsideServer | None, settings: ScorerSettings
) -> Reference:
    if server is not None:
        return load_outside_reference(server, directory)
    # Imported only here, so that a scorer without a model runs without torch.
    from dialoop_services.scorer.reference import load_reference

    return load_reference(
        directory,
        dtype=settings.dtype,
        device=settings.device,
        max_row_tokens=settings.max_row_tokens,
        num_threads=settings.num_threads,
    )


if __name__ == "__main__":
    run(serve, name="scorer", settings=ScorerSettings)
