"""Every snippet in a public docstring of the SDK runs, or is run by the test that is named."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dialoop
import pytest
from dialoop import environments, testing
from dialoop.chat import ChatHistory, History, Message
from dialoop.clients.channel import Channel
from dialoop.environments import ChatEnv
from dialoop.episode import ContinuedText, Sample
from dialoop.rollout import play_group
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.templates.chat_template import ChatTemplate
from dialoop.trajectory import SamplingParams, StopReason
from dialoop.views.views import TurnView
from dialoop.wire import records
from dialoop_extras import compat
from dialoop_extras.compat.offered import OFFERED
from dialoop_extras.text_environment.setups import calculator
from dialoop_extras.trials import DirectOutputAgent, ScriptedAgent, TwentyQuestions, run_trial

from tests.support.rest_world import service_in_a_thread
from tests.support.samples.docstring_snippets import module_of, run_snippet, snippets
from tests.support.samples.scripted_tokens import ScriptedTokens
from tests.support.waiting import PATIENCE_S

# The tests that play these: each starts a whole job, or needs a package that tests do without.
RUN_ELSEWHERE = {
    "dialoop.agents": "tests/contract/collector/test_agents.py::"
    "test_an_agents_run_is_a_trajectory_with_its_reward",
    "dialoop.clients.recordings": "tests/contract/collector/test_agents.py::"
    "test_a_notebook_records_through_the_sdk",
    "dialoop_extras.compat.verifiers": "tests/extras/contract/compat/test_verifiers.py::"
    "test_a_run_with_a_tool_is_a_trajectory_with_verifiers_rewards",
    "dialoop_extras.compat.verifiers.VerifiersTasks": "tests/extras/contract/compat/"
    "test_verifiers.py::test_the_tasks_of_a_taskset_are_listed",
    "dialoop.import_paths": "tests/unit/test_import_paths.py::"
    "test_a_file_of_python_is_loaded_once_and_its_errors_are_told",
    "dialoop_ops.jobs": "tests/contract/stack/test_jobs.py::"
    "test_the_documented_job_trains_in_this_process_and_gives_rows_and_a_summary",
    "dialoop.environments.tasks.files": "tests/unit/tasks/test_tasks.py::"
    "test_the_same_rows_come_from_json_lines_parquet_and_a_saved_data_set",
    "dialoop.tasks.stored_tasks": "tests/unit/tasks/test_rows_of_others.py::"
    "test_a_share_of_the_rows_is_held_out",
    "dialoop_extras.torchrl_view": "tests/extras/unit/views/test_tensors.py::"
    "test_turns_of_different_lengths_come_back_as_they_were",
}
BLOCKING = {"dialoop.clients.blocking.connection", "dialoop.clients.blocking.loop"}

ROOT = Path(__file__).parents[2]
SNIPPETS = snippets(of_services=False)
QUESTION = ChatHistory(prompt=[{"role": "user", "content": "3+4"}])


def _search(query: str) -> str:
    """Search."""
    return query


def _lookup(key: str) -> str:
    """Look up."""
    return key


def _at_hand() -> dict[str, Any]:
    """Return the public names, and examples of what a reader has at hand."""
    names: dict[str, Any] = {"dialoop": dialoop, "History": History}
    for module in (dialoop, environments, testing):
        public = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
        names |= {name: getattr(module, name) for name in public}
    tokenizer = testing.byte_tokenizer()
    answered = QUESTION.respond(Message(role="assistant", content="7"))
    environment = environments.arithmetic()
    episode = environment.reset(environment.tasks.get("train", "35+40"), 0).episode
    return names | {
        "tokenizer": tokenizer,
        "template": ChatTemplate.of(tokenizer),
        "policy": testing.ScriptedPolicy(["Result=75<submit>"] * 3),
        "text": "Result=75<submit>",
        "chat_history": answered,
        "history": answered.full,
        "prompt": QUESTION.prompt,
        "environment": environment,
        "env": environment,
        "trajectory": testing.trajectory(),
        "episode": episode,
        "answer": Message(role="assistant", content="Result=75<submit>"),
        "task": dialoop.Task(task_id="t", environment="arithmetic", split="train", key="35+40"),
        "tasks": environments.RowTasks([{"key": "1", "query": "1+2", "answer": "3"}]),
        "brevity": lambda episode: 1 / (1 + len(episode.answer_text)),
        "has_answer": lambda episode: 1.0,
        "is_right": lambda episode: True,
        "unsure": lambda episode: False,
        "rewards": [dialoop.Reward(name="r", value=1.0)],
        "message": Message(role="assistant", content="hi"),
        "question": Message(role="user", content="35+40"),
        "search": _search,
        "lookup": _lookup,
        "source": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "reward": lambda episode: 1.0,
        "equal": lambda answer, truth: answer == truth,
        "truth": "75",
        "collate": dict,
        "row": {"query": "1+2"},
        "error": KeyError("answer"),
        "game": TwentyQuestions(),
        "agent": ScriptedAgent(["[apple]"]),
        "TwentyQuestions": TwentyQuestions,
        "driver": SimpleNamespace(),
    }


def _of_one_place(place: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return what the snippets of one place take from their reader."""
    tokenizer, version = names["tokenizer"], PolicyVersion(lineage="main", number=0)
    scores = SimpleNamespace(logprobs=lambda rows: [[-1.0] * (len(row) - 1) for row in rows])
    ids = tokenizer.encode("7").ids
    played = testing.trajectory(sampling=SamplingParams(temperature=1.0))
    longer = names["chat_history"].full.append(Message(role="user", content="more"))
    places: dict[str, dict[str, Any]] = {
        "dialoop.clients.connection": {"in_process": nullcontext},
        "dialoop.clients.interact": {"Channel": Channel, "play_group": play_group},
        "dialoop.clients.retry": {"client": SimpleNamespace(get_session=_later)},
        "dialoop_extras.compat.kl": {
            "dialoop": SimpleNamespace(inference=scores, scorer=scores),
            "sequence": played.sequences[0],
            "env": ChatEnv(name="e", input_mode="tokens", tokenizer=tokenizer),
        },
        "dialoop_extras.compat.sampling": {"client": names["policy"]},
        "dialoop_extras.compat.wrappers": {"dialoop": SimpleNamespace(inference=names["policy"])},
        "dialoop.environments.rewards.kl_reward": {
            "dialoop": SimpleNamespace(inference=scores, scorer=scores)
        },
        "dialoop.sandbox.killable": {"answers": {"given": "1", "wanted": "1"}},
        "dialoop_extras.text_environment.environment": {
            "policy": TextPolicy(["<request><calculate>13-3<call>", "Result=10<submit>"]),
            "calculate": calculate,
            "exact": lambda texts, answers: [1.0 for _ in texts],
            "SHOTS": "",
        },
        "dialoop_extras.text_environment.playing": {
            "inference": ScriptedTokens(lambda _: "Result=76<submit>"),
            "calculator": calculator,
        },
        "dialoop_extras.token_episodes": {
            "inference": ScriptedTokens(lambda _: "[key]"),
            "run_trial": run_trial,
            "DirectOutputAgent": DirectOutputAgent,
        },
        "dialoop_extras.trials.playing": {"inference": ScriptedTokens(lambda _: "[key]")},
        "dialoop.tokens.builder": {
            "history": QUESTION.prompt,
            "ids": ids,
            "logprobs": [-0.5] * len(ids),
            "versions": [(len(ids), version)],
            "longer": longer,
        },
        "dialoop.trajectory": {"t0": testing.trajectory(), "t1": testing.trajectory()},
        "dialoop_extras.padding": {"views": [TurnView.of_turn(played, 0)]},
        "dialoop.wire.codec": vars(records)
        | {"turn": played.turns[0], "proto": records.TURN.to_proto(played.turns[0])},
    }
    return places.get(place, {})


