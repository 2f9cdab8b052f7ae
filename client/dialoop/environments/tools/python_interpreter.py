r"""The transform that runs the policy's Python code in a sandbox.

It answers the policy's message "```python\nprint(2 ** 2)\n```" with a message of role `tool`:
"Code block 1 executed successfully:\n4\n".
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field, replace

from dialoop.chat import Message
from dialoop.environments.episode import Episode, Opening, Outcome
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.failures import failure_of
from dialoop.sandbox import Execution, PersistentInterpreter, Sandbox
from dialoop.trajectory import Owner

_STATE = "python_interpreter"
_FENCE = "```"
_FENCE_START = re.compile(rf"{_FENCE}(?:python3?|py)[ \t]*\r?\n", re.IGNORECASE)
# A fence that ends a line: alone on it, or after the last line of code.
_FENCE_END = re.compile(rf"^(?P<before>[^\n]*?){_FENCE}[ \t]*\r?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonInterpreter(Transform):
    """Run each Python block of the policy's message and append one message per block.

    If `persistent`, each episode has one interpreter, which keeps its variables from block to
    block. Transforms with the same `sandbox` share its limits. If the code fails or times out, the
    answer says so; if the sandbox fails, the episode ends as an error of the tool.
    """

    sandbox: Sandbox = field(default_factory=Sandbox)
    persistent: bool = False
    timeout_s: float = 10.0
    tool_role: str = "tool"
    max_blocks: int = 8

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.max_blocks < 1 or not self.tool_role:
            raise InvalidConfig(
                "`timeout_s` or `max_blocks` of PythonInterpreter is not above 0, or `tool_role` "
                "is empty.",
                remedy="Set timeout_s and max_blocks above 0, and tool_role to a role's name.",
            )

    @property
    def traits(self) -> Traits:
        """Return its role, and the sandbox's level with what that level denies."""
        isolation = self.sandbox.isolation
        return Traits(
            roles=(self.tool_role,),
            tools=("python",),
            needs_messages=True,
            needs_session=self.persistent,
            facts={"sandbox": isolation.level, "sandbox_denies": ", ".join(isolation.denies)},
        )

    def sample_calls(self, role: str) -> tuple[Message, ...]:
        """Return a message with a block of Python."""
        return (Message(role=role, content="```python\nprint(1)\n```"),)

    def reset(self, opening: Opening) -> Opening:
        """Remember an interpreter for this episode; it starts with the first block."""
        if not self.persistent:
            return opening
        return opening.remember(**{_STATE: self.sandbox.interpreter()})

    async def step(self, outcome: Outcome) -> Outcome:
        """Run the blocks in order, also after one that fails."""
        if outcome.episode.done:
            return outcome
        for index, code in enumerate(python_blocks(outcome.episode.answer_text)):
            if index == self.max_blocks:
                text = f"Only the first {self.max_blocks} code blocks were run."
                return outcome.append(Message(role=self.tool_role, content=text))
            outcome = replace(outcome, num_tool_calls=outcome.num_tool_calls + 1)
            try:
                execution = await self._run(outcome.episode, code)
            except DialoopError as error:
                failure = failure_of(
                    error, owner=Owner.TOOL, reason=error.reason, what="The Python sandbox"
                )
                return outcome.fail(failure)
            outcome = outcome.append(self._message(index + 1, execution))
        return outcome

    async def acquire(self) -> None:
        """Start the sandbox before the first episode needs it."""
        await self.sandbox.start()

    async def release(self) -> None:
        """End the sandbox and all its interpreters."""
        await self.sandbox.close()

    async def close(self, episode: Episode) -> None:
        """End this episode's interpreter."""
        interpreter = episode.state.get(_STATE)
        if isinstance(interpreter, PersistentInterpreter):
            await interpreter.close()

    async def _run(self, episode: Episode, code: str) -> Execution:
        interpreter = episode.state.get(_STATE)
        runner = interpreter if isinstance(interpreter, PersistentInterpreter) else self.sandbox
        return await runner.run(code, timeout_s=self.timeout_s)

    def _message(self, number: int, execution: Execution) -> Message:
        if execution.succeeded:
            text = f"Code block {number} executed successfully:\n{execution.stdout}"
        else:
            text = f"Code block {number} failed:\n{execution.stderr}"
        return Message(role=self.tool_role, content=text)


def python_blocks(text: str) -> tuple[str, ...]:
    r"""Return the code of each closed ```python or ```py block, in order.

    python_blocks("So:\n```python\nprint(1)\n```\n")      # ("print(1)\n",)

    CRLF, blanks after the fences, and a closing fence at the end of a line of code are allowed. A
    fence that is indented deeper than the block's own (in a docstring) does not close the block.
    """
    blocks, position = [], 0
    while opening := _FENCE_START.search(text, position):
        following = _FENCE_START.search(text, opening.end())
        region_end = following.start() if following else len(text)
        before = text[text.rfind("\n", 0, opening.start()) + 1 : opening.start()]
        indent = len(before) if not before.strip() else 0
        end, position = _end_of_block(text, opening.end(), region_end, indent)
        if end < 0:
            position = opening.end()
            continue
        code = text[opening.end() : end].replace("\r\n", "\n")
        blocks.append(textwrap.dedent(code) if indent else code)
    return tuple(blocks)


def _end_of_block(text: str, start: int, region_end: int, indent: int) -> tuple[int, int]:
    """Return where the code ends and where to go on; -1 twice when nothing closes it."""
    region = text[start:region_end]
    for closing in _FENCE_END.finditer(region):
        before = closing["before"]
        alone = not before.strip()
        if alone and len(before) > indent:
            continue
        end = closing.start() if alone else closing.end("before")
        return start + end, start + closing.end()
    inline = region.find(_FENCE)
    return (start + inline, start + inline + len(_FENCE)) if inline >= 0 else (-1, -1)
