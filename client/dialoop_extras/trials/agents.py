"""Agents for trials: one that samples from a policy, and one that reads from a script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.trajectory import SamplingParams, StopReason
from dialoop.user_functions import call

from dialoop_extras.trials.trial import Action

if TYPE_CHECKING:
    from dialoop.chat import History
    from dialoop.tokens.tokenizer import Tokenizer

    from dialoop_extras.text_environment.environment import TextPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """The ids of the running episode, and the number of messages that they cover."""

    token_ids: tuple[int, ...] = ()
    num_messages: int = 0


@dataclass(frozen=True, slots=True)
class DirectOutputAgent:
    """An agent that answers with the policy's continuation of the running tokens.

    Its prompts hold exactly the ids that it sampled, never their text encoded again.
    """

    policy: TextPolicy
    tokenizer: Tokenizer
    sampling: SamplingParams = field(default_factory=SamplingParams)

    async def get_action(self, messages: History, state: Any) -> Action:
        """Sample one action; a conversation of one message starts a new episode."""
        memory = state if isinstance(state, _Memory) and len(messages) > 1 else _Memory()
        new_text = "".join(message.text for message in messages[memory.num_messages :])
        prompt = (*memory.token_ids, *self.tokenizer.encode(new_text).ids)
        (sample,) = await call(
            self.policy.generate, token_ids=prompt, sampling=self.sampling, turn=len(messages) // 2
        )
        sampled = tuple(sample.sequence.token_ids[len(prompt) :].tolist())
        ends = bool(sampled) and sampled[-1] in self.tokenizer.end_of_turn_ids
        return Action(
            text=self.tokenizer.decode(sampled[:-1] if ends else sampled),
            state=_Memory(token_ids=prompt + sampled, num_messages=len(messages) + 1),
            is_context_full=not sampled and sample.stop_reason is StopReason.CONTEXT_FULL,
            token_ids=sampled,
            logprobs=tuple(sample.sequence.inference_logprobs.tolist()),
            versions=tuple(
                (s.length, s.policy_version)
                for s in sample.sequence.segments
                if s.policy_version is not None
            ),
        )


@dataclass(frozen=True, slots=True)
class ScriptedAgent:
    """An agent that answers with a script's lines in order, or with a function's results."""

    script: Sequence[str] | Callable[[History], str | Awaitable[str]]

    async def get_action(self, messages: History, state: Any) -> tuple[str, Any]:
        """Return the next line, or the last one again when the script is over."""
        if callable(self.script):
            return await call(self.script, messages), state
        number = state if isinstance(state, int) else 0
        return self.script[min(number, len(self.script) - 1)], number + 1
