"""REST takes a single message where messages are expected, and its answer says so."""

from __future__ import annotations

from typing import Any

import pytest
from dialoop.v1 import environment_service_pb2 as env
from dialoop_extras.rest.lenient_json import read_leniently
from google.protobuf import descriptor_pool

from tests.contract.rest.test_congruence import ANSWER, KEY
from tests.support.rest_world import http_of, refusal, service

USER = {"role": "user", "content": "3+4"}
SUBMIT = {"role": "assistant", "content": f"Result={ANSWER}<submit>"}
PLAIN = {"prompt": {"messages": [USER]}}


def generate_request(history: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/generate", {"history": history}


def without_times(content: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in content.items() if k not in ("warnings", "queue_s", "generate_s")}


@pytest.mark.parametrize(
    ("prompt", "warned"),
    [
        (USER, "history.prompt: there is a single message where a history is expected"),
        (
            {"messages": USER},
            "history.prompt.messages: there is a single message where a list of messages is "
            "expected",
        ),
        ([USER], ""),
    ],
)
async def test_a_single_message_is_made_a_history_and_the_answer_says_so(prompt, warned):
    async with service("inference") as server, http_of(server) as http:
        plain = (await http.post("/v1/generate", json={"history": PLAIN})).json()
        answer = await http.post("/v1/generate", json={"history": {"prompt": prompt}})
        assert answer.status_code == 200, answer.text
        content = answer.json()
        assert without_times(content) == without_times(plain)
        assert plain["warnings"] == []
        assert [w.partition(";")[0] for w in content["warnings"]] == ([warned] if warned else [])


async def test_one_conversation_is_one_row_to_score():
    whole = {"messages": [USER, {"role": "assistant", "content": "7"}]}
    async with service("inference") as server, http_of(server) as http:
        rows = await http.post("/v1/logprob", json={"histories": [{"full": whole}]})
        single = await http.post("/v1/logprob", json={"histories": {"full": whole}})
        assert without_times(single.json()) == without_times(rows.json())
        assert [w.split(":")[0] for w in single.json()["warnings"]] == ["histories"]


async def test_an_environment_takes_a_single_message_everywhere_and_counts_it_once():
    async with service("environment") as server, http_of(server) as http:

        async def post(path: str, body: Any) -> dict[str, Any]:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        await post("/v1/sessions", {"session_id": "s", "environment": "arithmetic"})
        own = {"episode": 1, "messages": USER, "data": {"answer": "7"}}
        opened = await post("/v1/sessions/s/reset", own)
        assert opened["history"]["prompt"]["messages"][-1]["content"] == "3+4"
        assert [w.split(":")[0] for w in opened["warnings"]] == ["messages"]
        body = {"episode": 2, "split": "train", "task_key": KEY}
        assert (await post("/v1/sessions/s/reset", body))["warnings"] == []
        step = {"episode": 2, "step_index": 0, "history": {"response": SUBMIT}}
        first = await post("/v1/sessions/s/step", step)
        again = await post("/v1/sessions/s/step", step)
        assert first["terminated"]
        assert [w.split(":")[0] for w in first["warnings"]] == ["history.response"]
        assert (again["replayed"], again["warnings"]) == (True, first["warnings"])
        batch = await post("/v1/batch/step", {"items": [{"session_id": "s", **step}] * 2})
        assert [w.split(":")[0] for w in batch["warnings"]] == [
            "items.0.history.response",
            "items.1.history.response",
        ]


async def test_a_template_renders_a_single_message():
    async with service("inference") as server, http_of(server) as http:
        answer = await http.post("/v1/templates/chatml/render", json={"history": USER})
        assert answer.json()["text"].startswith("<|im_start|>user\n3+4<|im_end|>")
        assert len(answer.json()["warnings"]) == 1


async def test_what_is_no_message_stays_refused():
    async with service("inference") as server, http_of(server) as http:
        for prompt, reason in (
            ({"content": "no role"}, "UNKNOWN_FIELD"),
            ({"messages": {"content": "no role"}}, "INVALID_FIELD"),
            ({"role": "user", "contents": "x"}, "UNKNOWN_FIELD"),
            ("3+4", "INVALID_FIELD"),
            ([[USER], [USER]], "BATCH_OF_HISTORIES"),
            ([3], "INVALID_FIELD"),
        ):
            answer = await http.post("/v1/generate", json={"history": {"prompt": prompt}})
            assert refusal(answer) == (400, reason), prompt


async def test_nothing_is_promoted_where_the_answer_cannot_say_so():
    group = {"group_id": "g", "trajectories": [{"history": USER}]}
    async with service("replay") as server, http_of(server) as http:
        answer = await http.post("/v1/runs/r/groups", json={"groups": [group]})
        assert answer.status_code == 400


def test_a_right_body_is_left_alone():
    descriptor = env.StepRequest.DESCRIPTOR
    assert (
        read_leniently(b'{"history": {"response": {"messages": []}}, "episode": 1}', descriptor)
        is None
    )
    assert read_leniently(b"[1", descriptor) is None
    assert read_leniently(b"[" * 100_000, descriptor) is None


def test_every_answer_to_a_question_in_messages_can_say_what_it_made_of_it():
    pool = descriptor_pool.Default()
    for name in ("EnvironmentService", "InferenceService", "TemplateService"):
        for rpc in pool.FindServiceByName(f"dialoop.v1.{name}").methods:
            is_unary = not (rpc.client_streaming or rpc.server_streaming)
            if is_unary and _asks_in_messages(rpc.input_type):
                assert "warnings" in rpc.output_type.fields_by_name, rpc.full_name


def _asks_in_messages(kind: Any) -> bool:
    if kind.name in ("History", "ChatHistory"):
        return True
    if kind.name == "Trajectory":  # a record, not a question
        return False
    return any(f.message_type and _asks_in_messages(f.message_type) for f in kind.fields)
