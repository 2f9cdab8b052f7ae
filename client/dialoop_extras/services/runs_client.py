"""RunsClient: text environments and trials, played by an environment service on its own policy.

async with Dialoop(environment="127.0.0.1:50051") as dialoop:
runs = dialoop.client("environment", RunsClient)
result = await runs.run_trial("twenty_questions", [{"solution": "apple"}])
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dialoop.clients.channel import rpc_of
from dialoop.trajectory import SamplingParams
from dialoop.v1 import run_service_pb2 as pb
from dialoop.wire.records import SAMPLING

from dialoop_extras.services.runs_wire import (
    mask_scope_to_proto,
    text_history_from_proto,
    trials_from_proto,
)
from dialoop_extras.text_environment.environment import TextRun
from dialoop_extras.trials.trial import TrialOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dialoop.clients.channel import Channel

    from dialoop_extras.trials.trial import TrialResult

# Not repeated: all episodes would be played again.
RUN_TEXT = rpc_of(pb, "RunService", "RunText", deadline_s=600.0)
RUN_TRIAL = rpc_of(pb, "RunService", "RunTrial", deadline_s=600.0)


class RunsClient:
    """Asks an environment service for whole runs on the policy that it was given."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def run_text(
        self,
        environment: str,
        queries: Iterable[str],
        *,
        extra: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        compat: str = "",
    ) -> TextRun:
        """Play a text environment of the service on its own policy; `extra` goes to the reward."""
        request = pb.RunTextRequest(
            environment=environment,
            queries=queries,
            extra_json=json.dumps(extra) if extra else "",
            sampling=SAMPLING.to_proto(sampling or SamplingParams()),
            compat=compat,
        )
        answer = await self._channel.call(RUN_TEXT, request)
        return TextRun.of(text_history_from_proto(proto) for proto in answer.histories)

    async def run_trial(
        self,
        environment: str,
        inputs: Iterable[Mapping[str, str]],
        *,
        options: TrialOptions | None = None,
        sampling: SamplingParams | None = None,
    ) -> TrialResult:
        """Play one trial per input in a game of the service, on its own policy."""
        options = options or TrialOptions()
        request = pb.RunTrialRequest(
            environment=environment,
            inputs=[pb.TrialInput(data=data) for data in inputs],
            episodes_per_trial=options.episodes_per_trial,
            free_shots=options.free_shots,
            mask_scope=mask_scope_to_proto(options.mask_scope),
            seed=options.seed,
            sampling=SAMPLING.to_proto(sampling or SamplingParams()),
        )
        answer = await self._channel.call(RUN_TRIAL, request)
        return trials_from_proto(answer.trials, mask_scope=options.mask_scope)
