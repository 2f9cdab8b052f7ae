"""OpenAPI documents are valid, complete, and kept by the services under generated requests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from openapi_spec_validator import validate
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from services.runtime.examples import EXAMPLES
from services.runtime.routes import TABLE
from services.runtime.schema import Models, comments
from tests.rest_world import routes, served

SERVICES = ("environment", "replay", "inference", "scorer", "trainer")
# They never end: tests/contract/test_rest.py reads them.
STREAMS = {"ReplayService.Watch", "TrainerService.WatchPolicy", "InferenceService.GenerateStream"}
TOKEN = {"authorization": "Bearer right"}
# Bounds what waits for work (wait_s) or runs long; 504 is documented.
TIMEOUT = "x-request-timeout-s"
NUM_EXAMPLES = 8
# A value that fits its type may still make no sense to the service: a session that is not there, a
# page token that nobody gave. What it may not do is end in anything undocumented, or in a 5xx.
# A 5xx is judged below: 501, 503 and 504 are answers too.
LEFT_OUT = {"positive_data_acceptance", "not_a_server_error"}


@pytest.fixture(params=SERVICES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with served(request.param, token="right") as found:
        yield found


def test_documents_are_valid_and_name_every_route(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    validate(document)
    page = httpx.get(f"{url}/docs").text
    ids = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(set(ids)) == len(ids)
    for path in document["paths"]:
        assert path in page
    for path in document["paths"].values():
        for operation in path.values():
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]
                assert set(content) == {"application/json", "application/x-protobuf"}


@pytest.mark.parametrize("mode", GenerationMode)
def test_generated_requests_meet_no_undocumented_answer(url: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    checks = [check for check in CHECKS.get_all() if check.__name__ not in LEFT_OUT]
    num_tested = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.definition.raw["operationId"] in STREAMS:
            continue
        if mode is GenerationMode.NEGATIVE and not operation.definition.raw.get("parameters"):
            continue  # nothing that could be wrong

        @seed(0)
        @settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def exercise(case: schemathesis.Case) -> None:
            is_wrong = mode is GenerationMode.NEGATIVE and TIMEOUT in (case.headers or {})
            headers = TOKEN if is_wrong else TOKEN | {TIMEOUT: "2"}
            response = case.call(headers=headers)
            case.validate_response(response, checks=checks, headers=headers)
            if response.status_code >= 500:
                assert response.status_code in (501, 503, 504)
                assert response.json()["reason"]

        exercise()
        num_tested += 1
    assert num_tested


def test_the_table_names_rpcs_that_there_are() -> None:
    names = {name.partition(".")[0] for name in TABLE}
    known = {f"{name}.{rpc}" for name in names for rpc in routes(name)}
    assert set(TABLE) <= known


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_request(name: str) -> None:
    service_name, _, rpc = name.partition(".")
    route = routes(service_name)[rpc]
    assert not route.reads_query
    model = Models(comments()).model(route.rpc.input_type, frozenset(route.bindings.values()))
    model.model_validate(dict(EXAMPLES[name]))


def test_every_rpc_with_a_body_has_an_example() -> None:
    for name in (
        f"{s}Service" for s in ("Environment", "Inference", "Replay", "Scorer", "Trainer")
    ):
        for rpc, route in routes(name).items():
            if not route.reads_query and len(route.rpc.input_type.fields) > len(route.bindings):
                assert f"{name}.{rpc}" in EXAMPLES
