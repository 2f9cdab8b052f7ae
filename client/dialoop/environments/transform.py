"""The base class of transforms; an ordered list of them makes an environment.

class Hint(Transform):
    async def step(self, outcome: Outcome) -> Outcome:
        if outcome.episode.done:
            return outcome
        return outcome.append(Message(role="user", content="Think again."))
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field

from dialoop.answers import AnswerForm
from dialoop.chat import Message, ToolDefinition
from dialoop.environments.episode import Episode, Opening, Outcome, Score
from dialoop.environments.modes import RewardShape
from dialoop.environments.tasks.source import TaskSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts of an environment or a transform: Traits(max_turns=3, stop=("<call>",))."""

    max_turns: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    reward_names: tuple[str, ...] = ()
    # Roles of the messages it adds; the policy's role may not be among them.
    roles: tuple[str, ...] = ()
    # Whose reward `score` returns: the episode's (SPARSE, once it is over) or the last step's.
    reward_shape: RewardShape = RewardShape.SPARSE
    # Definitions of its tools, for callers.
    tool_definitions: tuple[ToolDefinition, ...] = ()
    # Those of them that the chat template shows the policy, who calls them in its own syntax.
    prompt_tools: tuple[ToolDefinition, ...] = ()
    # Whether there are such tools; what they are may be known only once it is acquired.
    needs_tool_template: bool = False
    # Grammar in which it reads calls of the policy's own syntax; "" where it reads none, or those
    # of any model.
    call_grammar: str = ""
    # Whether it reads or writes messages, which text and tokens mode do not send.
    needs_messages: bool = False
    # Whether it reads token ids, which only tokens mode has.
    needs_tokens: bool = False
    # Whether it remembers more than the messages hold, so that a step needs its session.
    needs_session: bool = False
    # Further facts, such as {"sandbox": "bubblewrap"}.
    facts: Mapping[str, str] = field(default_factory=dict)

    def join(self, other: Traits) -> Traits:
        """Return both together: the lower limit and everything that either one adds."""
        limits = [limit for limit in (self.max_turns, other.max_turns) if limit]
        return Traits(
            max_turns=min(limits, default=0),
            stop=tuple(dict.fromkeys(self.stop + other.stop)),
            tools=tuple(dict.fromkeys(self.tools + other.tools)),
            reward_names=tuple(dict.fromkeys(self.reward_names + other.reward_names)),
            roles=tuple(dict.fromkeys(self.roles + other.roles)),
            reward_shape=max(self.reward_shape, other.reward_shape),
            tool_definitions=self.tool_definitions + other.tool_definitions,
            prompt_tools=self.prompt_tools + other.prompt_tools,
            needs_tool_template=self.needs_tool_template or other.needs_tool_template,
            call_grammar=self.call_grammar or other.call_grammar,
            needs_messages=self.needs_messages or other.needs_messages,
            needs_tokens=self.needs_tokens or other.needs_tokens,
            needs_session=self.needs_session or other.needs_session,
            facts={**self.facts, **other.facts},
        )


class Transform:
    """One thing that an environment does; methods that you do not override change nothing.

    One transform serves all episodes at once, so keep what belongs to an episode in its `state`, by
    `remember`. Take what the whole service shares (a connection, a pool) in `acquire` and give it
    back in `release`. Free what one episode holds in `close`.
    """

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """Return what this transform adds to the environment's description."""
        return Traits()

    def bound_to(self, form: AnswerForm) -> Transform:
        """Return this transform for a model that writes its answers in this form."""
        return self

    def reset(self, opening: Opening) -> Opening:
        """Return the opening, perhaps changed."""
        return opening

    async def step(self, outcome: Outcome) -> Outcome:
        """Answer the policy's response: add messages, end the episode, remember something."""
        return outcome

    async def score(self, episode: Episode) -> Score:
        """Give rewards; called after each step, and again to score a stored trajectory.

        An episode's reward is the sum of what its steps return. With the traits' `reward_shape`
        SPARSE, the reward is the episode's: return it only when `episode.done`. With TURN or DENSE,
        it is the reward of the last step alone, never a sum over steps. ChatEnv makes a SPARSE
        reward before the end a failure (REWARD_BEFORE_END), since it would count at each step.
        """
        return Score()

    def sample_calls(self, role: str) -> tuple[Message, ...]:
        """Return messages of the policy that call its tools, each once, for `dialoop env check`."""
        return ()

    def rehearse(self, tasks: TaskSource) -> None:
        """Raise InvalidConfig for what would fail in episodes; `dialoop config check` asks it."""

    async def acquire(self) -> None:
        """Take what is needed before the first episode; on an error the service does not start."""

    async def release(self) -> None:
        """Give back what `acquire` took, after the last episode."""

    def snapshot(self, episode: Episode) -> bytes | Awaitable[bytes]:
        """Return what it holds of the episode beside the `state`, for redo = "snapshot"."""
        return b""

    def restore(self, episode: Episode, snapshot: bytes) -> Episode | Awaitable[Episode]:
        """Return the episode, perhaps changed, holding for it what the snapshot says."""
        return episode

    async def close(self, episode: Episode) -> None:
        """Free what this episode holds; called once, when it or its session is over."""

    def problem(self) -> str:
        """Return why it cannot work at the moment, as /readyz shows it, or an empty text."""
        return ""
