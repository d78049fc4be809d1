"""What `plan` counts for kernels is what the extension reserves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmctl.kernels.scratch import attend_scratch_bytes, latent_scratch_bytes

# One attention op in a process of its own: the memory is the process's, and never shrinks.
SCRIPT = r"""
import sys
import numpy as np
from llmctl.kernels import registry
from llmctl.kernels.formats import KVFormat
from llmctl.kernels.ops import AttendArgs, KVLayer, make_act, make_batch, make_rows

heads, kv_heads, dim, positions, rows, threads = map(int, sys.argv[1:])
registry.configure("auto", threads)
form = KVFormat("f16")
stride = kv_heads * 2 * 16 * form.head_bytes(dim)
kv = KVLayer(np.zeros(stride, np.uint8), stride, 0, 16, kv_heads, dim, form, 0)
batch = make_batch(rows, 1, 1, (np.zeros((1, positions // 16), np.int32),))
act = make_act(heads * dim, rows, threads, ())
registry.bind("attend", AttendArgs(batch, make_rows(heads * dim, rows), heads, kv, 0, positions, act), kernels="auto")
from llmctl.kernels import _cpu
print(_cpu.workspace_bytes())
"""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "positions", "rows", "threads"),
    [(9, 3, 64, 8192, 512, 2), (4, 1, 256, 32768, 512, 2), (12, 2, 128, 1024, 16, 1), (32, 4, 64, 2048, 512, 2)],
)
def test_partial_results_of_attention_take_what_is_counted(heads, kv_heads, dim, positions, rows, threads):
    sizes = heads, kv_heads, dim, positions, rows, threads
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, sizes)], cwd="/", text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counted = attend_scratch_bytes(*sizes)
    assert counted <= int(done.stdout) < counted + 4096  # whole pages


LATENT_SCRIPT = r"""
import sys
import numpy as np
from llmctl.kernels import registry
from llmctl.kernels.cpu.pack import packed_bytes
from llmctl.kernels.formats import KVFormat, WeightFormat
from llmctl.kernels.ops import KVLayer, LatentArgs, PackedWeight, make_act, make_batch, make_rows

heads, rank, rope, positions, rows, threads = map(int, sys.argv[1:])
registry.configure("auto", threads)
form, up = KVFormat("f16"), WeightFormat("f16")
stride = 16 * form.head_bytes(rank + rope)
kv = KVLayer(np.zeros(stride, np.uint8), stride, 0, 16, 1, rank + rope, form, 0)
batch = make_batch(rows, 1, 1, (np.zeros((1, positions // 16), np.int32),))
table, weights = np.zeros((positions, rope // 2), np.float32), np.zeros(packed_bytes(up, heads * 32, rank), np.uint8)
args = LatentArgs(
    batch, make_rows(heads * (16 + rope), rows), make_rows(rank + rope, rows), np.zeros(rank, np.float32), 1e-6,
    PackedWeight(up, heads * 32, rank, weights), table, table, False, heads, 16, 16, 1.0, kv,
    make_act(heads * 16, rows, threads, ()),
)
registry.bind("latent", args, kernels="auto")
from llmctl.kernels import _cpu
print(_cpu.workspace_bytes())
"""


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "positions", "rows", "threads"),
    [(16, 512, 64, 8192, 512, 2), (40, 256, 32, 2048, 64, 1), (128, 512, 64, 32768, 4, 2), (4, 64, 8, 128, 512, 3)],
)
def test_attention_on_latents_takes_what_is_counted(heads, rank, rope, positions, rows, threads):
    sizes = heads, rank, rope, positions, rows, threads
    done = subprocess.run(
        [sys.executable, "-c", LATENT_SCRIPT, *map(str, sizes)], cwd="/", text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counted = latent_scratch_bytes(*sizes)
    assert counted <= int(done.stdout) < counted + 4096  # whole pages
