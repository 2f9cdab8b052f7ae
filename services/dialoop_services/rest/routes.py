"""The method and path of every rpc: all of REST in one table.

Paths name fields of the request in braces, dotted when they are inside a message
(`{step.session_id}` is `{session_id}` to callers). GET and DELETE take the other fields from the
query. A rpc that is not in the table has `POST /v1/<rpc_in_snake_case>`; one whose caller streams
(Interact, LoadWeights) is served over gRPC alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

_SESSION = "/v1/sessions/{session_id}"
_RECORDING = "/v1/recordings/{recording_id}"
_RUN = "/v1/runs/{run}"

TABLE: Mapping[str, str] = MappingProxyType(
    {
        "EnvironmentService.ListEnvironments": "GET /v1/environments",
        "EnvironmentService.GetEnvironment": "GET /v1/environments/{environment}",
        "EnvironmentService.ListTasks": "GET /v1/environments/{environment}/tasks",
        "EnvironmentService.CreateSession": "POST /v1/sessions",
        "EnvironmentService.GetSession": f"GET {_SESSION}",
        "EnvironmentService.CloseSession": f"DELETE {_SESSION}",
        "EnvironmentService.Reset": f"POST {_SESSION}/reset",
        "EnvironmentService.Step": f"POST {_SESSION}/step",
        "EnvironmentService.StepAndReset": "POST /v1/sessions/{step.session_id}/step_and_reset",
        "EnvironmentService.BatchReset": "POST /v1/batch/reset",
        "EnvironmentService.BatchStep": "POST /v1/batch/step",
        "EnvironmentService.Score": "POST /v1/score",
        "RunService.RunText": "POST /v1/text_env/run",
        "RunService.RunTrial": "POST /v1/trials/run",
        "InferenceService.LogProb": "POST /v1/logprob",
        "InferenceService.GetPolicy": "GET /v1/policy",
        "InferenceService.UnloadAdapter": "DELETE /v1/adapters/{adapter}",
        "InferenceService.CreateRecording": "POST /v1/recordings",
        "InferenceService.GetRecording": f"GET {_RECORDING}",
        "InferenceService.CloseRecording": f"POST {_RECORDING}/close",
        "TemplateService.ListTemplates": "GET /v1/templates",
        "TemplateService.RegisterTemplate": "POST /v1/templates",
        "TemplateService.Render": "POST /v1/templates/{template_name}/render",
        "TemplateService.Parse": "POST /v1/templates/{template_name}/parse",
        "ReplayService.OfferTasks": f"POST {_RUN}/tasks",
        "ReplayService.LeaseTasks": f"POST {_RUN}/tasks/lease",
        "ReplayService.AppendMembers": f"POST {_RUN}/members",
        "ReplayService.AppendTurns": f"POST {_RUN}/turns",
        "ReplayService.GetTurns": f"GET {_RUN}/turns",
        "ReplayService.AppendGroups": f"POST {_RUN}/groups",
        "ReplayService.LeaseGroups": f"POST {_RUN}/groups/lease",
        "ReplayService.Peek": f"GET {_RUN}/groups",
        "ReplayService.Acknowledge": f"POST {_RUN}/leases/acknowledge",
        "ReplayService.Return": f"POST {_RUN}/leases/return",
        "ReplayService.Extend": f"POST {_RUN}/leases/extend",
        "ReplayService.ListLeases": f"GET {_RUN}/leases",
        "ReplayService.ReopenLeases": f"POST {_RUN}/leases/reopen",
        "ReplayService.AdvancePolicy": f"POST {_RUN}/policy",
        "ReplayService.Watch": f"GET {_RUN}/events",
        "ReplayService.GetStats": f"GET {_RUN}/stats",
        "ReplayService.ListDeadLetters": f"GET {_RUN}/dead_letters",
        "ReplayService.Requeue": f"POST {_RUN}/dead_letters/requeue",
        "ReplayService.Purge": f"POST {_RUN}/purge",
        "RegistryService.Announce": f"POST {_RUN}/services/announce",
        "RegistryService.Withdraw": f"POST {_RUN}/services/withdraw",
        "RegistryService.Admit": f"POST {_RUN}/services/admit",
        "RegistryService.ListInstances": f"GET {_RUN}/services",
        "RegistryService.WatchInstances": f"GET {_RUN}/services/events",
        "ScorerService.LogProb": "POST /v1/logprob",
        "ScorerService.RetrieveKl": "POST /v1/kl",
        "TrainerService.GetStatus": "GET /v1/status",
        "TrainerService.WatchPolicy": "GET /v1/policy/events",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The method and path of a rpc."""

    rpc: MethodDescriptor
    method: str
    path: str
    # Path parameter -> dotted field of the request.
    bindings: Mapping[str, str]

    @property
    def reads_query(self) -> bool:
        """Return whether the fields that are not in the path come from the query."""
        return self.method in ("GET", "DELETE")

    @property
    def is_stream(self) -> bool:
        """Return whether the rpc answers with many messages."""
        return bool(self.rpc.server_streaming)


def routes_of(service: ServiceDescriptor) -> list[Route]:
    """Return the routes of all rpcs of a service that REST can carry."""
    return [_route(rpc) for rpc in service.methods if not rpc.client_streaming]


def _route(rpc: MethodDescriptor) -> Route:
    method, path = TABLE.get(name_of(rpc), f"POST /v1/{_snake_case(rpc.name)}").split()
    fields = re.findall(r"\{([^}]+)\}", path)
    bindings = {field.rpartition(".")[2]: field for field in fields}
    for parameter, field in bindings.items():
        path = path.replace(f"{{{field}}}", f"{{{parameter}}}")
    return Route(rpc=rpc, method=method, path=path, bindings=MappingProxyType(bindings))


def name_of(rpc: MethodDescriptor) -> str:
    """Return a rpc's name as logs and tables write it: "EnvironmentService.Step"."""
    return f"{rpc.containing_service.name}.{rpc.name}"


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
