"""The hints of a budget's error: what they name works, and a little more does not."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.engine.budget import MemoryBudget, ModelSize, memory_budget
from llmctl.engine.config import KV_DTYPES, EngineConfig
from llmctl.engine.models.arch import DecoderSpec, RopeSpec
from llmctl.kernels.errors import CapacityError

MIB = 1 << 20
PLAIN = DecoderSpec(
    family="llama", num_layers=8, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, ffn_size=512,
    vocab_size=4096, context_length=4096, norm_eps=1e-5, rope=RopeSpec(),
)  # fmt: skip
WINDOWS = msgspec.structs.replace(PLAIN, windows=((512,) * 3 + (0,)) * 2)
DRAFT = ModelSize(msgspec.structs.replace(PLAIN, num_layers=2), 4 * MIB, ("int4g32",))

MODELS = st.fixed_dictionaries(
    {"spec": st.sampled_from([PLAIN, WINDOWS]), "formats": st.sampled_from([("f32",), ("int4g32",), ("bf16", "f16")])}
)
OPTIONS = st.fixed_dictionaries(
    {"kv_cache_dtype": st.sampled_from(KV_DTYPES), "block_size": st.sampled_from([8, 32, 128])},
    optional={"max_model_len": st.integers(1, 4096), "max_num_batched_tokens": st.sampled_from([64, 512, 8192])},
)
SIZES = st.one_of(
    st.just({}),
    st.builds(lambda share: {"gpu_memory_utilization": share / 100}, st.integers(1, 100)),
    st.builds(lambda blocks: {"num_gpu_blocks_override": blocks}, st.integers(1, 600)),
    st.builds(lambda size: {"kv_cache_memory_bytes": size}, st.integers(1, 40 * MIB)),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(MODELS, OPTIONS, SIZES, st.integers(270, 420), st.sampled_from([None, DRAFT]))
def test_what_a_hint_names_works_and_a_block_or_a_byte_more_does_not(model, options, size, available, draft):
    def budget(**changes) -> MemoryBudget:
        config = EngineConfig(max_num_seqs=4, threads=2, **{**options, **size, **changes})
        return memory_budget(model["spec"], 6 * MIB, model["formats"], config, available * MIB, draft)

    def refused(**changes) -> bool:
        try:
            budget(**changes)
        except CapacityError:
            return True
        return False

    try:
        budget()
    except CapacityError as error:
        hint = error.hint
    else:
        return
    block = options["block_size"]
    for way in hint.split(", or "):
        found = dict(re.findall(r"`--([a-z-]+) ([\w.]+)`", way))
        if "num-gpu-blocks-override" in found:
            blocks, length = int(found["num-gpu-blocks-override"]), int(found["max-model-len"])
            changes = {"num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": 0, "max_model_len": length}
            assert budget(**changes).num_blocks == blocks
            more = {"num_gpu_blocks_override": blocks + 1, "max_model_len": length + block}
            assert refused(**{**changes, **more})
        elif "max-num-batched-tokens" in found:
            changes = {"max_num_batched_tokens": int(found["max-num-batched-tokens"])}
            if "max-model-len" in found:
                changes["max_model_len"] = int(found["max-model-len"])
            assert not refused(**changes)
        elif "max-model-len" in found:
            length = int(found["max-model-len"])
            assert budget(max_model_len=length).max_model_len == length
            assert refused(max_model_len=length + block)
        elif "gpu-memory-utilization" in found:
            share = float(found["gpu-memory-utilization"])
            assert not refused(gpu_memory_utilization=share)
            assert refused(gpu_memory_utilization=share - 0.01)
        elif "kv-cache-dtype" in found:
            assert not refused(kv_cache_dtype=found["kv-cache-dtype"])
        elif fit := re.match(r"(\d+) blocks fit", way):
            changes = {"kv_cache_memory_bytes": 0}
            assert budget(num_gpu_blocks_override=int(fit[1]), **changes).num_blocks == int(fit[1])
            assert refused(num_gpu_blocks_override=int(fit[1]) + 1, **changes)
        elif least := re.match(r"use at least (\d+) blocks, which is .* \((\d+) bytes\)", way):
            assert not refused(num_gpu_blocks_override=int(least[1]), kv_cache_memory_bytes=0)
            if int(least[1]) > 1:  # 0 is: choose
                assert refused(num_gpu_blocks_override=int(least[1]) - 1, kv_cache_memory_bytes=0)
            assert not refused(kv_cache_memory_bytes=int(least[2]), num_gpu_blocks_override=0)
            assert refused(kv_cache_memory_bytes=int(least[2]) - 1, num_gpu_blocks_override=0)
        else:
            assert way.startswith(("free ", "choose ")), way


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2", "int8", "int16", "float16", "float32"])
def test_the_length_that_is_proposed_fits_in_every_format(kind):
    def budget(available: int, **changes) -> MemoryBudget:
        config = EngineConfig(threads=2, kv_cache_dtype=kind, max_num_seqs=1, **changes)
        return memory_budget(PLAIN, 6 * MIB, ("f32",), config, available)

    whole = budget(1 << 30)
    scarce = whole.total - whole.kv_bytes // 4 + 256 * MIB
    with pytest.raises(CapacityError) as caught:
        budget(scarce)
    length = int(re.search(r"--max-model-len (\d+)", caught.value.hint)[1])
    assert 3 / 4 * 4096 - 32 < length < 4096
    assert budget(scarce, max_model_len=length).num_blocks == length // 32
    with pytest.raises(CapacityError):
        budget(scarce, max_model_len=length + 32)
