"""Check the house: sizes of folders, files and functions, what rooms say, cycles of imports.

Run it from the repository's root (`make check` does). It prints one line for each thing that
breaks a rule and ends with 1 when there is one. Two tables below hold what is tolerated: ALLOWED
for good, KNOWN until a change that is under way removes it. An entry that excuses nothing is an
error as well.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("client", "services", "tests", "benchmarks", "infra")
# Where imports, class names and room descriptions are checked: the packages of each source root.
PRODUCT = {
    "client": ("dialoop", "dialoop_extras"),
    "services": ("dialoop_learning", "dialoop_services", "dialoop_ops"),
}
GENERATED = "client/dialoop/v1"
# A package imports those before it; strings that are imported by name keep to it too.
ORDER = ("dialoop", "dialoop_learning", "dialoop_services", "dialoop_extras", "dialoop_ops")
MAX_MODULES, MAX_FILE_LINES, MAX_FUNCTION_LINES, MIN_MODULE_LINES = 20, 700, 60, 60

# Rule and subject, as findings print them -> why it may stay.
ALLOWED: Mapping[str, str] = {
    "function client/examples/grpo_by_hand.py:main": "the loop, read from top to bottom",
    "small dialoop.clients.blocking.twins": "its types stand beside it, in twins.pyi",
    "small dialoop.sandbox.confined.work": "bubblewrap starts it alone, without the fork server",
    "small dialoop_services.environment.__main__": "a program, which in_process runs too",
}
KNOWN: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing that breaks a rule; `rule subject` is its key in the tables."""

    rule: str
    subject: str
    text: str

    @property
    def key(self) -> str:
        """Return what the tables call it."""
        return f"{self.rule} {self.subject}"


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed file. `name` is how product code imports it; empty elsewhere."""

    path: str
    name: str
    num_lines: int
    tree: ast.Module

    @property
    def folder(self) -> str:
        """Return the path of the folder it lies in."""
        return self.path.rpartition("/")[0]

    @property
    def is_package(self) -> bool:
        """Say whether it is a package's `__init__`."""
        return self.path.endswith("/__init__.py")


def read_house(root: Path) -> list[Module]:
    """Parse every file of ours below `root`, in the order of their paths."""
    modules = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        place = path.relative_to(root).as_posix()
        if not place.startswith(f"{GENERATED}/"):
            text = path.read_text("utf-8")
            modules.append(Module(place, _import_name(place), text.count("\n"), ast.parse(text)))
    return modules


def _import_name(place: str) -> str:
    source, *parts = place.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts) if parts and parts[0] in PRODUCT.get(source, ()) else ""


def check(root: Path) -> list[Finding]:
    """Return what breaks a rule in the house at `root`, whether it is tolerated or not."""
    modules = read_house(root)
    product = [module for module in modules if module.name]
    imports = imports_of(product)
    return sorted(
        [
            *check_sizes(modules),
            *check_rooms(product),
            *check_cycles(imports),
            *check_names_up(product),
            *check_small_modules(product, imports),
            *check_class_names(product),
        ]
    )


def check_sizes(modules: Sequence[Module]) -> Iterator[Finding]:
    """Find folders, files and functions over their size."""
    counts = Counter(module.folder for module in modules if not module.is_package)
    for folder, count in counts.items():
        if count > MAX_MODULES:
            yield Finding("folder", folder, f"has {count} modules, more than {MAX_MODULES}")
    for module in modules:
        if module.num_lines > MAX_FILE_LINES:
            text = f"has {module.num_lines} lines, more than {MAX_FILE_LINES}"
            yield Finding("file", module.path, text)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    text = f"has {length} lines, more than {MAX_FUNCTION_LINES}"
                    yield Finding("function", f"{module.path}:{node.name}", text)


def check_rooms(product: Sequence[Module]) -> Iterator[Finding]:
    """Find packages whose `__init__` says too little: what lives there, what enters and leaves."""
    packages = {module.folder: module for module in product if module.is_package}
    for folder in sorted({module.folder for module in product}):
        if folder not in packages:
            yield Finding("room", folder, "has no __init__.py")
            continue
        text = ast.get_docstring(packages[folder].tree) or ""
        if len(re.findall(r"[.!?](?=\s|$)", text)) < 2:
            yield Finding("room", folder, "says less than two sentences in its __init__")


