"""What is wrong with a chat history, and what it holds: for a failing policy or environment.

print(debug.check(chat_history))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dialoop.chat import ChatHistory, History

_POLICY_ROLE = "assistant"
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Problems in words; roles and contents of each part that is there, in its order."""

    problems: tuple[str, ...]
    roles: dict[str, tuple[str, ...]]
    contents: dict[str, tuple[str, ...]]

    @property
    def is_sound(self) -> bool:
        """Return whether there is no problem."""
        return not self.problems

    def __str__(self) -> str:
        lines = [f"problem: {problem}" for problem in self.problems] or ["no problem"]
        for part, roles in self.roles.items():
            lines.append(f"{part}: {len(roles)} messages")
            pairs = zip(roles, self.contents[part], strict=True)
            lines += [f"  {role}: {content[:_SHOWN]!r}" for role, content in pairs]
        return "\n".join(lines)


def check(chat_history: ChatHistory) -> Report:
    """Report where a policy's answer breaks the contract (full is prompt and response)."""
    parts: dict[str, History] = {
        name: part
        for name in ("prompt", "response", "full")
        if (part := getattr(chat_history, name)) is not None
    }
    return Report(
        problems=tuple(_problems(parts)),
        roles={name: tuple(m.role for m in part) for name, part in parts.items()},
        contents={name: tuple(m.text for m in part) for name, part in parts.items()},
    )


def _problems(parts: dict[str, History]) -> list[str]:
    problems: list[str] = []
    if "prompt" not in parts:
        problems.append("prompt is missing: reset the environment first.")
    if "full" not in parts:
        problems.append("full is missing: a policy must answer with prompt, response and full.")
    problems += [f"{name} has no messages." for name, part in parts.items() if not len(part)]
    full, prompt = parts.get("full"), parts.get("prompt")
    if full is not None and prompt is not None and not full.starts_with(prompt):
        problems.append("full does not begin with the messages of prompt.")
    for name in ("response", "full"):
        part = parts.get(name)
        if part is not None and len(part) and part[-1].role != _POLICY_ROLE:
            problems.append(f"{name} ends with role {part[-1].role}, not with {_POLICY_ROLE}.")
    for index, message in enumerate(full or ()):
        if not message.is_complete:
            problems.append(f"full[{index}] is incomplete: it was cut short.")
        is_empty = not (message.content or message.tool_calls or message.tool_responses)
        if is_empty:
            problems.append(f"full[{index}] of role {message.role} is empty.")
    return problems
