"""The parameters that a weights file must hold: exactly those of the model directory.

The checks read safetensors headers only, so a wrong file is refused before any weight changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.reasons import Reason

Shapes = dict[str, tuple[int, ...]]

HEAD = "lm_head.weight"
_MAX_HEADER_BYTES = 100_000_000
_MAX_NAMED = 5


def read_shapes(path: Path) -> Shapes:
    """Return the name and shape of every tensor of a safetensors file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if 0 < size <= _MAX_HEADER_BYTES else None
        if not isinstance(header, dict):
            raise ValueError("no header")
        header.pop("__metadata__", None)
        return {name: tuple(int(n) for n in tensor["shape"]) for name, tensor in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise PreconditionFailed(
            f"{path.name} is not a safetensors file.",
            reason=Reason.UNKNOWN_PARAMETERS,
            remedy="Publish with safetensors.torch.save_file.",
        ) from error


def model_shapes(model_dir: Path) -> Shapes:
    """Return the name and shape of every tensor of a model directory (one file or shards)."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise InvalidConfig(
            f"{model_dir} holds no .safetensors file.",
            reason=Reason.NO_WEIGHTS,
            remedy="Save the model with save_pretrained.",
        )
    shapes: Shapes = {}
    for file in files:
        shapes |= read_shapes(file)
    return shapes


def num_parameters(model_dir: Path) -> int:
    """Return how many numbers the model's parameters hold; tied ones count once."""
    tied = is_tied(model_dir)
    shapes = model_shapes(model_dir)
    return sum(math.prod(shape) for name, shape in shapes.items() if not (tied and name == HEAD))


def is_tied(model_dir: Path) -> bool:
    """Return whether the output head shares the input embedding's weight."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    tied = config.get("tie_word_embeddings")
    return HEAD not in model_shapes(model_dir) if tied is None else bool(tied)


def require_same_parameters(path: Path, expected: Shapes, *, tied: bool) -> None:
    """Refuse a weights file with unknown, missing or differently shaped parameters."""
    require_shapes(read_shapes(path), expected, tied=tied)


def require_shapes(shapes: Shapes, expected: Shapes, *, tied: bool, is_whole: bool = True) -> None:
    """Refuse parameters that are not the expected ones; a part of them may lack some."""
    if tied:
        shapes = {name: shape for name, shape in shapes.items() if name != HEAD}
        expected = {name: shape for name, shape in expected.items() if name != HEAD}
    problems = (
        ("unknown", shapes.keys() - expected.keys()),
        ("missing", expected.keys() - shapes.keys() if is_whole else frozenset()),
        (
            "of another shape",
            {n for n in shapes.keys() & expected.keys() if shapes[n] != expected[n]},
        ),
    )
    for problem, names in problems:
        if names:
            raise PreconditionFailed(
                f"{len(names)} parameters are {problem}: {_some(names)}.",
                reason=Reason.UNKNOWN_PARAMETERS,
                remedy="Publish every parameter of the model this replica was started with.",
            )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_MAX_NAMED])
    return shown if len(ordered) <= _MAX_NAMED else f"{shown}, ..."
