from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from dialoop.chat import History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient, WeightsManifest
from dialoop.clients.scorer import ScorerClient
from dialoop.clients.trainer import Phase, TrainerClient
from dialoop.environments import ChatEnv, KLReward, TaskData, Tokens
from dialoop.errors import InternalError
from dialoop.sequences import PolicyVersion
from dialoop.testing import ScriptedPolicy, byte_tokenizer
from dialoop.trajectory import Group, SamplingParams, StopReason, Task
from dialoop.v1 import chat_pb2
from dialoop.v1 import inference_service_pb2 as inference_pb
from dialoop.v1 import inference_service_pb2_grpc as inference_grpc
from dialoop.v1 import scorer_service_pb2 as scorer_pb
from dialoop.v1 import scorer_service_pb2_grpc as scorer_grpc
from dialoop.v1 import trainer_service_pb2 as trainer_pb
from dialoop.v1 import trainer_service_pb2_grpc as trainer_grpc
from dialoop.wire.messages import CHAT_HISTORY
from dialoop.wire.records import SAMPLING as SAMPLING_CODEC
from dialoop.wire.sequences import POLICY_VERSION, sequence_from_proto, sequence_to_proto
from dialoop_services.hosting import GrpcServer
from dialoop_services.runtime import ServerSettings, load

V3 = PolicyVersion(lineage="main", number=3)
POLICY = ScriptedPolicy(["12<call>", "7"], policy_version=V3)
PROMPT = History((Message(role="user", content="3+4"),))
SAMPLING = SamplingParams(temperature=0.5, stop=("<call>",))


def rows_of(request, *, shift=0.0):
    """Return -0.5, -1.5, ... for the tokens of each row from the second one on."""
    return [
        chat_pb2.LogProbValues(
            values=[-0.5 - i - shift for i in range(len(row.values) - 1)], start=1
        )
        for row in request.token_ids
    ]


