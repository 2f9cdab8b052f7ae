"""ReplayService: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from dialoop.v1 import replay_service_pb2 as pb
from dialoop.v1 import replay_service_pb2_grpc as rpc
from dialoop.v1 import trajectory_pb2

from dialoop_services.replay import requests, responses
from dialoop_services.replay.queue import ReplayQueue

_Context = grpc.aio.ServicerContext[Any, Any]


class ReplayServicer(rpc.ReplayServiceServicer):
    """The queue over the wire."""

    def __init__(
        self, queue: ReplayQueue, *, default_lease_s: float, max_message_bytes: int
    ) -> None:
        self._queue = queue
        # Room for what stands around the groups; above the limit a lease could not be answered.
        self._max_lease_bytes = max_message_bytes * 9 // 10
        self._default_lease_s = default_lease_s

    def _lease_s(self, lease_s: float) -> float:
        return requests.seconds_of("lease_s", lease_s) or self._default_lease_s

    async def OfferTasks(
        self, request: pb.OfferTasksRequest, context: _Context
    ) -> pb.OfferTasksResponse:
        offered = await self._queue.offer_tasks(
            requests.run_of(request.run), requests.tasks_of(request), requests.cursor_of(request)
        )
        return pb.OfferTasksResponse(
            num_new=offered.num_new, num_known=offered.num_known, cursor=offered.cursor
        )

    async def LeaseTasks(
        self, request: pb.LeaseTasksRequest, context: _Context
    ) -> pb.LeaseTasksResponse:
        lease_s = self._lease_s(request.lease_s)
        found = await self._queue.lease_tasks(
            requests.run_of(request.run),
            worker=requests.worker_of(request.worker),
            max_tasks=requests.count_of("max_tasks", request.max_tasks),
            lease_s=lease_s,
            wait_s=requests.seconds_of("wait_s", request.wait_s),
        )
        return responses.task_leases(found, lease_s)

    async def AppendGroups(
        self, request: pb.AppendGroupsRequest, context: _Context
    ) -> pb.AppendGroupsResponse:
        stage = requests.stage_of(request.stage)
        verdicts = await self._queue.append_groups(
            requests.run_of(request.run),
            stage,
            [requests.submission_of(item, stage) for item in request.items],
        )
        return pb.AppendGroupsResponse(outcomes=map(responses.append_outcome, verdicts))

    async def LeaseGroups(
        self, request: pb.LeaseGroupsRequest, context: _Context
    ) -> pb.LeaseGroupsResponse:
        query = requests.query_of(
            request, default_lease_s=self._default_lease_s, max_bytes=self._max_lease_bytes
        )
        found = await self._queue.lease_groups(
            requests.run_of(request.run),
            query,
            wait_s=requests.seconds_of("wait_s", request.wait_s),
        )
        return responses.group_leases(found, query.lease_s)

    async def Acknowledge(
        self, request: pb.AcknowledgeRequest, context: _Context
    ) -> pb.AcknowledgeResponse:
        reasons = await self._queue.acknowledge(
            requests.run_of(request.run), list(map(requests.acknowledgement_of, request.items))
        )
        return pb.AcknowledgeResponse(
            outcomes=[
                pb.AcknowledgeOutcome(
                    lease_id=item.lease_id, acknowledged=not reason, reason=reason
                )
                for item, reason in zip(request.items, reasons, strict=True)
            ]
        )

    async def Return(self, request: pb.ReturnRequest, context: _Context) -> pb.ReturnResponse:
        returned = await self._queue.give_back(
            requests.run_of(request.run), list(map(requests.given_back_of, request.items))
        )
        return pb.ReturnResponse(
            num_returned=returned.num_returned, num_dropped=returned.num_dropped
        )

    async def Extend(self, request: pb.ExtendRequest, context: _Context) -> pb.ExtendResponse:
        lost = await self._queue.store.extend(
            requests.run_of(request.run),
            requests.unique(request.lease_ids),
            self._lease_s(request.lease_s),
        )
        return pb.ExtendResponse(lost_lease_ids=lost)

    async def ListLeases(
        self, request: pb.ListLeasesRequest, context: _Context
    ) -> pb.ListLeasesResponse:
        lease_ids = await self._queue.store.leases_of(
            requests.run_of(request.run),
            requests.stage_of(request.stage),
            requests.worker_of(request.worker),
        )
        return pb.ListLeasesResponse(lease_ids=lease_ids)

    async def ReopenLeases(
        self, request: pb.ReopenLeasesRequest, context: _Context
    ) -> pb.ReopenLeasesResponse:
        lease_s = self._lease_s(request.lease_s)
        found = await self._queue.store.reopen(
            requests.run_of(request.run),
            requests.unique(request.lease_ids),
            lease_s=lease_s,
            max_bytes=self._max_lease_bytes,
        )
        return responses.reopened(found, lease_s)

    async def AdvancePolicy(
        self, request: pb.AdvancePolicyRequest, context: _Context
    ) -> pb.AdvancePolicyResponse:
        credits = await self._queue.advance_policy(
            requests.run_of(request.run),
            requests.version_of(request.policy_version),
            trained_lease_ids=requests.unique(request.trained_lease_ids),
            max_outstanding_groups=requests.count_of(
                "max_outstanding_groups", request.max_outstanding_groups, least=0
            ),
        )
        return pb.AdvancePolicyResponse(credits=credits)

    async def Watch(
        self, request: pb.WatchRequest, context: _Context
    ) -> AsyncIterator[pb.WatchResponse]:
        interval_s = requests.seconds_of("interval_s", request.interval_s)
        async for stats in self._queue.watch(requests.run_of(request.run), interval_s):
            yield pb.WatchResponse(stats=responses.replay_stats(stats))

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        stats = await self._queue.store.stats(requests.run_of(request.run))
        return pb.GetStatsResponse(stats=responses.replay_stats(stats))

    async def Peek(self, request: pb.PeekRequest, context: _Context) -> pb.PeekResponse:
        payloads = await self._queue.store.peek(
            requests.run_of(request.run),
            requests.stage_of(request.stage),
            requests.page_of(request.max_groups),
        )
        return pb.PeekResponse(groups=map(trajectory_pb2.Group.FromString, payloads))

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: _Context
    ) -> pb.ListDeadLettersResponse:
        letters = await self._queue.store.dead_letters(
            requests.run_of(request.run), requests.page_of(request.max_groups)
        )
        return pb.ListDeadLettersResponse(dead_letters=map(responses.dead_letter, letters))

    async def Requeue(self, request: pb.RequeueRequest, context: _Context) -> pb.RequeueResponse:
        num_requeued = await self._queue.requeue(
            requests.run_of(request.run), requests.unique(request.group_ids)
        )
        return pb.RequeueResponse(num_requeued=num_requeued)

    async def Purge(self, request: pb.PurgeRequest, context: _Context) -> pb.PurgeResponse:
        await self._queue.purge(requests.run_of(request.run), request.confirm)
        return pb.PurgeResponse()