def imports_of(product: Sequence[Module]) -> dict[str, set[str]]:
    """Return what each module imports of the others: for typing, in functions, by a string too."""
    names = {module.name for module in product}
    imports: dict[str, set[str]] = {name: set() for name in names}
    for module in product:
        for node in ast.walk(module.tree):
            imports[module.name] |= _imports_at(module, node, names)
        imports[module.name] |= names & _named_in(module).keys()
        imports[module.name].discard(module.name)
    return imports


def _named_in(module: Module) -> dict[str, int]:
    """Return the modules of ours that strings name, where `import_module` is called, and lines."""
    nodes = list(ast.walk(module.tree))
    called = {ast.unparse(n.func).rpartition(".")[2] for n in nodes if isinstance(n, ast.Call)}
    if called.isdisjoint({"import_module", "__import__", "load_attribute", "resolve_name"}):
        return {}
    return {
        name: node.lineno
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (name := node.value.partition(":")[0]).partition(".")[0] in ORDER
    }


def check_names_up(product: Sequence[Module]) -> Iterator[Finding]:
    """Find strings that are imported by name from a package above."""
    for module in product:
        place = ORDER.index(module.name.partition(".")[0])
        for name, line in _named_in(module).items():
            if ORDER.index(name.partition(".")[0]) > place:
                yield Finding("up", f"{module.path}:{name}", f"is above it (line {line})")


def _imports_at(module: Module, node: ast.AST, names: set[str]) -> set[str]:
    if isinstance(node, ast.Import):
        return names & {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        package = module.name.split(".")
        package = package[: len(package) - node.level + module.is_package]
        base = ".".join([*package, base]).rstrip(".")
    # `from room import module` imports that module; anything else is the room's own.
    return names & {
        inner if (inner := f"{base}.{alias.name}") in names else base for alias in node.names
    }


def check_cycles(imports: Mapping[str, set[str]]) -> Iterator[Finding]:
    """Find the modules that reach themselves by imports."""
    reached = {name: _reachable(name, imports) for name in imports}
    for name in sorted(imports):
        if name in reached[name]:
            others = sorted(other for other in reached[name] - {name} if name in reached[other])
            through = [other for other in others if other in imports[name]]
            yield Finding("cycle", name, f"imports {', '.join(through)} and is imported by it")


def _reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    todo = [start]
    while todo:
        new = imports[todo.pop()] - reached
        reached |= new
        todo += new
    return reached


def check_small_modules(
    product: Sequence[Module], imports: Mapping[str, set[str]]
) -> Iterator[Finding]:
    """Find short modules with one importer, to which their lines belong."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, imported in imports.items():
        for other in imported:
            importers[other].add(name)
    for module in product:
        of_it = importers[module.name]
        # What a room's __init__ takes in is imported from the room, by whoever it is.
        is_shown = module.name.rpartition(".")[0] in of_it
        if (
            module.num_lines < MIN_MODULE_LINES
            and not module.is_package
            and len(of_it) == 1
            and not is_shown
        ):
            text = f"has {module.num_lines} lines and is imported by {min(of_it)} alone"
            yield Finding("small", module.name, text)


def check_class_names(product: Sequence[Module]) -> Iterator[Finding]:
    """Find public names that several modules give to a class of theirs."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in product:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    for name, where in places.items():
        if len(where) > 1:
            yield Finding("class", name, f"is defined in {', '.join(where)}")


def complaints(
    findings: Iterable[Finding], tolerated: Sequence[Mapping[str, str]] | None = None
) -> list[str]:
    """Return a line for each finding that no table tolerates, and for each idle entry."""
    tables = (ALLOWED, KNOWN) if tolerated is None else tolerated
    entries = {key: reason for table in tables for key, reason in table.items()}
    by_key = {finding.key: finding for finding in findings}
    return [
        *(f"{key} {finding.text}" for key, finding in by_key.items() if key not in entries),
        *(
            f"{key} is fine by now: take it out of the table in infra/check_rooms.py"
            for key in entries
            if key not in by_key
        ),
    ]


def main() -> int:
    """Check the repository in the working directory; 1 when it breaks a rule."""
    lines = complaints(check(Path()))
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
