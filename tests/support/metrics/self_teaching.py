"""Groups whose rewards say what an answer failed, and the teacher's prompts by hand.

The hand is ChatML as plain text and the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dialoop import testing
from dialoop.chat import History, Message
from dialoop.clients.replay import GroupLease
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.trajectory import Group, Reward, SamplingParams, Trajectory, Turn
from tokenizers import Tokenizer

from tests.support.metrics.plain_steps import Answer

FIRST = PolicyVersion(lineage="main", number=1)
RIGHT = "the sea is wide"
COMMAS, LOWER = "Do not use any commas.", "Write in lowercase letters only."


def turn_of(*feedback: str, start: int = 1, reward: float = 0.0) -> Turn:
    rewards = tuple(Reward(name=f"r{n}", value=reward, feedback=f) for n, f in enumerate(feedback))
    return Turn(message_start=start, num_messages=1, rewards=rewards)


@dataclass
class Class:
    """A tokenizer that writes prompts, and seeded answers that no tokenizer would write."""

    directory: Path
    version: PolicyVersion = FIRST

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(7)
        self._tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    def ids(self, question: str) -> list[int]:
        """The ids of a prompt in ChatML."""
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def taught(self, question: str, feedback: str, answer: str = "") -> list[int]:
        """The ids of the teacher's prompt."""
        shown = f"\n\nA correct answer:\n\n{answer}" if answer else ""
        told = f"\n\nFeedback on an earlier answer, which was wrong:\n\n{feedback}"
        return self.ids(f"{question}{shown}{told}\n\nAnswer the question above again.")

    def member(
        self,
        question: str,
        *turns: Turn,
        said: str = "nothing",
        lengths: Sequence[int] = (5,),
        temperature: float | None = None,
        prompt: Sequence[int] = (),
    ) -> Trajectory:
        """A trajectory; `lengths` are of sampled tokens and of what a tool says, in turns."""
        policy = {"source": Source.MODEL, "policy_version": self.version}
        pieces: list[Any] = [(list(prompt) or self.ids(question), {"source": Source.PROMPT})]
        for number, length in enumerate(lengths):
            ids = self._random.integers(120, 300, size=length).tolist()
            pieces.append((ids, {"source": Source.TOOL} if number % 2 else policy))
        messages = [Message(role="user", content=question)]
        for number in range(len(lengths)):
            text = "and?" if number % 2 else said
            messages.append(Message(role="user" if number % 2 else "assistant", content=text))
        logprobs = self._random.uniform(-6, -5, size=sum(lengths[::2])).astype("f4")
        return testing.trajectory(
            trajectory_id=f"{question}/{self._random.integers(1 << 30)}",
            history=History(tuple(messages)),
            turns=turns,
            sequences=(sequence_of(pieces, logprobs=logprobs),),
            sampling=SamplingParams(temperature=temperature),
        )

    def groups(self) -> tuple[Group, Group]:
        """One with a successful answer, one of two turns and another temperature; three taught."""
        sea = testing.group(
            self.member("the sea", turn_of(COMMAS)),
            self.member("the sea", turn_of("", reward=1.0), said=RIGHT),
            group_id="sea",
        )
        two_turns = (turn_of(COMMAS), turn_of(LOWER, COMMAS, start=3))
        moon = testing.group(
            self.member("the moon", *two_turns, lengths=(4, 3, 6)),
            self.member("the moon", turn_of(LOWER), temperature=0.7, lengths=(8,)),
            group_id="moon",
        )
        return sea, moon

    def by_hand(self, sea: Group, moon: Group) -> list[tuple[Answer, Answer]]:
        """Each taught answer as it was sampled, and behind the teacher's prompt."""
        first, second = moon.trajectories
        pairs = (
            (sea.trajectories[0], self.taught("the sea", COMMAS, RIGHT)),
            (first, self.taught("the moon", f"{COMMAS}\n{LOWER}")),
            (second, self.taught("the moon", LOWER)),
        )
        return [(_answer(member, ()), _answer(member, prompt)) for member, prompt in pairs]


def _answer(member: Trajectory, prompt: Sequence[int]) -> Answer:
    (row,) = member.sequences
    temperature = member.sampling.temperature
    own = Answer.of(row, temperature=1.0 if temperature is None else temperature)
    if not prompt:
        return own
    start = own.sampled[0]
    return Answer(
        ids=[*prompt, *own.ids[start:]],
        sampled=[position - start + len(prompt) for position in own.sampled],
        temperature=own.temperature,
    )


def leases_of(*groups: Group) -> list[GroupLease]:
    return [
        GroupLease(lease_id=f"lease-{g.group_id}", group=g, num_deliveries=1, expires_in_s=60)
        for g in groups
    ]


def batch_of(*groups: Group) -> Callable[[Any], list[GroupLease]]:
    """A batch for `real_job`."""
    return lambda _: leases_of(*groups)
