"""Show that what the worked examples of CONTRIBUTING.md add is there and works.

python -m tests.support.programs.places_to_touch FOLDER

The test runs it in a fresh interpreter on a copy of the product that has the examples' patches, and
beside it an engine of one file.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import dialoop

TOPR = 'run = "mine"\n[train]\nloss = "topr"\nnum_steps = 1\n'
ADAM_EPS = 'run = "mine"\n[train]\nadam_eps = 1e-06\nnum_steps = 1\n'


def trajectory_field(folder: Path) -> None:
    """Play an episode, and send its record over the wire and back."""
    from dialoop import LocalEnvironmentClient, Task, arithmetic, play
    from dialoop.testing import ScriptedPolicy
    from dialoop.v1 import trajectory_pb2
    from dialoop.wire.records import TRAJECTORY

    environment = arithmetic()
    key = environment.tasks.keys("train")[0]
    task = Task(task_id=key, environment=environment.name, split="train", key=key)
    policy = ScriptedPolicy(["Result=1<submit>"])
    sessions = LocalEnvironmentClient(environment)
    trajectory = asyncio.run(play(task, sessions=sessions, policy=policy))
    assert trajectory.play_s > 0

    sent = TRAJECTORY.to_proto(trajectory).SerializeToString()
    arrived = trajectory_pb2.Trajectory.FromString(sent)
    assert TRAJECTORY.from_proto(arrived).play_s == trajectory.play_s
    arrived.ClearField("play_s")  # as a sender that does not know the field
    assert TRAJECTORY.from_proto(arrived).play_s == 0.0


def rpc(folder: Path) -> None:
    """Call the rpc over gRPC with both clients' code, and over REST."""
    asyncio.run(_call_rpc())


async def _call_rpc() -> None:
    import pytest
    from dialoop.clients.blocking.twins import BlockingTemplateClient
    from dialoop.clients.channel import Channel
    from dialoop.clients.template import TemplateClient
    from dialoop.errors import NotFound
    from dialoop.templates.registry import named_template

    from tests.support.rest_world import http_of, service

    expected = named_template("qwen").source
    async with service("inference") as server, Channel(server.address) as channel:
        client = TemplateClient(channel)
        assert await client.source("qwen") == expected
        with pytest.raises(NotFound, match="unheard_of"):
            await client.source("unheard_of")
        async with http_of(server) as http:
            answer = await http.get("/v1/templates/qwen")
            assert (answer.status_code, answer.json()) == (200, {"source": expected})
            assert (await http.get("/v1/templates/unheard_of")).status_code == 404
            described = (await http.get("/openapi.json")).json()["paths"]
            assert "get" in described["/v1/templates/{template_name}"]
    assert callable(BlockingTemplateClient.source)


def wire(folder: Path) -> None:
    """Ask in the new wire: whole, as a stream, in a recording, without the key and wrongly."""
    asyncio.run(_ask_in_wire())


async def _ask_in_wire() -> None:
    import json

    from dialoop.clients.channel import Channel
    from dialoop.clients.recordings import RecordingClient

    from tests.support.rest_world import http_of, service

    body = {"model": "bytes", "max_tokens": 4, "messages": [{"role": "user", "content": "3+4"}]}
    key = {"x-api-key": "secret"}
    async with (
        service("inference", token="secret") as server,
        http_of(server) as http,
        Channel(server.address, token="secret") as channel,
    ):
        assert (await http.post("/v1/messages", json=body)).status_code == 401
        whole = (await http.post("/v1/messages", json=body, headers=key)).json()
        assert whole["content"] == [{"type": "text", "text": "7"}]
        assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("end_turn", 2)
        stream = await http.post("/v1/messages", json={**body, "stream": True}, headers=key)
        events = [event.split("\n") for event in stream.text.split("\n\n") if event]
        documents = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [f"event: {document['type']}" for document in documents] == [n for n, _ in events]
        texts = (document.get("delta", {}).get("text", "") for document in documents)
        assert "".join(texts) == "7"
        assert (documents[0]["type"], documents[-1]["type"]) == ("message_start", "message_stop")
        wrong = await http.post("/v1/messages", json={**body, "n": 2}, headers=key)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "unknown_field")
        recordings = RecordingClient(channel, rest_url=f"http://{server.rest_address}")
        opened = await recordings.create("r")
        own = {"x-api-key": opened.api_key}
        path = "/recordings/r/v1/messages"
        assert (await http.post(path, json=body, headers=own)).json()["content"] == whole["content"]
        assert (await http.post("/v1/messages", json=body, headers=own)).status_code == 401
        assert (await recordings.close("r")).history[-1].content == "7"


