"""In-memory twins: a scripted policy and an environment without a server.

    policy = ScriptedPolicy(["<request><Calculator>3+4<call>", "Result=7<submit>"])
    trajectory = await play(task, sessions=InMemoryEnvironment(arithmetic()), policy=policy)

They answer as the services do, with real token sequences, so that `dialoop.rollout` and whatever is
built on it runs in a notebook or a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dialoop.chat import ChatHistory, History
from dialoop.episode import Opening, Outcome, Sample
from dialoop.errors import AlreadyExists, InvalidInput, NotFound, PreconditionFailed
from dialoop.sequences import PolicyVersion
from dialoop.templates import ChatTemplate
from dialoop.token_builder import TokenBuilder
from dialoop.tokenizer import Tokenizer
from dialoop.trajectory import SamplingParams, StopReason

if TYPE_CHECKING:
    from dialoop.environments import Environment
    from dialoop.environments import Opening as EnvironmentOpening
    from dialoop.environments import Outcome as EnvironmentOutcome
    from dialoop.environments.tasks import TaskPage
    from dialoop.sequences import Sequence as TokenSequence

Script = Sequence[str] | Callable[[History], str]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]
_TTL_S = 900.0


def byte_tokenizer() -> Tokenizer:
    """One token per byte and the two tokens of a ChatML template: 258 ids, nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}

    def engine() -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(_SPECIAL_TOKENS)
        return made

    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    return Tokenizer(engine(), engine(), config)


def byte_builder() -> TokenBuilder:
    """Tokens of conversations by `byte_tokenizer`."""
    tokenizer = byte_tokenizer()
    return TokenBuilder(tokenizer, ChatTemplate.of(tokenizer))


class ScriptedPolicy:
    """A policy that answers from a list, one text per turn, or with what a function says.

    An answer ends at the first of the sampling's stop strings, at `max_new_tokens`, or with the
    end-of-turn token. Each token has the log-prob `logprob` and the version `policy_version`.
    """

    def __init__(
        self,
        script: Script,
        *,
        builder: TokenBuilder | None = None,
        policy_version: PolicyVersion | None = None,
        logprob: float = -0.5,
    ) -> None:
        self._script = script
        self._builder = builder or byte_builder()
        self._policy_version = policy_version or PolicyVersion(lineage="scripted", number=0)
        self._logprob = logprob

    async def generate(
        self,
        history: History,
        *,
        context: TokenSequence | None = None,
        num_context_messages: int = 0,
        sampling: SamplingParams | None = None,
        turn: int = 0,
        num_samples: int = 1,
    ) -> tuple[Sample, ...]:
        """Answer the prompt, the same each time."""
        sampling = sampling or SamplingParams()
        prompt = self._builder.prompt(
            history, context=context, num_context_messages=num_context_messages, turn=turn
        )
        ids, stop_reason, stop_string = self._sampled(self._text(history, turn), sampling)
        answer = self._builder.answer(
            prompt,
            ids,
            logprobs=[self._logprob] * len(ids),
            versions=[(len(ids), self._policy_version)],
            is_complete=stop_reason is StopReason.STOP,
        )
        sample = Sample(
            history=ChatHistory(prompt=history).respond(answer.message),
            sequence=answer.appended,
            stop_reason=stop_reason,
            stop_string=stop_string,
            sampling=sampling,
            tokenizer_digest=self._builder.tokenizer.digest,
            template_digest=self._builder.template.digest,
        )
        return (sample,) * num_samples

    def _text(self, history: History, turn: int) -> str:
        if callable(self._script):
            return self._script(history)
        if turn >= len(self._script):
            raise InvalidInput(
                f"The script has {len(self._script)} answers and turn {turn} is asked for.",
                reason="SCRIPT_ENDED",
                remedy="Give one answer per turn, or a function of the history.",
            )
        return self._script[turn]

    def _sampled(self, text: str, sampling: SamplingParams) -> tuple[list[int], StopReason, str]:
        """Token ids of the answer, why they end, and the stop string that ended them."""
        tokenizer = self._builder.tokenizer
        found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        start, stop_string = min(found, default=(len(text), ""))
        ids = list(tokenizer.encode(text[: start + len(stop_string)]).ids)
        if not stop_string:
            ids += tokenizer.end_of_turn_ids[:1]
        if sampling.max_new_tokens is not None and len(ids) > sampling.max_new_tokens:
            return ids[: sampling.max_new_tokens], StopReason.LENGTH, ""
        return ids, StopReason.STOP, stop_string


