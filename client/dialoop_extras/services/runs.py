"""Play text environments and trials as a whole, with the service's own policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialoop.environments import refusals
from dialoop.errors import InvalidConfig, InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ended_as_written
from dialoop.tokens.tokenizer import Tokenizer

from dialoop_extras.compat.trl_text import TrlTextEnvironment
from dialoop_extras.games import game_of
from dialoop_extras.text_environment.environment import TextEnvironment
from dialoop_extras.text_environment.setups import load_text_setup
from dialoop_extras.trials.agents import DirectOutputAgent
from dialoop_extras.trials.trial import run_trial

if TYPE_CHECKING:
    from dialoop.clients.inference import InferenceClient
    from dialoop.environments.sessions.catalogue import Catalogue
    from dialoop.trajectory import SamplingParams
    from dialoop_services.environment.settings import EnvironmentEntry

    from dialoop_extras.text_environment.environment import TextRun
    from dialoop_extras.text_environment.setups import TextSetup
    from dialoop_extras.trials.trial import TrialOptions, TrialResult

MAX_EPISODES = 4096
_REMEDY = "Set DIALOOP_ENVIRONMENT_INFERENCE_ADDRESS and DIALOOP_ENVIRONMENT_MODEL_DIR."


class TextCatalogue:
    """The text environments a service has, by name."""

    def __init__(self, setups: Iterable[TextSetup]) -> None:
        self._by_name: dict[str, TextSetup] = {}
        for setup in setups:
            if setup.name in self._by_name:
                raise InvalidConfig(
                    f"Two text environments are named '{setup.name}'.",
                    remedy="Give one of them another name.",
                )
            self._by_name[setup.name] = setup

    @classmethod
    def from_entries(cls, entries: Iterable[EnvironmentEntry]) -> TextCatalogue:
        """Load each entry; raise InvalidConfig for one that cannot be loaded."""
        return cls(load_text_setup(entry.use, entry.options) for entry in entries)

    def get(self, name: str) -> TextSetup:
        """Return the text environment of a name; raise NotFound (ENVIRONMENT_NOT_FOUND)."""
        if name not in self._by_name:
            raise refusals.unknown_environment(name, self._by_name)
        return self._by_name[name]


class OwnPolicy:
    """The policy that the settings name, and its tokenizer, which is read at the first use."""

    def __init__(self, client: InferenceClient | None, model_dir: Path | None) -> None:
        self._client = client
        self._model_dir = model_dir
        self._reading = asyncio.Lock()
        self._tokenizer: Tokenizer | None = None

    async def get(self) -> tuple[InferenceClient, Tokenizer]:
        """Return both. Raise PreconditionFailed (NO_INFERENCE, TOKENIZER_MISMATCH)."""
        if self._client is None or self._model_dir is None:
            raise no_inference(_REMEDY)
        async with self._reading:
            if self._tokenizer is None:
                read = await asyncio.to_thread(Tokenizer.from_directory, self._model_dir)
                self._tokenizer = ended_as_written(read)
        status = await self._client.get_policy()
        if status.tokenizer_digest != self._tokenizer.digest:
            raise PreconditionFailed(
                "The inference service has another tokenizer than this service's model_dir.",
                reason=Reason.TOKENIZER_MISMATCH,
                remedy="Set DIALOOP_ENVIRONMENT_MODEL_DIR to the model that is served.",
            )
        return self._client, self._tokenizer


class Runs:
    """Plays what a caller asks for from start to end, with the service's own policy."""

    def __init__(self, catalogue: Catalogue, texts: TextCatalogue, policy: OwnPolicy) -> None:
        self._catalogue = catalogue
        self._texts = texts
        self._policy = policy

    async def text(
        self,
        environment: str,
        queries: list[str],
        *,
        extra_json: str,
        sampling: SamplingParams,
        compat: str,
    ) -> TextRun:
        """Play one episode per query in a text environment."""
        setup = self._texts.get(environment)
        _require_few(len(queries))
        extra = _extra(extra_json, len(queries))
        client, tokenizer = await self._policy.get()
        running = setup.on(client, tokenizer, sampling=sampling, kind=_kind_of(compat))
        return await running.run(queries, **extra)

    async def trial(
        self,
        environment: str,
        inputs: list[Mapping[str, str]],
        *,
        options: TrialOptions,
        sampling: SamplingParams,
    ) -> TrialResult:
        """Play one trial per input with the policy."""
        game = game_of(self._catalogue.get(environment))
        _require_few(len(inputs) * options.episodes_per_trial)
        client, tokenizer = await self._policy.get()
        agent = DirectOutputAgent(client, tokenizer, sampling)
        return await run_trial(game, inputs, agent, tokenizer=tokenizer, options=options)


def no_inference(remedy: str) -> PreconditionFailed:
    """Return the error of a run that needs a policy where the service was given none."""
    return PreconditionFailed(
        "This environment service has no inference service.",
        reason=Reason.NO_INFERENCE,
        remedy=remedy,
    )


def _kind_of(compat: str) -> type[TextEnvironment]:
    """Return the class for `compat`: "" is Dialoop's own, "trl" that of TRL."""
    kinds = {"": TextEnvironment, "trl": TrlTextEnvironment}
    if compat not in kinds:
        raise InvalidInput(
            f"`compat` is '{compat[:80]}'.",
            reason=Reason.BAD_COMPAT,
            remedy='Leave it empty, or give "trl".',
        )
    return kinds[compat]


def _require_few(num_episodes: int) -> None:
    if num_episodes > MAX_EPISODES:
        raise refusals.bad_value("The number of episodes", f"Ask for at most {MAX_EPISODES}.")


def _extra(text: str, num_queries: int) -> dict[str, Any]:
    """Return the reward's extra arguments.

    Raise InvalidInput (BAD_EXTRA) for text that is not an object, and for lists whose length is
    not the number of queries.
    """
    try:
        extra = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise _bad_extra("`extra_json` is not a JSON object.")
    for name, value in extra.items():
        if isinstance(value, list) and len(value) != num_queries:
            raise _bad_extra(f"{name[:80]} has {len(value)} values for {num_queries} queries.")
    return extra


def _bad_extra(message: str) -> InvalidInput:
    return InvalidInput(
        message,
        reason=Reason.BAD_EXTRA,
        remedy='Send an object with one value per query in each list: {"answers": ["7"]}.',
    )
