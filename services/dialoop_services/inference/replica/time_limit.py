"""How long an answer may be sampled: some seconds, and more for each token that it may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dialoop.errors import DeadlineExceeded
from dialoop.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """Seconds of sampling: base_s + per_token_s for each of the tokens that an answer may have."""

    base_s: float = 60.0
    per_token_s: float = 1.0

    @asynccontextmanager
    async def around(
        self, num_tokens: int, *, from_begin: bool
    ) -> AsyncIterator[Callable[[], None]]:
        """Raise DeadlineExceeded (ANSWER_TIMED_OUT) if the block takes longer than the limit.

        The time runs from the last call of the function that it yields. Before the first call it
        does not run at all if `from_begin`, else it runs from the start of the block.
        """
        limit_s, loop = self.base_s + self.per_token_s * num_tokens, asyncio.get_running_loop()
        is_over = False
        try:
            async with asyncio.timeout(None if from_begin else limit_s) as timer:

                def begin() -> None:
                    if not (is_over or timer.expired()):
                        timer.reschedule(loop.time() + limit_s)

                try:
                    yield begin
                finally:
                    is_over = True
        except TimeoutError:
            if not timer.expired():
                raise
            raise DeadlineExceeded(
                f"An answer of at most {num_tokens} tokens took more than {limit_s:g} s to sample.",
                reason=Reason.ANSWER_TIMED_OUT,
                remedy="Ask for fewer max_new_tokens, or raise answer_base_s or "
                "answer_s_per_token in [inference].",
            ) from None
