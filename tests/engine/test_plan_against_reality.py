"""What `plan` predicts against what a process takes, on the default model: within 3 percent.

The process does all that it was asked for: as many sequences as may decode at once, and together they fill the pool.
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
import json, random, re, sys
from pathlib import Path

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.assemble import assemble
from llmctl.engine.load.hub import resolve as resolve_source
from llmctl.engine.load.model import open_model
from llmctl.engine.plan import resolve
from llmctl.engine.request import Request, SamplingParams

def pss():
    return 1024 * int(re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)[1])

config, settings = EngineConfig(**json.loads(sys.argv[1])), environment()
before = pss()
source = resolve_source(config.model, environment=settings, progress=None)
model = open_model(source, implementation="auto", dtype=config.dtype, cache=settings.cache, progress=None)
_, budget = resolve(config, model)
engine, _ = assemble(config, model, epoch=1)
each = budget.num_tokens // config.max_num_seqs  # tokens of a sequence when all decode and the pool is full
rng, count, free = random.Random(1), 0, SamplingParams()
while engine.stats().blocks_free:
    for count in range(count, count + config.max_num_seqs):
        prompt = tuple(rng.randrange(5, model.spec.vocab_size) for _ in range(each // 2))
        asked = Request(id=str(count), prompt=prompt, sampling=free, seed=1, stop_ids=(), max_tokens=each // 2)
        engine.add(asked)
    count += 1
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
    model = str(resolve("", environment=environment(), progress=None).path)
    config = json.dumps({"model": model, "max_model_len": 2048, **options})
    command = [sys.executable, "-c", SCRIPT, config]
    for _ in range(2):  # the first packs the weights, which takes memory of its own
        done = subprocess.run(
            command, env={**os.environ, "LLMCTL_CACHE": own_cache}, cwd="/", text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
    planned, taken = json.loads(re.findall(r"^\[.*\]$", done.stdout, re.M)[-1])
    assert planned == pytest.approx(taken, rel=0.03)
