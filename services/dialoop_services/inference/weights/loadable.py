"""What an engine loads beside a file of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from dialoop.clients.weights import SharedTensor, TransferPhase
    from dialoop.sequences import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One loaded adapter: its PEFT directory, and a slot that no other load ever had."""

    name: str
    policy_version: PolicyVersion
    slot: int
    folder: Path

    @property
    def key(self) -> str:
        """Return the engine's name for it, which differs after each swap."""
        return f"{self.name}@{self.slot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAdapter:
    """An adapter file that fits the base: the policy is W + scaling * B A."""

    path: Path
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One control message of vLLM's transfer, with the tensors that the trainer shares in it."""

    phase: TransferPhase
    info: Any
    tensors: tuple[SharedTensor, ...] = ()
