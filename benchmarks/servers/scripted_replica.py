"""Serve Generate with an engine that answers at once: python scripted_replica.py MODEL_DIR.

Everything of the service but sampling runs: decoding, rendering, tokens, encoding. It works with
today's checkout and with 127deda, and prints its address.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any

import dialoop
import grpc
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import StopReason
from dialoop.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server

_NUM_TOKENS = 8
_VERSION = PolicyVersion(lineage="main", number=0)


def _load(name: str, name_before: str = "") -> Any:
    """Return a module of the inference service, in today's layout or that of 127deda."""
    root = Path(dialoop.__file__).parents[2]
    if (root / "services" / "dialoop_services").exists():
        return importlib.import_module(f"dialoop_services.inference.{name}")
    return importlib.import_module(f"services.inference.{name_before or name}")


class _Engine:
    name, version, max_model_len, is_alive = "scripted", "1", 1_000_000, True
    policy_version = _VERSION
    adapter_space = None
    transfer_backend = ""  # 127deda asks every engine for it

    def __init__(self, renderer: Any, engines: Any) -> None:
        tokenizer = renderer.tokenizer
        self.vocab_size = tokenizer.vocab_size
        ids = (*tokenizer.encode("1" * _NUM_TOKENS).ids, *tokenizer.end_of_turn_ids[:1])
        self._sampled = engines.Sampled(
            token_ids=ids,
            logprobs=(-0.1,) * len(ids),
            versions=(engines.VersionSpan(start=0, length=len(ids), policy_version=_VERSION),),
            stop_reason=StopReason.STOP,
        )

    async def sample(self, prompt_ids: Any, sampling: Any, **options: Any) -> tuple[Any, ...]:
        """Answer at once."""
        return (self._sampled,) * int(options.get("num_samples", 1))


async def _serve(model_dir: Path) -> None:
    engines = _load("engine")
    renderer = _load("rendering").Renderer.of(model_dir)
    replicas = _load("replica.replica", "replica")

    async def report(serving: bool) -> None:
        """Tell nobody."""

    replica = replicas.Replica(_Engine(renderer, engines), weights_root=None, report=report)
    servicer = _load("servicer").InferenceServicer(
        replica, renderer, num_parameters=7, max_new_tokens=20
    )
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"address=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
