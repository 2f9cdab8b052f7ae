"""The prompt of a policy that teaches itself: the question again, with what a first answer missed.

    teacher = SelfTeacher.of(settings)
    teacher.prompt(row)     # int64 ids in place of those before the answer; None without feedback

The answer's own ids are never tokenised anew. They follow this prompt as they were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from dialoop.chat import ContentPart, History
from dialoop.errors import InvalidInput
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ChatTemplate
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence as Rows

    from dialoop.trajectory import Group, Trajectory
    from dialoop_learning.packing.rows import TokenRow
    from torch import Tensor

    from dialoop_services.trainer.data.batches import TrainedSequence
    from dialoop_services.trainer.settings import TrainerSettings

_ANSWER = "\n\nA correct answer:\n\n"
_FEEDBACK = "\n\nFeedback on an earlier answer, which was wrong:\n\n"
_AGAIN = "\n\nAnswer the question above again."


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTeacher:
    """Writes feedback, and a successful answer of the group, into a trajectory's first prompt.

    success_reward: the least reward of that answer; None: none is shown. max_tokens: of a row.
    """

    builder: TokenBuilder
    success_reward: float | None
    max_tokens: int
    oversize: str = "error"

    @classmethod
    def of(cls, settings: TrainerSettings) -> SelfTeacher:
        """Return the teacher of a job, which renders with its checkpoint's own template."""
        tokenizer = Tokenizer.from_directory(settings.model_dir)
        shows = settings.objective.sibling_answer
        return cls(
            builder=TokenBuilder(tokenizer, ChatTemplate.of(tokenizer)),
            success_reward=settings.candidates.success_reward if shows else None,
            max_tokens=settings.packed_row_tokens,
            oversize=settings.oversize,
        )

    def prompt(self, row: TrainedSequence) -> Tensor | None:
        """Return the prompt ids that stand before the row's sampled tokens.

        None where its trajectory has no feedback, and with an `oversize` other than "error" where
        the row would be too long. A successful answer is left out where the row would be.

        Raises InvalidInput (SEQUENCE_TOO_LONG), and (PROMPT_NOT_RENDERED) where the recorded prompt
        is not what the template makes of the messages, so that nothing can be added to them.
        """
        group, trajectory = row.group, row.trajectory
        if group is None or trajectory is None or not trajectory.feedback:
            return None
        start = int(row.sequence.response_mask().argmax())
        asked = trajectory.history[: trajectory.turns[0].message_start]
        self._require_rendered(asked, row.sequence.token_ids[:start].tolist())
        num_tokens = min(len(row.sequence.token_ids), self.max_tokens) - start
        for answer in dict.fromkeys((self._sibling_answer(group, trajectory), "")):
            ids = self._ids(_with_feedback(asked, trajectory.feedback, answer))
            if len(ids) + num_tokens <= self.max_tokens:
                return torch.tensor(ids, dtype=torch.int64)
        if self.oversize == "error":
            raise _too_long(self.max_tokens)
        return None

    def _ids(self, history: History) -> list[int]:
        ids: list[int] = self.builder.prompt(history).sequence.token_ids.tolist()
        return ids

    def _require_rendered(self, asked: History, recorded: list[int]) -> None:
        has_question = any(message.role == "user" for message in asked)
        if has_question and self._ids(asked) == recorded:
            return
        raise InvalidInput(
            "Feedback has no place in this prompt: it has no user message, or its tokens are not "
            "what the checkpoint's chat template makes of the messages before the first answer.",
            reason=Reason.PROMPT_NOT_RENDERED,
            remedy="Play messages, without tools for the template and without template options, "
            "and multi-turn episodes with a template that rewrites no earlier message.",
        )

    def _sibling_answer(self, group: Group, own: Trajectory) -> str:
        """Return the last answer of the first other trajectory that succeeded, or ""."""
        least = self.success_reward
        for trajectory in group.trajectories:
            is_own = trajectory is own
            if least is None or is_own or trajectory.reward < least or not trajectory.turns:
                continue
            played = trajectory.history[trajectory.turns[0].message_start :]
            answers = [message.text.strip() for message in played if message.role == "assistant"]
            if answers and answers[-1]:
                return answers[-1]
        return ""


def taught_rows(
    teacher: SelfTeacher, sequences: Rows[TrainedSequence], rows: Rows[TokenRow]
) -> list[TokenRow]:
    """Return the sequences' rows that have a teacher, with its prompt and without a reference.

    Raises InvalidInput as `SelfTeacher.prompt` does, and (SEQUENCE_TOO_LONG) where there is
    feedback and no row is left.
    """
    prompts = [teacher.prompt(sequence) for sequence in sequences]
    taught = [
        replace(row, teacher_prompt=prompt, ref_logprobs=None)
        for row, prompt in zip(rows, prompts, strict=True)
        if prompt is not None
    ]
    if not taught and any(s.trajectory and s.trajectory.feedback for s in sequences):
        raise _too_long(teacher.max_tokens)
    return taught


def _too_long(max_tokens: int) -> InvalidInput:
    return InvalidInput(
        f"With feedback in its prompt a sequence is longer than a packed row, {max_tokens} tokens.",
        reason=Reason.SEQUENCE_TOO_LONG,
        remedy="Raise max_row_tokens in [train], or sample fewer tokens than max_model_len allows.",
    )


def _with_feedback(asked: History, feedback: str, answer: str) -> History:
    """Return the prompt whose last user message goes on with the answer and the feedback."""
    added = (f"{_ANSWER}{answer}" if answer else "") + f"{_FEEDBACK}{feedback}{_AGAIN}"
    last = max(number for number, message in enumerate(asked) if message.role == "user")
    content = asked[last].content
    longer = (
        content + added
        if isinstance(content, str)
        else (*content, ContentPart(type="text", text=added))
    )
    messages = list(asked)
    messages[last] = replace(asked[last], content=longer)
    return History(tuple(messages))
