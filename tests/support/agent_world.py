"""A served replica with OpenAI's routes, engines that keep a log, and a tiny model with tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import torch
from dialoop.clients.channel import Channel
from dialoop.clients.recordings import RecordingClient
from dialoop.clients.retry import RetryPolicy
from dialoop.sequences import PolicyVersion, Source
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import StopReason
from dialoop.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from dialoop_learning.model.tiny import make_tiny_model, tiny_config
from dialoop_services.hosting.server import GrpcServer
from dialoop_services.inference.engine import BASE_VERSION, Sampled, TokenChunk, VersionSpan
from dialoop_services.inference.recordings.store import RecordingLimits, RecordingStore
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.servicer import InferenceServicer
from dialoop_services.inference.wires.base import WireHost
from dialoop_services.inference.wires.openai.routes import openai_routes
from dialoop_services.runtime.settings import ServerSettings
from transformers import Qwen2ForCausalLM

from tests.support.rest_world import NO_TLS
from tests.support.waiting import PATIENCE_S

SERVICE = "dialoop.v1.InferenceService"
MODEL = "tiny"
MAX_NEW_TOKENS = 160

# As Qwen's: tools in the system message, calls in <tool_call>, answers of tools in a user's turn.
TOOL_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{%- set arguments = call.function.arguments %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tool_model(directory: Path, *, max_positions: int = 2048, seed: int = 0) -> Path:
    """A tiny model whose template shows tools, with room for their schemas."""
    make_tiny_model(directory, seed=seed)
    config = tiny_config()
    config.max_position_embeddings = max_positions
    config.num_hidden_layers = 2
    config.layer_types = config.layer_types[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer |= {"chat_template": TOOL_TEMPLATE, "model_max_length": max_positions}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


def call_text(name: str, **arguments: object) -> str:
    """A tool call as the policy spells it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@dataclass
class Sampling:
    """One sample as it crossed the engine's boundary."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass
class ScriptedEngine:
    """Answers with the next text of its script, one token at a time; keeps a log.

    A number in the script is an answer that is as many tokens long and never ends, and a tuple is
    the answer's ids with its end; `gate` holds the tokens back, one permit each.
    """

    directory: Path
    script: list[str | int | tuple[int, ...]]
    gate: asyncio.Semaphore | None = None
    max_model_len: int = 2048
    name: str = "scripted"
    version: str = "1"
    log: list[Sampling] = field(default_factory=list)
    num_running: int = 0
    is_alive: bool = True
    policy_version: PolicyVersion = BASE_VERSION
    fails: Callable[[int], Exception | None] = lambda number: None

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_directory(self.directory)
        self.vocab_size = self._tokenizer.vocab_size

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1) -> tuple[Sampled, ...]:
        return await self._answers(prompt_ids, sampling, stop, num_samples, None)

    async def stream(self, prompt_ids, sampling, *, stop, on_tokens) -> Sampled:
        (sampled,) = await self._answers(prompt_ids, sampling, stop, 1, on_tokens)
        return sampled

    async def _answers(
        self, prompt_ids, sampling, stop, num_samples, on_tokens
    ) -> tuple[Sampled, ...]:
        answers = [self._next() for _ in range(num_samples)]
        self.num_running += 1
        try:
            error = self.fails(len(self.log))
            return tuple(
                [
                    await self._answer(tuple(prompt_ids), answer, sampling, stop, on_tokens, error)
                    for answer in answers
                ]
            )
        finally:
            self.num_running -= 1

    def _next(self) -> str | int | tuple[int, ...]:
        return self.script.pop(0) if self.script else "nothing"

    def _ids(self, answer: str | int | tuple[int, ...]) -> list[int]:
        if isinstance(answer, tuple):
            return list(answer)
        if isinstance(answer, int):
            return [65] * answer
        return [*self._tokenizer.encode(answer).ids, self._tokenizer.end_of_turn_ids[0]]

    async def _answer(self, prompt_ids, answer, sampling, stop, on_tokens, error) -> Sampled:
        logged = Sampling(prompt_ids, seed=sampling.seed)
        self.log.append(logged)
        ids = self._ids(answer)
        taken: list[int] = []
        stop_reason, stop_string = StopReason.LENGTH, ""
        for token in ids[: sampling.max_new_tokens]:
            if self.gate is not None:
                await self.gate.acquire()
            await asyncio.sleep(0)
            taken.append(token)
            logged.token_ids = tuple(taken)
            if on_tokens is not None:
                on_tokens(
                    TokenChunk(
                        token_ids=(token,), logprobs=(-0.5,), policy_version=self.policy_version
                    )
                )
            if error is not None:
                raise error
            text = self._tokenizer.decode(taken)
            stop_text = next((s for s in stop.strings if s in text), None)
            if token in stop.by_id or stop_text is not None:
                stop_reason = StopReason.STOP
                stop_string = stop.by_id.get(token, stop_text or "")
                break
        version = VersionSpan(start=0, length=len(taken), policy_version=self.policy_version)
        return Sampled(
            token_ids=tuple(taken),
            logprobs=tuple(-0.5 - 0.01 * i for i in range(len(taken)))
            if on_tokens is None
            else (-0.5,) * len(taken),
            versions=(version,),
            stop_reason=stop_reason,
            stop_string=stop_string,
        )


class LoggingEngine:
    """Any engine, with a log of what crossed its boundary."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.log: list[Sampling] = []

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def sample(self, prompt_ids: Sequence[int], *arguments, **options):
        sampled = await self._engine.sample(prompt_ids, *arguments, **options)
        self.log += [Sampling(tuple(prompt_ids), sample.token_ids) for sample in sampled]
        return sampled

    async def stream(self, prompt_ids: Sequence[int], *arguments, **options):
        sampled = await self._engine.stream(prompt_ids, *arguments, **options)
        self.log.append(Sampling(tuple(prompt_ids), sampled.token_ids))
        return sampled


