"""Snippets of "TransformersWrapper and ChatEnv Integration" (S0) and of torchrl's LLM page (S1).

Each test names the lines that it follows; where they differ from the document, docs/compat.md says
what to write, and the test does.
"""

from __future__ import annotations

import re

import pytest
from dialoop.environments import TaskData
from dialoop.errors import InvalidHistory, InvalidInput
from dialoop.testing import ScriptedPolicy, byte_tokenizer
from dialoop_extras.compat import (
    ChatEnv,
    ChatHistory,
    PythonInterpreter,
    TransformersWrapper,
    lazy_stack,
)
from dialoop_extras.compat.chat import History, add_chat_template

from tests.goldens.samples import LLAMA

QUESTION = TaskData(key="1", question="Hello!")
CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there!"},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "I'm doing well, thanks!"},
]


async def test_s0_lines_13_to_24_and_85_to_121_full_is_set_and_becomes_the_next_prompt() -> None:
    env = ChatEnv(batch_size=[1])
    opening = env.reset(QUESTION, seed=0)
    wrapper = TransformersWrapper(ScriptedPolicy(["Hi."]), input_mode="history")
    view = await wrapper(opening.history)
    full = view.history.prompt.extend(view.history.response, inplace=False, dim=-1)
    assert view.history.full == full
    outcome = await env.step(opening.episode, view.history)
    assert outcome.history == ChatHistory(prompt=full)
    assert view.history.full is not None
    assert (full.batch_dims, full.role, full.content) == (
        1,
        ("user", "assistant"),
        ("Hello!", "Hi."),
    )


def test_s1_lines_91_to_115_assistant_tokens_are_masked() -> None:
    history = History.from_chats([CHAT])
    result = history.apply_chat_template(
        byte_tokenizer(),
        chat_template_name="qwen",
        add_generation_prompt=False,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="np",
    )
    num_ids = sum(len(byte_tokenizer().encode(message["content"]).ids) for message in CHAT[1::2])
    assert result["assistant_masks"].shape[0] == 1
    assert result["assistant_masks"].sum().item() == num_ids


def test_s1_lines_130_to_181_and_195_to_311_a_template_masks_renders_and_parses() -> None:
    def parse_llama_text(text: str) -> History:
        pattern = r"<s>\[INST\]\s*(.*?)\s*\[/INST\]\s*(.*?)</s>"
        messages = []
        for user_content, assistant_content in re.findall(pattern, text, re.DOTALL):
            messages.append(History(role="user", content=user_content.strip()))
            messages.append(History(role="assistant", content=assistant_content.strip()))
        return lazy_stack(messages)

    add_chat_template(
        template_name="seed_llama",
        template=LLAMA,
        inverse_parser=parse_llama_text,
        model_family_keywords=["seed-llama", "seed-meta-llama"],
    )
    history = History.from_chats([CHAT])
    result = history.apply_chat_template(
        tokenizer=byte_tokenizer(),
        chat_template_name="seed_llama",
        add_generation_prompt=False,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="np",
    )
    assert "assistant_masks" in result
    assert result["assistant_masks"].shape[0] == 1
    assert 0 < result["assistant_masks"].sum().item() < result["assistant_masks"].shape[1]
    options = {"add_generation_prompt": False, "tokenize": False}
    (formatted,) = history.apply_chat_template(chat_template_name="seed_llama", **options)
    (default_out,) = history.apply_chat_template(chat_template=LLAMA, **options)
    assert re.sub(r"\s+", " ", formatted.strip()) == re.sub(r"\s+", " ", default_out.strip())
    parsed = History.from_text(formatted, chat_template_name="seed_llama")
    assert (parsed.role, parsed.content) == (history[0].role, history[0].content)


async def test_s1_lines_367_to_373_the_loop_of_model_and_environment() -> None:
    env, llm = ChatEnv(), TransformersWrapper(ScriptedPolicy(["One.", "Two."]))
    opening = env.reset(QUESTION, seed=0)
    episode, history = opening.episode, opening.history
    for turn in (1, 2):
        view = await llm(history)
        outcome = await env.step(episode, view.history)
        episode, history = outcome.episode, outcome.history
        assert len(history.prompt) == 1 + turn


async def test_s1_lines_618_to_666_the_interpreter_runs_the_block() -> None:
    system = (
        "You are an assistant that can execute Python code. Decorate your code with ```python``` "
        "tags."
    )
    base_env = ChatEnv(
        tokenizer=byte_tokenizer(),
        system_prompt=system,
        user_role="user",
        system_role="system",
        batch_size=[1],
    )
    env = base_env.append_transform(PythonInterpreter())
    text = "Let's write a Python function that returns the square of a number."
    opening = env.reset(TaskData(key="1", question=text), seed=0)
    action = (
        "Here is a block of code to be executed in python:\n```python\ndef square(x):\n"
        "    return x * x\nprint('testing the square function with input 2:', square(2))\n```"
    )
    answer = {"role": "assistant", "content": action}
    outcome = await env.step(opening.episode, opening.history.respond(answer))
    shown = outcome.history.prompt.apply_chat_template(
        chat_template_name="qwen", tokenize=False, add_generation_prompt=True
    )
    assert shown.startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}")
    assert "<tool_response>\nCode block 1 executed successfully:\n" in shown
    assert "testing the square function with input 2: 4\n" in shown
    assert shown.endswith("<|im_start|>assistant\n")


def test_a_history_is_a_value_with_the_sources_arguments() -> None:
    hello = History(role="user", content="Hello")
    both = hello.append({"role": "assistant", "content": "Hi"}, inplace=False, dim=-1)
    assert (len(hello), both.role) == (1, ("user", "assistant"))
    assert hello.append(History(role="assistant", content="Hi")) == both
    plain = History.from_chats([dict(m) for m in both.to_chats()])
    assert (both == plain, plain == both, hash(both) == hash(plain)) == (True, True, True)
    for change, words in (
        (lambda: hello.extend(both, inplace=True), "a history is a value"),
        (lambda: hello.append(both[0], dim=1), "dim is 1"),
    ):
        with pytest.raises(InvalidInput, match=words):
            change()
    with pytest.raises(InvalidHistory, match="three deep") as caught:
        History.from_chats([[CHAT]])
    assert caught.value.reason == "WRONG_TYPE"
