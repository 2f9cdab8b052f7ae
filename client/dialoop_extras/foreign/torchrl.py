"""TorchRL chat environments as environments: extra `dialoop-extras[torchrl]`.

def gsm8k():                                # in my_environments.py
    return torchrl_environment(name="gsm8k", make=make_chat_env, tasks=my_tasks)

`make` builds a ChatEnv of TorchRL in history mode and batch size 1, with any transforms. Each
episode has its own one, on its own thread. Only this module of the SDK imports torch and torchrl,
so only the process that serves such an environment loads them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dialoop.chat import History, Message
from dialoop.environments.episode import TaskData
from dialoop.environments.tasks.source import NoTasks, TaskSource
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.user_functions import call_now

from dialoop_extras.foreign.driver import ForeignEnvironment, ForeignReset, ForeignStep

T = TypeVar("T")


def torchrl_environment(
    *, name: str, make: Callable[[], Any], tasks: TaskSource | None = None, **options: Any
) -> ForeignEnvironment:
    """Return TorchRL ChatEnvs as an environment; InvalidConfig (PACKAGE_MISSING).

    tasks: resets get their questions under the environment's `data_key`. options: those of
    ForeignEnvironment, such as max_turns.
    """
    fields: dict[str, Any] = {"reward_name": "torchrl"} | options
    driver = TorchrlDriver(make=make)
    return ForeignEnvironment(name=name, driver=driver, tasks=tasks or NoTasks(), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrlDriver:
    """Plays each episode in a TorchRL environment of its own."""

    make: Callable[[], Any]

    def __post_init__(self) -> None:
        _libraries()

    async def begin(self, task: TaskData, seed: int) -> ForeignReset:
        """Make and reset an environment."""
        place = _Place()
        try:
            history = await place.run(lambda: place.reset(self.make, task, seed))
        except BaseException:
            place.close()
            raise
        return ForeignReset(place=place, messages=history.messages)

    async def move(self, place: _Place, history: History) -> ForeignStep:
        """Step with the whole conversation as `full`."""
        return await place.run(lambda: place.step(history))

    async def end(self, place: _Place) -> None:
        """Close the environment after its running step, if any."""
        place.close()


@dataclass(slots=True)
class _Place:
    """One TorchRL environment and the only thread that uses it."""

    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="torchrl")
    )
    environment: Any = None
    state: Any = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run the work on the thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def close(self) -> None:
        """Close the environment on its own thread, and end the thread."""
        self.thread.submit(self._close)
        self.thread.shutdown(wait=False)

    def reset(self, make: Callable[[], Any], task: TaskData, seed: int) -> History:
        """Make and reset the environment, and return its prompt."""
        torchrl, tensordict = _libraries()
        self.environment = call_now(make)
        if getattr(self.environment, "input_mode", "history") != "history":
            raise InvalidConfig(
                "The TorchRL environment is not in history mode.",
                reason=Reason.HISTORY_MODE_ONLY,
                remedy='Make it with input_mode="history".',
            )
        if tuple(self.environment.batch_size) != (1,):
            raise InvalidConfig(
                "The TorchRL environment is a batch.",
                reason=Reason.BATCH_SIZE,
                remedy="Make it with batch_size=(1,): each episode has its own.",
            )
        self.environment.set_seed(seed % 2**31)
        fields = {self.environment.data_key: _question(torchrl, task)}
        fields |= {k: v for k, v in task.metadata.items() if k != "seed"}
        if task.answer:
            fields["answer"] = task.answer
        data = tensordict.TensorDict(fields, batch_size=(1,))
        self.state = self.environment.reset(data)
        return _messages(self.state["history"].prompt)

    def step(self, history: History) -> ForeignStep:
        """Step the environment with the conversation as `full`, and return the result."""
        torchrl, _ = _libraries()
        prompt = len(_messages(self.state["history"].prompt))
        state = self.state.copy()
        state["history"] = torchrl.ChatHistory(
            prompt=_to_torchrl(torchrl, history[:prompt]),
            response=_to_torchrl(torchrl, history[prompt:]),
            full=_to_torchrl(torchrl, history),
        )
        result = self.environment.step(state)
        after = result["next"]
        next_prompt = _messages(after["history"].prompt)
        if _texts(next_prompt)[: len(history)] != _texts(history):
            raise ValueError("the next prompt does not begin with the conversation that was sent")
        reward = after.get("reward", None)
        self.state = self.environment.step_mdp(result)  # keeps the data of the reset
        terminated, truncated = (_flag(after, name) for name in ("terminated", "truncated"))
        return ForeignStep(
            messages=next_prompt.messages[len(history) :],
            reward=None if reward is None else float(reward.sum()),
            terminated=terminated or (_flag(after, "done") and not truncated),
            truncated=truncated,
        )

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            if self.environment is not None:
                self.environment.close(raise_if_closed=False)


def _flag(state: Any, name: str) -> bool:
    value = state.get(name, None)
    return value is not None and bool(value.any())


def _question(torchrl: Any, task: TaskData) -> Any:
    if task.messages is not None:
        return _to_torchrl(torchrl, task.messages)
    return task.question


def _to_torchrl(torchrl: Any, history: History) -> Any:
    if any(message.tool_calls for message in history):
        raise ValueError("a message has tool calls, but TorchRL's messages hold only text here")
    chats = [{"role": m.role, "content": m.text, "is_complete": m.is_complete} for m in history]
    return torchrl.History.from_chats([chats])


def _messages(history: Any) -> History:
    """Return the messages of the only conversation in a TorchRL batch."""
    roles, contents = list(history.role[0]), list(history.content[0])
    return History(tuple(Message(role=r, content=c) for r, c in zip(roles, contents, strict=True)))


def _texts(history: History) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in history]


def _libraries() -> tuple[Any, Any]:
    try:
        import tensordict
        import torchrl.data.llm.history as histories
        import torchrl.modules.llm.policies.common as containers
    except ImportError as error:
        raise InvalidConfig(
            "TorchRL environments need the `torchrl` package.",
            reason=Reason.PACKAGE_MISSING,
            remedy='Run: pip install "dialoop-extras[torchrl]"',
        ) from error
    return _Names(histories.History, containers.ChatHistory), tensordict


@dataclass(frozen=True, slots=True)
class _Names:
    """The TorchRL classes that this module uses."""

    History: Any
    ChatHistory: Any