@dataclass
class AgentWorld:
    """A replica that records, its clients and its engine."""

    url: str
    engine: object
    store: RecordingStore
    recordings: RecordingClient
    channel: Channel
    http: httpx.AsyncClient
    replica: Replica
    tokenizer: Tokenizer
    exits: AsyncExitStack
    token: str = ""

    def client(self, recording_id: str = "", **options) -> openai.AsyncOpenAI:
        """The official client, at the plain or the recording URL."""
        prefix = f"/recordings/{recording_id}" if recording_id else ""
        values = {"api_key": self.token or "any", "max_retries": 0} | options
        client = openai.AsyncOpenAI(base_url=f"{self.url}{prefix}/v1", **values)
        self.exits.push_async_callback(client.close)
        return client

    async def start_recording(self, recording_id: str = "r", **options) -> openai.AsyncOpenAI:
        """The official client at a new recording."""
        await self.recordings.create(recording_id, **options)
        return self.client(recording_id)

    async def post(self, path: str, body: object, **options) -> httpx.Response:
        """A request by hand."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return await self.http.post(self.url + path, content=content, headers=headers, **options)


@asynccontextmanager
async def agent_world(
    directory: Path,
    engine,
    *,
    limits: RecordingLimits | None = None,
    clock: Callable[[], float] | None = None,
    **settings,
) -> AsyncIterator[AgentWorld]:
    """Serve an engine at both doors."""
    token = settings.get("token", "")
    server = GrpcServer(ServerSettings(port=0, rest_port=0, **{"drain_s": 1} | settings))

    async def report(serving: bool) -> None:
        await server.set_serving(serving, SERVICE)

    replica = Replica(engine, weights_root=None, report=report)
    renderer = Renderer.of(directory)
    store = RecordingStore(limits or RecordingLimits(), **({"clock": clock} if clock else {}))
    servicer = InferenceServicer(
        replica, renderer, num_parameters=7, max_new_tokens=MAX_NEW_TOKENS, store=store
    )
    server.add(add_InferenceServiceServicer_to_server, servicer, SERVICE)
    host = WireHost(
        replica=replica,
        renderer=renderer,
        store=store,
        model_name=MODEL,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    for route in openai_routes(host):
        server.add_route(route)
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(server)
        once = RetryPolicy(max_attempts=1)
        channel = await exits.enter_async_context(Channel(server.address, retry=once, token=token))
        url = f"http://{server.rest_address}"
        yield AgentWorld(
            url=url,
            engine=engine,
            store=store,
            recordings=RecordingClient(channel, rest_url=url),
            channel=channel,
            http=await exits.enter_async_context(
                httpx.AsyncClient(timeout=PATIENCE_S, verify=NO_TLS)
            ),
            replica=replica,
            tokenizer=renderer.tokenizer,
            exits=exits,
            token=token,
        )


USER = {"role": "user", "content": "What is 3+4?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def sampled_ids(trajectory) -> list[tuple[int, ...]]:
    """The runs of sampled tokens of all sequences."""
    return [
        tuple(sequence.token_ids[segment.start : segment.end].tolist())
        for sequence in trajectory.sequences
        for segment in sequence.segments
        if segment.source is Source.MODEL
    ]


def require_owned_once(trajectory, engine) -> None:
    """What the engine sampled stands in the trajectory, all of it once."""
    assert sorted(sampled_ids(trajectory)) == sorted(s.token_ids for s in engine.log)


async def ask(client, messages, **options):
    values = {"model": "any", "messages": messages} | options
    return await client.chat.completions.create(**values)


async def answer_to(client, messages, **options):
    return (await ask(client, messages, **options)).choices[0].message
