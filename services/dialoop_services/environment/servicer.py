"""EnvironmentService over gRPC: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceServicer
from dialoop.wire import chat_history_from_proto, sampling_from_proto, trajectory_from_proto
from dialoop.wire.runs import text_history_to_proto, trials_to_proto

from dialoop_services.environment import encoding
from dialoop_services.runtime.calls import announce_start
from dialoop_services.runtime.errors import public_error

if TYPE_CHECKING:
    from dialoop.environments.sessions.catalogue import Catalogue
    from dialoop.environments.sessions.engine import SessionEngine
    from dialoop.environments.sessions.records import AnsweredStep

    from dialoop_services.environment.runs import Runs

# Items of a batch that are answered at once before other calls get a turn: about 3 ms of work.
_ITEMS_A_TURN = 64

_Request = TypeVar("_Request")
_Item = TypeVar("_Item")
_Played = TypeVar("_Played")


class EnvironmentServicer(EnvironmentServiceServicer):
    """Serves a catalogue of environments and the sessions in them."""

    def __init__(
        self,
        catalogue: Catalogue,
        sessions: SessionEngine,
        runs: Runs,
        *,
        max_concurrent_items: int = 256,
    ) -> None:
        self._catalogue = catalogue
        self._sessions = sessions
        self._runs = runs
        self._max_concurrent_items = max_concurrent_items
        self._streamed: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "create_session": self.CreateSession,
            "reset": self.Reset,
            "step": self.Step,
            "close_session": self.CloseSession,
        }
        # What REST calls in the place of a method, for answers that no caller has to wait for.
        self.at_once = {"Step": self._step_at_once}
        # Steps that are sent twice because client and service had other prompts: by whether the
        # step or its answer showed it.
        self.num_resends = {"step": 0, "answer": 0}

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: Any
    ) -> pb.ListEnvironmentsResponse:
        infos = [encoding.environment_info(environment) for environment in self._catalogue]
        return pb.ListEnvironmentsResponse(environments=infos)

    async def GetEnvironment(
        self, request: pb.GetEnvironmentRequest, context: Any
    ) -> pb.GetEnvironmentResponse:
        environment = self._catalogue.get(request.environment)
        return pb.GetEnvironmentResponse(environment=encoding.environment_info(environment))

    async def ListTasks(self, request: pb.ListTasksRequest, context: Any) -> pb.ListTasksResponse:
        page = self._catalogue.get(request.environment).tasks.page(
            request.split,
            page_token=request.page_token,
            page_size=request.page_size,
            one_epoch=request.one_epoch,
            shuffle_seed=request.shuffle_seed,
        )
        return encoding.tasks_response(page)

    async def CreateSession(
        self, request: pb.CreateSessionRequest, context: Any
    ) -> pb.CreateSessionResponse:
        ttl_s = request.ttl_s if request.HasField("ttl_s") else None
        session = self._sessions.create(request.session_id, request.environment, ttl_s)
        return pb.CreateSessionResponse(session_id=session.session_id, ttl_s=session.ttl_s)

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.ResetResponse:
        opening = await self._sessions.reset(encoding.reset_call(request))
        return encoding.reset_response(opening, self._sessions.get(request.session_id))

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        answer = self._step_at_once(request)
        if answer is not None:
            return answer
        played = await self._count_mismatch(self._sessions.step(encoding.step_call(request)))
        return self._answer_to(request, played)

    def _step_at_once(self, request: pb.StepRequest) -> pb.StepResponse | None:
        """Return what `Step` does where nothing has to wait, else None."""
        try:
            played = self._sessions.step_at_once(encoding.step_call(request))
        except PreconditionFailed as error:
            self._count_refusal(error)
            raise
        return None if played is None else self._answer_to(request, played)

    async def StepAndReset(
        self, request: pb.StepAndResetRequest, context: Any
    ) -> pb.StepAndResetResponse:
        playing = self._sessions.step_and_reset(
            encoding.step_call(request.step), encoding.following_reset(request)
        )
        played, opening = await self._count_mismatch(playing)
        response = pb.StepAndResetResponse(step=self._answer_to(request.step, played))
        if opening is not None:
            session = self._sessions.get(request.step.session_id)
            response.reset.CopyFrom(encoding.reset_response(opening, session))
        return response

    async def BatchReset(
        self, request: pb.BatchResetRequest, context: Any
    ) -> pb.BatchResetResponse:
        async def answer(item: pb.ResetRequest) -> pb.BatchResetItem:
            return pb.BatchResetItem(response=await self.Reset(item, context))

        items = await self._each(request.items, answer, lambda e: pb.BatchResetItem(error=e))
        return pb.BatchResetResponse(items=items)

    async def BatchStep(self, request: pb.BatchStepRequest, context: Any) -> pb.BatchStepResponse:
        async def answer(item: pb.StepRequest) -> pb.BatchStepItem:
            return pb.BatchStepItem(response=await self.Step(item, context))

        def answer_at_once(item: pb.StepRequest) -> pb.BatchStepItem | None:
            response = self._step_at_once(item)
            return None if response is None else pb.BatchStepItem(response=response)

        def fail(error: pb.ItemError) -> pb.BatchStepItem:
            return pb.BatchStepItem(error=error)

        items = await self._each(request.items, answer, fail, answer_at_once)
        return pb.BatchStepResponse(items=items)

    async def Interact(self, requests: AsyncIterator[pb.InteractRequest], context: Any) -> None:
        # Each request takes a place until its answer is written. Without a free place nothing is
        # read, so the client has to wait. `context.write` and not `yield`, because answers also
        # come from tasks: those to requests that have to wait. One task writes them all.
        places = asyncio.Semaphore(self._max_concurrent_items)
        outbox: deque[pb.InteractResponse] = deque()
        has_news = asyncio.Event()
        has_ended = False

        def put(response: pb.InteractResponse) -> None:
            outbox.append(response)
            has_news.set()

        async def answer(request: pb.InteractRequest) -> None:
            put(await self._interact(request, context))

        async def write() -> None:
            while outbox or not has_ended:
                if outbox:
                    await context.write(outbox.popleft())
                    places.release()
                else:
                    has_news.clear()
                    await has_news.wait()

        async with asyncio.TaskGroup() as writing:
            writing.create_task(write())
            async with asyncio.TaskGroup() as answers:
                async for request in requests:
                    await places.acquire()
                    response = self._interact_at_once(request)
                    if response is None:
                        answers.create_task(answer(request))
                    else:
                        put(response)
            has_ended = True
            has_news.set()

    async def StepHistory(
        self, request: pb.StepHistoryRequest, context: Any
    ) -> pb.StepHistoryResponse:
        answered = chat_history_from_proto(request.history)
        outcome = await self._sessions.step_history(
            request.environment, encoding.task_choice(request.task), answered
        )
        step = encoding.stateless_response(answered, outcome, whole_prompt=request.whole_prompt)
        return pb.StepHistoryResponse(step=step)

    async def CreateGroup(
        self, request: pb.CreateGroupRequest, context: Any
    ) -> pb.CreateGroupResponse:
        await announce_start(context)
        members = await self._sessions.create_group(
            request.group_id,
            request.environment,
            request.num_sessions,
            encoding.task_choice(request.task),
            request.ttl_s if request.HasField("ttl_s") else None,
        )
        return encoding.group_response(members)

    async def GetSession(
        self, request: pb.GetSessionRequest, context: Any
    ) -> pb.GetSessionResponse:
        state = self._sessions.state(request.session_id)
        return encoding.session_response(state, self._sessions.get(request.session_id).current)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        return pb.CloseSessionResponse(closed=self._sessions.close(request.session_id))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        trajectory = trajectory_from_proto(request.trajectory)
        environment = self._catalogue.get(trajectory.environment)
        task = environment.tasks.get(request.split, trajectory.task_key)
        scores = await environment.score(task, trajectory)
        return encoding.score_response(scores)

    async def RunText(self, request: pb.RunTextRequest, context: Any) -> pb.RunTextResponse:
        run = await self._runs.text(
            request.environment,
            list(request.queries),
            extra_json=request.extra_json,
            sampling=sampling_from_proto(request.sampling),
            compat=request.compat,
        )
        return pb.RunTextResponse(histories=[text_history_to_proto(h) for h in run.histories])

    async def RunTrial(self, request: pb.RunTrialRequest, context: Any) -> pb.RunTrialResponse:
        result = await self._runs.trial(
            request.environment,
            [dict(trial_input.data) for trial_input in request.inputs],
            options=encoding.trial_options(request),
            sampling=sampling_from_proto(request.sampling),
        )
        return pb.RunTrialResponse(trials=trials_to_proto(result))

    async def _count_mismatch(self, step: Awaitable[_Played]) -> _Played:
        """Await a step; count it where it is refused because it continues another prompt."""
        try:
            return await step
        except PreconditionFailed as error:
            self._count_refusal(error)
            raise

    def _count_refusal(self, error: PreconditionFailed) -> None:
        self.num_resends["step"] += error.reason == Reason.PROMPT_MISMATCH

    def _answer_to(self, request: pb.StepRequest, played: AnsweredStep) -> pb.StepResponse:
        self.num_resends["answer"] += request.whole_prompt and played.replayed
        return encoding.played_response(played, whole_prompt=request.whole_prompt)

    async def _interact(self, request: pb.InteractRequest, context: Any) -> pb.InteractResponse:
        """Return the answer to one request of a stream, or its error."""
        kind = request.WhichOneof("request")
        response = pb.InteractResponse(request_id=request.request_id)
        try:
            if kind is None:
                raise InvalidInput("The request is empty.", remedy="Set one of its requests.")
            answer = await self._streamed[kind](getattr(request, kind), context)
            getattr(response, kind).CopyFrom(answer)
        except Exception as error:
            response.error.CopyFrom(encoding.item_error(public_error(error)))
        return response

    def _interact_at_once(self, request: pb.InteractRequest) -> pb.InteractResponse | None:
        """Return the answer, or the error, of a step for which nothing has to wait; else None."""
        if request.WhichOneof("request") != "step":
            return None
        try:
            answer = self._step_at_once(request.step)
        except Exception as error:
            item_error = encoding.item_error(public_error(error))
            return pb.InteractResponse(request_id=request.request_id, error=item_error)
        if answer is None:
            return None
        return pb.InteractResponse(request_id=request.request_id, step=answer)

    async def _each(
        self,
        requests: Sequence[_Request],
        answer: Callable[[_Request], Awaitable[_Item]],
        make_failed: Callable[[pb.ItemError], _Item],
        answer_at_once: Callable[[_Request], _Item | None] = lambda _: None,
    ) -> list[_Item]:
        """Answer `max_concurrent_items` of a batch at a time; an error concerns its item only.

        Items that `answer_at_once` returns None for get tasks.
        """
        places = asyncio.Semaphore(self._max_concurrent_items)

        def fail(error: Exception) -> _Item:
            return make_failed(encoding.item_error(public_error(error)))

        async def answer_item(number: int, request: _Request) -> None:
            async with places:
                try:
                    items[number] = await answer(request)
                except Exception as error:
                    items[number] = fail(error)

        items: dict[int, _Item] = {}
        async with asyncio.TaskGroup() as waiting:
            for number, request in enumerate(requests):
                try:
                    item = answer_at_once(request)
                except Exception as error:
                    item = fail(error)
                if item is None:
                    waiting.create_task(answer_item(number, request))
                else:
                    items[number] = item
                if number % _ITEMS_A_TURN == _ITEMS_A_TURN - 1:
                    await asyncio.sleep(0)
        return [items[number] for number in range(len(items))]
