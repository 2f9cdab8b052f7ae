"""torchrl's TransformersWrapper and vLLMWrapper, over any policy: a client, or a twin of a test.

    wrapper = vLLMWrapper(dialoop.inference, generate_kwargs={"max_tokens": 8})
    view = await wrapper(ChatHistory(prompt=prompt))
    view.history.full, view.tokens.response, view.log_probs.response, view.masks

The engine is the inference service's, so both names are the same; a wrapper loads no weights.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from dialoop.chat import ChatHistory
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.reasons import Reason
from dialoop.user_functions import call
from dialoop.views.views import LogProbRow, LogProbs, Text, TurnView

from dialoop_extras.compat.arguments import with_neutral
from dialoop_extras.compat.history import SourceHistory
from dialoop_extras.compat.sampling import GenerateOptions, read_generate_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop.episode import Sample

_TIMEOUT_S = 600.0
_MODES = {"history": "history", "text": "text", "tokens": "token_ids"}
_ROWS = {"history": "histories", "text": "texts", "tokens": "rows"}


def require_policy(model: Any, needed: str) -> None:
    """Raise InvalidConfig (WRONG_TYPE) for a model that has to be served first, or is none.

    A module of torch and an engine of vLLM have a `generate` of their own, which is not a policy's.
    """
    roots = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if not hasattr(model, needed) or roots & {"torch", "transformers", "vllm"}:
        has = "is no policy" if hasattr(model, needed) else f"has no `{needed}`"
        raise InvalidConfig(
            f"The model is {type(model).__name__}, which {has}.",
            reason=Reason.WRONG_TYPE,
            remedy="Serve it, and give the client: Dialoop(address).inference.",
        )


@with_neutral
@dataclass(frozen=True, slots=True)
class PolicyWrapper:
    """Calls a policy with torchrl's arguments; `await` the call, which takes one item or a list.

    input_mode: history, text or tokens, of which an item is a ChatHistory, Text or Tokens.
    generate: sample an answer to `prompt`; else give the log-probs of `full`.
    generate_kwargs: sampling by the names of transformers or vLLM, see `compat.sampling`.
    """

    model: Any
    tokenizer: Any = field(default=None, kw_only=True)
    input_mode: str = field(default="history", kw_only=True)
    generate: bool = field(default=True, kw_only=True)
    generate_kwargs: Mapping[str, Any] | None = field(default=None, kw_only=True)
    num_samples: int | None = field(default=None, kw_only=True)
    return_log_probs: bool | None = field(default=None, kw_only=True)
    pad_output: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require_policy(self.model, "generate" if self.generate else "logprobs")
        if self.input_mode not in _MODES:
            raise InvalidConfig(
                f"input_mode is {self.input_mode!r:.40}.",
                reason=Reason.BAD_OPTIONS,
                remedy="Choose 'history', 'text' or 'tokens'.",
            )
        if self.return_log_probs is False or self.pad_output:
            raise InvalidConfig(
                "return_log_probs=False and pad_output=True are not supported.",
                reason=Reason.BAD_OPTIONS,
                remedy="Log-probs always come; pad with dialoop_extras.padding.pad_output.",
            )

    def get_new_version(self, **changes: Any) -> PolicyWrapper:
        """Return a wrapper of the same model with other arguments."""
        return replace(self, **changes)

    async def __call__(self, data: Any) -> Any:
        """Return a TurnView, or a tuple of num_samples; a list of them for a list of items.

        With generate=False it is LogProbs, whose `full` begins at the second token.
        """
        if isinstance(data, list):
            return list(await asyncio.gather(*(self(item) for item in data)))
        return await (self._sample(data) if self.generate else self._score(data))

    async def _sample(self, data: Any) -> TurnView | tuple[TurnView, ...]:
        options = self._options()
        samples = await call(
            self.model.generate,
            **{_MODES[self.input_mode]: self._part(data, "prompt")},
            sampling=options.sampling,
            num_samples=options.num_samples,
            timeout_s=_TIMEOUT_S,
        )
        views = tuple(self._view(sample) for sample in samples)
        return views[0] if options.num_samples == 1 else views

    def _view(self, sample: Sample) -> TurnView:
        """Return the view of a sample, whose texts need no tokenizer where the prompt was one."""
        view, said = TurnView.of_sample(sample, tokenizer=self.tokenizer), sample.text
        if view.text is None and said is not None:
            text = Text(prompt=said.prompt, response=said.response, full=said.full)
            view = replace(view, text=text)
        if view.history is not None:
            parts = {f.name: getattr(view.history, f.name) for f in fields(view.history)}
            own = {n: part and SourceHistory(part.messages) for n, part in parts.items()}
            view = replace(view, history=ChatHistory(**own))
        return view

    def _options(self) -> GenerateOptions:
        """Return the sampling; a number of samples given twice must agree."""
        named = dict(self.generate_kwargs or {})
        return read_generate_options(named | {"num_samples": self.num_samples})

    async def _score(self, data: Any) -> LogProbs:
        full = self._part(data, "full")
        if self.input_mode == "tokens":
            (row,) = await call(self.model.logprobs, [list(full)], timeout_s=_TIMEOUT_S)
        else:
            items = {_ROWS[self.input_mode]: [full]}
            (row,) = await call(self.model.logprobs_of, **items, timeout_s=_TIMEOUT_S)
        return LogProbs(full=LogProbRow(values=row, start=1))

    def _part(self, data: Any, name: str) -> Any:
        """Return the part of the item that this mode reads."""
        part = getattr(data, name, None)
        if part is None:
            raise InvalidInput(
                f"The {type(data).__name__} has no `{name}`, which {self.input_mode} mode reads.",
                reason=Reason.PROMPT_MISSING if name == "prompt" else Reason.FULL_MISSING,
                remedy="Give a ChatHistory, Text or Tokens with that part.",
            )
        return part
