"""Read another trainer's config and write ours: verl's YAML, or a config of TRL.

`import_config` returns TOML, and then a comment for each key that is left out. What the file does
not say is as the other package has it.

TRL's GRPOConfig, AsyncGRPOConfig or SFTConfig may be JSON, YAML, or Python that calls the class or
writes a dict; the Python is read and never run.
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

from dialoop_extras.importers.from_trl import KINDS, kind_of, read_trl
from dialoop_extras.importers.from_verl import read_verl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dialoop_extras.importers.foreign_keys import ForeignKeys

_CLASS = "(class)"
_REMEDY = "Name a verl YAML file, or a TRL GRPOConfig as JSON, YAML or Python."


def import_config(path: Path) -> str:
    """Return the job file for another trainer's config, with every key that it could not map."""
    values = _values_of(path)
    is_verl = "actor_rollout_ref" in values or {"data", "algorithm"} <= values.keys()
    if is_verl:
        keys = read_verl(values, folder=path.parent)
    else:
        kind = str(values.pop(_CLASS, kind_of(values)))
        keys = read_trl(_flat_adapter(values), kind=kind, folder=path.parent)
    _fill_in(keys)
    job: dict[str, Any] = {}
    for name, value in keys.mapped.items():
        override_in(job, Override(path=name, value=value, origin=str(path)))
    parse_config(job, source=str(path))
    head = f"# From {path}, read as {keys.title}. Check it with `dialoop config check`."
    todo = [f"# Fill in {name}: {why}." for name, why in keys.to_fill_in.items()]
    assumed = [f"# Assumed for {name}: {why}." for name, why in keys.assumed.items()]
    lines = [head, *todo, *assumed, "schema = 1", *_tables(job, ""), *_left_out(keys)]
    return "\n".join(lines) + "\n"


def _flat_adapter(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with those of peft's LoraConfig, if there is one, beside them."""
    adapter = values.get("peft_config")
    if not isinstance(adapter, dict):
        return values
    rest = {name: value for name, value in values.items() if name != "peft_config"}
    return rest | {f"peft_config.{name}": value for name, value in adapter.items()}


def _fill_in(keys: ForeignKeys) -> None:
    """Set what the job needs and the other config does not hold; TRL's script holds it."""
    needed = {"model.directory": ""}
    if keys.mapped.get("environment.use") == "trl":
        needed |= {
            "environment.options.dataset": "train.parquet",
            "environment.options.reward_funcs": "rewards.py:reward",
        }
    if keys.mapped.get("train.mode") == "sft":
        needed["sft.file"] = "chats.jsonl"
    for name, value in needed.items():
        if name not in keys.mapped:
            keys.mapped[name] = value
            keys.to_fill_in[name] = "the config does not say it"
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
    own = {name: left for name, left in keys.left_out.items() if name in keys.given}
    lines = ["", f"# Not mapped: {len(own)} keys.", *map(_left, own.items())]
    others = [item for item in keys.left_out.items() if item[0] not in own]
    if others:
        lines += [f"# Not mapped, and so in {keys.title} by default: {len(others)} keys."]
    return [*lines, *map(_left, others)]


def _left(item: tuple[str, tuple[Any, str]]) -> str:
    name, (value, reason) = item
    text = " ".join(json.dumps(value, default=str, ensure_ascii=False).split())
    return f"# {name} = {text}: {reason}"


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
    """Return the arguments of a config's class, and of peft's, or the first dict, in Python."""
    tree = ast.parse(text)
    calls = {
        ast.unparse(node.func).rpartition(".")[2]: node
        for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.Call)])
    }
    name = next((name for name in (*KINDS, "TrainingArguments") if name in calls), None)
    if name is not None:
        values = _arguments(calls[name]) | ({_CLASS: name} if name in KINDS else {})
        adapter = {"peft_config": _arguments(calls["LoraConfig"])} if "LoraConfig" in calls else {}
        return values | adapter
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {str(_literal(key)): _literal(item) for key, item in pairs if key}
    raise ValueError(f"it calls none of {', '.join(KINDS)}, and has no dict")


def _arguments(call: ast.Call) -> dict[str, Any]:
    """Return a call's arguments by name; what only running it would tell, as an expression."""
    arguments = {word.arg: _literal(word.value) for word in call.keywords if word.arg}
    for word in call.keywords:
        if word.arg is None:
            value = _literal(word.value)
            named = value if isinstance(value, dict) else {f"**{ast.unparse(word.value)}": value}
            arguments |= named
    return arguments


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return f"${{{ast.unparse(node)}}}"  # an expression, which only running it would tell
