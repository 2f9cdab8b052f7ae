"""torchrl's transforms by name and with its arguments, over `dialoop.environments`.

env = env.with_transforms(PythonInterpreter(persistent=True, timeout=5.0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dialoop.environments import thinking
from dialoop.environments.stamps import PolicyVersions, PolicyVersionStamp
from dialoop.environments.stamps import TemplateTransform as OwnTemplateTransform
from dialoop.environments.tasks import data_loading
from dialoop.environments.tools import python_interpreter as interpreter
from dialoop.environments.tools.function_tools import FunctionTool
from dialoop.environments.tools.mcp_tools import McpTools
from dialoop.environments.tools.tool_syntaxes import BlockCalls
from dialoop.environments.tools.tool_use import ToolUse
from dialoop.templates.options import choose_template

from dialoop_extras.browser import BrowserTools
from dialoop_extras.compat.arguments import require_neutral

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dialoop.environments.tools.tool_syntaxes import ToolSyntax
    from dialoop.environments.transform import Transform


class VersionStamp(PolicyVersionStamp):
    """torchrl's PolicyVersion: reports the policy's version, and counts it up.

    version_type: "int", from 0 on, or "uuid".
    """

    def __init__(self, version_type: str | type = "int") -> None:
        kind = "int" if version_type in ("int", int) else version_type
        self.versions = PolicyVersions(str(kind))
        super().__init__(self.versions)

    @property
    def version(self) -> int | str:
        """Return the current version: a number with "int", else a text."""
        current = self.versions.current
        return int(current) if current.isdecimal() else current

    def increment_version(self) -> None:
        """Count up once, after a whole update of the weights."""
        self.versions.advance()


def python_interpreter(
    tokenizer: Any = None,
    *,
    tool_name: str = "tool",
    persistent: bool = False,
    timeout: float = 10.0,
) -> Transform:
    """Return the transform that runs python blocks; the tokenizer has no use."""
    del tokenizer
    return interpreter.PythonInterpreter(
        tool_role=tool_name, persistent=persistent, timeout_s=timeout
    )


def mcp_tool_transform(
    servers: Mapping[str, Any],
    *,
    tokenizer: Any = None,
    tool_name: str = "tool",
    timeout: float = 10.0,
) -> Transform:
    """Return the transform that calls MCP servers' tools; the tokenizer has no use."""
    del tokenizer
    return McpTools(servers, role=tool_name, timeout_s=timeout)


def browser_transform(
    *,
    allowed_domains: Sequence[str],
    timeout: float = 30.0,
    tokenizer: Any = None,
    tool_name: str = "tool",
    **others: Any,
) -> Transform:
    """Return the transform that browses the allowed domains; the tokenizer has no use."""
    del tokenizer
    require_neutral("BrowserTransform", others)
    return BrowserTools(allowed_domains=list(allowed_domains), role=tool_name, timeout_s=timeout)


def simple_tool_transform(
    tools: Mapping[str, Callable[..., Any]],
    *,
    tokenizer: Any = None,
    tool_name: str = "tool",
    timeout: float = 10.0,
) -> Transform:
    """Return the transform that calls functions by `<tool>name` and JSON; it keeps its timeout."""
    del tokenizer
    return execute_tools_in_order(tools, BlockCalls(), tool_name=tool_name, timeout=timeout)


def execute_tools_in_order(
    registry: Mapping[str, Callable[..., Any]] | Sequence[Any],
    parser: ToolSyntax | None = None,
    *,
    stop_on_error: bool = False,
    tool_name: str = "tool",
    timeout: float = 10.0,
) -> Transform:
    """Return the transform that runs the calls of a message in their order."""
    named = hasattr(registry, "items")
    tools: list[Any] = (
        [FunctionTool(function, name=name) for name, function in registry.items()]  # type: ignore[union-attr]
        if named
        else list(registry)
    )
    return ToolUse(
        tools, syntax=parser, role=tool_name, timeout_s=timeout, stop_on_error=stop_on_error
    )


def data_loading_primer(
    dataloader: Any = None,
    *,
    dataloader_factory: Callable[[], Any] | None = None,
    repeats: int | None = None,
    group_repeats: bool = False,
    **others: Any,
) -> data_loading.DataLoadingPrimer:
    """Return the transform that loads the next task; the rows are read once and keep their order.

    dataloader: rows, a task source, or a torch DataLoader of rows.
    """
    require_neutral("DataLoadingPrimer", others)
    return data_loading.DataLoadingPrimer(
        dataloader, factory=dataloader_factory, repeats=repeats or 1, group_repeats=group_repeats
    )


def add_thinking_prompt(  # noqa: PLR0913 - the source's arguments
    cond: Callable[[Any], bool],
    prompt: str | Sequence[str] | None = None,
    *,
    random_prompt: bool = False,
    role: str = "assistant",
    edit_last_turn: bool = True,
    zero_reward: bool | None = None,
    undo_done: bool = True,
    tokenizer: Any = None,
) -> Transform:
    """Return the transform that asks for more thought; `cond` is given the Episode."""
    del tokenizer
    return thinking.AddThinkingPrompt(
        cond,
        prompt=prompt or "",
        random_prompt=random_prompt,
        role=role,
        edit_last_turn=edit_last_turn,
        zero_reward=zero_reward,
        undo_done=undo_done,
    )


def template_transform(
    tokenizer: Any = None,
    *,
    chat_template_name: str | None = None,
    add_generation_prompt: bool = True,
) -> Transform:
    """Return the transform that shows each prompt as text; a name comes before the tokenizer."""
    template = choose_template(tokenizer, chat_template_name=chat_template_name)
    return OwnTemplateTransform(template, add_generation_prompt=add_generation_prompt)
