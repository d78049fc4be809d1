"""What `plan` predicts against what a process takes, on the default model: within 3 percent.

The process does all that it was asked for: as many sequences as may decode at once, which fill the pool together, of
texts with tokens from the whole vocabulary, so that every page of the embedding is read; and greedy ones by themselves.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.engine.config import environment
from llmctl.engine.load.hub import resolve

SCRIPT = r"""
import dataclasses, itertools, json, re, sys
from pathlib import Path

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.assemble import assemble
from llmctl.engine.load.hub import resolve as resolve_source
from llmctl.engine.load.model import open_model
from llmctl.engine import plan
from llmctl.engine.plan import resolve
from llmctl.engine.request import Request, SamplingParams

def pss():
    return 1024 * int(re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)[1])

if len(sys.argv) > 2:  # a machine with so much memory
    machine = dataclasses.replace(plan.read_machine(), memory_available=int(sys.argv[2]))
    plan.read_machine = lambda: machine
config, settings = EngineConfig(**json.loads(sys.argv[1])), environment()
before = pss()
source = resolve_source(config.model, environment=settings, progress=None)
model = open_model(source, implementation="auto", dtype=config.dtype, cache=settings.cache, progress=None)
_, budget = resolve(config, model)
engine, _ = assemble(config, model, epoch=1)
each = budget.num_tokens // config.max_num_seqs  # tokens of a sequence when all decode and the pool is full
vocab, free, count = model.spec.vocab_size, SamplingParams(), 0
words = itertools.chain.from_iterable(range(5 + shift % 64, vocab, 64) for shift in itertools.count())
while engine.stats().blocks_free or count * (each // 2) < vocab // 64:
    for count in range(count, count + config.max_num_seqs):
        prompt = tuple(itertools.islice(words, each // 2))
        asked = Request(id=str(count), prompt=prompt, sampling=free, seed=1, stop_ids=(), max_tokens=each // 2)
        engine.add(asked)
    count += 1
    while engine.has_work:
        engine.step()
# and, more often than it takes to make ready for that, a likeliest token by itself
likeliest = SamplingParams(temperature=0.0)
for one in range(40):
    engine.add(Request(id=f"likeliest {one}", prompt=prompt[:8], sampling=likeliest, seed=1, stop_ids=(), max_tokens=1))
    while engine.has_work:
        engine.step()
print(json.dumps([budget.total, pss() - before]))
"""


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Where this test packs the model: a page that another process maps as well would count by its share."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell a process's PSS")
@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 128, "max_num_seqs": 16},
        {"num_gpu_blocks_override": 128, "max_num_seqs": 16, "dtype": "float32"},
        {"num_gpu_blocks_override": 256, "max_num_seqs": 64, "kv_cache_dtype": "fp8"},
    ],
    ids=["int4", "float32", "fp8 cache"],
)
def test_what_is_planned_is_what_is_taken(options, own_cache):
    planned, taken = reality(own_cache, options)
    assert planned == pytest.approx(taken, rel=0.03)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell a process's PSS")
def test_a_share_of_the_memory_is_not_exceeded(own_cache):
    machine = 640 << 20
    planned, taken = reality(own_cache, {"gpu_memory_utilization": 0.4, "max_num_seqs": 16}, machine)
    assert 0.99 * 0.4 * machine < planned <= 0.4 * machine
    assert taken <= 1.03 * 0.4 * machine  # what is planned is true within so much


def reality(cache, options, *machine):
    """What is planned for the default model and what it takes, in bytes."""
    model = str(resolve("", environment=environment(), progress=None).path)
    config = json.dumps({"model": model, "max_model_len": 2048, **options})
    command = [sys.executable, "-c", SCRIPT, config, *map(str, machine)]
    for _ in range(2):  # the first packs the weights, which takes memory of its own
        done = subprocess.run(
            command, env={**os.environ, "LLMCTL_CACHE": cache}, cwd="/", text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
    planned, taken = json.loads(re.findall(r"^\[.*\]$", done.stdout, re.M)[-1])
    return planned, taken