@dataclass(slots=True)
class _Session:
    """A session of the twin: its environment, the episode it plays, and the answers it gave."""

    environment: Environment
    episode: int = 0
    opening: EnvironmentOpening | None = None
    steps: list[tuple[ChatHistory, EnvironmentOutcome]] = field(default_factory=list)


class InMemoryEnvironment:
    """Plays environments in this process, as an EnvironmentClient plays them on a server.

    Sessions never expire. An exception of the environment's own comes out as it is.
    """

    def __init__(self, *environments: Environment) -> None:
        self._environments = {environment.name: environment for environment in environments}
        self._sessions: dict[str, _Session] = {}

    async def list_tasks(
        self,
        environment: str,
        *,
        split: str,
        page_size: int = 100,
        page_token: str = "",
        one_epoch: bool = False,
        shuffle_seed: int = 0,
    ) -> TaskPage:
        """One page of tasks; pages run on through epochs unless `one_epoch`."""
        return self._environment(environment).tasks.page(
            split,
            page_token=page_token,
            page_size=page_size,
            one_epoch=one_epoch,
            shuffle_seed=shuffle_seed,
        )

    async def create_session(
        self, session_id: str, environment: str, *, ttl_s: float | None = None
    ) -> float:
        """Open a session under the caller's id; its time to live in seconds."""
        found = self._environment(environment)
        known = self._sessions.setdefault(session_id, _Session(found))
        if known.environment is not found:
            raise AlreadyExists(
                f"Session '{session_id}' is of environment {known.environment.name}.",
                reason="SESSION_CONFLICT",
                remedy="Choose another session_id.",
            )
        return _TTL_S if ttl_s is None else ttl_s

    async def reset(
        self, session_id: str, *, episode: int, split: str, task_key: str, seed: int = 0
    ) -> Opening:
        """Start an episode of the session."""
        session = self._session(session_id)
        if episode != session.episode + 1:
            raise _conflict("STEP_CONFLICT", f"Episode {episode} follows {session.episode}.")
        environment = session.environment
        task = environment.tasks.get(environment.tasks.require_split(split), task_key)
        opening = environment.reset(task, seed)
        session.episode, session.opening, session.steps = episode, opening, []
        return Opening(
            history=opening.history,
            info=dict(opening.info),
            environment_version=environment.version,
        )

    async def step(
        self, session_id: str, *, episode: int, step_index: int, history: ChatHistory
    ) -> Outcome:
        """Take the policy's answer; a retry gets the first answer."""
        session = self._session(session_id)
        if session.opening is None or episode != session.episode:
            raise _conflict("STEP_GAP", f"Episode {episode} is not being played.")
        if step_index < len(session.steps):
            answered, outcome = session.steps[step_index]
            if answered != history:
                raise _conflict("STEP_CONFLICT", f"Step {step_index} was another one.")
            return replace(_outcome(outcome), replayed=True)
        if step_index > len(session.steps):
            raise _conflict("STEP_GAP", f"Step {len(session.steps)} comes before {step_index}.")
        before = session.steps[-1][1].episode if session.steps else session.opening.episode
        outcome = await session.environment.step(before, history)
        session.steps.append((history, outcome))
        return _outcome(outcome)

    async def close_session(self, session_id: str) -> bool:
        """Forget the session; whether there was one."""
        return self._sessions.pop(session_id, None) is not None

    def _environment(self, name: str) -> Environment:
        if name not in self._environments:
            raise NotFound(
                f"There is no environment '{name}'.",
                reason="ENVIRONMENT_NOT_FOUND",
                remedy=f"Choose one of: {', '.join(self._environments)}.",
            )
        return self._environments[name]

    def _session(self, session_id: str) -> _Session:
        if session_id not in self._sessions:
            raise NotFound(
                f"There is no session '{session_id}'.",
                reason="SESSION_LOST",
                remedy="Create a session and play the task again from its start.",
            )
        return self._sessions[session_id]


def _conflict(reason: str, message: str) -> PreconditionFailed:
    return PreconditionFailed(message, reason=reason, remedy="Go on from where the session stands.")


def _outcome(outcome: EnvironmentOutcome) -> Outcome:
    """What a client sees of an environment's outcome."""
    episode = outcome.episode
    return Outcome(
        history=outcome.history,
        rewards=outcome.rewards,
        terminated=episode.terminated,
        truncated=episode.truncated,
        done_reason=episode.done_reason,
        failures=outcome.failures,
        num_tool_calls=outcome.num_tool_calls,
    )
