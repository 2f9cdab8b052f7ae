"""LoRA adapters in a transformers model, by PEFT: each row of a batch may have its own.

The model's own weights never change. PEFT is imported, and wraps the model's linear layers, while
there is an adapter; removing the last one unwraps them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason
from safetensors.torch import load_file

from dialoop_services.inference.weights.adapter_files import WEIGHTS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dialoop_services.inference.weights.loadable import Adapter

_BASE = "__base__"


class AdaptedModel:
    """A model that is called as before, or within `rows_of` with an adapter for each row."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft: Any = None
        self._keys: set[str] = set()
        self._rows: list[str] = []

    @property
    def device(self) -> Any:
        """Return the torch device on which the model's weights are now."""
        return self._model.device

    def __call__(self, **inputs: Any) -> Any:
        """Run the model's forward pass, with each row's adapter where there is one."""
        if self._peft is None:
            return self._model(**inputs)
        names = self._rows or [_BASE] * len(inputs["input_ids"])
        return self._peft(adapter_names=names, **inputs)

    @contextmanager
    def rows_of(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Within the context, row i of the model's input uses adapter i."""
        self._rows = [_BASE if adapter is None else _module_key(adapter) for adapter in adapters]
        try:
            yield
        finally:
            self._rows = []

    def add(self, adapter: Adapter) -> None:
        """Load the adapter's PEFT directory; PreconditionFailed, no change if it does not fit."""
        from peft import LoraConfig, PeftModel, set_peft_model_state_dict

        key = _module_key(adapter)
        config = LoraConfig.from_pretrained(str(adapter.folder))
        if self._peft is None:
            self._peft = PeftModel(self._model, config, adapter_name=key)
        else:
            self._peft.add_adapter(key, config)
        self._keys.add(key)
        tensors = load_file(adapter.folder / WEIGHTS_FILE)
        loading = set_peft_model_state_dict(self._peft, tensors, adapter_name=key)
        missing = [name for name in loading.missing_keys if key in name]
        if missing or loading.unexpected_keys:
            self.remove(adapter)
            raise PreconditionFailed(
                f"PEFT does not take adapter {adapter.name}.",
                reason=Reason.ADAPTER_REFUSED,
                remedy="Publish the tensors that PEFT's save_pretrained writes.",
            )
        self._peft.eval().requires_grad_(False)

    def remove(self, adapter: Adapter) -> None:
        """Remove an adapter; removing the last one unwraps the model. Idempotent."""
        key = _module_key(adapter)
        if key not in self._keys:
            return
        self._keys.discard(key)
        if self._keys:
            self._peft.set_adapter(next(iter(self._keys)))
            self._peft.delete_adapter(key)
        else:
            self._peft.unload()
            self._peft = None


def require_peft() -> None:
    """Raise InvalidConfig (PEFT_MISSING) when PEFT is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(
            "Adapters need the package peft.",
            reason=Reason.PEFT_MISSING,
            remedy="Run `make setup`, or pip install 'dialoop-services[inference]'.",
        ) from error


def _module_key(adapter: Adapter) -> str:
    """Return PEFT's name of the adapter, which becomes a module's name and may hold no dot."""
    return f"slot{adapter.slot}"
