"""`python -m dialoop_services.trainer`: train, and answer questions about it.

Run it as four processes on this machine, or as sixteen on two. Each reads the job file that
DIALOOP_CONFIG names, and needs the same DIALOOP_TRAINER_... variables and access to the directories
of the run and the model. The first one is the service:

    python -m dialoop_services.trainer.learner.launch 4
    python -m dialoop_services.trainer.learner.launch 8 --num-nodes 2 --node 0
        --rendezvous HOST:29400
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import torch
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.retry import RetryPolicy
from dialoop.errors import InvalidConfig, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.parallel.group_commands import RankGroup

from dialoop_services.hosting.hosts import Host, OwnProcess
from dialoop_services.hosting.server import GrpcServer
from dialoop_services.runtime.cores import let_others_go_first, threads_of
from dialoop_services.runtime.durable import write_json
from dialoop_services.runtime.exit_reason import CONFIG_ERROR, ExitReason
from dialoop_services.runtime.logs import configure_logs
from dialoop_services.runtime.process import run_blocking
from dialoop_services.runtime.settings import load
from dialoop_services.trainer.data.demonstrations import (
    DemonstrationSet,
    demonstration_set,
    warm_start_batches,
)
from dialoop_services.trainer.data.queue_client import QueueClient
from dialoop_services.trainer.job.evaluation import Evaluator
from dialoop_services.trainer.job.job import TrainingJob
from dialoop_services.trainer.job.parts import JobParts
from dialoop_services.trainer.job.status import StatusBoard
from dialoop_services.trainer.learner.learner import Learner
from dialoop_services.trainer.learner.ranks import (
    RankSettings,
    join_trainer_ranks,
    learners_of,
    leave_stopping_to_the_first,
    make_learner,
)
from dialoop_services.trainer.publish.placement import placement_of
from dialoop_services.trainer.publish.publisher import Publisher
from dialoop_services.trainer.publish.rotation import Rotation
from dialoop_services.trainer.records.records import RunRecords
from dialoop_services.trainer.records.trackers import trackers_of
from dialoop_services.trainer.recovery.checkpoint import Checkpoints
from dialoop_services.trainer.servicer import TrainerServicer
from dialoop_services.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

_LAST_FAILURE = "last_failure.json"

# The trainer waits for a queue that restarts until each call's deadline. If it gave up sooner, it
# would lose the train steps since its checkpoint.
_RETRY_UNTIL_DEADLINE = RetryPolicy(max_attempts=None)


def main() -> None:
    """Run one rank of the trainer to its end; the first one is the service."""
    rank_settings, settings = load(RankSettings), load(TrainerSettings)
    with join_trainer_ranks(rank_settings, settings) as ranks:
        learners = learners_of(ranks)
        if ranks.is_first:
            with closing(learners):
                asyncio.run(serve(settings, learners))
        else:
            configure_logs(f"trainer-{ranks.rank}")
            leave_stopping_to_the_first(rank_settings)
            learners.serve()


async def serve(settings: TrainerSettings, learners: RankGroup[Learner]) -> None:
    """Train to the end, then answer calls until the process is stopped."""
    await serve_in(OwnProcess(settings), settings, learners)


async def serve_in(
    host: Host, settings: TrainerSettings, learners: RankGroup[Learner] | None = None
) -> None:
    """Train to the end, then answer calls until the host stops; without `learners` on one rank."""
    await _compute_first(settings)
    builder = _builder(settings)
    # The demonstrations are read before anything heavy is loaded.
    warm_start = warm_start_batches(settings, builder) if settings.warm_start.num_steps else None
    supervised = demonstration_set(settings, builder) if settings.mode == "sft" else None
    settings = with_steps_of(settings, supervised)
    trackers = trackers_of(settings)  # before the model is loaded, since one may be refused
    learner = await asyncio.to_thread(make_learner, settings, learners)
    log.info("The model is loaded.", extra={"matrix_products": learner.matrix_products})
    records = RunRecords(
        settings.run_dir,
        max_trajectory_bytes=settings.max_trajectories_mb * 1_000_000,
        trackers=trackers,
    )
    board = StatusBoard()
    async with AsyncExitStack() as exits:
        exits.callback(records.close)
        enter = exits.enter_async_context
        queue = host.connect(settings.replay_address, "replay", retry=_RETRY_UNTIL_DEADLINE)
        replay = QueueClient(await enter(queue))
        exits.push_async_callback(replay.close)
        sessions = host.connect(settings.environment_address, "environment")
        environment = EnvironmentClient(await enter(sessions))
        rotation = Rotation(settings, host.connect) if settings.discovery == "registry" else None
        addresses = settings.inference_addresses if rotation is None else []
        replicas = [InferenceClient(await enter(host.connect(a, "inference"))) for a in addresses]
        placement = placement_of(settings, learner, replicas)
        exits.push_async_callback(placement.leave)
        digest = builder.tokenizer.digest
        publisher = Publisher(settings, learner, replicas, replay, placement, rotation, digest)
        parts = JobParts(
            learner=learner,
            demonstrations=warm_start,
            replay=replay,
            publisher=publisher,
            evaluator=Evaluator(settings.run, environment, replay, records),
            checkpoints=Checkpoints(settings.run_dir, keep_steps=settings.keep_steps),
            records=records,
            board=board,
            placement=placement,
        )
        job = TrainingJob(settings, parts, supervised)
        servicer = TrainerServicer(settings, job, board, records, learner.num_parameters)
        show_metrics(host.server, board, records)
        host.server.add(add_TrainerServiceServicer_to_server, servicer, "dialoop.v1.TrainerService")
        beside = _tasks_beside(publisher, rotation, exits)
        unforeseen = map(asyncio.wrap_future, (learner.group.failed, job.broken))
        async with host.server as server, noting_failures(settings.run_dir, board):
            await _run_until_stopped(
                server,
                job,
                board,
                drain_s=settings.drain_s,
                failures=(*beside, *unforeseen),
                exit_when_done=settings.exit_when_done,
            )


def _tasks_beside(
    publisher: Publisher, rotation: Rotation | None, exits: AsyncExitStack
) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(publisher.keep_up())]
    if rotation is not None:
        exits.push_async_callback(rotation.close)
        tasks.append(asyncio.create_task(rotation.follow(publisher.take_replicas)))
    for task in tasks:
        exits.callback(task.cancel)
    return tasks


def show_metrics(server: GrpcServer, board: StatusBoard, records: RunRecords) -> None:
    """Show steps, alarms and the newest row of each kind among the service's metrics."""
    server.show(
        "dialoop_steps",
        "Steps that the trainer has taken.",
        "kind",
        lambda: {
            "train": board.state.num_train_steps,
            "warm_start": board.state.num_warm_start_steps,
        },
    )
    server.show(
        "dialoop_alarms",
        "Alarms that are on.",
        "alarm",
        lambda: dict.fromkeys(board.alarms, 1),
        is_gauge=True,
    )
    server.show(
        "dialoop_newest",
        "Numbers of the newest row of each kind in metrics.jsonl.",
        "name",
        lambda: records.newest,
        is_gauge=True,
    )


