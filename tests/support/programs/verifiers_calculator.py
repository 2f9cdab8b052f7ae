"""A verifiers environment: sums, a calculator as tool, and a harness that runs in this process."""

from __future__ import annotations

import json

import openai
import verifiers.v1 as vf

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State]):
    @vf.reward(weight=2.0)
    async def is_right(self, trace: vf.Trace) -> float:
        if self.data.answer == "broken":
            raise RuntimeError("secret text")
        return float(self.data.answer in (trace.last_message.content or ""))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for question, answer in (("What is 3+4?", "7"), ("What is 2+2?", "4"), ("?", "broken")):
            yield SumTask(SumData(prompt=question, answer=answer), self.config.task)


class CallingHarnessConfig(vf.HarnessConfig):
    pass


class CallingHarness(vf.Harness[CallingHarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        async with client:
            for _ in range(4):
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[TOOL]
                )
                message = answer.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    arguments = json.loads(call["function"]["arguments"])
                    content = str(arguments["a"] + arguments["b"])
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["CallingHarness", "SumTaskset"]