async def _later(*_: Any) -> None:
    await asyncio.sleep(0)


def calculate(query: str) -> str:
    first, second = query.split("-")
    return str(int(first) - int(second))


class TextPolicy:
    """Goes on with the given texts in turn."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    async def generate(self, *, token_ids: Any, turn: int, **_: Any) -> tuple[Sample, ...]:
        text = self._texts[turn]
        ids = testing.byte_tokenizer().encode(text).ids
        version = PolicyVersion(lineage="main", number=0)
        model = {"source": Source.MODEL, "turn": turn, "policy_version": version}
        sequence = sequence_of([(list(token_ids), {"source": Source.PROMPT}), (ids, model)])
        text_of_turn = ContinuedText(prompt="", response=text)
        stop = StopReason.STOP
        return (
            Sample(history=ChatHistory(), sequence=sequence, stop_reason=stop, text=text_of_turn),
        )


FILES = {
    "capitals.jsonl": '{"question": "France?", "answer": "#### Paris"}\n',
    "gsm8k.jsonl": '{"question": "1+1?", "answer": "#### 2"}\n',
    "my_env.py": "from dialoop.environments import arithmetic as make\n",
    "grading.py": "def same(a, b):\n    return a == b\n",
    "my_folder/grading.py": "def same_answer(given, wanted):\n"
    "    return float(eval(given)) == float(wanted)\n",
}


async def _names(place: str) -> dict[str, Any]:
    own = vars(importlib.import_module(module_of(place)))
    names = _at_hand() | {key: value for key, value in own.items() if key[:2] != "__"}
    if ".compat." in place:
        used = set(re.findall(r"\w+", SNIPPETS[place])) & set(OFFERED)
        names |= {name: getattr(compat, name) for name in used}
    if place.endswith("parts"):
        names["history"] = names["chat_history"]
    if "result" in SNIPPETS[place]:
        played = [{"solution": "apple"}], ScriptedAgent(["[apple]"])
        names["result"] = await run_trial(TwentyQuestions(), *played)
    return names | _of_one_place(place, names)


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """The addresses in snippets, and those of light services that answer there."""
    with (
        service_in_a_thread("environment", rest_port=None) as environment,
        service_in_a_thread("inference", rest_port=None) as inference,
    ):
        yield {"127.0.0.1:50051": environment.address, "127.0.0.1:50052": inference.address}


@pytest.mark.parametrize("place", [place for place in SNIPPETS if place not in RUN_ELSEWHERE])
async def test_a_snippet_runs(place: str, tmp_path: Path, monkeypatch, request) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = SNIPPETS[place]
    if "127.0.0.1:5005" in code:
        for shown, real in request.getfixturevalue("addresses").items():
            code = code.replace(shown, real)
    async with asyncio.timeout(PATIENCE_S):
        names = await _names(place)
        if place in BLOCKING:
            await asyncio.to_thread(exec, code, names)
        else:
            await run_snippet(place, code, names)


def test_what_runs_elsewhere_is_a_snippet_and_a_test() -> None:
    assert set(RUN_ELSEWHERE) <= set(SNIPPETS)
    for test in RUN_ELSEWHERE.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text("utf-8"), test
