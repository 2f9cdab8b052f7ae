"""Ask the policy to think again before its episode ends.

AddThinkingPrompt(lambda episode: not is_right(episode))          # edits the policy's last message
AddThinkingPrompt(unsure, role="user")                            # adds a user message

Place it after the transforms that end the episode and before the rewards.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from dialoop.chat import History, Message
from dialoop.environments.episode import Episode, Outcome
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.user_functions import call

_ANSWER = re.compile(r"<answer>(?:(?!<answer>).)*?</answer>", re.DOTALL)
_PROMPTS = {
    "assistant": (
        "But wait, let me think about this more carefully before I answer.",
        "Let me check this answer once more, step by step.",
        "Hold on. I should look for a mistake in what I did so far.",
    ),
    "user": (
        "Think about it more carefully before you answer.",
        "Check your answer once more, step by step.",
        "Look for a mistake in what you did so far.",
    ),
}


class AddThinkingPrompt(Transform):
    """Ask for more thought when `condition` holds, and let the episode go on.

    `edit_last_turn` (for role "assistant" only) replaces the last answer block of the policy's
    message by the prompt, or appends the prompt when there is no block. The policy did not sample
    the edited message, so its tokens fork into a new sequence in which none of it is trained. With
    `zero_reward` (default: when editing) this step gets no reward; else its rewards read the
    message as the policy sent it. Without `edit_last_turn` the prompt is a message of its own, of
    the user or of the assistant; none of it is trained. `undo_done` reopens the episode. It asks at
    most `max_times` per episode. `condition` may be async, and has `timeout_s` seconds.
    """

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        condition: Callable[[Episode], bool | Awaitable[bool]],
        *,
        prompt: str | Sequence[str] = "",
        role: str = "assistant",
        edit_last_turn: bool | None = None,
        random_prompt: bool = False,
        zero_reward: bool | None = None,
        undo_done: bool = True,
        max_times: int = 1,
        timeout_s: float = 30.0,
    ) -> None:
        if role not in _PROMPTS:
            raise InvalidConfig(f"role is '{role}'.", remedy="Choose 'assistant' or 'user'.")
        edits = role == "assistant" if edit_last_turn is None else edit_last_turn
        if edits and role != "assistant":
            raise InvalidConfig(
                f"edit_last_turn edits the policy's message, but role is '{role}'.",
                remedy='Use role="assistant", or edit_last_turn=False.',
            )
        self._condition = condition
        prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
        self._prompts = tuple(filter(None, prompts)) or _PROMPTS[role]
        self._role = role
        self._edits = edits
        self._random = random_prompt
        self._zero_reward = edits if zero_reward is None else zero_reward
        self._undo_done = undo_done
        self._max_times = max_times
        self._timeout_s = timeout_s

    @property
    def traits(self) -> Traits:
        """Return that it needs messages, and a session for the count of its prompts."""
        roles = (self._role,) if self._role == "user" else ()
        return Traits(needs_messages=True, needs_session=True, roles=roles)

    async def step(self, outcome: Outcome) -> Outcome:
        """Test the condition on the episode as the earlier transforms left it."""
        episode = outcome.episode
        num_prompts = episode.state.get("num_thinking_prompts", 0)
        if not outcome.is_scorable or num_prompts >= self._max_times or episode.answer is None:
            return outcome
        if not await call(self._condition, episode, timeout_s=self._timeout_s):
            return outcome
        outcome = self._add_prompt(outcome, self._prompt(episode))
        outcome = outcome.remember(num_thinking_prompts=num_prompts + 1)
        if self._undo_done:
            outcome = outcome.reopen()
        return replace(outcome, is_rewarded=outcome.is_rewarded and not self._zero_reward)

    def _prompt(self, episode: Episode) -> str:
        if not self._random:
            return self._prompts[0]
        return episode.rng("thinking").choice(self._prompts)

    def _add_prompt(self, outcome: Outcome, prompt: str) -> Outcome:
        if not self._edits:
            return outcome.append(Message(role=self._role, content=prompt))
        episode = outcome.episode
        answer = episode.answer
        assert answer is not None
        place = max(i for i, message in enumerate(episode.history) if message is answer)
        edited = replace(answer, content=_replace_answer(answer.text, prompt), is_complete=True)
        messages = list(episode.history)
        messages[place] = edited
        after = replace(episode, history=History(tuple(messages)), answer=edited)
        return replace(outcome, episode=after)


def _replace_answer(text: str, prompt: str) -> str:
    """Return the text with the prompt in place of its last answer block and what follows it."""
    blocks = list(_ANSWER.finditer(text))
    before = text[: blocks[-1].start()] if blocks else text
    return before.rstrip() + ("\n" if before.strip() else "") + prompt
