"""Define [train.mesh]: how the trainer's processes share a model and its sequences."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dialoop_services.config.values import Section

_SHARDED = (
    "weights, gradients and AdamW take 16 bytes a parameter in float32, divided by dp_shard x cp"
)
_NOT_BUILT = {
    "tp": f"{_SHARDED} (70 billion on 128 GPUs: 8.75 GB each), and one layer is whole at a time. "
    "Tensor parallelism is for layers too large for that: of 400 billion parameters in 126 layers "
    "one takes 13 GB, and its gradient as much",
    "ep": f"{_SHARDED}, experts too, and one layer's experts are gathered at a time. Expert "
    "parallelism is for layers too large for that: 235 billion parameters in 94 layers take 10 GB "
    "a layer, 1,000 billion in 61 layers 66 GB",
    "pp": f"{_SHARDED}, over all nodes. Pipelines are for models that this does not divide enough: "
    "1,000 billion parameters are 16 TB, 31 GB each on 512 GPUs",
}


class MeshSettings(Section):
    """How the trainer's processes share the work: dp_replicate x dp_shard x cp of them.

    A process holds 1 / (dp_shard x cp) of weights, gradients and optimiser, and computes with one
    layer at a time as a whole.
    """

    dp_replicate: int = Field(default=1, ge=1)
    """Number of copies of the model, each sharded over dp_shard x cp processes (HSDP)."""
    dp_shard: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of processes that share one copy's weights and train different rows (FSDP2); "auto":
    what dp_replicate and cp leave."""
    cp: int = Field(default=1, ge=1)
    """Number of processes that compute one sequence together, each a part of its tokens; a packed
    row then holds one sequence."""

    @model_validator(mode="before")
    @classmethod
    def _require_built_dimensions(cls, values: Any) -> Any:
        for name, why in _NOT_BUILT.items() if isinstance(values, dict) else ():
            if name in values:
                raise ValueError(f"{name} is not built: {why}; leave {name} out of [train.mesh]")
        return values

    def sizes(self, num_ranks: int) -> tuple[int, int, int]:
        """Return dp_replicate, dp_shard and cp for so many processes; ValueError if they differ."""
        fixed = self.dp_replicate * self.cp
        left = num_ranks // fixed if self.dp_shard == "auto" else self.dp_shard
        if fixed * left == num_ranks:
            return self.dp_replicate, left, self.cp
        raise ValueError(
            f"the mesh of dp_replicate {self.dp_replicate}, dp_shard {self.dp_shard} and cp "
            f"{self.cp} does not fit {num_ranks} trainer process{'es' * (num_ranks > 1)} "
            "(num_nodes x num_processes): their product has to be that number"
        )
