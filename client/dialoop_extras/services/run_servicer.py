"""RunService: text environments and trials on the environment service's own policy."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from dialoop.clients.inference import InferenceClient
from dialoop.v1 import run_service_pb2 as pb
from dialoop.v1.run_service_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server
from dialoop.wire.records import SAMPLING

from dialoop_extras.services.runs import OwnPolicy, Runs, TextCatalogue
from dialoop_extras.services.runs_wire import (
    mask_scope_from_proto,
    text_history_to_proto,
    trials_to_proto,
)
from dialoop_extras.trials.trial import TrialOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dialoop_services.environment.serving import ServedEnvironments

SERVICE = "dialoop.v1.RunService"


class RunServicer(RunServiceServicer):
    """RunService over gRPC and REST: decode, call, encode."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def RunText(self, request: pb.RunTextRequest, context: Any) -> pb.RunTextResponse:
        run = await self._runs.text(
            request.environment,
            list(request.queries),
            extra_json=request.extra_json,
            sampling=SAMPLING.from_proto(request.sampling),
            compat=request.compat,
        )
        return pb.RunTextResponse(histories=[text_history_to_proto(h) for h in run.histories])

    async def RunTrial(self, request: pb.RunTrialRequest, context: Any) -> pb.RunTrialResponse:
        options = TrialOptions(
            episodes_per_trial=request.episodes_per_trial or 1,
            free_shots=request.free_shots,
            mask_scope=mask_scope_from_proto(request.mask_scope),
            seed=request.seed,
        )
        result = await self._runs.trial(
            request.environment,
            [dict(trial_input.data) for trial_input in request.inputs],
            options=options,
            sampling=SAMPLING.from_proto(request.sampling),
        )
        return pb.RunTrialResponse(trials=trials_to_proto(result))


@asynccontextmanager
async def serve_runs(served: ServedEnvironments) -> AsyncIterator[None]:
    """Add RunService to the environment service's server."""
    settings = served.settings
    texts = TextCatalogue.from_entries(settings.text_environments)
    async with AsyncExitStack() as exits:
        client = None
        if settings.inference_address:
            channel = served.connect(settings.inference_address, "inference")
            client = InferenceClient(await exits.enter_async_context(channel))
        runs = Runs(served.catalogue, texts, OwnPolicy(client, settings.model_dir))
        served.server.add(add_RunServiceServicer_to_server, RunServicer(runs), SERVICE)
        yield
