"""`python -m services.trainer`: train, and answer questions about it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from dialoop.clients.channel import RetryPolicy
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.replay import ReplayClient
from dialoop.clients.trainer import Phase
from dialoop.templates import ChatTemplate
from dialoop.token_builder import TokenBuilder
from dialoop.tokenizer import Tokenizer
from dialoop.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server

from services.runtime.hosting import OwnProcess
from services.runtime.process import run
from services.runtime.settings import load
from services.trainer.checkpoint import Checkpoints
from services.trainer.evaluation import Evaluator
from services.trainer.job import JobParts, TrainingJob
from services.trainer.learner import Learner
from services.trainer.publisher import Publisher
from services.trainer.records import RunRecords
from services.trainer.servicer import TrainerServicer
from services.trainer.settings import TrainerSettings
from services.trainer.status import StatusBoard
from services.trainer.warm_start import demonstration_batches, demonstrator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dialoop.clients.channel import Channel
    from dialoop.sequences import Sequence

    from services.runtime.hosting import Host, Server

log = logging.getLogger(__name__)

# A queue that restarts is waited for until each call's deadline: a trainer that gave up sooner
# would lose the train steps since its checkpoint.
_PATIENT = RetryPolicy(max_attempts=1000)


async def serve() -> None:
    """Train to the end, then stay to be asked until told to stop."""
    settings = load(TrainerSettings)
    await serve_in(OwnProcess(settings), settings)


async def serve_in(host: Host, settings: TrainerSettings) -> None:
    """Train to the end, then stay to be asked until the host says stop."""
    settings = settings.require_consistent()
    demonstrations = _demonstrations(settings)
    learner = await asyncio.to_thread(Learner, settings)
    records = RunRecords(settings.run_dir)
    board = StatusBoard()
    async with AsyncExitStack() as exits:
        exits.callback(records.close)

        async def open_channel(address: str, retry: RetryPolicy | None = None) -> Channel:
            return await exits.enter_async_context(host.connect(address, retry=retry))

        replay = ReplayClient(await open_channel(settings.replay_address, _PATIENT))
        environment = EnvironmentClient(await open_channel(settings.environment_address))
        replicas = [InferenceClient(await open_channel(a)) for a in settings.inference_addresses]
        publisher = Publisher(settings, learner, replicas, replay)
        parts = JobParts(
            learner=learner,
            demonstrations=demonstrations,
            replay=replay,
            publisher=publisher,
            evaluator=Evaluator(settings.run, environment, replay, records),
            checkpoints=Checkpoints(settings.run_dir),
            records=records,
            board=board,
        )
        job = TrainingJob(settings, parts)
        servicer = TrainerServicer(settings, job, board, records, learner.num_parameters)
        server = host.server
        server.add(add_TrainerServiceServicer_to_server, servicer, "dialoop.v1.TrainerService")
        keeping_up = asyncio.create_task(publisher.keep_up())
        exits.callback(keeping_up.cancel)
        async with server:
            await _run_until_stopped(server, job, board)


async def _run_until_stopped(server: Server, job: TrainingJob, board: StatusBoard) -> None:
    """Run the job beside the server; a failed job ends the process, so that it is restarted."""
    running = asyncio.ensure_future(job.run())
    stopping = asyncio.ensure_future(server.wait_until_stopped())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if running.done() and running.exception() is not None:
        board.phase = Phase.FAILED
        stopping.cancel()
        await running
    if stopping.done():
        running.cancel()
        await asyncio.wait({running})
    await stopping


def _demonstrations(settings: TrainerSettings) -> Iterator[list[Sequence]]:
    """Read what a warm start needs before anything heavy is loaded."""
    tokenizer = Tokenizer.from_directory(settings.model_dir)
    builder = TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))
    if not settings.warm_start_steps:
        return iter(())
    demonstrate, stop = demonstrator(settings)
    return demonstration_batches(
        demonstrate,
        builder,
        stop=stop,
        batch_size=settings.warm_start_batch_size,
        seed=settings.seed,
    )


if __name__ == "__main__":
    run(serve, name="trainer")
