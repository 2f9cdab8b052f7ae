"""A policy that continues token ids by a script, as an InferenceClient does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dialoop.chat import ChatHistory
from dialoop.episode import Sample
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.testing import byte_tokenizer
from dialoop.trajectory import SamplingParams, StopReason, Task

BYTES = byte_tokenizer()
MAIN_7 = PolicyVersion(lineage="main", number=7)
LOGPROB = -0.25
TASK = Task(task_id="t", environment="e", split="train", key="k", seed=5)


@dataclass
class ScriptedTokens:
    """Answers with what `script` makes of the prompt's text; an empty text is a full context."""

    script: Callable[[str], str]
    delay_s: float = 0.0
    digest: str = BYTES.digest
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[SamplingParams | None] = field(default_factory=list)

    async def generate(
        self,
        *,
        token_ids: Iterable[int],
        sampling: SamplingParams | None = None,
        turn: int = 0,
        **options: Any,
    ) -> tuple[Sample, ...]:
        prompt = list(token_ids)
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        await asyncio.sleep(self.delay_s)
        ids = BYTES.encode(self.script(BYTES.decode(prompt)), trusted=True).ids
        model = {"source": Source.MODEL, "turn": turn, "policy_version": MAIN_7}
        sequence = sequence_of(
            [(prompt, {"source": Source.PROMPT, "turn": turn}), (ids, model)],
            logprobs=[LOGPROB] * len(ids),
        )
        stop = StopReason.STOP if ids else StopReason.CONTEXT_FULL
        return (
            Sample(
                history=ChatHistory(),
                sequence=sequence,
                stop_reason=stop,
                sampling=sampling or SamplingParams(),
                tokenizer_digest=self.digest,
                generate_s=0.5,
            ),
        )


def ids_of(text: str) -> list[int]:
    """One id for each byte."""
    return list(BYTES.encode(text, trusted=True).ids)
