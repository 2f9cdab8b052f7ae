"""Read another trainer's config and write ours: verl's YAML, or a TRL GRPOConfig.

`import_config` returns TOML, and then a comment for each key that is left out.

A GRPOConfig may be JSON, YAML, or Python that calls `GRPOConfig(...)` or writes a dict; the Python
is read and never run.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop_services.config.file import Override, override_in, parse_config, toml_value

from dialoop_extras.importers.from_trl import read_trl
from dialoop_extras.importers.from_verl import read_verl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_extras.importers.foreign_keys import ForeignKeys

_REMEDY = "Name a verl YAML file, or a TRL GRPOConfig as JSON, YAML or Python."


def import_config(path: Path) -> str:
    """Return the job file for another trainer's config, with every key that it could not map."""
    values = _values_of(path)
    is_verl = "actor_rollout_ref" in values or {"data", "algorithm"} <= values.keys()
    keys = read_verl(values) if is_verl else read_trl(values)
    _fill_in(keys)
    job: dict[str, Any] = {}
    for name, value in keys.mapped.items():
        override_in(job, Override(path=name, value=value, origin=str(path)))
    parse_config(job, source=str(path))
    kind = "verl config" if is_verl else "TRL GRPOConfig"
    head = f"# From the {kind} {path}. Check it with `dialoop config check`."
    todo = [f"# Fill in {name}: the config does not say it." for name in keys.to_fill_in]
    return "\n".join([head, *todo, "schema = 1", *_tables(job, ""), *_left_out(keys)]) + "\n"


def _fill_in(keys: ForeignKeys) -> None:
    """Set what the job needs and the other config does not hold; TRL's script holds it."""
    for name, value in (
        ("environment.options.dataset", "train.parquet"),
        ("environment.options.reward_funcs", "rewards.py:reward"),
        ("model.directory", ""),
    ):
        is_verl = keys.mapped["environment.use"] == "verl"
        if name not in keys.mapped and not (is_verl and name.startswith("environment.")):
            keys.mapped[name] = value
            keys.to_fill_in.append(name)
    if "environment.options.val_files" not in keys.mapped:
        keys.mapped["evaluation.num_tasks"] = 0


def _tables(values: Mapping[str, Any], path: str) -> list[str]:
    """Return the lines of a table, its own keys first."""
    own = [f"{k} = {toml_value(v)}" for k, v in values.items() if not _is_table(path, k, v)]
    lines = ["", f"[{path}]", *own] if path and own else own
    for name, value in values.items():
        if _is_table(path, name, value):
            lines += _tables(value, f"{path}.{name}" if path else name)
    return lines


def _is_table(path: str, name: str, value: Any) -> bool:
    return isinstance(value, dict) and name not in ("options", "loss_options")


def _left_out(keys: ForeignKeys) -> list[str]:
    lines = ["", f"# Not mapped: {len(keys.left_out)} keys."]
    for name, (value, reason) in keys.left_out.items():
        text = " ".join(json.dumps(value, default=str, ensure_ascii=False).split())
        lines.append(f"# {name} = {text}: {reason}")
    return lines


def _values_of(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.", remedy=_REMEDY
        ) from None
    try:
        values = _of_python(text) if path.suffix == ".py" else _of_yaml(text)
    except (ValueError, SyntaxError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}.", remedy=_REMEDY) from None
    if not isinstance(values, dict) or not values:
        raise InvalidConfig(f"{path} holds no mapping of keys.", remedy=_REMEDY)
    return {str(name): value for name, value in values.items()}


def _of_yaml(text: str) -> Any:
    try:  # JSON is YAML too, but not to every reader
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml
    except ImportError as error:
        raise InvalidConfig(
            "Reading YAML needs the `pyyaml` package.",
            reason=Reason.PACKAGE_MISSING,
            remedy="Run: pip install pyyaml",
        ) from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return _numbers_in(values)


def _numbers_in(value: Any) -> Any:
    """Return the value with numbers such as 1e-6, which YAML 1.1 reads as texts, as numbers."""
    if isinstance(value, dict):
        return {name: _numbers_in(item) for name, item in value.items()}
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _of_python(text: str) -> dict[str, Any]:
    """Return the arguments of the first `...Config(...)`, or the first dict, in Python's source."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Config"):
            return {word.arg: _literal(word.value) for word in node.keywords if word.arg}
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {str(_literal(key)): _literal(item) for key, item in pairs if key}
    raise ValueError("it has no GRPOConfig(...) and no dict")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return f"${{{ast.unparse(node)}}}"  # an expression, which only running it would tell
