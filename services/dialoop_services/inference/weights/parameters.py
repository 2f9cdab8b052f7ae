"""The parameters that a weights file must hold: exactly those of the model directory.

The checks read safetensors headers only, so a wrong file is refused before any weight changes.
"""

from __future__ import annotations

from pathlib import Path

from dialoop.errors import PreconditionFailed
from dialoop.reasons import Reason
from dialoop_learning.model.weight_files import HEAD, Shapes, read_shapes, some_of


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
                f"{len(names)} parameters are {problem}: {some_of(names)}.",
                reason=Reason.UNKNOWN_PARAMETERS,
                remedy="Publish every parameter of the model this replica was started with.",
            )
