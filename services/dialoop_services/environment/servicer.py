"""EnvironmentService over gRPC: decode, call, encode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dialoop.chat import ChatHistory, History
from dialoop.clients.environment_records import (
    CHOICE,
    INFO,
    RESET_RESULT,
    RESUMED,
    SESSION_STATE,
    STEP_RESULT,
    TASK_PAGE,
    TURN_SCORE,
    info_of,
)
from dialoop.environments import Answered, Opening, Outcome, TaskChoice
from dialoop.environments.sessions.records import (
    AnsweredStep,
    Prompt,
    ResetCall,
    Session,
    StepCall,
    added_to,
    full_of,
    prompt_of_episode,
    reset_result,
    step_result,
)
from dialoop.errors import DialoopError, InvalidHistory, InvalidInput
from dialoop.reasons import Reason
from dialoop.v1 import environment_service_pb2 as pb
from dialoop.v1.environment_service_pb2_grpc import EnvironmentServiceServicer
from dialoop.wire.messages import CHAT_HISTORY, MESSAGE, TEXT, TOKENS
from dialoop.wire.records import TRAJECTORY

from dialoop_services.runtime.calls import announce_start, require_known_fields
from dialoop_services.runtime.errors import public_error

if TYPE_CHECKING:
    from dialoop.environments.sessions.catalogue import Catalogue
    from dialoop.environments.sessions.engine import SessionEngine

_Request = TypeVar("_Request")
_VIEWS = ("history", "text", "tokens")


class EnvironmentServicer(EnvironmentServiceServicer):
    """Serves a catalogue of environments and the sessions in them."""

    def __init__(
        self,
        catalogue: Catalogue,
        sessions: SessionEngine,
        *,
        max_concurrent_items: int = 256,
    ) -> None:
        self._catalogue = catalogue
        self._sessions = sessions
        self._max_concurrent_items = max_concurrent_items
        self._streamed: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "create_session": self.CreateSession,
            "reset": self.Reset,
            "step": self.Step,
            "close_session": self.CloseSession,
        }

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: Any
    ) -> pb.ListEnvironmentsResponse:
        infos = [INFO.to_proto(info_of(environment)) for environment in self._catalogue]
        return pb.ListEnvironmentsResponse(environments=infos)

    async def GetEnvironment(
        self, request: pb.GetEnvironmentRequest, context: Any
    ) -> pb.GetEnvironmentResponse:
        environment = self._catalogue.get(request.environment)
        return pb.GetEnvironmentResponse(environment=INFO.to_proto(info_of(environment)))

    async def ListTasks(self, request: pb.ListTasksRequest, context: Any) -> pb.ListTasksResponse:
        page = self._catalogue.get(request.environment).tasks.page(
            request.split,
            page_token=request.page_token,
            page_size=request.page_size,
            one_epoch=request.one_epoch,
            shuffle_seed=request.shuffle_seed,
        )
        return TASK_PAGE.to_proto(page)

    async def CreateSession(
        self, request: pb.CreateSessionRequest, context: Any
    ) -> pb.CreateSessionResponse:
        ttl_s = request.ttl_s if request.HasField("ttl_s") else None
        session = self._sessions.create(request.session_id, request.environment, ttl_s)
        return pb.CreateSessionResponse(session_id=session.session_id, ttl_s=session.ttl_s)

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.ResetResponse:
        opening = await self._sessions.reset(_reset_call(request))
        return _reset_response(opening, self._sessions.get(request.session_id))

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        played = await self._sessions.step(_step_call(request))
        return _step_response(played, whole_prompt=request.whole_prompt)

    async def StepAndReset(
        self, request: pb.StepAndResetRequest, context: Any
    ) -> pb.StepAndResetResponse:
        played, opening = await self._sessions.step_and_reset(
            _step_call(request.step), _following_reset(request)
        )
        step = _step_response(played, whole_prompt=request.step.whole_prompt)
        response = pb.StepAndResetResponse(step=step)
        if opening is not None:
            session = self._sessions.get(request.step.session_id)
            response.reset.CopyFrom(_reset_response(opening, session))
        return response

    async def BatchReset(
        self, request: pb.BatchResetRequest, context: Any
    ) -> pb.BatchResetResponse:
        batch = pb.BatchResetResponse()
        await self._each(request.items, batch.items, partial(self.Reset, context=context))
        return batch

    async def BatchStep(self, request: pb.BatchStepRequest, context: Any) -> pb.BatchStepResponse:
        batch = pb.BatchStepResponse()
        await self._each(request.items, batch.items, partial(self.Step, context=context))
        return batch

    async def Interact(self, requests: AsyncIterator[pb.InteractRequest], context: Any) -> None:
        # A request has a place until its answer is written; without one nothing more is read, and
        # the client has to wait. No answer waits for another one.
        places, writing = asyncio.Semaphore(self._max_concurrent_items), asyncio.Lock()

        async def answer(request: pb.InteractRequest) -> None:
            response = await self._interact(request, context)
            async with writing:
                await context.write(response)  # and no `yield`: answers come from several tasks
            places.release()

        async with asyncio.TaskGroup() as answering:
            async for request in requests:
                await places.acquire()
                answering.create_task(answer(request))  # tasks begin in their order

    async def StepHistory(
        self, request: pb.StepHistoryRequest, context: Any
    ) -> pb.StepHistoryResponse:
        answered = CHAT_HISTORY.from_proto(request.history)
        outcome = await self._sessions.step_history(
            request.environment, CHOICE.from_proto(request.task), answered
        )
        step = _stateless_response(answered, outcome, whole_prompt=request.whole_prompt)
        return pb.StepHistoryResponse(step=step)

    async def CreateGroup(
        self, request: pb.CreateGroupRequest, context: Any
    ) -> pb.CreateGroupResponse:
        await announce_start(context)
        members = await self._sessions.create_group(
            request.group_id,
            request.environment,
            request.num_sessions,
            CHOICE.from_proto(request.task),
            request.ttl_s if request.HasField("ttl_s") else None,
        )
        return pb.CreateGroupResponse(
            session_ids=[session.session_id for session, _ in members],
            resets=[_reset_response(opening, session) for session, opening in members],
            ttl_s=members[0][0].ttl_s,
        )

    async def GetSession(
        self, request: pb.GetSessionRequest, context: Any
    ) -> pb.GetSessionResponse:
        return SESSION_STATE.to_proto(self._sessions.state(request.session_id))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        return pb.CloseSessionResponse(closed=self._sessions.close(request.session_id))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        trajectory = TRAJECTORY.from_proto(request.trajectory)
        environment = self._catalogue.get(trajectory.environment)
        task = environment.tasks.get(request.split, trajectory.task_key)
        scores = await environment.score(task, trajectory)
        return pb.ScoreResponse(turns=map(TURN_SCORE.to_proto, scores))

    async def _interact(self, request: pb.InteractRequest, context: Any) -> pb.InteractResponse:
        """Return the answer to one request of a stream, or its error."""
        kind = request.WhichOneof("request")
        response = pb.InteractResponse(request_id=request.request_id)
        try:
            require_known_fields(request)
            if kind is None:
                raise InvalidInput("The request is empty.", remedy="Set one of its requests.")
            answer = await self._streamed[kind](getattr(request, kind), context)
            getattr(response, kind).CopyFrom(answer)
        except Exception as error:
            response.error.CopyFrom(_item_error(public_error(error)))
        return response

    async def _each(
        self,
        requests: Sequence[_Request],
        answers: Any,
        answer: Callable[[_Request], Awaitable[Any]],
    ) -> None:
        """Add an item to `answers` for each request of a batch; an error concerns its item only.

        `max_concurrent_items` are answered at a time.
        """
        places = asyncio.Semaphore(self._max_concurrent_items)

        async def answer_one(request: _Request, item: Any) -> None:
            async with places:
                try:
                    item.response.CopyFrom(await answer(request))
                except Exception as error:
                    item.error.CopyFrom(_item_error(public_error(error)))

        async with asyncio.TaskGroup() as answering:
            for request in requests:
                answering.create_task(answer_one(request, answers.add()))


def _reset_call(request: pb.ResetRequest) -> ResetCall:
    """Return the call for a reset."""
    has_snapshot = request.HasField("resumed")
    return ResetCall(
        session_id=request.session_id,
        episode=request.episode,
        choice=CHOICE.from_proto(request),
        resumed=RESUMED.from_proto(request.resumed) if has_snapshot else None,
    )


def _following_reset(request: pb.StepAndResetRequest) -> ResetCall:
    """Return the call for the reset that follows the step."""
    return ResetCall(
        session_id=request.step.session_id,
        episode=request.step.episode + 1,
        choice=TaskChoice(
            split=request.next_split, task_key=request.next_task_key, seed=request.next_seed
        ),
    )


def _step_call(request: pb.StepRequest) -> StepCall:
    """Return the call for a step; raise InvalidHistory when the request has several views."""
    require_known_fields(request)
    return StepCall(
        session_id=request.session_id,
        episode=request.episode,
        step_index=request.step_index,
        answered=_response_of(request),
    )


def _response_of(request: pb.StepRequest) -> Answered:
    """Return the one view that was sent."""
    views = [view for view in _VIEWS if request.HasField(view)]
    if len(views) > 1:
        raise InvalidHistory(
            f"The step holds {' and '.join(views)}.",
            reason=Reason.WRONG_MODE,
            remedy="Send the one that the environment's input mode names.",
        )
    if views == ["text"]:
        return TEXT.from_proto(request.text)
    if views == ["tokens"]:
        return TOKENS.from_proto(request.tokens)
    return CHAT_HISTORY.from_proto(request.history)


def _added(added: Prompt) -> pb.Added:
    if isinstance(added, History):
        return pb.Added(messages=map(MESSAGE.to_proto, added))
    if isinstance(added, str):
        return pb.Added(text=added)
    return pb.Added(token_ids={"values": added})


def _reset_response(opening: Opening, session: Session) -> pb.ResetResponse:
    """Return the answer to a reset."""
    return RESET_RESULT.to_proto(reset_result(opening, session.environment))


def _step_response(played: AnsweredStep, *, whole_prompt: bool) -> pb.StepResponse:
    """Return the answer to a step of a session."""
    added = None if whole_prompt else played.added
    return _outcome_response(played.outcome, added, replayed=played.replayed)


def _stateless_response(
    answered: ChatHistory, outcome: Outcome, *, whole_prompt: bool
) -> pb.StepResponse:
    """Return the answer to a step without a session."""
    full = full_of(History(), answered)
    added = None if whole_prompt else added_to(full, prompt_of_episode(outcome.episode))
    return _outcome_response(outcome, added)


def _outcome_response(
    outcome: Outcome, added: Prompt | None, *, replayed: bool = False
) -> pb.StepResponse:
    """Return the answer with what was `added` to the prompt, or without that the whole of it.

    Text and tokens that transforms show beside messages are whole.
    """
    result = step_result(outcome, replayed=replayed)
    if added is None:
        return STEP_RESULT.to_proto(result)
    if outcome.episode.view is not None:
        result = replace(result, text=None, tokens=None)
    response = STEP_RESULT.to_proto(replace(result, history=ChatHistory()))
    response.added.CopyFrom(_added(added))
    return response


def _item_error(error: DialoopError) -> pb.ItemError:
    """Return the error of one item of a batch or stream."""
    return pb.ItemError(code=int(error.status), reason=error.reason, message=str(error))
