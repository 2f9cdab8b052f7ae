"""The checks: what every engine must do, and what the protocols of some engines promise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from dialoop.episode import UpdateMode
from dialoop.errors import InvalidInput, PreconditionFailed
from dialoop.reasons import Reason
from dialoop.trajectory import StopReason
from dialoop_learning.model.tiny import make_random_model
from dialoop_learning.model.weight_files import is_tied
from dialoop_services.inference.engine import (
    BASE_VERSION,
    OUTSIDE_VERSION,
    OutsideWeights,
    StopTokens,
    SupportsAdapters,
    SupportsPause,
    SupportsPolicyAdapters,
    SupportsRoutedExperts,
    SupportsSleep,
    SupportsStreaming,
    SupportsTopLogprobs,
    SupportsTransfer,
    TokenChunk,
)
from dialoop_services.inference.weights.adapter_files import NO_ADAPTERS
from dialoop_services.inference.weights.loadable import Adapter, PolicyAdapter
from safetensors.torch import save_file

from dialoop_ops.conformance.inference.bench import (
    NO_STOP,
    NUM_TOKENS,
    PROMPTS,
    RANK,
    SCALING,
    EngineBench,
    adapter_tensors,
    chosen_by_model,
    parameters,
    reference,
    require,
    require_error,
    sampling,
    used_mib,
    write_adapter,
)

_HELD_S = 0.3
_EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


async def _status(bench: EngineBench) -> str:
    """Check that the engine says what it is and what it serves."""
    engine = bench.engine
    require(bool(engine.name and engine.version), "The engine has no name or no version.")
    require(engine.is_alive, "A fresh engine is not alive.")
    require(
        engine.max_model_len == bench.options.max_model_len,
        f"max_model_len is {engine.max_model_len}; asked were {bench.options.max_model_len}.",
    )
    fresh = OUTSIDE_VERSION if isinstance(engine, OutsideWeights) else BASE_VERSION
    require(
        engine.policy_version == fresh,
        f"A fresh engine serves {engine.policy_version}, not {fresh}.",
    )
    return f"{engine.name} {engine.version}"


async def _logprobs(bench: EngineBench) -> str:
    """Check the scores of given ids against a full forward pass."""
    await bench.require_scores("Log-probs of given ids")
    return f"{len(PROMPTS)} rows"


async def _sample(bench: EngineBench, *, temperature: float = 1.0) -> str:
    """Check sampled log-probs of requests that run at the same time."""
    samples = await asyncio.gather(
        *(bench.sample(ids, temperature=temperature, seed=3) for ids in PROMPTS)
    )
    for ids, sampled in zip(PROMPTS, samples, strict=True):
        bench.require_own(ids, sampled, temperature=temperature)
    return f"temperature {temperature}"


async def _greedy(bench: EngineBench) -> str:
    """Check that temperature 0 takes the likeliest token each time."""
    ids = list(PROMPTS[0])
    sampled = await bench.sample(ids, temperature=0.0)
    model = reference(bench.model_dir, bench.seed)
    for token in sampled.token_ids:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        gap = float(logits.max() - logits[token])
        require(gap < bench.tolerance, f"At temperature 0 token {token} is {gap:.2g} nats behind.")
        ids.append(token)
    return f"{len(sampled.token_ids)} tokens"


async def _seeds(bench: EngineBench) -> str:
    """Check that samples of one prompt differ, and that a seed repeats them."""
    first, again = [
        await bench.engine.sample(PROMPTS[0], sampling(seed=3), stop=NO_STOP, num_samples=3)
        for _ in "ab"
    ]
    rows = [sampled.token_ids for sampled in first]
    require(len(rows) == 3, f"3 samples were asked for, and {len(rows)} came.")
    require(len(set(rows)) == 3, "Samples of one prompt are equal.")
    require(rows == [s.token_ids for s in again], "A seed does not repeat its samples.")
    return "3 samples, twice"


async def _stops(bench: EngineBench) -> str:
    """Check that a stop token ends a sample and stays in it, and names its string."""
    whole = await bench.sample(PROMPTS[0], seed=3)
    token = whole.token_ids[4]
    length = whole.token_ids.index(token) + 1
    stop = StopTokens(by_id={token: "<stop>"})
    (sampled,) = await bench.engine.sample(PROMPTS[0], sampling(seed=3), stop=stop)
    require(sampled.token_ids == whole.token_ids[:length], "A stop token does not end a sample.")
    require(sampled.stop_reason is StopReason.STOP, f"It ended with {sampled.stop_reason}.")
    require(sampled.stop_string == "<stop>", f"Its stop string is {sampled.stop_string!r}.")
    return f"after {length} tokens"


async def _context(bench: EngineBench) -> str:
    """Check that a full context gives an empty sample, and its last place one token."""
    row = [5 + i % 40 for i in range(bench.engine.max_model_len)]
    full, last = await bench.sample(row), await bench.sample(row[:-1])
    require(
        (full.token_ids, full.stop_reason) == ((), StopReason.CONTEXT_FULL),
        "A prompt that fills the context is not answered with nothing and CONTEXT_FULL.",
    )
    require(
        (len(last.token_ids), last.stop_reason) == (1, StopReason.LENGTH),
        "A prompt that leaves one place is not answered with one token and LENGTH.",
    )
    return f"{len(row)} tokens"


async def _bad_ids(bench: EngineBench) -> str:
    """Check that no ids, and ids outside the vocabulary, are InvalidInput."""
    engine = bench.engine
    rows: tuple[list[int], ...] = ([], [-1], [engine.vocab_size])
    for row in rows:
        sample = partial(engine.sample, row, sampling(), stop=NO_STOP)
        for call in (sample, partial(engine.logprobs, row)):
            await require_error(call, InvalidInput, f"The ids {row}")
    return f"{len(rows)} rows"


async def _load(bench: EngineBench) -> str:
    """Check that new weights serve at once under their version, in every update mode."""
    for mode in UpdateMode:
        version, seed = bench.next_version(), bench.seed + 1
        times = await bench.engine.load_weights(bench.file_of(seed), version, mode=mode)
        bench.seed = seed
        require(0 <= times.pause_s <= times.load_s, f"A load's times are {times}.")
        require(
            bench.engine.policy_version == version,
            f"After a load the version is {bench.engine.policy_version}, not {version}.",
        )
        await bench.require_scores(f"Log-probs after a load ({mode.name})")
        ids = PROMPTS[1]
        bench.require_own(ids, await bench.sample(ids, temperature=1.0), temperature=1.0)
    return f"{len(UpdateMode)} modes"


async def _load_in_flight(bench: EngineBench) -> str:
    """Check that each token of samples that run through a load is of the version it names."""
    length = bench.engine.max_model_len - 16
    seeds = {bench.engine.policy_version: bench.seed}
    running = [
        asyncio.create_task(bench.engine.sample(ids, sampling(max_new_tokens=length), stop=NO_STOP))
        for ids in PROMPTS
    ]
    try:
        await asyncio.sleep(0)
        version = await bench.load()
        seeds[version] = bench.seed
        samples = [(await task)[0] for task in running]
    finally:
        for task in running:
            task.cancel()
    last = bench.seed
    try:
        for ids, sampled in zip(PROMPTS, samples, strict=True):
            row = [*ids, *sampled.token_ids]
            for span in sampled.versions:
                bench.seed = seeds[span.policy_version]
                begin = len(ids) - 1 + span.start
                bench.require_equal(
                    sampled.logprobs[span.start : span.start + span.length],
                    bench.reference_logprobs(row)[begin : begin + span.length],
                    f"Log-probs of tokens labelled {span.policy_version}",
                )
            num_labelled = sum(span.length for span in sampled.versions)
            require(num_labelled == len(sampled.token_ids), "Some tokens have no version.")
    finally:
        bench.seed = last
    return f"{len(samples)} samples of {length} tokens"


async def _bad_weights(bench: EngineBench) -> str:
    """Check that missing, unknown and misshapen tensors are refused and nothing changes."""
    good = parameters(reference(bench.model_dir, bench.seed + 1), tied=is_tied(bench.model_dir))
    name = next(name for name, tensor in good.items() if tensor.ndim == 2)
    cases = {
        "unknown": good | {"model.extra.weight": torch.zeros(2)},
        "missing": {n: tensor for n, tensor in good.items() if n != name},
        "misshapen": good | {name: torch.zeros(2, 2)},
    }
    version = bench.engine.policy_version
    for what, tensors in cases.items():
        path = bench.folder / f"{what}.safetensors"
        save_file({n: tensor.contiguous() for n, tensor in tensors.items()}, path)
        await require_error(
            partial(bench.engine.load_weights, path, bench.next_version()),
            PreconditionFailed,
            f"A file with a tensor that is {what}",
            reason=Reason.UNKNOWN_PARAMETERS,
        )
        require(bench.engine.policy_version == version, "A refused load changed the version.")
        await bench.require_scores("Log-probs after a refused load")
    return ", ".join(cases)


async def _streaming(bench: EngineBench) -> str:
    """Check that the chunks of a stream are the sample that it returns."""
    assert isinstance(bench.engine, SupportsStreaming)
    chunks: list[TokenChunk] = []
    ids = PROMPTS[0]
    sampled = await bench.engine.stream(
        ids, sampling(seed=3), stop=NO_STOP, on_tokens=chunks.append
    )
    bench.require_own(ids, sampled, temperature=1.0)
    streamed = [
        (token, logprob, chunk.policy_version)
        for chunk in chunks
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]
    (span,) = sampled.versions
    whole = [
        (token, logprob, span.policy_version)
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ]
    require(streamed == whole, "The chunks of a stream are not its sample.")
    return f"{len(chunks)} chunks"


async def _top_logprobs(bench: EngineBench) -> str:
    """Check that the likeliest tokens of each position are those of a forward pass."""
    ids, num = PROMPTS[0], 5
    sampled = await bench.sample(ids, temperature=0.7, top_logprobs=num)
    model = reference(bench.model_dir, bench.seed)
    with torch.inference_mode():
        row = torch.tensor([[*ids, *sampled.token_ids]])
        logits = model(row).logits[0, len(ids) - 1 : -1].float()
    expected = torch.log_softmax(logits / 0.7, dim=-1).topk(num, dim=-1).values
    values = [list(top.values()) for top in sampled.top_logprobs]
    shape = [len(row) for row in values]
    require(shape == [num] * NUM_TOKENS, f"Each position names {shape} tokens, not {num}.")
    bench.require_equal(np.array(values).ravel(), expected.numpy().ravel(), "The likeliest tokens")
    return f"{num} at each position"


async def _pause(bench: EngineBench) -> str:
    """Check that a pause holds requests and a resume finishes them."""
    assert isinstance(bench.engine, SupportsPause)
    await bench.engine.pause()
    running = asyncio.create_task(bench.sample(PROMPTS[0], seed=3))
    try:
        await asyncio.wait([running], timeout=_HELD_S)
        require(not running.done(), "A request ended while the engine was paused.")
    finally:
        await bench.engine.resume()
    bench.require_own(PROMPTS[0], await running, temperature=1.0)
    return "one request held"


async def _sleep(bench: EngineBench) -> str:
    """Check sleep with weights that are kept, and with weights that only a load brings back.

    Asleep, the trainer can own the device's lock, and the device has memory for it.
    """
    engine, before = bench.engine, used_mib()
    assert isinstance(engine, SupportsSleep)
    await engine.sleep(keep_weights=True)
    require(engine.is_asleep, "A sleeping engine says that it is awake.")
    await engine.sleep(keep_weights=True)
    freed = [bench.require_freed(before)]
    await engine.wake()
    await engine.wake()
    require(not engine.is_asleep, "A woken engine says that it is asleep.")
    await bench.require_scores("Log-probs after a sleep")
    before = used_mib()
    await engine.sleep(keep_weights=False)
    freed.append(bench.require_freed(before))
    await bench.load()
    await engine.wake()
    require(not engine.is_asleep, "A load of the policy does not wake the engine.")
    await bench.require_scores("Log-probs after a sleep and a load")
    if not all(freed):
        return "with weights and without; it holds no GPU's memory"
    return f"frees {freed[0]} of {bench.held_mib} MiB with its weights kept, {freed[1]} without"


async def _adapters(bench: EngineBench) -> str:
    """Check an adapter beside the policy: used where it is named, and gone after its removal."""
    engine, ids = bench.engine, PROMPTS[1]
    assert isinstance(engine, SupportsAdapters)
    tensors, folder = adapter_tensors(bench.model_dir), bench.folder / "adapter"
    write_adapter(folder, tensors)
    adapter = Adapter(name="style", policy_version=bench.next_version(), slot=1, folder=folder)
    await engine.add_adapter(adapter)
    named, plain = await asyncio.gather(engine.logprobs(ids, adapter=adapter), engine.logprobs(ids))
    own = bench.reference_logprobs(ids)
    bench.adapter = tensors
    try:
        merged = bench.reference_logprobs(ids)
        bench.require_equal(named.logprobs, merged, "Log-probs with an adapter")
    finally:
        bench.adapter = {}
    bench.require_equal(plain.logprobs, own, "Log-probs without the adapter, beside it")
    await engine.remove_adapter(adapter)
    await engine.remove_adapter(adapter)
    await bench.require_scores("Log-probs after an adapter was removed")
    return f"rank {RANK}, {float(np.abs(merged - own).max()):.2g} nats from the policy"


async def _policy_adapters(bench: EngineBench) -> str:
    """Check a policy that is published as an adapter of the model directory's weights."""
    engine = bench.engine
    assert isinstance(engine, SupportsPolicyAdapters)
    folder, tensors = bench.folder / "policy", adapter_tensors(bench.model_dir)
    adapter = PolicyAdapter(path=write_adapter(folder, tensors), scaling=SCALING)
    await bench.load()  # the adapter is of the base, whatever is loaded before
    seed, bench.seed = bench.seed, 0
    bench.adapter = tensors
    try:
        await engine.load_onto_base(adapter, bench.next_version())
        await bench.require_scores("Log-probs of a policy that is an adapter")
    finally:
        bench.adapter, bench.seed = {}, seed
    await bench.load()
    await bench.require_scores("Log-probs of whole weights after an adapter")
    return f"rank {RANK}"


