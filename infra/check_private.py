"""Find uses of what other packages keep to themselves: names that begin with `_`.

Run it from the repository's root (`make check` does). It prints one line for each use and ends with
1 when there is one. A use is

    import      `from uvicorn import _x`, `import grpc._cython`
    attribute   `torch._C`; `pool._x` and `getattr(pool, "_x")` where nothing of ours is named `_x`
    self        `self._x` in a class with a base of another package, where neither the class nor a
                base of ours defines `_x`; `super()._x` where no base of ours does
    assignment  `uvicorn.main = ...`, `setattr(uvicorn, "main", ...)`: another package is changed

The standard library is not looked at, nor are names with two underscores. EXCEPTIONS holds what may
stay. An entry that excuses nothing is an error as well.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("client", "services", "benchmarks", "infra")
OURS = re.compile(r"(dialoop\w*|benchmarks|infra|tests)(\.|$)")
# Documented names of tuples, enums, processes and syntax trees.
DOCUMENTED = frozenset(
    {"_replace", "_asdict", "_fields", "_make", "_value_", "_attributes", "_exit"}
)

# Pattern of a file, and how the name begins as it is printed -> why it may stay.
EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("client/dialoop/v1/*_pb2.py", ""): "protobuf's compiler writes it",
    ("client/dialoop/v1/*_pb2_grpc.py", "grpc._utilities"): "grpcio's compiler writes it",
    ("*", "torch.backends."): "torch's documentation tells its users to assign these",
    ("*", "langdetect.DetectorFactory.seed"): "langdetect's documentation tells its users to",
    (
        "*_learning/model/products.py",
        "torch.ops.mkldnn._linear_pointwise",
    ): "oneDNN's product without copies; by to_mkldnn() it takes as long as torch's own",
    (
        "*_learning/model/forest_attention.py",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    ): "no public attention on a CPU returns the sums that put its parts together",
    (
        "*/transformers_engine/engine.py",
        "?._attn_implementation",
    ): "transformers sets it by public means, and reads it by none",
    ("benchmarks/servers/trl_rollouts.py", "RecordingTrainer."): "TRL shows its batches nowhere",
}


class Use(NamedTuple):
    """One use of another package's private name."""

    path: str
    line: int
    kind: str
    name: str


@dataclass(slots=True)
class Class:
    """A class of ours: what it and its bases define; two of one name are taken together."""

    bases: set[str] = field(default_factory=set)
    defines: set[str] = field(default_factory=set)
    has_foreign_base: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed file; `imports` maps its names to the whole names of what they import."""

    path: str
    nodes: Sequence[ast.AST]
    imports: Mapping[str, str]

    def foreign(self, owner: ast.expr) -> str:
        """Return the whole name of another package's thing; empty for anything else."""
        root, _, rest = _dotted(owner).partition(".")
        whole = ".".join(filter(None, (self.imports.get(root, ""), rest)))
        return whole if root in self.imports and is_foreign(whole) else ""


def is_private(name: str) -> bool:
    """Say whether one underscore is before a name."""
    is_dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and bool(name.strip("_")) and not is_dunder | (name in DOCUMENTED)


def is_foreign(module: str) -> bool:
    """Say whether a module is of another package; the standard library's are not."""
    return not OURS.match(module) and module.partition(".")[0] not in sys.stdlib_module_names


def read(root: Path) -> list[Module]:
    """Parse every file of ours below `root`."""
    modules = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        imports = {bound: whole for node in nodes for bound, whole in _imports_of(node)}
        modules.append(Module(path.relative_to(root).as_posix(), nodes, imports))
    return modules


def _imports_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (root, root)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)


def find(modules: Sequence[Module]) -> set[Use]:
    """Return every use, whether it is excused or not."""
    classes = _classes_of(modules)
    ours = {name for module in modules for node in module.nodes for name in _defined_by(node)}
    uses = set()
    for module in modules:
        for node in module.nodes:
            found = [*_imported(node), *_changed(node, module), *_read(node, module, ours)]
            line = getattr(node, "lineno", 0)
            uses |= {Use(module.path, line, kind, name) for kind, name in found}
            if isinstance(node, ast.ClassDef):
                uses |= {Use(module.path, *use) for use in _of_self(node, classes)}
    return uses


