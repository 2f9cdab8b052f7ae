"""The rows of the features table that play whole runs, 73 to 92, through every door of the service.

The policy is an inference service whose engine says what a function makes of the prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from dialoop import BlockingDialoop
from dialoop.clients.channel import Channel
from dialoop.clients.retry import RetryPolicy
from dialoop.environments import arithmetic
from dialoop.environments.sessions.catalogue import Catalogue
from dialoop.errors import InvalidConfig, PreconditionFailed
from dialoop.sequences import Source
from dialoop.testing import CHAT_TEMPLATE, byte_tokenizer
from dialoop.trajectory import Owner, SamplingParams, StopReason
from dialoop.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from dialoop_extras.compat.trials import trial_keys
from dialoop_extras.games import twenty_questions
from dialoop_extras.services.runs_client import RunsClient
from dialoop_extras.services.runs_wire import trials_from_proto, trials_to_proto
from dialoop_extras.text_environment.environment import TextLimits, each
from dialoop_extras.text_environment.setups import TextSetup, exact_result, load_text_setup
from dialoop_extras.trials.agents import ScriptedAgent
from dialoop_extras.trials.trial import MaskScope, TrialOptions, run_trial
from dialoop_extras.trials.twenty_questions import TwentyQuestions
from dialoop_services.environment.serving import serving
from dialoop_services.environment.settings import EnvironmentSettings
from dialoop_services.hosting import GrpcServer
from dialoop_services.inference.engine import Sampled, VersionSpan
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.servicer import InferenceServicer
from dialoop_services.runtime import ServerSettings

from tests.support.connections import connection_to, copy, serving_connections
from tests.support.environment_doors import RawChannel, reason_of
from tests.support.rest_world import MAIN_3, GrpcDoor, RestServer, TwinEngine, service_in_a_thread
from tests.support.waiting import PATIENCE_S

Script = Callable[[str], str]

BYTES = byte_tokenizer()
QUERY = "What is 1+2?\n"
CALL = "<request><add>1+2<call>"
SUBMIT = "Result=3<submit>"
doors = pytest.mark.parametrize("door", ["grpc", "rest", "sdk"])


class Engine(TwinEngine):
    """Says what the script makes of the prompt's text."""

    max_model_len = 4000

    def __init__(self, script: Script) -> None:
        self._script = script

    async def sample(self, prompt_ids, sampling, *, stop, num_samples=1, adapter=None):
        ids = BYTES.encode(self._script(BYTES.decode(prompt_ids)), trusted=True).ids
        sampled = Sampled(
            token_ids=ids,
            logprobs=(-0.25,) * len(ids),
            versions=(VersionSpan(start=0, length=len(ids), policy_version=MAIN_3),),
            stop_reason=StopReason.STOP,
        )
        return (sampled,)