async def _transfer(bench: EngineBench) -> str:
    """Say that transfers between devices are not checked here: they need the trainer's device."""
    assert isinstance(bench.engine, SupportsTransfer)
    return "not checked: it needs a trainer on a GPU"


async def _routed_experts(bench: EngineBench) -> str:
    """Check the experts of each token, with a mixture of experts, against a full forward pass."""
    model_dir = make_random_model(bench.folder / "experts", "qwen3_moe", fields=_EXPERTS)
    kind: Any = type(bench.engine)
    # In float32, since rounding decides between experts that are nearly alike.
    options = replace(bench.options, adapters=NO_ADAPTERS, records_experts=True, dtype="float32")
    engine = await kind.start(model_dir, options)
    try:
        require(engine.routing is not None, "`routing` is None with records_experts.")
        layers = (engine.routing.num_layers, engine.routing.top_k)
        for ids in PROMPTS:
            (sampled,) = await engine.sample(ids, sampling(seed=3), stop=NO_STOP)
            expected = chosen_by_model(model_dir, [*ids, *sampled.token_ids[:-1]])
            recorded = sampled.routed_experts
            require(recorded is not None, "A sample lacks routed_experts.")
            require(
                recorded.shape == expected.shape == (len(expected), *layers),
                f"routed_experts have the shape {list(recorded.shape)}, not "
                f"{list(expected.shape)}: all tokens but the last.",
            )
            require(
                np.array_equal(np.sort(recorded, axis=-1), expected),
                "routed_experts differ from those of a full forward pass.",
            )
    finally:
        await engine.close()
    return f"{layers[0]} layers, {layers[1]} of {engine.routing.num_experts} experts"


