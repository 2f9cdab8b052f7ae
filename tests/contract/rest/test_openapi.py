"""OpenAPI documents are valid, complete, and kept by the services under generated requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from dialoop_services.rest.examples import EXAMPLES
from dialoop_services.rest.routes import TABLE
from dialoop_services.rest.schema import models
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

# Else the first test imports it, while a service's thread may compile too: CPython 3.11 fails then.
from schemathesis.specs.openapi import adapter  # noqa: F401

from tests.support.rest_world import routes, service_url
from tests.support.waiting import PATIENCE_S

SERVICES = ("environment", "replay", "inference", "scorer", "trainer")
TOKEN = {"authorization": "Bearer right"}
# Bounds what waits for work (wait_s), runs long or streams for ever; 504 is documented, as a status
# or as the last line of a stream that had begun.
TIMEOUT = "x-request-timeout-s"
# Generating a request costs ten times what sending it does: few by default, many among the heavy.
NUM_EXAMPLES = (
    pytest.param(2, id="few"),
    pytest.param(
        25, id="many", marks=pytest.mark.heavy(reason="it generates requests for minutes")
    ),
)
# A value that fits its type may still make no sense to the service: a session that is not there, a
# page token that nobody gave, a count below nothing (protos name no ranges). What it may not do is
# end in anything undocumented, or in a 5xx. positive_data_acceptance is therefore asked of those
# operations alone in which, once the ids name what is there, every value makes sense (SENSIBLE).
# A 5xx is judged below: 501, 503 and 504 are answers too.
LEFT_OUT = {"positive_data_acceptance", "not_a_server_error"}
# Operation -> what names what is there, in its path or query.
SENSIBLE: dict[str, dict[str, str]] = {
    "EnvironmentService.ListEnvironments": {},
    "EnvironmentService.GetEnvironment": {"environment": "arithmetic"},
    "EnvironmentService.GetSession": {"session_id": "there"},
    "EnvironmentService.CloseSession": {},
    "InferenceService.GetPolicy": {},
    "InferenceService.Pause": {},
    "InferenceService.Resume": {},
    "TemplateService.ListTemplates": {},
    "ReplayService.GetStats": {"run": "there"},
    "ReplayService.Watch": {"run": "there", "interval_s": "0.1"},
    "TrainerService.GetStatus": {},
    "TrainerService.WatchPolicy": {},
    "TrainerService.Publish": {},
    "TrainerService.Checkpoint": {},
    "TrainerService.Pause": {},
    "TrainerService.Resume": {},
}
THERE = {"session_id": "there", "environment": "arithmetic"}
# Wrong values may take any format. schemathesis' own binary strings are of a class which the
# validator that it asks about them does not know: it fails while generating.
schemathesis.openapi.format("binary", st.text())


@pytest.fixture(params=SERVICES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with service_url(request.param, token="right") as url:
        yield url


def test_documents_are_valid_and_name_every_route(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    validate(document)
    ids = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(set(ids)) == len(ids)
    for path in document["paths"].values():
        for operation in path.values():
            if "requestBody" in operation:
                others = set() if operation["tags"] == ["OpenAI"] else {"application/x-protobuf"}
                assert set(operation["requestBody"]["content"]) == {"application/json"} | others


def test_descriptions_are_sentences_and_reasons_stand_with_their_status(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    operations = [o for path in document["paths"].values() for o in path.values()]
    rpcs = [o for o in operations if "Service." in o["operationId"]]
    assert rpcs
    for operation in rpcs:
        text = operation["description"]
        assert len(text.split()) >= 4, operation["operationId"]
        assert text.endswith("."), text
        assert not re.search(r"\bOK\b|NOT_FOUND|INVALID_ARGUMENT|FAILED_PRECONDITION", text), text
        assert operation["responses"]["200"]["description"] != "OK."
    if reset := next((o for o in rpcs if o["operationId"] == "EnvironmentService.Reset"), None):
        assert "TASK_NOT_FOUND" in reset["responses"]["404"]["description"]
        assert "SESSION_BUSY" in reset["responses"]["409"]["description"]


def test_the_page_leads_to_calls_that_work_with_the_token(url: str) -> None:
    with httpx.Client(base_url=url, follow_redirects=True) as browser:
        page = browser.get("/")
        assert (page.status_code, page.url.path) == (200, "/docs")
        assert '"persistAuthorization": true' in page.text
        assert "connect-src 'self'" in page.headers["content-security-policy"]
        for asset in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
            assert browser.get(asset).status_code == 200
        document = browser.get("/openapi.json").json()
        (scheme,) = document["security"][0]
        assert document["components"]["securitySchemes"][scheme]["scheme"] == "bearer"
        # What Swagger UI sends: the token that was typed, and the page's own origin.
        sent = {"origin": url, "authorization": TOKEN["authorization"]}
        for path, operations in document["paths"].items():
            example = operations.get("post", {}).get("requestBody", {}).get("content", {})
            body = example.get("application/json", {}).get("example")
            if body is not None and "{" not in path:
                answer = browser.post(path, json=body, headers=sent | {TIMEOUT: "2"})
                assert answer.status_code not in (401, 403, 415), (path, answer.text)


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("num_examples", NUM_EXAMPLES)
def test_generated_requests_meet_no_undocumented_answer(
    url: str, mode: GenerationMode, num_examples: int
) -> None:
    httpx.post(f"{url}/v1/sessions", json=THERE, headers=TOKEN)  # 404 but in the one service
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.definition.raw.get("parameters"):
            continue  # nothing that could be wrong
        exercise(operation, mode, num_examples)


def test_the_sensible_operations_are_rpcs_that_there_are() -> None:
    names = {name.partition(".")[0] for name in SENSIBLE}
    assert set(SENSIBLE) <= {f"{name}.{rpc}" for name in names for rpc in routes(name)}


def exercise(operation: Any, mode: GenerationMode, num_examples: int) -> None:
    """Send generated requests and judge the answers."""
    raw = operation.definition.raw
    name = raw["operationId"]
    is_stream = "application/x-ndjson" in raw["responses"]["200"].get("content", {})
    is_sensible = mode is GenerationMode.POSITIVE and name in SENSIBLE
    checks = [check for check in CHECKS.get_all() if check.__name__ not in LEFT_OUT]

    @seed(0)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def judge(case: schemathesis.Case) -> None:
        if is_sensible:
            for parameter, value in SENSIBLE[name].items():
                in_path = f"{{{parameter}}}" in operation.path
                (case.path_parameters if in_path else case.query)[parameter] = value
        seconds = {} if is_no_time(case) else {TIMEOUT: "0.3" if is_stream else "2"}
        response = case.call(headers=TOKEN | seconds, timeout=PATIENCE_S)
        case.validate_response(response, checks=checks, headers=TOKEN | seconds)
        if response.status_code >= 500:
            assert response.status_code in (501, 503, 504)
            assert response.json()["reason"]
        if is_sensible:
            assert response.status_code in (200, 504), response.text
        if is_stream and response.status_code == 200:
            judge_lines(response.content.splitlines(), name)

    judge()


def is_no_time(case: schemathesis.Case) -> bool:
    """Whether the generated deadline is the wrong value, which is to be sent as it is."""
    given_s = (case.headers or {}).get(TIMEOUT)
    try:
        return given_s is not None and not 0 < float(given_s) < math.inf
    except ValueError:
        return True


def judge_lines(lines: list[bytes], name: str) -> None:
    """Each line of a stream is a message of its type; the last may be a problem instead."""
    service_name, _, rpc = name.partition(".")
    model = models().model(routes(service_name)[rpc].rpc.output_type)
    *first, last = lines or [b"{}"]
    for line in first:
        model.model_validate_json(line)
    document = json.loads(last)
    if "reason" in document and "status" in document:
        assert document["status"] in (501, 503, 504)
    else:
        model.model_validate_json(last)


def test_the_table_names_rpcs_that_there_are() -> None:
    names = {name.partition(".")[0] for name in TABLE}
    rpcs = {f"{name}.{rpc}" for name in names for rpc in routes(name)}
    assert set(TABLE) <= rpcs


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_request(name: str) -> None:
    service_name, _, rpc = name.partition(".")
    route = routes(service_name)[rpc]
    assert not route.reads_query
    model = models().model(route.rpc.input_type, frozenset(route.bindings.values()))
    model.model_validate(dict(EXAMPLES[name]))


def test_every_rpc_with_a_body_has_an_example() -> None:
    for name in (
        f"{s}Service"
        for s in ("Environment", "Inference", "Template", "Replay", "Scorer", "Trainer")
    ):
        for rpc, route in routes(name).items():
            if not route.reads_query and len(route.rpc.input_type.fields) > len(route.bindings):
                assert f"{name}.{rpc}" in EXAMPLES
