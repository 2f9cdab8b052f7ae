"""engine = "openai": a server that Dialoop does not run, in every form in which servers talk."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from dialoop.errors import InvalidConfig, Unavailable, Unsupported
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer
from dialoop.trajectory import SamplingParams, StopReason
from dialoop_ops.conformance.inference import checks
from dialoop_ops.conformance.inference.running import check_engine
from dialoop_services.inference.engine import OUTSIDE_VERSION, EngineOptions, StopTokens
from dialoop_services.inference.outside_engine import OutsideEngine
from dialoop_services.inference.replica.replica import Replica
from dialoop_services.inference.transformers_engine.engine import TransformersEngine
from dialoop_services.scorer.__main__ import make_scorer
from dialoop_services.scorer.settings import ScorerSettings

from benchmarks.servers.families import make_family
from tests.support.agent_world import MODEL, ScriptedEngine, agent_world
from tests.support.programs.completion_servers import Form, completion_server
from tests.support.samples.scorer_samples import make_group

pytestmark = pytest.mark.filterwarnings("ignore")

WIDE = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
LOADS = {"load", "load: samples in flight", "load: bad weights"}
DIALOOP = "dialoop"
FORMS = {
    DIALOOP: None,
    "vllm-processed": Form(ids="field"),
    "vllm-raw": Form(ids="field", is_raw=True),
    "older-vllm": Form(ids="text", scores="echo"),
    "no-scores": Form(ids="field", scores="", names_longest=False),
}
REFUSED = {
    "vllm-raw": {"sample: temperature"},
    "no-scores": {"logprobs"},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_family("qwen2", tmp_path_factory.mktemp("outside") / "model", fields=WIDE)


@asynccontextmanager
async def server_of(form: Form | None, model_dir: Path):
    """Serve the model; yield the URL of the form, or of Dialoop's own door."""
    engine = await TransformersEngine.start(
        model_dir, EngineOptions(max_model_len=64, max_num_seqs=16)
    )
    try:
        async with agent_world(model_dir, engine) as world:
            upstream = f"{world.url}/v1"
            if form is None:
                yield upstream
                return
            async with completion_server(form, upstream, world.tokenizer.decode) as proxy:
                yield proxy.url
    finally:
        await engine.close()


@asynccontextmanager
async def outside(url: str, model_dir: Path, **own):
    options = EngineOptions(max_model_len=64, own={"url": url} | own)
    engine = await OutsideEngine.start(model_dir, options)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("name", FORMS)
async def test_it_conforms_and_refuses_by_name_what_its_server_cannot_do(
    name: str, model_dir: Path, tmp_path: Path
) -> None:
    async with server_of(FORMS[name], model_dir) as url:
        findings = await check_engine(
            "openai", folder=tmp_path, model_dir=model_dir, own={"url": url, "model": MODEL}
        )
    notes = {finding.check: finding.note for finding in findings}
    assert {f.check: f.problem for f in findings if not f.is_ok} == {}
    assert notes.keys() == {*checks.CORE, *checks.CAPABILITIES, "close"}
    refused = {check for check, note in notes.items() if note.startswith("refused by name")}
    assert refused == LOADS | REFUSED.get(name, set())
    assert all("not offered" in notes[capability] for capability in checks.CAPABILITIES)


async def test_a_server_of_openais_fields_alone_is_read_by_the_text_of_its_tokens(model_dir):
    """A token that no other reads like is known by its text; parts of characters are refused."""
    text = "Result=57 and 8"
    tokenizer = Tokenizer.from_directory(model_dir)
    scripted = ScriptedEngine(model_dir, [text] * 20)
    async with (
        agent_world(model_dir, scripted) as world,
        completion_server(
            Form(is_strict=True, scores=""), f"{world.url}/v1", tokenizer.decode
        ) as proxy,
        outside(proxy.url, model_dir) as engine,
    ):
        prompt, sampling = [5, 9, 17], SamplingParams(max_new_tokens=30)
        (whole,) = await engine.sample(prompt, sampling, stop=StopTokens())
        assert tokenizer.decode(whole.token_ids).startswith(text)
        assert whole.stop_reason is StopReason.STOP
        # The server goes on after a stop token of ours; the answer ends with it.
        stop = StopTokens(by_id={whole.token_ids[2]: "<end>"})
        (cut,) = await engine.sample(prompt, sampling, stop=stop)
        end = whole.token_ids.index(whole.token_ids[2]) + 1
        assert cut.token_ids == whole.token_ids[:end]
        assert (cut.stop_reason, cut.stop_string) == (StopReason.STOP, "<end>")
        assert {span.policy_version for span in cut.versions} == {OUTSIDE_VERSION}
        with pytest.raises(Unsupported, match="top_k is none"):
            await engine.sample(prompt, SamplingParams(top_k=5), stop=StopTokens())
        scripted.script[:] = ["ß"] * 3
        with pytest.raises(Unsupported, match="tokens have the text"):
            await engine.sample(prompt, sampling, stop=StopTokens())


