"""What turns the blank canvas into an environment: an ordered list of small transforms.

class Hint(Transform):
    async def step(self, outcome: Outcome) -> Outcome:
        if outcome.episode.done:
            return outcome
        return outcome.append(Message(role="user", content="Think again."))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dialoop.chat import ToolDefinition
from dialoop.environments.episode import Episode, Opening, Outcome, Score
from dialoop.environments.modes import RewardShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What others want to know of an environment: Traits(max_turns=3, stop=("<call>",))."""

    max_turns: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    reward_names: tuple[str, ...] = ()
    # Roles of the messages it adds; none may be the policy's.
    roles: tuple[str, ...] = ()
    # The finest of its rewards.
    reward_shape: RewardShape = RewardShape.SPARSE
    # The arguments of its tools, for the chat template and for callers.
    tool_definitions: tuple[ToolDefinition, ...] = ()
    # It reads or writes messages, which text and tokens mode do not send.
    needs_messages: bool = False
    # It reads token ids, which tokens mode alone has.
    needs_tokens: bool = False
    # It remembers more than the messages tell, so that a step needs its session.
    needs_session: bool = False
    # Further facts, as {"sandbox": "bubblewrap"}.
    facts: Mapping[str, str] = field(default_factory=dict)

    def joined(self, other: Traits) -> Traits:
        """Both together: the lower limit and everything either one adds."""
        limits = [limit for limit in (self.max_turns, other.max_turns) if limit]
        return Traits(
            max_turns=min(limits, default=0),
            stop=tuple(dict.fromkeys(self.stop + other.stop)),
            tools=tuple(dict.fromkeys(self.tools + other.tools)),
            reward_names=tuple(dict.fromkeys(self.reward_names + other.reward_names)),
            roles=tuple(dict.fromkeys(self.roles + other.roles)),
            reward_shape=max(self.reward_shape, other.reward_shape),
            tool_definitions=self.tool_definitions + other.tool_definitions,
            needs_messages=self.needs_messages or other.needs_messages,
            needs_tokens=self.needs_tokens or other.needs_tokens,
            needs_session=self.needs_session or other.needs_session,
            facts={**self.facts, **other.facts},
        )


class Transform:
    """One thing an environment does; override what is needed, the rest changes nothing.

    One transform serves all episodes at once: what belongs to an episode lies in its `state`, by
    `remember`. A transform that owns something for the whole service (a connection, a pool) takes
    it in `acquire` and gives it back in `release`; what belongs to one episode it frees in `close`.
    """

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """What this transform adds to the environment's description."""
        return Traits()

    def reset(self, opening: Opening) -> Opening:
        """Change how an episode opens."""
        return opening

    async def step(self, outcome: Outcome) -> Outcome:
        """Answer the policy's response: add messages, end the episode, remember something."""
        return outcome

    async def score(self, episode: Episode) -> Score:
        """Give rewards; asked after all steps, and again when a trajectory is scored later."""
        return Score()

    async def acquire(self) -> None:
        """Take what is needed before the first episode; an error here keeps the service down."""

    async def release(self) -> None:
        """Give it back after the last episode."""

    async def close(self, episode: Episode) -> None:
        """Free what this episode holds: it is over, or its session is. Called once, at its end."""

    def problem(self) -> str:
        """Why it cannot work at the moment, as /readyz says it; empty while all is well."""
        return ""
