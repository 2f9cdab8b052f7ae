"""What turns the blank canvas into an environment: an ordered list of small transforms.

class Hint(Transform):
    async def step(self, outcome: Outcome) -> Outcome:
        if outcome.episode.done:
            return outcome
        return outcome.append(Message(role="user", content="Think again."))
"""

from __future__ import annotations

from dataclasses import dataclass

from dialoop.environments.episode import Episode, Opening, Outcome, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What others want to know of an environment: Traits(max_turns=3, stop=("<call>",))."""

    max_turns: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    reward_names: tuple[str, ...] = ()
    # Roles of the messages it adds; none may be the policy's.
    roles: tuple[str, ...] = ()

    def joined(self, other: Traits) -> Traits:
        """Both together: the lower limit and everything either one adds."""
        limits = [limit for limit in (self.max_turns, other.max_turns) if limit]
        return Traits(
            max_turns=min(limits, default=0),
            stop=tuple(dict.fromkeys(self.stop + other.stop)),
            tools=tuple(dict.fromkeys(self.tools + other.tools)),
            reward_names=tuple(dict.fromkeys(self.reward_names + other.reward_names)),
            roles=tuple(dict.fromkeys(self.roles + other.roles)),
        )


class Transform:
    """One thing an environment does; override what is needed, the rest changes nothing."""

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
