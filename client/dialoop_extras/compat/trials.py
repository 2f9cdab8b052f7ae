"""Trials under the names and keys that MetaRLGym's users and their tests know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dialoop.tokens.tokenizer import Tokenizer

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
    ) -> dict[str, Any]:
        """Play one trial per input with the agent, or with one that samples from `llm`.

        llm: a policy, such as an InferenceClient. sampling_params: of `dialoop.SamplingParams`.
        """
        from dialoop.clients.blocking.loop import BackgroundLoop

        from dialoop_extras.trials.trial import run_trial

        player = agent or self._agent(llm, sampling_params)
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

    def _agent(self, llm: Any, sampling_params: Any) -> Any:
        """Return the agent that answers with the policy's text."""
        from dialoop.trajectory import SamplingParams

        from dialoop_extras.trials.agents import DirectOutputAgent

        if llm is None or self.tokenizer is None:
            raise InvalidConfig(
                "There is neither an agent, nor an llm with a tokenizer.",
                reason=Reason.BAD_OPTIONS,
                remedy="Give agent, or llm and the environment's tokenizer.",
            )
        return DirectOutputAgent(llm, self.tokenizer, sampling_params or SamplingParams())


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
