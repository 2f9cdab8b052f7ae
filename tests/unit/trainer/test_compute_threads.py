"""Every worker of the trainer computes with the configured number of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dialoop_services.trainer import __main__ as trainer
from dialoop_services.trainer.settings import TrainerSettings


class Enough(Exception):
    """Ends the trainer after its first work."""


async def test_the_first_worker_has_the_trainers_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A worker that began before the number was set kept torch's, one for each core. Its train steps
    # then took other cores' time, and a restarted trainer did not repeat them bit for bit.
    before, seen = torch.get_num_threads(), []

    def make(settings: TrainerSettings) -> None:
        torch.ones(2) @ torch.ones(2)
        seen.append(torch.get_num_threads())
        raise Enough

    monkeypatch.setattr(trainer, "_make_tiny_model", make)
    host: Any = None
    settings = TrainerSettings(model_dir=Path("unused"), run="r", num_threads=1)
    torch.set_num_threads(2)
    try:
        with pytest.raises(Enough):
            await trainer.serve_in(host, settings)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]