class Inference(inference_grpc.InferenceServiceServicer):
    """Serves a scripted policy."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    async def Generate(self, request, context):  # noqa: N802
        has_context = request.HasField("context")
        samples = await POLICY.generate(
            CHAT_HISTORY.from_proto(request.history).require_prompt(),
            context=sequence_from_proto(request.context) if has_context else None,
            num_context_messages=request.num_context_messages,
            sampling=SAMPLING_CODEC.from_proto(request.sampling),
            turn=request.turn,
            num_samples=request.num_samples or 1,
        )
        return inference_pb.GenerateResponse(
            samples=[
                inference_pb.Sample(
                    history=CHAT_HISTORY.to_proto(sample.history),
                    sequence=sequence_to_proto(sample.sequence),
                    stop_reason=int(sample.stop_reason),
                    stop_string=sample.stop_string,
                )
                for sample in samples
            ],
            sampling=SAMPLING_CODEC.to_proto(samples[0].sampling),
            tokenizer_digest=samples[0].tokenizer_digest,
            template_digest=samples[0].template_digest,
        )

    async def GenerateStream(self, request, context):  # noqa: N802
        version = POLICY_VERSION.to_proto(V3)
        yield inference_pb.GenerateStreamResponse(
            token_ids=[1], inference_logprobs=[-0.5], policy_version=version, text="1"
        )
        completed = await self.Generate(request.request, context)
        yield inference_pb.GenerateStreamResponse(completed=completed)

    async def LogProb(self, request, context):  # noqa: N802
        self.received = [list(row.values) for row in request.token_ids]
        version = POLICY_VERSION.to_proto(V3)
        return inference_pb.LogProbResponse(logprobs=rows_of(request), policy_version=version)

    async def GetPolicy(self, request, context):  # noqa: N802
        return inference_pb.GetPolicyResponse(engine="scripted", reason="LOADING")

    async def LoadWeights(self, requests, context):  # noqa: N802
        self.received = [request async for request in requests]
        return inference_pb.LoadWeightsResponse(policy_version=POLICY_VERSION.to_proto(V3))

    async def Pause(self, request, context):  # noqa: N802
        return inference_pb.PauseResponse()

    async def Resume(self, request, context):  # noqa: N802
        return inference_pb.ResumeResponse()


class Scorer(scorer_grpc.ScorerServiceServicer):
    """Returns what it gets."""

    async def LogProb(self, request, context):  # noqa: N802
        return scorer_pb.ScorerServiceLogProbResponse(logprobs=rows_of(request, shift=0.25))

    async def Score(self, request, context):  # noqa: N802
        return scorer_pb.ScorerServiceScoreResponse(group=request.group)


class Trainer(trainer_grpc.TrainerServiceServicer):
    """Answers with fixed values."""

    async def GetStatus(self, request, context):  # noqa: N802
        return trainer_pb.GetStatusResponse(phase=3, num_train_steps=7, metrics={"loss": 0.5})

    async def WatchPolicy(self, request, context):  # noqa: N802
        for number in (3, 4):
            yield trainer_pb.WatchPolicyResponse(
                policy_version={"lineage": "main", "number": number}, weights={"path": "w"}
            )

    async def Publish(self, request, context):  # noqa: N802
        return trainer_pb.PublishResponse(policy_version=POLICY_VERSION.to_proto(V3))

    async def Checkpoint(self, request, context):  # noqa: N802
        return trainer_pb.CheckpointResponse(path="c", num_train_steps=7)

    async def Pause(self, request, context):  # noqa: N802
        return trainer_pb.TrainerServicePauseResponse()

    async def Resume(self, request, context):  # noqa: N802
        return trainer_pb.TrainerServiceResumeResponse()

    async def Evaluate(self, request, context):  # noqa: N802
        return trainer_pb.EvaluateResponse(
            mean_reward=0.25, num_trajectories=request.max_tasks, share=0.5
        )


@asynccontextmanager
async def connect(register, servicer):
    server = GrpcServer(load(ServerSettings))
    server.add(register, servicer, "x")
    async with server, Channel(server.address) as channel:
        yield channel


@asynccontextmanager
async def inference():
    servicer = Inference()
    register = inference_grpc.add_InferenceServiceServicer_to_server
    async with connect(register, servicer) as channel:
        yield servicer, InferenceClient(channel)


@asynccontextmanager
async def trainer():
    async with connect(trainer_grpc.add_TrainerServiceServicer_to_server, Trainer()) as channel:
        yield TrainerClient(channel)


async def test_a_sample_crosses_the_wire_unchanged():
    async with inference() as (_, client):
        (there,) = await client.generate(PROMPT, sampling=SAMPLING)
    (here,) = await POLICY.generate(PROMPT, sampling=SAMPLING)
    assert there == here
    assert (there.stop_reason, there.stop_string) == (StopReason.STOP, "<call>")


async def test_a_second_turn_continues_the_context():
    async with inference() as (_, client):
        (first,) = await client.generate(PROMPT, sampling=SAMPLING)
        longer = first.history.require_full().append(Message(role="tool", content="7"))
        continuation = {"context": first.sequence, "num_context_messages": 2, "turn": 1}
        (there,) = await client.generate(longer, **continuation)
        assert len(await client.generate(longer, num_samples=3, **continuation)) == 3
    (here,) = await POLICY.generate(longer, **continuation)
    assert there.sequence == here.sequence
    assert len(first.sequence.extended_by(there.sequence)) > len(first.sequence)


async def test_too_few_samples_are_refused_in_words(monkeypatch):
    async with inference() as (_, client):
        generate = POLICY.generate
        monkeypatch.setattr(
            type(POLICY), "generate", lambda _, *a, **kw: generate(*a, **kw | {"num_samples": 1})
        )
        with pytest.raises(InternalError, match="gave 1 of 3 samples"):
            await client.generate(PROMPT, sampling=SAMPLING, num_samples=3)


async def test_a_stream_ends_with_the_whole_sample():
    async with inference() as (_, client):
        chunks = [chunk async for chunk in client.generate_stream(PROMPT, sampling=SAMPLING)]
    assert (chunks[0].text, chunks[0].policy_version, chunks[0].samples) == ("1", V3, ())
    assert chunks[-1].samples == await POLICY.generate(PROMPT, sampling=SAMPLING)


async def test_logprobs_are_rows_of_numbers_with_a_version():
    async with inference() as (servicer, client):
        answer = await client.logprobs([np.array([1, 2, 3], dtype=np.int32)])
    assert servicer.received == [[1, 2, 3]]
    assert [row.tolist() for row in answer.logprobs] == [[-0.5, -1.5]]
    assert answer.policy_version == V3


async def test_a_replica_without_a_policy_has_no_version():
    async with inference() as (_, client):
        status = await client.get_policy()
        await client.pause()
        await client.resume()
    assert (status.policy_version, status.ready, status.reason) == (None, False, "LOADING")


async def chunks_later():
    yield b"ab"
    yield b"c"


@pytest.mark.parametrize("chunks", [[b"ab", b"c"], chunks_later()])
async def test_weights_are_a_manifest_and_then_chunks(chunks):
    manifest = WeightsManifest(policy_version=V3, sha256="ff", num_bytes=3)
    async with inference() as (servicer, client):
        assert (await client.load_weights(manifest, chunks)).policy_version == V3
    first, *rest = servicer.received
    assert (first.manifest.sha256, first.manifest.path) == ("ff", "")
    assert [request.chunk for request in rest] == [b"ab", b"c"]


async def test_weights_in_a_file_are_a_manifest_alone():
    manifest = WeightsManifest(policy_version=V3, sha256="ff", num_bytes=3, path="v3.safetensors")
    async with inference() as (servicer, client):
        await client.load_weights(manifest)
    (only,) = servicer.received
    assert only.manifest.path == "v3.safetensors"


async def test_a_scorer_scores_groups_and_gives_logprobs():
    task = Task(task_id="t", environment="e", split="s", key="k")
    group = Group(group_id="t#1", task=task, trajectories=())
    register = scorer_grpc.add_ScorerServiceServicer_to_server
    async with connect(register, Scorer()) as channel:
        client = ScorerClient(channel)
        assert await client.score(group) == group
        (row,) = await client.logprobs([[1, 2, 3]])
    assert row.tolist() == [-0.75, -1.75]


async def test_a_kl_reward_takes_both_clients_as_they_are():
    register = scorer_grpc.add_ScorerServiceServicer_to_server
    async with inference() as (_, policy), connect(register, Scorer()) as channel:
        reference = ScorerClient(channel)
        kl = KLReward(policy=policy.logprobs, reference=reference.logprobs, coefficient=2.0)
        environment = ChatEnv(
            name="kl", transforms=(kl,), input_mode="tokens", tokenizer=byte_tokenizer()
        )
        opening = environment.reset(TaskData(key="k", question="hi"), 0)
        outcome = await environment.step(opening.episode, Tokens(response=(65, 66)))
        assert type(await policy.logprobs([[1]])) is type(await reference.logprobs([[1]]))
    assert not outcome.failures
    assert outcome.rewards[0].per_token == (-0.5, -0.5)


async def test_a_trainer_says_how_far_it_is():
    async with trainer() as client:
        status = await client.get_status()
        evaluation = await client.evaluate("e", split="heldout", max_tasks=5)
        published, saved = await client.publish(), await client.checkpoint()
        await client.pause()
        await client.resume()
    assert (status.phase, status.num_train_steps) == (Phase.TRAINING, 7)
    assert (status.policy_version, status.metrics) == (None, {"loss": 0.5})
    assert (evaluation.mean_reward, evaluation.num_trajectories) == (0.25, 5)
    assert (evaluation.accuracy, evaluation.share) == (None, 0.5)
    assert (published.policy_version, saved.path) == (V3, "c")


async def test_published_policies_are_watched():
    async with trainer() as client:
        watched = [policy async for policy in client.watch_policy()]
    assert [p.policy_version.number for p in watched] == [3, 4]
    assert watched[0].path == "w"


def test_importing_dialoop_loads_neither_grpc_nor_protobuf():
    code = (
        "import dialoop, sys; sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
