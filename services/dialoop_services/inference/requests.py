"""Requests as domain types; an error says what was expected and what the request holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.clients.weights import (
    MANIFEST,
    TRANSFER_STEP,
    Content,
    WeightsKind,
    WeightsManifest,
)
from dialoop.errors import InvalidHistory, InvalidInput
from dialoop.reasons import Reason
from dialoop.wire.messages import CHAT_HISTORY, tool_from_proto
from dialoop.wire.records import SAMPLING
from dialoop.wire.sequences import sequence_from_proto

from dialoop_services.config.tables import DEVICE_PLANES
from dialoop_services.inference.generate import with_defaults
from dialoop_services.inference.partial_answer import require_continuable
from dialoop_services.inference.rendering import GenerationRequest
from dialoop_services.runtime.calls import require_known_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from dialoop.chat import History
    from dialoop.v1 import chat_pb2
    from dialoop.v1 import inference_service_pb2 as pb

P = TypeVar("P")
D = TypeVar("D")

_MAX_SAMPLES = 1024
_INPUTS = ("history", "text", "token_ids")
_ROWS = ("token_ids", "histories", "texts")


def generation_request_of(request: pb.GenerateRequest, *, max_new_tokens: int) -> GenerationRequest:
    """Read what to continue, how to render it and how to sample; `max_new_tokens` by default."""
    require_known_fields(request)
    present = [name for name in _INPUTS if request.HasField(name)]
    field = require_one_of(present, _INPUTS)
    if field != "history":
        _require_no_context(request, field)
    sampling = with_defaults(SAMPLING.from_proto(request.sampling), max_new_tokens=max_new_tokens)
    num_samples, partial_answer = _num_samples_of(request), None
    if request.HasField("partial_answer"):
        partial_answer = sequence_from_proto(request.partial_answer)
        require_continuable(partial_answer, sampling, num_samples=num_samples)
    return GenerationRequest(
        history=_prompt_of(request.history) if field == "history" else None,
        text=request.text if field == "text" else None,
        token_ids=tuple(request.token_ids.values) if field == "token_ids" else None,
        context=sequence_from_proto(request.context) if request.HasField("context") else None,
        num_context_messages=request.num_context_messages,
        turn=request.turn,
        template_name=request.template_name,
        tools=tuple(tool_from_proto(tool) for tool in request.tools),
        template_options=template_options_of(request.template_options_json),
        truncate_prompt=request.truncate_prompt,
        skip_special_tokens=request.skip_special_tokens,
        add_special_tokens=not request.HasField("add_special_tokens") or request.add_special_tokens,
        sampling=sampling,
        num_samples=num_samples,
        partial_answer=partial_answer,
    )


def rows_field(request: pb.LogProbRequest) -> str:
    """Return the name of the field that holds the rows to score."""
    return require_one_of([name for name in _ROWS if getattr(request, name)], _ROWS)


def require_one_of(present: list[str], names: tuple[str, ...]) -> str:
    """Return the one field that is set; InvalidInput names what was expected and what is set."""
    if len(present) == 1:
        return present[0]
    expected = f"{', '.join(names[:-1])} and {names[-1]}"
    raise InvalidInput(
        f"Expected exactly one of {expected}, found {' and '.join(present) or 'none'}.",
        reason=Reason.PROMPT_AMBIGUOUS if present else Reason.PROMPT_MISSING,
        remedy=f"Send one of {expected}.",
    )


def full_of(history: chat_pb2.ChatHistory) -> History:
    """Return the conversation to score; InvalidHistory says what is set when `full` is missing."""
    full = CHAT_HISTORY.from_proto(history).full
    if full is None or not len(full):
        present = [name for name in ("prompt", "response") if history.HasField(name)]
        raise InvalidHistory(
            f"Expected history.full, found {' and '.join(present) or 'nothing'}.",
            reason=Reason.FULL_MISSING,
            remedy="Send the whole conversation as full.",
        )
    return full


def template_options_of(text: str) -> dict[str, Any]:
    """Return the template's further variables from their JSON; empty for none."""
    try:
        options = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise InvalidInput(
            f"template_options_json is not a JSON object: {text[:40]!r}.",
            reason=Reason.INVALID_FIELD,
            remedy='Give it as {"enable_thinking": false}, or leave it out.',
        )
    return options


def _num_samples_of(request: pb.GenerateRequest) -> int:
    """Return the number of samples; 0 means 1."""
    if not 0 <= request.num_samples <= _MAX_SAMPLES:
        raise InvalidInput(
            f"num_samples is {request.num_samples}.",
            reason=Reason.INVALID_SAMPLING,
            remedy=f"Ask for 1 to {_MAX_SAMPLES} samples.",
        )
    return request.num_samples or 1


def manifest_of(request: pb.LoadWeightsRequest | None) -> WeightsManifest:
    """Return the manifest in the first message of a publish's stream."""
    if request is None or request.WhichOneof("content") != "manifest":
        raise manifest_mismatch("The stream does not begin with a manifest.")
    proto = request.manifest
    is_file = proto.data_plane not in DEVICE_PLANES
    if not proto.policy_version.lineage or (is_file and proto.num_bytes <= 0):
        raise manifest_mismatch("The manifest lacks a policy version or num_bytes.")
    manifest = _read(MANIFEST.from_proto, proto)
    if manifest.kind is WeightsKind.ADAPTER:
        if manifest.adapter:
            raise manifest_mismatch("An adapter is either the policy or held under a name.")
        if not (manifest.adapter_config_json and manifest.base_digest):
            raise manifest_mismatch("The manifest lacks the adapter's config or its base_digest.")
    if manifest.kind is WeightsKind.DELTA and (manifest.adapter or not is_file):
        raise manifest_mismatch("A delta is of the whole policy, and comes as a file or in chunks.")
    return manifest


def _read(from_proto: Callable[[P], D], proto: P) -> D:
    """Return the value; MANIFEST_MISMATCH names an enum's unknown number."""
    try:
        return from_proto(proto)
    except InvalidInput as error:
        raise manifest_mismatch(error.message) from None


async def contents_of(requests: AsyncIterator[pb.LoadWeightsRequest]) -> AsyncIterator[Content]:
    """Yield what follows the manifest."""
    async for request in requests:
        match request.WhichOneof("content"):
            case "chunk":
                yield request.chunk
            case "transfer":
                yield _read(TRANSFER_STEP.from_proto, request.transfer)
            case _:
                raise manifest_mismatch("A message without content followed the manifest.")


def manifest_mismatch(message: str) -> InvalidInput:
    """Return the error of a publish whose stream is wrong."""
    return InvalidInput(
        message,
        reason=Reason.MANIFEST_MISMATCH,
        remedy="Send a manifest, then the chunks it describes, or none when it names a path.",
    )


def _prompt_of(proto: chat_pb2.ChatHistory) -> History:
    present = [name for name in ("prompt", "response", "full") if proto.HasField(name)]
    history = CHAT_HISTORY.from_proto(proto).prompt
    if history is None or not len(history):
        has_others = present and "prompt" not in present
        what = f"only {' and '.join(present)}" if has_others else "no messages"
        raise InvalidHistory(
            f"Expected messages in history.prompt, found {what}.",
            reason=Reason.PROMPT_MISSING,
            remedy="Send history.prompt.",
        )
    return history


def _require_no_context(request: pb.GenerateRequest, field: str) -> None:
    if request.HasField("context") or request.num_context_messages:
        raise InvalidInput(
            f"Expected a history beside context, found {field}.",
            reason=Reason.BAD_CONTEXT,
            remedy=f"Leave context out: {field} is continued as it stands.",
        )
