"""Players of a collector's tasks: as trials of a game, or as text episodes, by token ids.

The game, the tools and the reward run in the collector, as agents do. The environment service
offers the tasks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dialoop.environments import load_environment
from dialoop.environments.modes import InputMode
from dialoop.errors import InvalidConfig, Unsupported
from dialoop.failures import error_of
from dialoop.import_paths import load_attribute
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ended_as_written
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import Owner, Trajectory

from dialoop_extras.games import game_of, inputs_of
from dialoop_extras.text_environment.playing import play_text
from dialoop_extras.text_environment.setups import TextModeEnvironment
from dialoop_extras.trials.agents import DirectOutputAgent
from dialoop_extras.trials.playing import play_trial
from dialoop_extras.trials.trial import MaskScope, TrialOptions

if TYPE_CHECKING:
    from dialoop.environments import Environment
    from dialoop.trajectory import SamplingParams, Task
    from dialoop_services.collector.settings import CollectorSettings
    from dialoop_services.config.tables import EnvironmentSection

    from dialoop_extras.trials.game import Game
    from dialoop_extras.trials.playing import MakeAgent


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlay:
    """How the tasks of one environment are played: `game` is None for text episodes."""

    environment: Environment
    game: Game[Any] | None
    options: TrialOptions
    make_agent: MakeAgent


def load_token_play(section: EnvironmentSection, environment: Environment) -> TokenPlay | None:
    """Return how an environment's tasks are played; None for chats.

    Raise InvalidConfig where the environment cannot be played as `play` says.
    """
    is_text = isinstance(environment, TextModeEnvironment)
    if is_text != (section.play == "text"):
        wrong = "is" if is_text else "is not"
        raise InvalidConfig(
            f'play is "{section.play}" in [environment], and {section.kind} {wrong} a text '
            "environment.",
            reason=Reason.NOT_A_TEXT_ENVIRONMENT,
            remedy='Set play = "text".' if is_text else "Name a TextSetup, or leave play out.",
        )
    if section.play == "chat":
        _require_messages(section, environment)
        return None
    try:
        game = game_of(environment) if section.play == "trial" else None
    except Unsupported as error:
        raise InvalidConfig(
            f'play is "trial" in [environment], and {section.kind} is not a game.',
            reason=Reason.NOT_A_GAME,
            remedy="Name an environment of game_environment(...), such as twenty_questions.",
        ) from error
    trial = section.trial
    return TokenPlay(
        environment=environment,
        game=game,
        options=TrialOptions(
            episodes_per_trial=trial.episodes_per_trial,
            free_shots=trial.free_shots,
            mask_scope=MaskScope(trial.mask_scope),
            reward_split=trial.reward_split,
        ),
        make_agent=_load_maker(trial.agent) if trial.agent else DirectOutputAgent,
    )


def _require_messages(section: EnvironmentSection, environment: Environment) -> None:
    mode = InputMode.parse(getattr(environment, "input_mode", InputMode.HISTORY))
    if mode is not InputMode.HISTORY:
        raise InvalidConfig(
            f"{section.kind} in [environment] is in {mode.name.lower()} mode, and a job plays "
            "messages.",
            reason=Reason.HISTORY_MODE_ONLY,
            remedy="Use input_mode 'history', or write a TextSetup and set play = \"text\".",
        )


def _load_maker(use: str) -> MakeAgent:
    maker: MakeAgent = load_attribute(use, what="agent", reason=Reason.AGENT_NOT_FOUND)
    try:
        inspect.signature(maker).bind("policy", "tokenizer", "sampling")
    except (TypeError, ValueError):
        raise InvalidConfig(
            f"The agent '{use}' is not a function of a policy, a tokenizer and sampling "
            "parameters.",
            reason=Reason.NOT_AN_AGENT,
            remedy="Write `def make_agent(policy, tokenizer, sampling)`, which returns an object "
            "with `get_action(messages, state)`.",
        ) from None
    return maker


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlayer:
    """Plays the tasks of an environment whose `play` is "trial" or "text".

    Satisfies `dialoop_services.collector.player.TaskPlayer`.
    """

    token_play: TokenPlay
    tokenizer: Tokenizer
    time_limit_s: float

    async def play(
        self, task: Task, *, policy: Any, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        """Play the task once and return its trajectory."""
        play, environment = self.token_play, self.token_play.environment
        try:
            data = environment.tasks.get(task.split, task.key)
        except Exception as error:
            failure = error_of(error, Owner.ENVIRONMENT)
            return Trajectory.of_failures(task, failure, group_id=group_id, sampling=sampling)
        if play.game is None:
            assert isinstance(environment, TextModeEnvironment)
            return await play_text(
                task,
                setup=environment.setup,
                data=data,
                policy=policy,
                tokenizer=self.tokenizer,
                group_id=group_id,
                sampling=sampling,
                time_limit_s=self.time_limit_s,
            )
        return await play_trial(
            task,
            game=play.game,
            inputs=inputs_of(data),
            policy=policy,
            tokenizer=self.tokenizer,
            make_agent=play.make_agent,
            options=play.options,
            group_id=group_id,
            sampling=sampling,
            environment_version=environment.version,
            time_limit_s=self.time_limit_s,
        )


def load_token_player(section: EnvironmentSection, settings: CollectorSettings) -> TokenPlayer:
    """Load what a section names; InvalidConfig where it cannot be played or has no model."""
    token_play = load_token_play(section, load_environment(section.kind, section.arguments))
    assert token_play is not None
    if settings.model_dir is None:
        raise InvalidConfig(
            f"The tasks of {section.served_name} are played by token ids, and the collector "
            "has no model_dir.",
            reason=Reason.TOKENIZER_MISSING,
            remedy="Set DIALOOP_COLLECTOR_MODEL_DIR to the directory of the model that is "
            'served, or set play = "chat".',
        )
    return TokenPlayer(
        token_play=token_play,
        tokenizer=ended_as_written(Tokenizer.from_directory(settings.model_dir)),
        time_limit_s=settings.agent_time_limit_s,
    )
