"""Steps by difference: what client and service both have of each session is not sent again.

The client remembers the prompt of each session, so that a step carries the response and the digest
of the prompt before it, and the answer what the environment added and the digest of the next
prompt. Where the digests differ, the step is sent once more in full, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import ChatHistory, History
from dialoop.clients.environment_records import step_result_from_proto, step_to_proto
from dialoop.environments.modes import Text, Tokens
from dialoop.environments.sessions.prompts import (
    Prompt,
    PromptChain,
    PromptChange,
    PromptDigest,
    full_of,
    sent_parts,
    starts_with,
)
from dialoop.errors import DialoopError
from dialoop.reasons import Reason
from dialoop.wire import message_from_proto

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dialoop.clients.environment_records import StepItem
    from dialoop.environments.modes import Answered
    from dialoop.episode import ResetResult, StepResult
    from dialoop.v1 import environment_service_pb2 as pb

    Send = Callable[[pb.StepRequest], Awaitable[pb.StepResponse]]

# Sessions whose prompts are remembered, as many as a service has by default. The steps of others
# are sent in full.
_MAX_SESSIONS = 4096


@dataclass(frozen=True, slots=True)
class _Shared:
    """The prompt of a session's next step."""

    episode: int
    step_index: int
    prompt: Prompt
    chain: PromptChain


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step as its caller gave it and as it is sent; `shared` is the prompt that it leaves out."""

    item: StepItem
    request: pb.StepRequest
    shared: _Shared | None


class Conversations:
    """The prompts that a client and its service share.

    `num_resends` counts the steps that were sent once more, in full, because the digests differed.
    """

    def __init__(self) -> None:
        self.num_resends = 0
        self._shared: dict[str, _Shared] = {}

    def begin(self, session_id: str, episode: int, opening: ResetResult) -> ResetResult:
        """Remember the prompt of an episode's start; return the opening."""
        prompt = _prompt_of(opening)
        self._keep(session_id, _Shared(episode, 0, prompt, PromptChain.of(prompt)))
        return opening

    def forget(self, session_id: str) -> None:
        """Forget a session."""
        self._shared.pop(session_id, None)

    async def step(self, item: StepItem, send: Send) -> StepResult:
        """Send a step and return its result."""
        sent = self.prepare(item)
        try:
            response = await send(sent.request)
        except DialoopError as error:
            return await self.finish_step(sent, error, send)
        return await self.finish_step(sent, response, send)

    def prepare(self, item: StepItem) -> SentStep:
        """Return the step to send: a difference where the service has the rest."""
        shared = self._shared.get(item.session_id)
        if shared and (shared.episode, shared.step_index) == (item.episode, item.step_index):
            response = _response_to(shared.prompt, item.history)
            if response is not None:
                request = step_to_proto(replace(item, history=response))
                digest = shared.chain.digest
                request.prompt.length, request.prompt.digest = digest.length, digest.digest
                return SentStep(item, request, shared)
        request = step_to_proto(item)
        request.whole_prompt = _has_no_past(item.history)
        return SentStep(item, request, None)

    async def finish_step(
        self, sent: SentStep, answer: pb.StepResponse | DialoopError, send: Send
    ) -> StepResult:
        """Return the result of a step that was answered, or raise its error.

        Where the digests differ, send the step once more and take the prompt as the service has it.
        """
        if isinstance(answer, DialoopError):
            if answer.reason != Reason.PROMPT_MISMATCH or sent.shared is None:
                raise answer
            return await self._resend(sent.item, send)
        result = self._result_of(sent, answer)
        if result is None:
            return replace(await self._resend(sent.item, send), replayed=answer.replayed)
        return result

    def _result_of(self, sent: SentStep, response: pb.StepResponse) -> StepResult | None:
        """Return the result and remember its prompt; None where the digests differ."""
        item, shared = sent.item, sent.shared
        result = step_result_from_proto(response)
        if response.HasField("change"):
            full = full_of(None if shared is None else shared.prompt, item.history)
            prompt = _change_from_proto(response.change, item.history).apply(full)
            result = _with_prompt(result, prompt)
        else:
            prompt = _prompt_of(result)
        chain = _chain_of(shared, prompt)
        if chain.digest != PromptDigest(response.prompt.length, response.prompt.digest):
            return None
        if result.done:
            self.forget(item.session_id)
        else:
            following = _Shared(item.episode, item.step_index + 1, prompt, chain)
            self._keep(item.session_id, following)
        return result

    async def _resend(self, item: StepItem, send: Send) -> StepResult:
        self.num_resends += 1
        self.forget(item.session_id)
        sent = SentStep(item, step_to_proto(item), None)
        sent.request.whole_prompt = True
        response = await send(sent.request)
        return self._result_of(sent, response) or step_result_from_proto(response)

    def _keep(self, session_id: str, shared: _Shared) -> None:
        self._shared.pop(session_id, None)  # so that the oldest use comes first
        self._shared[session_id] = shared
        if len(self._shared) > _MAX_SESSIONS:
            del self._shared[next(iter(self._shared))]


def stateless_result(answered: ChatHistory, response: pb.StepResponse) -> StepResult:
    """Return the result of a step without a session."""
    change = _change_from_proto(response.change, answered)
    return _with_prompt(
        step_result_from_proto(response), change.apply(full_of(History(), answered))
    )


def _response_to(prompt: Prompt, answered: Answered) -> Answered | None:
    """Return the response alone, or None where what was sent does not continue the prompt."""
    before, response, full = sent_parts(answered)
    if full is not None:
        if len(full) <= len(prompt) or not starts_with(full, prompt):
            return None
        return type(answered)(response=full[len(prompt) :])
    if response is None or not (before is None or _is_same(before, prompt)):
        return None
    return type(answered)(response=response)


def _is_same(before: Prompt, prompt: Prompt) -> bool:
    return len(before) == len(prompt) and starts_with(before, prompt)


def _has_no_past(answered: Answered) -> bool:
    prompt, _, full = sent_parts(answered)
    return prompt is None and full is None


def _prompt_of(result: ResetResult | StepResult) -> Prompt:
    """Return the prompt in the environment's mode."""
    if result.history.prompt is not None:
        return result.history.prompt
    shown = result.text or result.tokens
    return History() if shown is None else shown.prompt


def _chain_of(shared: _Shared | None, prompt: Prompt) -> PromptChain:
    if shared is None or type(shared.prompt) is not type(prompt):
        return PromptChain.of(prompt)
    if not starts_with(prompt, shared.prompt):
        return PromptChain.of(prompt)
    return shared.chain.extend(prompt[len(shared.prompt) :])


def _change_from_proto(proto: pb.PromptChange, answered: Answered) -> PromptChange:
    added: Any
    if isinstance(answered, Text):
        added = proto.text
    elif isinstance(answered, Tokens):
        added = tuple(proto.token_ids.values)
    else:
        added = History(tuple(map(message_from_proto, proto.messages)))
    return PromptChange(proto.num_kept, added)


def _with_prompt(result: StepResult, prompt: Prompt) -> StepResult:
    if isinstance(prompt, History):
        return replace(result, history=ChatHistory(prompt=prompt))
    if isinstance(prompt, str):
        return replace(result, text=Text(prompt=prompt))
    return replace(result, tokens=Tokens(prompt=prompt))
