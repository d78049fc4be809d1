"""After warm-up a step takes no memory: every call of the allocator is counted, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .tiny import write_checkpoint

COUNTER = """
#include <stddef.h>
#include <errno.h>
extern void *__libc_malloc(size_t); extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t); extern void *__libc_memalign(size_t, size_t);
static long calls, large;
static void count(size_t size) {
  __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
  if (size >= 16384) __atomic_fetch_add(&large, 1, __ATOMIC_RELAXED);
}
long allocator_calls(void) { return calls; }
long large_calls(void) { return large; }
void *malloc(size_t size) { count(size); return __libc_malloc(size); }
void *calloc(size_t n, size_t size) { count(n * size); return __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { count(size); return __libc_realloc(old, size); }
void *memalign(size_t align, size_t size) { count(size); return __libc_memalign(align, size); }
void *aligned_alloc(size_t align, size_t size) { count(size); return __libc_memalign(align, size); }
int posix_memalign(void **out, size_t align, size_t size) {
  count(size);
  *out = __libc_memalign(align, size);
  return *out ? 0 : ENOMEM;
}
"""
SCRIPT = """
import ctypes, gc, json, sys

from llmctl.engine.assemble import build_engine
from llmctl.engine.config import EngineConfig
from llmctl.engine.request import Request, SamplingParams

counter = ctypes.CDLL(None)
config = EngineConfig(
    model=sys.argv[1], max_model_len=256, num_gpu_blocks_override=60, block_size=8, threads=2, swap_space=0.01
)
engine, _ = build_engine(config, epoch=1)
for number in range(6):
    prompt = tuple(range(5 + number, 25 + number))
    engine.add(
        Request(id=str(number), prompt=prompt, sampling=SamplingParams(), seed=1, stop_ids=(), max_tokens=80)
    )
for _ in range(20):
    engine.step()
program = engine._runner.decoder.program
program.replay()
gc.disable()
before = counter.allocator_calls()
for _ in range(20):
    program.replay()
replays = counter.allocator_calls() - before
before = counter.large_calls()
for _ in range(40):
    engine.step()
print(json.dumps([counter.allocator_calls(), replays, counter.large_calls() - before, engine.has_work]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("cc"), reason="needs glibc and a compiler")
def test_the_recorded_program_never_calls_the_allocator_and_a_step_asks_for_nothing_large(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", "llama")
    (tmp_path / "counter.c").write_text(COUNTER)
    library = tmp_path / "counter.so"
    built = subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-fno-builtin", "-o", library, tmp_path / "counter.c"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode:
        pytest.skip(f"the counter cannot be built: {built.stderr}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], cwd="/", capture_output=True, text=True, check=False,
        env={**os.environ, "LD_PRELOAD": str(library)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counted, replays, large, at_work = json.loads(done.stdout.splitlines()[-1])
    assert counted > 1000 and at_work
    assert (replays, large) == (0, 0)
