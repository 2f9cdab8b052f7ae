"""A config check reads the rows of a job with the template of its model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dialoop.chat import History, Message
from dialoop.environments import BlockCalls, ChatEnv, TaskData, ToolUse
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.environments.tasks.source import ListedTasks
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.templates import probe
from dialoop.templates.chat_template import ChatTemplate
from dialoop_ops.stack.template_checks import check_template, warnings_for_template
from dialoop_services.config.job import JobConfig

from tests.support.families import family

ASK = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
PLAIN = ChatEnv(name="plain", tasks=RowTasks([{"query": "2+2?"}]))
TOLD = {"role": "tool", "content": "four", "tool_call_id": "call_1"}


def job(name: str, **sections: Any) -> JobConfig:
    fields = {"model": {"directory": str(family(name).directory)}, **sections}
    return JobConfig.model_validate({"engine": "transformers", "store": "memory", **fields})


def sft(name: str, path: Path, *rows: list[dict[str, Any]]) -> JobConfig:
    file = path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), "utf-8")
    return job(name, train={"mode": "sft", "num_steps": 1}, sft={"file": str(file)})


def test_a_row_whose_field_the_template_drops_is_named_by_its_line(tmp_path: Path) -> None:
    check_template(sft("phi4", tmp_path, [ASK, FOUR], [ASK, FOUR]), [PLAIN])
    dropped = sft("phi4", tmp_path, [ASK, FOUR], [ASK, TOLD, FOUR])
    with pytest.raises(
        InvalidConfig, match=r"line 2 of .*leaves out messages\[1\]\.content"
    ) as raised:
        check_template(dropped, [PLAIN])
    assert raised.value.reason == "TEMPLATE_DROPS_FIELD"
    thought = sft("qwen2_5", tmp_path, [ASK, FOUR | {"reasoning_content": "Two and two."}])
    with pytest.raises(
        InvalidConfig, match=r"line 1 of .* cannot be taught.*the reasoning"
    ) as raised:
        check_template(thought, [PLAIN])
    assert raised.value.reason == "TEMPLATE_HIDES_ANSWERS"


def test_of_rows_of_one_shape_one_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[ASK | {"content": f"{n}+2?"}, FOUR | {"content": str(n + 2)}] for n in range(200)]
    config = sft("qwen3", tmp_path, *rows)
    rendered = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *args, **kw: rendered.append(1) or render(*args, **kw)
    )
    check_template(config, [PLAIN])
    assert 0 < len(rendered) < 20


class _Talks(ListedTasks):
    def __init__(self, *messages: Message) -> None:
        super().__init__({"train": ("first",)})
        self._messages = History(messages)

    def task(self, split: str, key: str) -> TaskData:
        return TaskData(key=key, messages=self._messages)


def test_a_task_whose_conversation_is_not_shown_whole_is_named() -> None:
    asked = Message(role="user", content="2+2?", name="Ada")
    environment = ChatEnv(name="talks", tasks=_Talks(asked))
    section = {"use": f"{__name__}:unused", "heldout_split": "train"}
    config = job("qwen3", environment=section)
    with pytest.raises(InvalidConfig, match=r"Task 'first' .* leaves out messages\[0\]\.name"):
        check_template(config, [environment])
    plain = ChatEnv(name="talks", tasks=_Talks(Message(role="user", content="2+2?")))
    check_template(config, [plain])


def test_an_agent_is_warned_of_what_the_template_does_not_show() -> None:
    section = {"agent": f"{__name__}:agent", "use": f"{__name__}:unused"}
    (warning,) = warnings_for_template(job("phi4", environment=section))
    assert "tool answer" in warning
    assert not list(warnings_for_template(job("nemotron_3_nano", environment=section)))


def test_a_template_that_takes_too_long_is_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "MAX_PROBE_S", 0.0)
    for _ in range(2):
        template = ChatTemplate("{{ messages[0].content }} slow")
        with pytest.raises(InvalidInput, match="sixty short conversations"):
            _ = template.profile
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match="sixty short conversations"):
        _ = ChatTemplate("{{ messages[0].content }} slow").profile


def test_what_a_templates_roles_cannot_show_at_the_second_turn_is_told_before_the_first() -> None:
    section = {"use": f"{__name__}:unused", "heldout_split": "train"}
    told = ChatEnv(
        name="told",
        tasks=RowTasks([{"query": "2+2?"}]),
        transforms=(ToolUse([_add], syntax=BlockCalls()),),
    )
    with pytest.raises(InvalidConfig, match=r"leaves out messages\[2\]\.content"):
        check_template(job("phi4", environment=section), [told])
    check_template(job("qwen3", environment=section), [told])
    asked = ChatEnv(name="asked", tasks=RowTasks([{"query": "2+2?"}]), system_prompt="Be brief.")
    with pytest.raises(InvalidConfig, match="System role not supported"):
        check_template(job("gemma", environment=section), [asked])


def _add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def with_end(path: Path, template: str, **config: str) -> dict[str, Any]:
    """A model directory whose tokenizer is Qwen3's, with another template and other marks."""
    model = path / "model"
    model.mkdir()
    shutil.copy(family("qwen3").directory / "tokenizer.json", model)
    fields = {"chat_template": template, **config}
    (model / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")
    return {"model": {"directory": str(model)}}


PLAIN_TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_an_answer_that_nothing_ends_is_found(tmp_path: Path) -> None:
    model = with_end(tmp_path, PLAIN_TEXT)
    with pytest.raises(InvalidConfig, match="Nothing ends an answer but its length") as raised:
        check_template(job("qwen3", **model), [PLAIN])
    assert raised.value.reason == "NO_END_OF_TURN"
    assert check_template(job("qwen3", **model, collector={"stop": ["\n"]}), [PLAIN]) == []


def test_an_end_of_turn_that_is_no_token_is_said(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<|fin|>{% endfor %}"
    model = with_end(tmp_path, template, eos_token="<|endoftext|>")
    (warning,) = check_template(job("qwen3", **model), [PLAIN])
    assert "ends an answer with '<|fin|>', which is no token" in warning


def test_prompts_that_leave_no_token_are_counted_with_what_happens() -> None:
    words = ["two", "two " * 20, "two " * 200]
    rows = ChatEnv(name="rows", tasks=RowTasks([{"query": text} for text in words]))
    sizes: dict[str, Any] = {"inference": {"max_model_len": 128}}
    answer = {"max_new_tokens": 90}
    with pytest.raises(InvalidConfig, match="1 of the first 3 prompts of rows leave no") as raised:
        check_template(job("qwen3", **sizes, collector=answer), [rows])
    assert raised.value.reason == "CONTEXT_FULL"
    assert 'long_prompts = "skip"' in (raised.value.remedy or "")
    skips = job("qwen3", **sizes, collector={**answer, "long_prompts": "skip"})
    little, none = check_template(skips, [rows])
    assert "1 of the first 3 prompts of rows leave fewer than max_new_tokens = 90" in little
    assert "their groups are played without one and dropped" in none