async def test_another_tokenizer_is_refused_at_the_start(model_dir, tmp_path):
    import json

    other = tmp_path / "other"
    other.mkdir()
    document = json.loads((model_dir / "tokenizer.json").read_text("utf-8"))
    vocabulary = document["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[10:12]
    letters = [token for token in vocabulary if token in "What"]
    vocabulary[letters[0]], vocabulary[letters[1]] = (
        vocabulary[letters[1]],
        vocabulary[letters[0]],
    )
    assert first != second
    (other / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    config = (model_dir / "tokenizer_config.json").read_text("utf-8")
    (other / "tokenizer_config.json").write_text(config, encoding="utf-8")
    async with server_of(None, model_dir) as url:
        with pytest.raises(InvalidConfig) as caught:
            async with outside(url, other):
                pass
    assert caught.value.reason == Reason.TOKENIZER_MISMATCH


async def test_a_wrong_name_a_longer_context_and_a_server_that_is_away_are_named(model_dir):
    async with server_of(None, model_dir) as url:
        with pytest.raises(InvalidConfig, match="serves tiny, and not other"):
            async with outside(url, model_dir, model="other"):
                pass
        with pytest.raises(InvalidConfig, match="takes 64 tokens"):
            await OutsideEngine.start(model_dir, EngineOptions(max_model_len=65, own={"url": url}))
    with pytest.raises(Unavailable, match="does not answer"):
        async with outside(url, model_dir):
            pass
    with pytest.raises(InvalidConfig, match="url"):
        await OutsideEngine.start(model_dir, EngineOptions())


async def test_a_publish_is_refused_and_the_replica_goes_on(model_dir):
    async with server_of(None, model_dir) as url, outside(url, model_dir) as engine:

        async def report(serving: bool) -> None:
            raise AssertionError("it left the rotation")

        replica = Replica(engine, weights_root=None, report=report)
        with pytest.raises(Unsupported, match="does not set"):
            await replica.load(None, None)
        assert not replica.fault
        assert replica.model_digest() == ""
        with pytest.raises(Unsupported, match="does not pause"):
            await replica.pause()


async def test_a_teacher_on_a_server_gives_the_log_probs_of_the_same_model_here(model_dir):
    options = {"model_dir": model_dir, "reference_logprobs": True}
    async with server_of(FORMS["vllm-raw"], model_dir) as url:
        server = {"url": url, "model": MODEL}
        outside_settings = ScorerSettings(reference_server=server, **options)
        scorer = await asyncio.to_thread(make_scorer, outside_settings)
        scored = await scorer.score(make_group(0.0, 1.0))
        rows = await scorer.model().logprobs_of_all([[5, 8, 2, 11], [7, 7]])
        with pytest.raises(Unsupported, match="scores at temperature 1"):
            await scorer.model().logprobs_of_all([[5, 8]], [0.5])
        silent = ScorerSettings(models=[{"id": "t", "directory": str(model_dir), "server": server}])
        teacher = (await asyncio.to_thread(make_scorer, silent)).model("t")
        assert np.allclose((await teacher.logprobs_of_all([[7, 7]]))[0], rows[1], atol=1e-6)
    here = make_scorer(ScorerSettings(**options))
    expected = await here.score(make_group(0.0, 1.0))
    for trajectory, own in zip(scored.trajectories, expected.trajectories, strict=True):
        ours, theirs = trajectory.sequences[0].ref_logprobs, own.sequences[0].ref_logprobs
        assert len(ours) > 0
        assert np.allclose(ours, theirs, atol=1e-4)
    expected_rows = await here.model().logprobs_of_all([[5, 8, 2, 11], [7, 7]])
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(rows, expected_rows, strict=True))


async def test_a_teacher_that_scores_nothing_is_refused_at_the_start(model_dir):
    async with server_of(FORMS["no-scores"], model_dir) as url:
        settings = ScorerSettings(
            model_dir=model_dir, reference_logprobs=True, reference_server={"url": url}
        )
        with pytest.raises(InvalidConfig, match="no log-probs of given tokens"):
            await asyncio.to_thread(make_scorer, settings)


@pytest.mark.heavy(reason="starts dialoop eval and its service")
async def test_dialoop_eval_plays_with_a_server_and_needs_its_tokenizer_alone(model_dir, tmp_path):
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model_dir / name).is_file():
            (directory / name).write_bytes((model_dir / name).read_bytes())
    async with server_of(FORMS["vllm-raw"], model_dir) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dialoop_ops.cli.main", "eval", "arithmetic", "--tasks", "2"),
            *("--policy", str(directory), "--run", "outside", "--max-new-tokens", "8"),
            *("--engine", "openai", "--engine-option", f"url={url}", "--max-model-len", "64"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    log = tmp_path / "runs" / "outside" / "engine.log"
    assert process.returncode == 0, output.decode() + (log.read_text() if log.is_file() else "")
    lines = (tmp_path / "runs" / "outside" / "trajectories.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert all("outside" in line and '"inference_logprobs"' in line for line in lines)


@pytest.mark.heavy(reason="starts vLLM's own server")
@pytest.mark.vllm
@pytest.mark.timeout(1200)
async def test_vllms_own_server_conforms(model_dir: Path, tmp_path: Path) -> None:
    """Raw log-probs are vLLM's default: other temperatures are refused, and served where asked."""
    for mode, refused in (
        ("raw_logprobs", LOADS | {"sample: temperature"}),
        ("processed_logprobs", LOADS),
    ):
        async with vllm_server(model_dir, tmp_path, "--logprobs-mode", mode) as url:
            findings = await check_engine(
                "openai", folder=tmp_path, model_dir=model_dir, own={"url": url}
            )
        assert {f.check: f.problem for f in findings if not f.is_ok} == {}
        assert {f.check for f in findings if f.note.startswith("refused by name")} == refused


@asynccontextmanager
async def vllm_server(model_dir: Path, folder: Path, *words: str):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--generation-config", "vllm", *words),
    ]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
        try:
            async with httpx.AsyncClient() as http:
                while True:
                    assert process.poll() is None, (folder / "vllm.log").read_text()[-4000:]
                    try:
                        await http.get(f"http://127.0.0.1:{port}/v1/models")
                        break
                    except httpx.HTTPError:
                        await asyncio.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