def config_key(folder: Path) -> None:
    """Read the key from a job file into the trainer's optimiser."""
    import pytest
    import torch
    from dialoop.errors import InvalidConfig
    from dialoop_learning.optim import GuardedOptimizer
    from dialoop_services.config.file import load_config, toml_of
    from dialoop_services.runtime.settings import load
    from dialoop_services.trainer.learner.learner import optimizer_of
    from dialoop_services.trainer.settings import TrainerSettings

    path = _job_file(folder, ADAM_EPS)
    assert "\nadam_eps = 1e-06  # Number that" in toml_of(load_config(path, environment={}))
    settings = optimizer_of(load(TrainerSettings))
    optimizer = GuardedOptimizer([torch.nn.Parameter(torch.zeros(2))], settings)
    (adamw,) = optimizer.torch_optimizers
    assert adamw.param_groups[0]["eps"] == 1e-6
    path.write_text(ADAM_EPS.replace("1e-06", "-1.0"), encoding="utf-8")
    with pytest.raises(InvalidConfig, match="adam_eps"):
        load_config(path, environment={})


def loss(folder: Path) -> None:
    """Train one update with the loss that a job file names."""
    from dataclasses import replace

    import torch
    from dialoop.sequences import PolicyVersion, Source, sequence_of
    from dialoop_learning.loss.facts import facts_of
    from dialoop_learning.model.policy import load_policy
    from dialoop_learning.model.tiny import make_tiny_model
    from dialoop_learning.optim import GuardedOptimizer
    from dialoop_learning.packing.rows import TokenRow, pack_rows
    from dialoop_learning.training import update
    from dialoop_services.runtime.settings import load
    from dialoop_services.trainer.learner.learner import objective_of, optimizer_of
    from dialoop_services.trainer.settings import TrainerSettings

    torch.set_num_threads(1)
    _job_file(folder, TOPR)
    settings = load(TrainerSettings)
    assert settings.loss == "topr"
    assert not facts_of(settings.loss).divide_by_std

    version = PolicyVersion(lineage="main", number=0)
    parts = [([5, 6], {"source": Source.PROMPT})]
    parts += [([7, 8, 9], {"source": Source.MODEL, "policy_version": version})]
    sequence = sequence_of(parts, logprobs=[-1.0, -1.0, -1.0])
    rows = [TokenRow.from_sequence(replace(sequence, advantage=value)) for value in (1.0, -0.5)]
    policy = load_policy(make_tiny_model(folder / "model", seed=0))
    optimizer = GuardedOptimizer(policy.parameters(), optimizer_of(settings))
    before = policy(pack_rows(rows[:1]), temperature=1.0).logprobs.sum().item()
    report = update(policy, optimizer, [pack_rows(rows)], objective_of(settings))
    assert report.step.applied
    assert report.step.grad_norm > 0
    assert policy(pack_rows(rows[:1]), temperature=1.0).logprobs.sum().item() > before


def template_family(folder: Path) -> None:
    """Render with the template that is chosen for the family, and read the text back."""
    import tokenizers
    from dialoop import History, Message
    from dialoop.templates.registry import TemplateRegistry, named_template
    from dialoop.tokens.tokenizer import Tokenizer

    template = named_template("phi")
    talk = (Message(role="user", content="1+2?"), Message(role="assistant", content="3"))
    text = template.render(History(talk), add_generation_prompt=False)
    assert text == "<|user|>\n1+2?<|end|>\n<|assistant|>\n3<|end|>\n"
    assert tuple(template.parse(text)) == talk
    assert template.has_generation_blocks

    engines = (tokenizers.Tokenizer(tokenizers.models.BPE()) for _ in range(2))
    without_template = Tokenizer(*engines, {"name_or_path": "microsoft/Phi-4-mini-instruct"})
    assert TemplateRegistry().choose(without_template).name == "phi"


def engine(folder: Path) -> None:
    """Play with the engine that a config names, and score its tokens again."""
    asyncio.run(_play_with_engine())


async def _play_with_engine() -> None:
    from dialoop.sequences import Source
    from dialoop_ops.stack.in_process import in_process

    async with in_process({"engine": "plain_engine:PlainEngine"}) as services:
        assert (await services.inference.get_policy()).engine == "plain"
        task = await services.task("arithmetic", num_trajectories=2)
        first, second = (await services.play_group(task)).trajectories
        assert first.failures == second.failures == ()
        (sequence,) = second.sequences
        assert sequence.num_model_tokens
        async with asyncio.timeout(60):  # until the trainer's publish is loaded
            while (await services.inference.get_policy()).policy_version.lineage != "main":
                await asyncio.sleep(0.05)
        (scored,) = (await services.inference.logprobs([sequence.token_ids.tolist()])).logprobs
        sampled = [
            position
            for segment in sequence.segments
            if segment.source is Source.MODEL
            for position in range(segment.start, segment.start + segment.length)
        ]
        pairs = zip(sampled, sequence.inference_logprobs, strict=True)
        assert all(abs(scored[position - 1] - own) < 1e-4 for position, own in pairs)


def _job_file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    os.environ["DIALOOP_CONFIG"] = str(path)
    return path


EXAMPLES = (trajectory_field, rpc, wire, config_key, engine, loss, template_family)

if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    assert Path(dialoop.__file__).is_relative_to(folder), "another dialoop than the patched copy"
    for example in EXAMPLES:
        example(folder)
        os.environ.pop("DIALOOP_CONFIG", None)