async def _run_until_stopped(
    server: GrpcServer,
    job: TrainingJob,
    board: StatusBoard,
    *,
    drain_s: float,
    failures: Collection[asyncio.Future[None]] = (),
    exit_when_done: bool = False,
) -> None:
    """Run the job beside the server; a failed job ends the process, so that it is restarted.

    With `exit_when_done` a job that has ended does too.

    An error in one of `failures` ends the process too, also after the job's end, because a process
    that reports SERVING must be able to serve. A stopped job ends its train step, saves, and gives
    its leases back, within `drain_s` seconds.
    """
    running = asyncio.ensure_future(job.run())
    stopping = asyncio.ensure_future(server.wait_until_stopped())
    open_tasks = {running, stopping, *failures}
    while not stopping.done():
        done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
        error = next((task.exception() for task in done if task.exception()), None)
        if error is not None:
            board.fail(error)
            for task in (running, stopping):
                task.cancel()
            await asyncio.wait({running, stopping})
            raise error
        if exit_when_done and running.done():
            stopping.cancel()
            return
    if not running.done():
        board.stop()
        await asyncio.wait({running}, timeout=drain_s)
    if not running.done():
        log.warning("The job did not stop within the drain time.", extra={"drain_s": drain_s})
        running.cancel()
        await asyncio.wait({running})
    elif running.exception() is not None:
        log.error("The job failed while it stopped.", exc_info=running.exception())


@asynccontextmanager
async def noting_failures(run_dir: Path, board: StatusBoard) -> AsyncIterator[None]:
    """Let no failure pass that no restart mends; see `require_new_failure`."""
    try:
        yield
    except Exception as error:
        require_new_failure(run_dir, board.state.num_train_steps, error)
        raise


def require_new_failure(run_dir: Path, train_step: int, error: BaseException) -> None:
    """Raise InvalidConfig (SAME_FAILURE) where the trainer failed at this step in this way before.

    An error of a service that is away may pass, and is none of these.
    """
    reason, path = ExitReason.of(error), run_dir / _LAST_FAILURE
    if reason.may_pass or reason.exit_code == CONFIG_ERROR:
        return
    failure = {"train_step": train_step, "message": reason.message}
    before = None
    with suppress(FileNotFoundError):
        before = json.loads(path.read_text("utf-8"))
    if before == failure:
        raise InvalidConfig(
            f"The trainer failed twice after train step {train_step}: {reason.message}",
            reason=Reason.SAME_FAILURE,
            remedy="No restart mends it: see the trainer's log.",
        ) from error
    with suppress(OSError, PreconditionFailed):  # a full disk is no reason to hide the error
        write_json(path, failure)


def with_steps_of(
    settings: TrainerSettings, supervised: DemonstrationSet | None
) -> TrainerSettings:
    """Return the settings with as many train steps as `sft.num_epochs` epochs have."""
    if supervised is None or not settings.sft.num_epochs:
        return settings
    num_steps = settings.sft.num_epochs * supervised.steps_per_epoch
    return settings.model_copy(update={"num_steps": num_steps})


async def _compute_first(settings: TrainerSettings) -> None:
    # Before a worker computes anything: it keeps the number of threads with which it begins.
    torch.set_num_threads(threads_of(settings.num_threads))
    if not settings.num_threads and settings.device == "cpu":
        let_others_go_first()
    await asyncio.to_thread(_make_tiny_model, settings)


def _make_tiny_model(settings: TrainerSettings) -> None:
    """Make the tiny model if it is asked for and is not there."""
    directory, seed = settings.model_dir, settings.tiny_model_seed
    if seed is None or (directory / "model.safetensors").is_file():
        return
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        make_tiny_model(partial, seed=seed).rename(directory)  # replicas wait for the whole
    except OSError as error:
        raise Unavailable(
            f"The tiny model could not be made in {directory}: {error.strerror}.",
            reason=Reason.MODEL_FAILED,
            remedy="Make room on the disk, or name a model in [model].",
        ) from error
    log.info("The tiny model is made.", extra={"seed": seed})


def _builder(settings: TrainerSettings) -> TokenBuilder:
    tokenizer = Tokenizer.from_directory(settings.model_dir)
    return TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))


if __name__ == "__main__":
    run_blocking(main, name="trainer", settings=TrainerSettings)
