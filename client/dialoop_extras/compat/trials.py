"""Trials under the names and keys that MetaRLGym's users and their tests know."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.errors import DialoopWarning, InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop.chat import History
    from dialoop.tokens.tokenizer import Tokenizer

    from dialoop_extras.trials.agents import DirectOutputAgent
    from dialoop_extras.trials.game import Game
    from dialoop_extras.trials.trial import TrialResult


def trial_keys(result: TrialResult) -> dict[str, Any]:
    """Return every key of `run_trial` and its alias: ids, messages, mask, session_ids."""
    return {
        "full_token_ids": result.full_token_ids,
        "full_attention_mask": result.full_attention_mask,
        "completion_only_mask": result.completion_only_mask,
        "final_completion_messages": result.final_completion_messages,
        "session_ids": result.session_ids,
        "ids": result.full_token_ids,
        "messages": result.final_completion_messages,
        "mask": result.completion_only_mask,
    }


@dataclass(frozen=True, slots=True)
class OutputAgent:
    """MetaRLGym's DirectOutputAgent: the agent that answers with the policy's text.

    sampling_params: SamplingParams, or a mapping with names of vLLM or transformers. Without a
    tokenizer it takes that of the environment whose `run_trial` plays it.
    """

    llm: Any
    tokenizer: Any = None
    sampling_params: Any = None

    async def get_action(self, messages: History, state: Any) -> Any:
        """Sample one action, as `dialoop_extras.trials.DirectOutputAgent` does."""
        return await self.with_tokenizer(None).get_action(messages, state)

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> DirectOutputAgent:
        """Return the agent of this tokenizer, unless it has its own."""
        from dialoop.trajectory import SamplingParams

        from dialoop_extras.compat.sampling import read_generate_options
        from dialoop_extras.compat.wrappers import require_policy
        from dialoop_extras.trials.agents import DirectOutputAgent

        own = self.tokenizer or tokenizer
        if self.llm is None or own is None:
            raise InvalidConfig(
                "There is neither an agent, nor an llm with a tokenizer.",
                reason=Reason.BAD_OPTIONS,
                remedy="Give agent, or llm and the environment's tokenizer.",
            )
        require_policy(self.llm, "generate")
        sampling = self.sampling_params or SamplingParams()
        if not isinstance(sampling, SamplingParams):
            sampling = read_generate_options(dict(sampling)).sampling
        return DirectOutputAgent(self.llm, own, sampling)


@dataclass(slots=True)
class TrialEnvironment:
    """MetaRLGym's MultistepEnv over a game; `run_trial` blocks.

    Without a tokenizer the lists of tokens are empty. `result` is the last run's.
    """

    game: Game[Any]
    tokenizer: Tokenizer | None = field(default=None, kw_only=True)
    episodes_per_trial: int = field(default=1, kw_only=True)
    free_shots: int = field(default=0, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    result: TrialResult | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._options()

    def run_trial(
        self,
        inputs: Sequence[Mapping[str, Any]],
        llm: Any = None,
        sampling_params: Any = None,
        agent: Any = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Play one trial per input with the agent, or with one that samples from `llm`.

        llm: a policy, such as an InferenceClient. sampling_params: of `dialoop.SamplingParams`.
        `others` are taken, with a warning that nothing reads them.
        """
        if others:
            names = ", ".join(others)
            warnings.warn(f"run_trial does not use {names}.", DialoopWarning, stacklevel=2)
        from dialoop.clients.blocking.loop import BackgroundLoop

        from dialoop_extras.trials.trial import run_trial

        player = agent or OutputAgent(llm=llm, sampling_params=sampling_params)
        if isinstance(player, OutputAgent):
            player = player.with_tokenizer(self.tokenizer)
        with BackgroundLoop() as loop:
            work = run_trial(
                self.game, inputs, player, tokenizer=self.tokenizer, options=self._options()
            )
            self.result = loop.run(work)
        return trial_keys(self.result)

    def get_rubric(self) -> list[Any]:
        """Return the reward functions of the last run, called with completions, session_ids."""
        if self.result is None:
            raise InvalidConfig("No trial was run yet.", remedy="Call run_trial first.")
        return list(self.result.get_rubric())

    def _options(self) -> Any:
        from dialoop_extras.trials.trial import TrialOptions

        return TrialOptions(
            episodes_per_trial=self.episodes_per_trial, free_shots=self.free_shots, seed=self.seed
        )


def twenty_questions_env(
    *,
    tokenizer: Tokenizer | None = None,
    episodes_per_trial: int = 1,
    free_shots: int = 0,
    seed: int = 0,
    **game: Any,
) -> TrialEnvironment:
    """Return Twenty Questions; `game` are hardcore, max_turns, error_allowance and gamemaster."""
    from dialoop_extras.trials.twenty_questions import TwentyQuestions

    return TrialEnvironment(
        TwentyQuestions(**game),
        tokenizer=tokenizer,
        episodes_per_trial=episodes_per_trial,
        free_shots=free_shots,
        seed=seed,
    )
