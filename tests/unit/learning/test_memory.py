"""A process gives back what freed tensors leave between those that live on."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKS = """
import ctypes
from dialoop_learning.memory import _resident, return_free_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
return_free_memory()
before = _resident()
blocks = [libc.malloc(100_000) for _ in range(2000)]
for block in blocks:
    ctypes.memset(ctypes.c_void_p(block), 1, 100_000)
for block in blocks[:-1]:
    libc.free(block)
grown = _resident() - before
return_free_memory(above=1 << 30)
kept = _resident() - before
return_free_memory(above=64 << 20)
print(grown, kept, _resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is what gives back")
def test_what_freed_blocks_leave_is_given_back_once_it_is_worth_it() -> None:
    command = [sys.executable, "-c", BLOCKS]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    grown, kept, left = map(int, words)
    assert grown > 150 << 20
    assert kept == pytest.approx(grown, rel=0.1)
    assert left < 20 << 20


LAYERS = """
import sys
import torch
from dialoop_learning.memory import _resident
from dialoop_services.runtime.process import set_allocator
from dialoop_services.trainer.learner.learner import MAPPED_BYTES

if sys.argv[1] == "mapped":
    assert set_allocator(mapped_bytes=MAPPED_BYTES)
del (largest := [torch.ones(31 << 18)])[:]  # when it is freed, glibc raises its bound to 31 MiB
before = _resident()
tensors = [torch.ones(12 << 18) for _ in range(40)]
grown = _resident() - before
del tensors[::2]
print(grown, _resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is what keeps freed tensors")
@pytest.mark.parametrize("how", ["mapped", "as glibc does"])
def test_what_is_freed_between_large_tensors_that_live_on_goes_back_at_once(how: str) -> None:
    command = [sys.executable, "-c", LAYERS, how]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    grown, left = map(int, words)
    assert grown > 460 << 20
    share = 0.5 if how == "mapped" else 1.0
    assert left == pytest.approx(share * grown, rel=0.1)
