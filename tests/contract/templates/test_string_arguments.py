"""Arguments of a call mean the same at every server, whatever text they are."""

from __future__ import annotations

from typing import Any

import pytest
from dialoop.chat import History
from dialoop.clients.inference import InferenceClient
from dialoop.errors import DialoopError
from dialoop.v1 import template_service_pb2 as pb
from dialoop.wire.messages import HISTORY
from dialoop.wire.sequences import sequence_from_proto
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.template_servicer import TemplateServicer

from tests.support.agent_world import MODEL, AgentWorld, ScriptedEngine, agent_world
from tests.support.families import family

NAMES = ("qwen3", "qwen2_5", "llama3_1", "mistral", "deepseek_v3", "glm4_5", "kimi_k2", "gpt_oss")
OBJECTS = ('{"b": 2, "a": "é"}', '{"b":2,"a":"\\u00e9"}', '{"a": {"c": [1.50, null]}}', "{}")
OTHERS = ("not json", '{"a": 1', "", "[1]", "null", '"text"', '"{\\"a\\": 1}"')


def talk(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call12345", "type": "function"}
    call["function"] = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "call12345"},
    ]


def as_proto_json(chats: list[dict[str, Any]]) -> dict[str, Any]:
    """The conversation as REST takes it."""
    messages = []
    for chat in chats:
        calls = [
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "arguments_json": call["function"]["arguments"],
            }
            for call in chat.get("tool_calls", ())
        ]
        messages.append({**chat, "tool_calls": calls})
    return {"prompt": {"messages": messages}}


async def outcomes(world: AgentWorld, engine: ScriptedEngine, arguments: str) -> list[Any]:
    """The tokens of the prompt, or the reason of the refusal, at each server."""
    chats = talk(arguments)
    history = HISTORY.to_proto(History.from_chats(chats))
    rendering = TemplateServicer(
        Renderer.of(engine.directory), MODEL, max_model_len=engine.max_model_len
    ).Render(
        pb.RenderRequest(history=history),
        None,  # type: ignore[arg-type]
    )
    found: list[Any] = []
    for asking in (
        world.post("/v1/chat/completions", {"model": MODEL, "messages": chats}),
        world.post("/v1/generate", {"history": as_proto_json(chats)}),
        InferenceClient(world.channel).generate(chats),
        rendering,
    ):
        engine.log.clear()
        try:
            answer: Any = await asking
        except DialoopError as error:
            found.append(error.reason)
            continue
        if isinstance(answer, pb.RenderResponse):
            found.append(sequence_from_proto(answer.sequence).token_ids.tolist())
        elif engine.log:
            found.append(list(engine.log[-1].prompt_ids))
        else:
            document = answer.json()
            found.append((document.get("reason") or document["error"]["code"]).upper())
    return found


@pytest.mark.parametrize("name", NAMES)
async def test_arguments_mean_the_same_at_every_server(name: str) -> None:
    directory = family(name).directory
    engine = ScriptedEngine(directory, [])
    async with agent_world(directory, engine) as world:
        for arguments in (*OBJECTS, *OTHERS):
            first, *others = await outcomes(world, engine, arguments)
            assert all(other == first for other in others), (arguments, first, others)
