"""IFEval's 25 checks answer as lm-eval's own, which are the published ones."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dialoop.tasks.ifeval_checks import CHECKS, check_all

from tests.support.samples.ifeval_texts import ifeval_cases

REASON = "lm-eval brings some thirty packages: see infra/test_compat.sh"
GOLDENS = Path(__file__).parents[2] / "goldens" / "ifeval_checks.json"
PROMPT = "Say hi."
NUM_TEXTS = 600


def _folder_of(package: str) -> Path:
    """Return a package's folder, without importing it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def published() -> Any:
    """Return lm-eval's module of IFEval; nltk's data come from the wheel of llama-index."""
    lm_eval = pytest.importorskip("lm_eval", reason=REASON)
    nltk = pytest.importorskip("nltk", reason=REASON)
    nltk.data.path.insert(0, str(_folder_of("llama_index.core") / "_static" / "nltk_cache"))
    # Its package of all tasks imports what no check needs.
    tasks = ModuleType("lm_eval.tasks")
    tasks.__path__ = [str(Path(lm_eval.__file__).parent / "tasks")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval.tasks", tasks)
        # The published check draws anew each time what langdetect finds; ours does not.
        patch.setattr("langdetect.DetectorFactory.seed", 0)
        yield importlib.import_module("lm_eval.tasks.ifeval.utils")


def _published(module: Any, name: str, arguments: dict[str, Any], text: str) -> dict[str, Any]:
    row = module.InputExample(
        key=0, instruction_id_list=[name], prompt=PROMPT, kwargs=[dict(arguments)]
    )
    strict = module.test_instruction_following_strict(row, text)
    loose = module.test_instruction_following_loose(row, text)
    return {"strict": strict.follow_instruction_list, "loose": loose.follow_instruction_list}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_answers_as_the_published_one(published: Any, name: str) -> None:
    answers = []
    num = 60 if name == "language:response_language" else NUM_TEXTS
    for arguments, text in ifeval_cases(name, num):
        theirs = _published(published, name, arguments, text)
        assert check_all([name], [arguments], PROMPT, text) == theirs, (arguments, text)
        answers.append(theirs["strict"][0])
    assert 0.05 < sum(answers) / num < 0.95


def test_the_frozen_cases_are_the_published_ones(published: Any) -> None:
    for name, arguments, text, strict in json.loads(GOLDENS.read_text("utf-8")):
        assert _published(published, name, arguments, text)["strict"] == [strict], (name, text)
