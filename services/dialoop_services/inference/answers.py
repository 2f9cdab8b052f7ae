"""What callers are answered, as protobuf messages."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from dialoop.episode import UpdateMode
from dialoop.v1 import inference_service_pb2 as pb
from dialoop.wire import (
    chat_history_to_proto,
    policy_version_to_proto,
    sequence_to_proto,
    text_to_proto,
)

from dialoop_services.inference.rendering import RawPrompt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dialoop.episode import Sample
    from dialoop.sequences import Ids
    from dialoop.tokens.builder import Prompt
    from dialoop.tokens.tokenizer import RunningText
    from dialoop.trajectory import SamplingParams

    from dialoop_services.inference.engine import Piece, Sampled
    from dialoop_services.inference.rendering import Ask


def sample_to_proto(sample: Sample) -> pb.Sample:
    """One answer; a history, or text where text or token ids were asked with."""
    proto = pb.Sample(
        sequence=sequence_to_proto(sample.sequence),
        stop_reason=int(sample.stop_reason),  # type: ignore[arg-type]  # enums are ints
        stop_string=sample.stop_string,
        prompt_id=sample.prompt_id,
        sample_index=sample.sample_index,
    )
    if sample.text is None:
        proto.history.CopyFrom(chat_history_to_proto(sample.history))
    else:
        proto.text.CopyFrom(text_to_proto(sample.text))  # type: ignore[arg-type]  # same fields
    return proto


def prompt_id_of(token_ids: Ids) -> str:
    """A digest of prompt tokens int32 [L]."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=8).hexdigest()


def piece_to_proto(
    piece: Piece, text: RunningText, shown: Iterable[int]
) -> pb.GenerateStreamResponse:
    """Some tokens of a stream, and the whole characters that those of them add that are shown."""
    return pb.GenerateStreamResponse(
        token_ids=piece.token_ids,
        inference_logprobs=piece.logprobs,
        policy_version=policy_version_to_proto(piece.policy_version),
        text=text.add(shown),
    )


def update_mode_of(sampled: Iterable[Sampled]) -> UpdateMode:
    """What loads did to an answer's samples; KEEP_KV if to any."""
    modes = {one.update_mode for one in sampled}
    return next((m for m in (UpdateMode.KEEP_KV, UpdateMode.WAIT) if m in modes), min(modes))


def num_truncated_of(prompt: Prompt | RawPrompt) -> int:
    """How many of the prompt's tokens were cut off."""
    return prompt.num_truncated_tokens if isinstance(prompt, RawPrompt) else 0


def warnings_of(ask: Ask, sampling: SamplingParams) -> list[str]:
    """What is taken otherwise than asked, in words."""
    found = []
    if ask.history is None:
        unused = ("template_name", "tools", "template_options")
        found += [
            f"{name} is not used: the prompt is continued as it stands."
            for name in unused
            if getattr(ask, name)
        ]
    else:
        if ask.truncate_prompt:
            found.append("truncate_prompt is not used: a history is never cut.")
        if ask.skip_special_tokens:
            found.append("skip_special_tokens is not used: a content is all that was sampled.")
    if sampling.temperature == 0 and (sampling.truncates or sampling.seed is not None):
        found.append("top_p, top_k, min_p and seed are not used: temperature 0 is greedy.")
    return found
