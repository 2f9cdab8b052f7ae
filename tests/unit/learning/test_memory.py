"""A process gives back what freed tensors leave between those that live on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dialoop_learning import training
from dialoop_learning.loss.loss_loading import load_objective
from dialoop_learning.model.policy import load_policy
from dialoop_learning.model.tiny import make_tiny_model
from dialoop_learning.packing.rows import TokenRow, pack_rows
from dialoop_services.trainer.learner.policies import MAPPED_BYTES

BLOCKS = """
import ctypes
from dialoop_learning.memory import resident_bytes, return_free_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
return_free_memory()
before = resident_bytes()
blocks = [libc.malloc(100_000) for _ in range(2000)]
for block in blocks:
    ctypes.memset(ctypes.c_void_p(block), 1, 100_000)
for block in blocks[:-1]:
    libc.free(block)
grown = resident_bytes() - before
return_free_memory(above=1 << 30)
kept = resident_bytes() - before
return_free_memory(above=64 << 20)
left = resident_bytes() - before
blocks = [libc.malloc(100_000) for _ in range(1000)]
for block in blocks:
    ctypes.memset(ctypes.c_void_p(block), 1, 100_000)
return_free_memory()  # all of it is in use
for block in blocks[:-1]:
    libc.free(block)
return_free_memory()
print(grown, kept, left, resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is what gives back")
def test_what_freed_blocks_leave_is_given_back_once_it_is_worth_it() -> None:
    command = [sys.executable, "-c", BLOCKS]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    grown, kept, *left = map(int, words)
    assert grown > 150 << 20
    assert kept == pytest.approx(grown, rel=0.1)
    assert max(left) < 20 << 20


# numpy asks glibc for memory as torch does, and is imported in a tenth of the time.
LAYERS = """
import sys
import numpy
from dialoop_learning.memory import resident_bytes
from dialoop_services.runtime.process import set_allocator

if mapped_bytes := int(sys.argv[1]):
    assert set_allocator(mapped_bytes=mapped_bytes)
del (largest := [numpy.ones(31 << 17)])[:]  # when it is freed, glibc raises its bound to 31 MiB
before = resident_bytes()
tensors = [numpy.ones(12 << 17) for _ in range(40)]
grown = resident_bytes() - before
del tensors[::2]
print(grown, resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is what keeps freed tensors")
@pytest.mark.parametrize("mapped_bytes", [MAPPED_BYTES, pytest.param(0, id="as glibc does")])
def test_what_is_freed_between_large_tensors_that_live_on_goes_back_at_once(
    mapped_bytes: int,
) -> None:
    command = [sys.executable, "-c", LAYERS, str(mapped_bytes)]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    grown, left = map(int, words)
    assert grown > 460 << 20
    share = 0.5 if mapped_bytes else 1.0
    assert left == pytest.approx(share * grown, rel=0.1)


def test_rows_keep_memory_for_the_next_row_unless_they_leave_more_and_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []
    levels = iter([3 << 30, 3 << 30, 4 << 30, 3 << 30])  # the third row leaves 1 GiB more
    monkeypatch.setattr(training, "resident_bytes", lambda: next(levels))
    monkeypatch.setattr(
        training, "return_free_memory", lambda above=0: calls.append(f"above {above >> 20} MiB")
    )
    policy = load_policy(make_tiny_model(tmp_path / "tiny", seed=0))
    row = TokenRow.from_demonstration([5, 6, 7, 8], [False, False, True, True])
    training.forward_backward(policy, [pack_rows([row])] * 4, load_objective("sft"))
    assert calls == ["above 0 MiB", "above 512 MiB"]
