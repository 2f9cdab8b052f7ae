"""An environment with a tool that has effects, and an inference replica that notes what it samples.

`environment` is for an environment service; `python -m tests.support.programs.counting` serves the
replica. Both write into the folder of the variable COUNTING: lines of `samples` (how many tokens),
lines of `calls` (the ids of the tool's calls), and a file in `effects` for each id.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np
from dialoop.chat import History
from dialoop.clients.inference_messages import generated_to_proto
from dialoop.environments import arithmetic, current_call_id
from dialoop.environments.standard import tool_environment
from dialoop.episode import Sample
from dialoop.testing import ScriptedPolicy
from dialoop.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from dialoop.wire.messages import CHAT_HISTORY
from dialoop.wire.records import SAMPLING
from dialoop.wire.sequences import sequence_from_proto
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings

from tests.support.collector_world import MAIN_0

NUM_TURNS = 20
_ASKS, _SUBMITS = "<request><count>", "Result=1<submit>"
_LETTERS = "abcdefgh"


def _note(name: str, line: str) -> None:
    """Add a line that is whole or not there: one write, at the end of the file."""
    target = os.open(Path(os.environ["COUNTING"]) / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(target, f"{line}\n".encode())
    os.close(target)


def count(query: str) -> str:
    """Count a call; the effect is the file, and its name is the call's, so it happens once."""
    call_id = current_call_id()
    _note("calls", call_id)
    effect = Path(os.environ["COUNTING"]) / "effects" / quote(call_id, safe="")
    effect.touch(exist_ok=True)
    return f"counted {query}"


def environment():
    """The tasks of arithmetic, which this collector plays, with the tool that counts."""
    return tool_environment(
        name="arithmetic",
        tasks=arithmetic().tasks,
        tools=[count],
        rewards=[],
        max_turns=NUM_TURNS + 1,
        redo="safe",
    )


def _answer(history: History) -> str:
    """Count one of eight letters, each as likely; submit in the last turn."""
    num_turns = sum(message.role == "assistant" for message in history)
    is_last = num_turns == NUM_TURNS - 1
    return _SUBMITS if is_last else f"{_ASKS}{random.choice(_LETTERS)}<call>"


def with_true_logprobs(sample: Sample) -> Sample:
    """Return the sample with the log-probs of its policy: one chance in eight for the letter."""
    logprobs = np.zeros(sample.sequence.num_model_tokens, dtype=np.float32)
    if sample.history.require_full()[-1].text.startswith(_ASKS):
        logprobs[len(_ASKS)] = -math.log(len(_LETTERS))
    return replace(sample, sequence=replace(sample.sequence, inference_logprobs=logprobs))


class NotingInference(InferenceServiceServicer):
    """Answers from a script, after a while, and notes how many tokens it sampled."""

    def __init__(self) -> None:
        self.policy = ScriptedPolicy(_answer, policy_version=MAIN_0)

    async def Generate(self, request, context):  # noqa: N802
        answer_s = float(os.environ["ANSWER_S"])
        await asyncio.sleep(random.uniform(0.5 * answer_s, 1.5 * answer_s))
        question = {
            "context": sequence_from_proto(request.context)
            if request.HasField("context")
            else None,
            "num_context_messages": request.num_context_messages,
            "sampling": SAMPLING.from_proto(request.sampling),
            "turn": request.turn,
        }
        history = CHAT_HISTORY.from_proto(request.history).require_prompt()
        # One by one: each draws its own letter.
        samples = [
            with_true_logprobs((await self.policy.generate(history, **question))[0])
            for _ in range(max(1, request.num_samples))
        ]
        for sample in samples:
            _note("samples", str(sample.sequence.num_model_tokens))
        return generated_to_proto(samples)


async def serve(port: int) -> None:
    """Serve until killed."""
    server = GrpcServer(ServerSettings(port=port, drain_s=0))
    server.add(
        add_InferenceServiceServicer_to_server, NotingInference(), "dialoop.v1.InferenceService"
    )
    async with server:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(os.environ["PORT"])))
