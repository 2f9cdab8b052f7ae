"""The inference service over gRPC: answers, streams, refusals, and its end."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from contextlib import AsyncExitStack

import numpy as np
import pytest
from dialoop.chat import History, Message
from dialoop.clients.channel import Channel
from dialoop.clients.inference import InferenceClient
from dialoop.clients.retry import RetryPolicy
from dialoop.clients.template import TemplateClient
from dialoop.errors import InvalidConfig, InvalidInput, Unavailable
from dialoop.sequences import ForkCause, Source
from dialoop.tokens.tokenizer import RunningText
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_services.hosting import OwnProcess
from dialoop_services.inference.__main__ import serve_in
from dialoop_services.inference.engine import BASE_VERSION, StopTokens
from dialoop_services.inference.rendering import Renderer
from dialoop_services.inference.settings import InferenceSettings
from dialoop_services.runtime import load

from tests.support.connections import connection_to, copy, serving_connections
from tests.support.inference_world import (  # noqa: F401
    MAX_MODEL_LEN,
    QUESTION,
    assert_refused,
    model_dir,
    publish,
    world,
)
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


async def test_an_answer_has_prompt_response_full_and_its_tokens(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        (sample,) = await w.client.generate(QUESTION, sampling=SamplingParams(max_new_tokens=9))
        assert sample.history.prompt == QUESTION
        (message,) = sample.history.response
        assert sample.history.full == QUESTION.append(message)
        assert message.role == "assistant"
        ids = sample.sequence.token_ids[sample.sequence.response_mask()].tolist()
        ended = ids[-1] in w.renderer.tokenizer.end_of_turn_ids
        assert message.content == w.renderer.tokenizer.decode(ids[:-1] if ended else ids)
        assert message.is_complete == (sample.stop_reason is StopReason.STOP)
        assert sample.sequence.policy_versions == (BASE_VERSION,)
        assert sample.sequence.segments[0].source is not Source.MODEL
        assert sample.sampling.temperature == 1.0
        assert sample.tokenizer_digest == w.renderer.tokenizer.digest


async def test_inference_logprobs_are_those_of_logprob(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        samples = await w.client.generate(QUESTION, num_samples=4)
        assert len(samples) == 4
        scored = await w.client.logprobs(s.sequence.token_ids for s in samples)
        for sample, row in zip(samples, scored.logprobs, strict=True):
            mask = sample.sequence.response_mask()[1:]
            assert np.abs(row[mask] - sample.sequence.inference_logprobs).max() < 1e-4
        assert scored.policy_version == BASE_VERSION


async def test_the_next_turn_continues_the_same_tokens(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        sampling = SamplingParams(max_new_tokens=8)
        (first,) = await w.client.generate(QUESTION, sampling=sampling)
        longer = first.history.full.append(Message(role="tool", content="75<response>"))
        (second,) = await w.client.generate(
            longer, context=first.sequence, num_context_messages=2, sampling=sampling, turn=1
        )
        assert second.sequence.fork_cause is ForkCause.NONE
        whole = first.sequence.extended_by(second.sequence)
        scored = await w.client.logprobs([whole.token_ids])
        mask = whole.response_mask()[1:]
        assert np.abs(scored.logprobs[0][mask] - whole.inference_logprobs).max() < 1e-4
        assert Source.TOOL in {s.source for s in second.sequence.segments}
        assert {s.turn for s in second.sequence.segments} == {1}


async def test_a_rewritten_history_starts_another_sequence(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        (first,) = await w.client.generate(QUESTION)
        rewritten = QUESTION.append(Message(role="assistant", content="7")).append(QUESTION[0])
        (second,) = await w.client.generate(
            rewritten, context=first.sequence, num_context_messages=2
        )
        assert second.sequence.fork_cause is ForkCause.HISTORY_REWRITTEN
        assert second.sequence.segments[0].start == 0


async def test_a_stop_string_stays_in_the_content(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        digits = tuple("0123456789abcdefghijklmnopqrstuvwxyz<")
        sampling = SamplingParams(max_new_tokens=100, stop=digits)
        (sample,) = await w.client.generate(QUESTION, sampling=sampling)
        assert sample.stop_reason is StopReason.STOP
        (message,) = sample.history.response
        assert message.is_complete
        assert sample.stop_string in message.content
        assert sample.stop_string in digits


def test_a_stop_string_inside_other_tokens_is_searched_as_text(model_dir):
    renderer = Renderer.of(model_dir)
    eos = renderer.tokenizer.end_of_turn_ids[0]
    call = renderer.tokenizer.single_token("<call>")
    assert renderer.stop_tokens(["<call>", "e", "9"]) == StopTokens(
        by_id={eos: "", call: "<call>", renderer.tokenizer.single_token("9"): "9"}, strings=("e",)
    )


async def test_a_prompt_longer_than_the_context_gives_an_empty_sample(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        long = History((Message(role="user", content="1" * MAX_MODEL_LEN),))
        (sample,) = await w.client.generate(long)
        assert sample.stop_reason is StopReason.CONTEXT_FULL
        assert sample.sequence.num_model_tokens == 0
        assert sample.history.response[0].content == ""
        assert not sample.history.response[0].is_complete


async def test_a_stream_tells_the_tokens_of_the_whole_sample(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        chunks = [c async for c in w.client.generate_stream(QUESTION)]
        (sample,) = chunks[-1].samples
        ids = [i for chunk in chunks for i in chunk.token_ids]
        assert ids == sample.sequence.token_ids[sample.sequence.response_mask()].tolist()
        logprobs = [x for chunk in chunks for x in chunk.inference_logprobs]
        assert logprobs == sample.sequence.inference_logprobs.tolist()
        assert {c.policy_version for c in chunks[:-1]} == {BASE_VERSION}


def test_streamed_text_waits_for_whole_characters(model_dir):
    renderer = Renderer.of(model_dir)
    ids = renderer.tokenizer.encode("aé€b").ids
    text = RunningText(renderer.tokenizer)
    texts = [text.add([i]) for i in ids]
    assert "".join(texts) == "aé€b"
    assert "\ufffd" not in "".join(texts)


async def test_wrong_requests_say_why(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        ask = w.client.generate
        await assert_refused(ask(History(())), InvalidInput, "PROMPT_MISSING")
        await assert_refused(ask(QUESTION, num_samples=-1), InvalidInput, "INVALID_SAMPLING")
        for sampling in (SamplingParams(temperature=0.001), SamplingParams(stop=("",))):
            await assert_refused(ask(QUESTION, sampling=sampling), InvalidInput, "INVALID_SAMPLING")
        await assert_refused(w.client.logprobs([[10**6]]), InvalidInput, "TOKEN_OUT_OF_RANGE")
        await assert_refused(w.client.logprobs([[1] * 201]), InvalidInput, "CONTEXT_FULL")


async def test_versions_change_within_one_answer(model_dir, tmp_path):
    root = tmp_path / "w"
    async with world(model_dir, root) as w:
        for number in range(1, 20):
            manifest = publish(root, model_dir, number=number, scale=0.2)
            seen = []
            async for chunk in w.client.generate_stream(
                QUESTION, sampling=SamplingParams(max_new_tokens=150)
            ):
                seen.append(chunk)
                if len(seen) == 3:
                    await w.client.load_weights(manifest)
            (sample,) = seen[-1].samples
            versions = [c.policy_version for c in seen[:-1] for _ in c.token_ids]
            assert tuple(versions) == sample.sequence.token_versions()
            if len(sample.sequence.policy_versions) == 2:  # else it had ended before the load
                return
        pytest.fail("no answer ran on across a load")


async def test_a_pause_holds_answers_until_resume(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        await w.client.pause()
        await w.client.pause()
        task = asyncio.create_task(w.client.generate(QUESTION))
        await asyncio.sleep(0.2)
        assert not task.done()
        assert (await w.client.get_policy()).num_requests_running == 1
        await w.client.resume()
        assert len(await task) == 1


async def test_a_dead_engine_is_not_ready_and_ends_the_service(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        watched = asyncio.create_task(w.replica.until_engine_dies())
        await w.replica.engine.close()
        async with asyncio.timeout(PATIENCE_S):
            await watched
        assert await w.health() == "NOT_SERVING"
        await assert_refused(w.client.generate(QUESTION), Unavailable, "NOT_READY")


async def test_a_step_that_fails_blames_those_it_answered_and_no_waiting_request(
    model_dir, tmp_path, monkeypatch
):
    async with world(model_dir, tmp_path / "w") as w:
        engine = w.replica.engine
        advance, may_fail = engine._advance, threading.Event()

        def fail_once(old, new):
            may_fail.wait()
            monkeypatch.setattr(engine, "_advance", advance)
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine, "_advance", fail_once)
        first = asyncio.create_task(w.client.generate(QUESTION))
        await until(lambda: engine._running)
        second = asyncio.create_task(w.client.generate(QUESTION))
        await until(lambda: engine._waiting)
        may_fail.set()
        await assert_refused(first, Unavailable, "ENGINE_DIED")
        assert len(await second) == 1


class Cable:
    """A TCP connection to a port, which counts the bytes that come back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_bytes_back = 0

    async def carry(self, reader, writer) -> None:
        async with connection_to(self._port) as (there, back):
            await asyncio.gather(copy(reader, back), self._copy_back(there, writer))

    async def _copy_back(self, reader, writer) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            self.num_bytes_back += len(data)