def model_of(directory: Path, **config: Any) -> Path:
    """A model directory that holds a tokenizer alone."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(BYTES._trusting.to_str())
    saved_config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(saved_config))
    return directory


@asynccontextmanager
async def policy(script: Script | Engine, model_dir: Path) -> AsyncIterator[str]:
    """The address of an inference service that speaks by the script."""

    async def report(serving: bool) -> None:
        """Nobody asks."""

    renderer = Renderer.of(model_dir)
    engine = script if isinstance(script, Engine) else Engine(script)
    replica = Replica(engine, weights_root=None, report=report)
    servicer = InferenceServicer(replica, renderer, num_parameters=7, max_new_tokens=64)
    server = GrpcServer(ServerSettings(drain_s=1))
    server.add(add_InferenceServiceServicer_to_server, servicer, "dialoop.v1.InferenceService")
    async with server:
        yield server.address


def add(query: str) -> str:
    first, second = query.split("+")
    return str(int(first) + int(second))


class Loud:
    """A tool as a class with __call__ and a name of its own."""

    name = "loud"

    def __call__(self, query: str) -> str:
        return query.upper() * 100


SETUP = TextSetup(
    name="sums", tools=[add, Loud()], reward=each(exact_result), limits=TextLimits(max_turns=2)
)


def setup() -> TextSetup:
    return SETUP


@asynccontextmanager
async def at(
    door: str, script: Script | Engine, directory: Path, **settings: Any
) -> AsyncIterator[Any]:
    """A client of a service with a policy, through one door."""
    model_dir = model_of(directory / "model")
    async with AsyncExitStack() as exits:
        address = await exits.enter_async_context(policy(script, model_dir))
        fields = {"inference_address": address, "model_dir": model_dir, **settings}
        fields = {"text_environments": f"{__name__}:setup", "rest_port": 0, "drain_s": 1, **fields}
        catalogue = Catalogue([arithmetic(), twenty_questions()])
        server = await exits.enter_async_context(serving(EnvironmentSettings(**fields), catalogue))
        if door == "sdk":
            once = RetryPolicy(max_attempts=1)
            channel = await exits.enter_async_context(Channel(server.address, retry=once))
            yield RunsClient(channel)
            return
        raw = (
            RestServer(server)
            if door == "rest"
            else GrpcDoor(grpc.aio.insecure_channel(server.address))
        )
        exits.push_async_callback(raw.close)
        yield RunsClient(RawChannel(raw))  # type: ignore[arg-type]


def sums(prompt: str) -> str:
    """Calls first, then submits what was said."""
    return SUBMIT if prompt.endswith("<response>") else CALL


def guesses(prompt: str) -> str:
    """Asks once, then guesses the key."""
    return "[key]" if prompt.endswith(("Yes", "No")) else "Is it alive?"


@doors
async def test_73_run_trial_plays_a_game_by_the_services_policy(door, tmp_path):
    async with at(door, guesses, tmp_path) as client:
        result = await client.run_trial("twenty_questions", [{"solution": "key"}] * 3)
    assert result.rewards == [1.0] * 3
    assert [len(trial.final.steps) for trial in result.trials] == [2] * 3
    assert len({len(rows) for rows in trial_keys(result).values()}) == 1
    sequence = result.trials[0].final.sequence()
    assert sequence.inference_logprobs.tolist() == [-0.25] * len("Is it alive?[key]")
    assert {s.policy_version for s in sequence.segments if s.source is Source.MODEL} == {MAIN_3}


@doors
async def test_74_every_key_has_its_alias(door, tmp_path):
    async with at(door, guesses, tmp_path) as client:
        result = await client.run_trial("twenty_questions", [{"solution": "key"}])
    keys = trial_keys(result)
    assert keys["ids"] == keys["full_token_ids"]
    assert keys["mask"] == keys["completion_only_mask"]
    assert keys["messages"][0][0]["content"] == "[key]"
    assert keys["messages"][0][0]["session_id"] == keys["session_ids"][0]


async def test_75_without_a_tokenizer_token_lists_are_empty_on_the_wire_too():
    agent = ScriptedAgent(["Is it alive?", "[key]"])
    result = await run_trial(TwentyQuestions(), [{"solution": "key"}], agent)
    assert (result.full_token_ids, result.completion_only_mask) == ([[]], [[]])
    assert result.rewards == [1.0]
    sent = trials_to_proto(result)
    received = trials_from_proto(sent, mask_scope=result.mask_scope)
    assert trial_keys(received) == trial_keys(result)
    assert received.rewards == [1.0]


@doors
async def test_76_episodes_per_trial_and_free_shots(door, tmp_path):
    async with at(door, guesses, tmp_path) as client:
        options = TrialOptions(episodes_per_trial=3, free_shots=2)
        result = await client.run_trial("twenty_questions", [{"solution": "key"}], options=options)
        assert [e.reward for e in result.trials[0].episodes] == [0.0, 0.0, 1.0]
        assert [e.is_free_shot for e in result.trials[0].episodes] == [True, True, False]
        object.__setattr__(options, "free_shots", 3)
        refused = client.run_trial("twenty_questions", [{}], options=options)
        assert await reason_of(refused) == "INVALID_INPUT"


@doors
async def test_77_trials_at_one_time_have_sessions_of_their_own(door, tmp_path):
    async with at(door, guesses, tmp_path) as client:
        words = ["key", "cat", "oak"]
        result = await client.run_trial("twenty_questions", [{"solution": w} for w in words])
    assert result.rewards == [1.0, 0.0, 0.0]
    assert len(set(result.session_ids)) == 3
    assert [trial.final.steps[1].prompt for trial in result.trials] == ["No", "Yes", "Yes"]


@doors
@pytest.mark.parametrize("scope", MaskScope)
async def test_78_79_prompts_and_actions_alternate_and_the_mask_counts_actions(
    door, tmp_path, scope
):
    async with at(door, guesses, tmp_path) as client:
        options = TrialOptions(mask_scope=scope)
        result = await client.run_trial("twenty_questions", [{"solution": "key"}], options=options)
    first, second = result.trials[0].final.steps
    text = first.prompt + "Is it alive?" + second.prompt + "[key]"
    ids, mask = result.full_token_ids[0], result.completion_only_mask[0]
    assert BYTES.decode(ids) == text
    assert result.full_attention_mask[0] == [1] * len(ids)
    counted = BYTES.decode(
        [token for token, is_counted in zip(ids, mask, strict=True) if is_counted]
    )
    assert counted == ("[key]" if scope is MaskScope.FINAL else "Is it alive?[key]")


@doors
async def test_81_twenty_questions_by_seed_and_its_refusals(door, tmp_path):
    async with at(door, lambda prompt: "Is it alive?", tmp_path) as client:
        options = TrialOptions(seed=3)
        runs = [await client.run_trial("twenty_questions", [{}], options=options) for _ in "ab"]
        assert runs[0].trials[0].final == runs[1].trials[0].final
        assert len(runs[0].trials[0].final.steps) == 21
        refused = client.run_trial("twenty_questions", [{"solution": " "}])
        assert await reason_of(refused) == "INVALID_INPUT"
        assert await reason_of(client.run_trial("nope", [{}])) == "ENVIRONMENT_NOT_FOUND"
        assert await reason_of(client.run_trial("arithmetic", [{}])) == "NOT_A_GAME"
        many = client.run_trial("twenty_questions", [{}] * 5000)
        assert await reason_of(many) == "OUT_OF_RANGE"


async def test_a_service_without_a_way_to_its_policy_reaches_it_through_a_relay(tmp_path):
    async with policy(guesses, model_of(tmp_path / "model")) as address:

        async def relay(reader, writer):
            async with connection_to(int(address.rpartition(":")[2])) as (answers, there):
                await asyncio.gather(copy(reader, there), copy(answers, writer))

        async with (
            serving_connections(relay) as relayed,
            at("sdk", guesses, tmp_path, inference_address=relayed) as client,
        ):
            result = await client.run_trial("twenty_questions", [{"solution": "key"}])
    assert result.rewards == [1.0]


@doors
async def test_85_86_tools_by_function_and_by_class_answer_inline(door, tmp_path):
    def script(prompt: str) -> str:
        return SUBMIT if "<response>" in prompt else "<request><loud>ab<call>"

    async with at(door, script, tmp_path) as client:
        run = await client.run_text("sums", ["say "])
    history = run.histories[0]
    reply = ("AB" * 100)[:97] + "..."
    assert history.text == f"say <request><loud>ab<call>{reply}<response>{SUBMIT}"
    assert [segment.source for segment in history.segments] == [
        Source.PROMPT,
        Source.MODEL,
        Source.TOOL,
        Source.MODEL,
    ]


@doors
async def test_87_88_limits_end_an_episode_as_truncated(door, tmp_path):
    async with at(door, lambda prompt: CALL, tmp_path) as client:
        history = (await client.run_text("sums", [QUERY])).histories[0]
        assert (history.completed, history.truncated) == (True, True)
        assert history.text == QUERY + f"{CALL}3<response>" * 2
        trl = (await client.run_text("sums", [QUERY], compat="trl")).histories[0]
        assert (trl.completed, trl.truncated) == (False, False)
        refused = client.run_text("sums", [QUERY], compat="verl")
        assert await reason_of(refused) == "BAD_COMPAT"


@doors
async def test_89_run_gives_queries_responses_masks_rewards_and_histories(door, tmp_path):
    async with at(door, sums, tmp_path) as client:
        run = await client.run_text(
            "sums",
            [QUERY, "And 1+2?\n"],
            extra={"answers": ["3", "4"]},
            sampling=SamplingParams(temperature=0.5, max_new_tokens=50),
        )
        queries, responses, masks, rewards, histories = run
        assert rewards == [1.0, 0.0]
        assert BYTES.decode(queries[0]) == QUERY
        assert BYTES.decode(responses[0]) == f"{CALL}3<response>{SUBMIT}"
        assert sum(masks[0]) == len(CALL + SUBMIT)
        assert histories[0].sequence().num_model_tokens == len(CALL + SUBMIT)
        for extra in ({"answers": ["3"]}, {"answers": []}):
            refused = client.run_text("sums", [QUERY] * 2, extra=extra)
            assert await reason_of(refused) == "BAD_EXTRA"
        assert await reason_of(client.run_text("sums", [])) == "QUERIES_MISSING"
        assert await reason_of(client.run_text("sums", [""])) == "QUERIES_MISSING"
        assert await reason_of(client.run_text("nope", [QUERY])) == "ENVIRONMENT_NOT_FOUND"


@doors
async def test_91_92_a_history_that_came_over_the_wire_is_shown(door, tmp_path, capsys):
    async with at(door, sums, tmp_path) as client:
        run = await client.run_text("sums", [QUERY], extra={"answers": ["3"]})
    history = run.histories[0]
    assert history.system_spans == [True, False, True, False]
    assert history.last_text_segment == SUBMIT
    history.show_text(show_legend=True)
    history.show_tokens(BYTES)
    shown = capsys.readouterr().out
    assert SUBMIT in shown
    assert "Reward: 1.0" in shown


@doors
async def test_a_reward_that_fails_is_a_failure_and_no_zero(door, tmp_path):
    async with at(door, sums, tmp_path) as client:
        history = (await client.run_text("sums", [QUERY])).histories[0]
    assert history.reward is None
    assert history.failures[0].owner is Owner.REWARD
    assert "answers" not in history.failures[0].message


@doors
async def test_without_a_policy_both_say_what_to_set(door, tmp_path):
    async with at(door, sums, tmp_path, inference_address="") as client:
        assert await reason_of(client.run_text("sums", [QUERY])) == "NO_INFERENCE"
        assert await reason_of(client.run_trial("twenty_questions", [{}])) == "NO_INFERENCE"


class Slow(Engine):
    """Never answers."""

    def __init__(self) -> None:
        super().__init__(sums)
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()

    async def sample(self, prompt_ids, sampling, **options):
        self.asked.set()
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def test_a_caller_who_leaves_frees_the_policys_places(tmp_path):
    engine = Slow()
    async with at("sdk", engine, tmp_path) as client:
        running = asyncio.create_task(client.run_text("sums", [QUERY]))
        async with asyncio.timeout(PATIENCE_S):
            await engine.asked.wait()
            running.cancel()
            await engine.cancelled.wait()


async def test_a_policy_with_another_tokenizer_is_refused(tmp_path):
    other = model_of(tmp_path / "other")
    described = json.loads((other / "tokenizer.json").read_text())
    described["added_tokens"].pop()
    (other / "tokenizer.json").write_text(json.dumps(described))
    async with at("sdk", sums, tmp_path, model_dir=other) as client:
        assert await reason_of(client.run_text("sums", [QUERY])) == "TOKENIZER_MISMATCH"


async def test_a_policy_that_is_away_is_unavailable(tmp_path):
    async with at("sdk", sums, tmp_path, inference_address="127.0.0.1:9") as client:
        assert await reason_of(client.run_text("sums", [QUERY])) == "UNAVAILABLE"


def test_what_is_no_text_environment_is_refused():
    assert load_text_setup("calculator").name == "calculator"
    with pytest.raises(InvalidConfig, match="not a text environment"):
        load_text_setup("dialoop.environments:arithmetic")
    with pytest.raises(InvalidConfig, match="calculator or module:attribute"):
        load_text_setup("nope")


def test_a_thread_without_a_loop_asks_for_runs_by_the_twin_of_their_client():
    with (
        service_in_a_thread("environment", rest_port=None) as service,
        BlockingDialoop(environment=service.address) as dialoop,
        pytest.raises(PreconditionFailed) as caught,
    ):
        dialoop.client("environment", RunsClient).run_text("calculator", [QUERY])
    assert caught.value.reason == "NO_INFERENCE"
