"""Two unmodified agents with tools, how they are shown what to say, and their warm start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import openai
import torch
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.optim import GuardedOptimizer, OptimizerSettings
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_learning.training import update
from safetensors.torch import load_file, save_file

from tests.support.agent_world import ScriptedEngine, agent_world, call_text

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")

QUESTION = "What is 3+4, times 5?"
ANSWER = "The answer is 35."
SCRIPT = [call_text("add", a=3, b=4), call_text("multiply", a=7, b=5), ANSWER]

_NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _NUMBERS}}
    for name in ("add", "multiply")
]


async def run_by_hand(client: openai.AsyncOpenAI, *, stream: bool = False) -> str:
    """A loop as OpenAI's documents show it, on the official client."""
    messages: list = [{"role": "user", "content": QUESTION}]
    for _ in range(5):
        request = {"model": "gpt-5", "messages": messages, "tools": TOOLS}
        message = await (_answer_streamed if stream else _answer_whole)(client, request)
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            numbers = json.loads(call["function"]["arguments"])
            a, b = numbers["a"], numbers["b"]
            value = a + b if call["function"]["name"] == "add" else a * b
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(value)})
    return ""


async def _answer_whole(client: openai.AsyncOpenAI, request: dict) -> dict:
    answer = await client.chat.completions.create(**request)
    return answer.choices[0].message.model_dump()


async def _answer_streamed(client: openai.AsyncOpenAI, request: dict) -> dict:
    async with client.chat.completions.stream(**request) as stream:
        answer = await stream.get_final_completion()
    message = answer.choices[0].message.model_dump()
    for call in message["tool_calls"] or []:
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    message.pop("parsed", None)
    return message


async def run_openai_agents(client: openai.AsyncOpenAI) -> str:
    """The same task for the openai-agents package."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        RunConfig,
        Runner,
        function_tool,
    )

    @function_tool
    def add(a: int, b: int) -> int:
        return a + b

    @function_tool
    def multiply(a: int, b: int) -> int:
        return a * b

    agent = Agent(
        name="calculator",
        instructions="Use the tools.",
        tools=[add, multiply],
        model=OpenAIChatCompletionsModel(model="gpt-5", openai_client=client),
    )
    result = await Runner.run(
        agent, QUESTION, max_turns=5, run_config=RunConfig(tracing_disabled=True)
    )
    return str(result.final_output)


AGENTS = {"by_hand": run_by_hand, "openai_agents": run_openai_agents}


async def demonstrations(directory: Path) -> list[TokenRow]:
    """What both agents and a model that knows the answers say to each other, as tokens."""
    rows = []
    engine = ScriptedEngine(directory, SCRIPT * len(AGENTS))
    async with agent_world(directory, engine) as world:
        for name, agent in AGENTS.items():
            assert await agent(await world.start_recording(name)) == ANSWER
            (sequence,) = (await world.recordings.close(name)).sequences
            mask = sequence.response_mask().tolist()
            rows.append(TokenRow.from_demonstration(sequence.token_ids.tolist(), mask))
    return rows


def warm_start(directory: Path, rows: list[TokenRow], *, num_steps: int) -> float:
    """Imitate the demonstrations; the model's weights are replaced, the last loss comes back."""
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two would wait for each other
    policy = load_policy(directory)
    optimizer = GuardedOptimizer(
        list(policy.parameters()),
        OptimizerSettings(learning_rate=3e-3, warmup_steps=5, total_steps=num_steps),
    )
    batch, objective, loss = pack_rows(rows), load_objective("sft"), 0.0
    for _ in range(num_steps):
        loss = update(policy, optimizer, [batch], objective).loss
    torch.set_num_threads(num_threads)
    tensors = {k: v.detach().contiguous() for k, v in policy.causal_lm.state_dict().items()}
    names = load_file(directory / "model.safetensors").keys()
    path = directory / "model.safetensors"
    save_file({name: tensors[name].clone() for name in names}, path, metadata={"format": "pt"})
    return loss