async def test_a_connection_that_breaks_in_an_answer_is_told_from_one_that_is_refused(
    model_dir, tmp_path
):
    async with world(model_dir, tmp_path / "w") as w, AsyncExitStack() as connected:
        cable = Cable(w.server.port)
        address = await connected.enter_async_context(serving_connections(cable.carry))
        async with Channel(address, retry=RetryPolicy(max_attempts=1)) as channel:
            client = InferenceClient(channel)
            await client.get_policy()
            await w.client.pause()
            num_before = cable.num_bytes_back
            answering = asyncio.create_task(client.generate(QUESTION))
            await until(lambda: w.replica.num_requests_running)
            await until(lambda: cable.num_bytes_back > num_before)
            await connected.aclose()
            await assert_refused(answering, Unavailable, "SERVICE_DIED")
            await assert_refused(client.generate(QUESTION), Unavailable, "UNAVAILABLE")
            await w.client.resume()


async def test_the_model_s_own_template_is_the_default_and_renders(model_dir, tmp_path):
    async with world(model_dir, tmp_path / "w") as w:
        templates = TemplateClient(w.channel)
        own = (await templates.list_templates())[0]
        assert (own.name, own.digest) == ("tiny", w.renderer.template.digest)
        assert own.is_default
        name = w.renderer.template.name  # the model directory's
        (named,) = await w.client.generate(QUESTION, template_name=name)
        assert named.template_digest == own.digest
        opened = await templates.render(QUESTION)
        assert opened.text.endswith("<|im_start|>assistant\n")
        assert w.renderer.tokenizer.decode(opened.sequence.token_ids.tolist()) == opened.text
        closed = await templates.render(QUESTION, add_generation_prompt=False)
        assert opened.text == closed.text + "<|im_start|>assistant\n"
        assert w.renderer.tokenizer.decode(closed.sequence.token_ids.tolist()) == closed.text


async def test_wrong_settings_are_refused_with_one_sentence(model_dir, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    shutil.copytree(model_dir, bare)
    (bare / "tokenizer.json").unlink()
    (tmp_path / "vllm.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("vllm", "dialoop_services.inference.vllm_engine.engine"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for expected, settings in (
        ("tokenizer.json", {"model_dir": bare}),
        ("positions", {"model_dir": model_dir, "max_model_len": 100000}),
        ("vLLM does not import", {"model_dir": model_dir, "engine": "vllm"}),
    ):
        loaded = load(InferenceSettings, **{"engine": "transformers"} | settings)
        with pytest.raises(InvalidConfig, match=expected):
            await serve_in(OwnProcess(loaded), loaded)


def test_a_process_with_a_wrong_setting_ends_with_one_sentence_and_exit_2(tmp_path):
    variables = {"ENGINE": "transformers", "MODEL_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "dialoop_services.inference"],
        env=os.environ | {f"DIALOOP_INFERENCE_{k}": v for k, v in variables.items()},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "no config.json in" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
