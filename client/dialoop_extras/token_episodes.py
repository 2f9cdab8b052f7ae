"""Keep what an episode samples where it continues token ids, not messages.

    policy = RecordedPolicy(inference, tokenizer)
    agent = DirectOutputAgent(policy, tokenizer)
    await run_trial(game, [{"solution": "key"}], agent, tokenizer=tokenizer)
    policy.rows      # each sampled token once, after exactly the tokens that it was sampled on

`trials.playing` and `text_environment.playing` make trajectories with it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from dialoop.episode import update_mode_label
from dialoop.errors import DeadlineExceeded, InvalidInput, PreconditionFailed, Unavailable
from dialoop.reasons import Reason
from dialoop.sequences import Along, ForkCause, Sequence, Source
from dialoop.trajectory import StopReason
from dialoop.user_functions import call

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dialoop.episode import Sample
    from dialoop.sequences import Ids
    from dialoop.tokens.tokenizer import Tokenizer
    from dialoop.trajectory import SamplingParams

T = TypeVar("T")


@dataclass(slots=True)
class RecordedPolicy:
    """A policy that keeps its samples, and the token rows that they make.

    A call whose prompt begins with a whole row continues that row; any other call begins one.
    Tokens that were sampled before are context in it, and are never trained a second time.
    """

    policy: Any
    tokenizer: Tokenizer
    turn: int = field(default=0, kw_only=True)
    samples: list[tuple[int, Sample]] = field(default_factory=list, init=False)
    rows: list[Sequence] = field(default_factory=list, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    async def generate(self, *prompt: Any, **question: Any) -> tuple[Sample, ...]:
        """Ask the policy as its own `generate` is asked, and keep its samples under `turn`.

        Raise PreconditionFailed (TOKENIZER_MISMATCH), and Unavailable (CANCELLED).
        """
        self._loop = asyncio.get_running_loop()
        samples: tuple[Sample, ...] = await call(self.policy.generate, *prompt, **question)
        for sample in samples:
            self._require_whole(sample)
            self.samples.append((self.turn, sample))
            self._keep(sample.sequence, question.get("context"))
        return samples

    def generate_now(self, *prompt: Any, **question: Any) -> tuple[Sample, ...]:
        """Ask the policy and wait for it; for agents that are not async and run in a thread.

        Raise InvalidInput (EVENT_LOOP_RUNNING) in async code, which would wait for itself.
        """
        if self._loop is None:
            raise PreconditionFailed("No episode is being played.", remedy="Ask while one is.")
        if asyncio._get_running_loop() is self._loop:
            raise InvalidInput(
                "An async agent called generate_now, which would stop its event loop.",
                reason=Reason.EVENT_LOOP_RUNNING,
                remedy="Write `await policy.generate(...)`.",
            )
        asking = self.generate(*prompt, **question)
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    def begin_episode(self) -> None:
        """Forget what was sampled so far: another episode begins, and that one will be trained."""
        self._loop = asyncio.get_running_loop()
        self.turn = 0
        self.samples.clear()
        self.rows.clear()

    def samples_of(self, turn: int) -> list[Sample]:
        """Return the samples of a turn."""
        return [sample for number, sample in self.samples if number == turn]

    def facts(self, sampling: SamplingParams) -> dict[str, Any]:
        """Return the fields of a trajectory that its samples decide; `sampling` without any."""
        samples = [sample for _, sample in self.samples]
        if not samples:
            return {"sampling": sampling}
        return {
            "sampling": samples[-1].sampling,
            "tokenizer_digest": samples[-1].tokenizer_digest,
            "template_digest": samples[-1].template_digest,
            "labels": update_mode_label(sample.update_mode for sample in samples),
        }

    def _require_whole(self, sample: Sample) -> None:
        if sample.tokenizer_digest not in ("", self.tokenizer.digest):
            raise PreconditionFailed(
                "The inference service has another tokenizer than the episodes are played with.",
                reason=Reason.TOKENIZER_MISMATCH,
                remedy="Set model_dir to the model that is served.",
            )
        if sample.stop_reason is StopReason.CANCELLED:
            raise Unavailable("Sampling was cancelled.", reason=Reason.CANCELLED)

    def _keep(self, sampled: Sequence, context: Sequence | None) -> None:
        """Add a sample to the longest row that its prompt begins with, or as a row of its own."""
        if not sampled.num_model_tokens:
            return
        if context is not None and sampled.fork_cause is ForkCause.NONE:
            sampled = context.as_context().extended_by(sampled)
        num_prompt = next(s.start for s in sampled.segments if s.source is Source.MODEL)
        number = self._row_of(sampled.token_ids[:num_prompt])
        if number is not None:
            row = self.rows[number]
            self.rows[number] = row.extended_by(_after(sampled, len(row), self.turn))
            return
        cause = ForkCause.BRANCHED if self.rows else ForkCause.NONE
        self.rows.append(replace(_after(sampled, 0, self.turn), fork_cause=cause))

    def _row_of(self, prompt_ids: Ids) -> int | None:
        fitting = [
            (len(row), number)
            for number, row in enumerate(self.rows)
            if np.array_equal(prompt_ids[: len(row)], row.token_ids)
        ]
        return max(fitting)[1] if fitting else None


async def end_within(seconds: float, playing: Awaitable[T], *, what: str) -> T:
    """Return the result of `playing`; DeadlineExceeded (EPISODE_TIMED_OUT) when it takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await playing
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(
            f"{what} took longer than {seconds:g} s.",
            reason=Reason.EPISODE_TIMED_OUT,
            remedy="Raise agent_time_limit_s in [collector], or let the episode end earlier.",
        ) from None


def _after(sequence: Sequence, start: int, turn: int) -> Sequence:
    """Return the tokens from `start` on, at or before the first sampled one, as those of a turn."""
    segments = tuple(
        replace(
            segment,
            start=max(segment.start, start) - start,
            length=segment.end - max(segment.start, start),
            source=Source.ENVIRONMENT
            if start and segment.source is Source.PROMPT
            else segment.source,
            turn=turn,
            message_index=None,
            char_start=0,
            char_length=0,
        )
        for segment in sequence.segments
        if segment.end > start
    )
    columns = {
        name: replace(column, values=column.values[start:])
        if column.along is Along.TOKENS
        else column
        for name, column in sequence.columns.items()
    }
    return replace(
        sequence, token_ids=sequence.token_ids[start:], segments=segments, columns=columns
    )