def _classes_of(modules: Sequence[Module]) -> dict[str, Class]:
    classes: dict[str, Class] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                of_it = classes.setdefault(node.name, Class())
                for base in node.bases:
                    plain = base.value if isinstance(base, ast.Subscript) else base
                    of_it.bases.add(_dotted(plain).rpartition(".")[2])
                    of_it.has_foreign_base |= bool(module.foreign(plain))
                of_it.defines |= {name for inner in ast.walk(node) for name in _defined_by(inner)}
    return classes


def _defined_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node gives to a class, a module or an object of ours."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if _dotted(node.value) in ("self", "cls"):
            yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if is_foreign(name) and any(map(is_private, name.split("."))):
            yield "import", name


def _read(node: ast.AST, module: Module, ours: set[str]) -> Iterator[tuple[str, str]]:
    owner, name = _owner_and_name(node, ("getattr", "hasattr"))
    if owner is None or not is_private(name):
        return
    root = _dotted(owner).partition(".")[0]
    if whole := module.foreign(owner):
        yield "attribute", f"{whole}.{name}"
    elif root not in ("self", "cls", *module.imports) and name not in ours:
        yield "attribute", f"?.{name}"


def _changed(node: ast.AST, module: Module) -> Iterator[tuple[str, str]]:
    is_change = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
    owner, name = _owner_and_name(node, ("setattr", "delattr"))
    if owner and (is_change or isinstance(node, ast.Call)) and (whole := module.foreign(owner)):
        yield "assignment", f"{whole}.{name}"


def _owner_and_name(node: ast.AST, calls: tuple[str, ...]) -> tuple[ast.expr | None, str]:
    """Return what `owner.name` and `getattr(owner, "name")` speak of."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and _dotted(node.func) in calls and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return node.args[0], name.value
    return None, ""


def _of_self(node: ast.ClassDef, classes: Mapping[str, Class]) -> Iterator[tuple[int, str, str]]:
    seen, todo = {node.name}, [node.name]
    while todo:
        new = classes[todo.pop()].bases & classes.keys() - seen
        seen |= new
        todo += new
    if not any(classes[name].has_foreign_base for name in seen):
        return
    inherited = {name for base in seen - {node.name} for name in classes[base].defines}
    defined = {"self": inherited | classes[node.name].defines, "super": inherited}
    for inner in ast.walk(node):
        owner, name = _owner_and_name(inner, ("getattr", "hasattr", "setattr"))
        of_it = owner.func if isinstance(owner, ast.Call) else owner
        root = _dotted(of_it).replace("cls", "self") if of_it else ""
        if root in defined and is_private(name) and name not in defined[root]:
            yield getattr(inner, "lineno", 0), "self", f"{node.name}.{name}"


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` of such an expression; empty for any other."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def complaints(uses: set[Use], exceptions: Mapping[tuple[str, str], str]) -> list[str]:
    """Return a line for each use that no exception names, and for each idle exception."""

    def excuses(key: tuple[str, str], use: Use) -> bool:
        return fnmatch(use.path, key[0]) and use.name.startswith(key[1])

    kept = [use for use in sorted(uses) if not any(excuses(key, use) for key in exceptions)]
    idle = [key for key in exceptions if not any(excuses(key, use) for use in uses)]
    return [
        *(f"{use.path}:{use.line} {use.kind} {use.name}" for use in kept),
        *(
            f"{path} {name} is in the table of infra/check_private.py for nothing"
            for path, name in idle
        ),
    ]


def main() -> int:
    """Check the repository in the working directory; 1 when it uses a private name."""
    lines = complaints(find(read(Path())), EXCEPTIONS)
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
