r"""The transform that runs the Python a policy writes, in a sandbox.

The policy's message "```python\nprint(2 ** 2)\n```" is answered by a message of role `tool`:
"Code block 1 executed successfully:\n4\n".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dialoop.chat import Message
from dialoop.environments.episode import Episode, Opening, Outcome
from dialoop.environments.failures import failure_of
from dialoop.environments.tools.code_blocks import python_blocks
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.sandbox import Execution, PersistentInterpreter, Sandbox
from dialoop.trajectory import Owner

_STATE = "python_interpreter"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonInterpreter(Transform):
    """Run each Python block of the policy's message and append one message per block.

    `persistent`: one interpreter per episode, which remembers from block to block. Give several
    transforms one `sandbox` to share its limits. Code that fails or times out is the policy's
    doing and answered; a sandbox that fails ends the episode as an error of the tool.
    """

    sandbox: Sandbox = field(default_factory=Sandbox)
    persistent: bool = False
    timeout_s: float = 10.0
    tool_role: str = "tool"
    max_blocks: int = 8

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.max_blocks < 1 or not self.tool_role:
            raise InvalidConfig(
                "PythonInterpreter has no time, no block or no role.",
                remedy="Set timeout_s and max_blocks above 0, and tool_role to a role's name.",
            )

    @property
    def traits(self) -> Traits:
        """Its role, and the sandbox's level and what that denies."""
        isolation = self.sandbox.isolation
        return Traits(
            roles=(self.tool_role,),
            tools=("python",),
            needs_messages=True,
            needs_session=self.persistent,
            facts={"sandbox": isolation.level, "sandbox_denies": ", ".join(isolation.denies)},
        )

    def reset(self, opening: Opening) -> Opening:
        """A fresh interpreter for this episode, which starts with its first block."""
        if not self.persistent:
            return opening
        return opening.remember(**{_STATE: self.sandbox.interpreter()})

    async def step(self, outcome: Outcome) -> Outcome:
        """Run the blocks in order; a failing one does not keep the next from running."""
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
        """End this episode's interpreter; no other's."""
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
