"""Text environments without their policy, which authors write and services load by name.

capitals = TextSetup(name="capitals", tools=[lookup], reward=each(exact), prompt=SHOTS)
DIALOOP_ENVIRONMENT_TEXT_ENVIRONMENTS=calculator,my_folder.capitals:capitals
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.environments.loading import make_environment
from dialoop.environments.tools.calculator import Calculator
from dialoop.environments.tools.call_syntax import CallSyntax
from dialoop.environments.tools.text_tools import ToolFunction
from dialoop.errors import InvalidConfig
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.text_environment.environment import Reward, TextEnvironment, TextLimits, each

if TYPE_CHECKING:
    from dialoop.text_environment.environment import TextPolicy
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import SamplingParams

_SHOTS = """\
What is 13-3?
<request><Calculator>13-3<call>10<response>Result=10<submit>
What is 4*5?
<request><Calculator>4*5<call>20<response>Result=20<submit>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSetup:
    """The parts of a TextEnvironment except a policy and its tokenizer."""

    name: str
    tools: Mapping[str, ToolFunction] | Sequence[ToolFunction] | None = None
    reward: Reward | None = None
    prompt: str = ""
    limits: TextLimits = field(default_factory=TextLimits)
    syntax: CallSyntax = field(default_factory=CallSyntax)
    description: str = ""

    def on(
        self,
        policy: TextPolicy,
        tokenizer: Tokenizer,
        *,
        sampling: SamplingParams,
        kind: type[TextEnvironment] = TextEnvironment,
    ) -> TextEnvironment:
        """Make the environment; `kind` may be a subclass, such as `dialoop.compat.trl_text`'s."""
        return kind(
            policy,
            tokenizer,
            tools=self.tools,
            reward=self.reward,
            prompt=self.prompt,
            limits=self.limits,
            sampling=sampling,
            syntax=self.syntax,
        )


def calculator() -> TextSetup:
    """Return the built-in `calculator`; rewards compare with `answers`, one per query."""
    return TextSetup(
        name="calculator",
        tools=[Calculator()],
        reward=each(exact_result),
        prompt=_SHOTS,
        description="Arithmetic in a running text, with a calculator.",
    )


def exact_result(text: str, answers: str) -> float:
    """Return 1 when the text holds `Result=<answer><submit>`, else 0."""
    result = text.partition("Result=")[2].partition("<submit>")[0]
    return float(result.strip() == str(answers).strip())


def load_text_setup(use: str, options: Mapping[str, Any] | None = None) -> TextSetup:
    """Return the setup `calculator`, or the one at `module:attribute`, or made by that function.

    Raise InvalidConfig when it is not a TextSetup.
    """
    target = {"calculator": calculator}.get(use) or load_attribute(
        use,
        what="text environment",
        reason=Reason.ENVIRONMENT_NOT_FOUND,
        built_in=["calculator"],
    )
    setup = make_environment(target, dict(options or {}), use)
    if not isinstance(setup, TextSetup):
        raise InvalidConfig(
            f"{use} is not a text environment.",
            reason=Reason.NOT_A_TEXT_ENVIRONMENT,
            remedy="Name a TextSetup, or a function that returns one.",
        )
    return setup