async def close_twice(bench: EngineBench) -> str:
    """Check that the engine closes, twice too."""
    await bench.engine.close()
    await bench.engine.close()
    return "twice"


Run = Callable[[EngineBench], Awaitable[str]]
CORE: Mapping[str, Run] = {
    "status": _status,
    "logprobs": _logprobs,
    "sample": _sample,
    "sample: temperature": partial(_sample, temperature=0.7),
    "sample: greedy": _greedy,
    "sample: seeds": _seeds,
    "sample: stop tokens": _stops,
    "sample: full context": _context,
    "bad ids": _bad_ids,
    "load": _load,
    "load: samples in flight": _load_in_flight,
    "load: bad weights": _bad_weights,
}
"""What every engine must do, in the order in which it is checked."""
REFUSABLE = ("logprobs", "sample: temperature", "load")
"""What an engine whose weights are outside may refuse by name, with Unsupported."""
CAPABILITIES: Mapping[str, tuple[type, Run]] = {
    "streaming": (SupportsStreaming, _streaming),
    "top log-probs": (SupportsTopLogprobs, _top_logprobs),
    "routed experts": (SupportsRoutedExperts, _routed_experts),
    "pause": (SupportsPause, _pause),
    "sleep": (SupportsSleep, _sleep),
    "adapters": (SupportsAdapters, _adapters),
    "policy adapters": (SupportsPolicyAdapters, _policy_adapters),
    "device transfer": (SupportsTransfer, _transfer),
}
"""What some engines can do: the protocol that says so, and its check."""
