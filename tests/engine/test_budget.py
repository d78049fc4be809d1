"""The memory budget: what is counted, what fits, and what the errors propose."""

import re

import msgspec
import pytest

from llmctl.engine.budget import memory_budget
from llmctl.engine.config import EngineConfig
from llmctl.engine.kv_choice import choose_kv_format, kv_bytes_per_token
from llmctl.engine.models.arch import DecoderSpec, RopeSpec
from llmctl.engine.pools import blocks_for
from llmctl.engine.sizes import format_bytes
from llmctl.kernels.errors import CapacityError, UsageError
from llmctl.kernels.formats import KVFormat

MIB, GIB = 1 << 20, 1 << 30
F16 = KVFormat("f16")
SPEC = DecoderSpec(
    family="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn_size=1536,
    vocab_size=49152,
    context_length=8192,
    norm_eps=1e-5,
    rope=RopeSpec(),
)


def budget(available=8 * GIB, weights=100 * MIB, formats=("int4g32",), spec=SPEC, **options):
    return memory_budget(spec, weights, formats, EngineConfig(**{"threads": 2, **options}), available)


def test_kv_bytes_per_token_count_keys_and_values_of_all_layers():
    assert kv_bytes_per_token(SPEC, F16) == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(SPEC, KVFormat("f32")) == 2 * kv_bytes_per_token(SPEC, F16)


@pytest.mark.parametrize(("kind", "share"), [("fp8_e4m3", 0.5), ("fp8_e5m2", 0.5), ("int8", 33 / 64)])
def test_8_bit_formats_take_about_half_of_float16_with_their_scales(kind, share):
    assert kv_bytes_per_token(SPEC, KVFormat(kind)) == share * kv_bytes_per_token(SPEC, F16)
    assert share <= 0.53


def test_pool_takes_a_quarter_of_what_is_left():
    found = budget()
    room = found.available - found.weights - found.workspace - found.reserve
    assert found.num_blocks == room // found.bytes_per_block // 4
    assert found.total == found.weights + found.workspace + found.kv_bytes
    assert found.total + found.reserve < found.available


def test_a_share_of_the_memory_is_the_limit_of_everything_together():
    found = budget(gpu_memory_utilization=0.5)
    assert found.total <= found.available // 2 < found.total + found.bytes_per_block
    assert budget(gpu_memory_utilization=1.0).reserve == 256 * MIB
    with pytest.raises(CapacityError, match="100 MiB for weights"):
        budget(gpu_memory_utilization=0.01)


def test_a_share_and_a_size_of_the_pool_are_refused_together():
    with pytest.raises(UsageError, match="--kv-cache-memory-bytes 1073741824 and --gpu-memory-utilization 0.5 both"):
        budget(gpu_memory_utilization=0.5, kv_cache_memory_bytes=GIB)


def test_pool_is_no_larger_than_all_sequences_need():
    found = budget(available=64 * GIB, max_num_seqs=4, max_model_len=1024)
    assert found.num_blocks == 4 * 1024 // 32
    assert found.sequences(1024) == 4
    assert found.sequences(1025) == 3


def test_pool_holds_at_least_one_full_sequence_even_if_that_is_more_than_a_quarter():
    found = budget(available=800 * MIB)
    assert found.num_blocks == blocks_for(8192, 32)
    assert found.sequences(8192) == 1


def test_length_that_does_not_fit_is_an_error_with_one_that_does():
    with pytest.raises(CapacityError, match="one sequence of 8192 tokens needs 183 MiB") as caught:
        budget(available=550 * MIB)
    fits = int(re.search(r"--max-model-len (\d+)", caught.value.hint)[1])
    assert budget(available=550 * MIB, max_model_len=fits).max_model_len == fits
    with pytest.raises(CapacityError):
        budget(available=550 * MIB, max_model_len=fits + 2 * 32)


def test_float32_cache_that_would_fit_in_half_proposes_float16():
    with pytest.raises(CapacityError) as caught:
        budget(available=700 * MIB, formats=("f32",))
    assert "--kv-cache-dtype float16" in caught.value.hint
    budget(available=700 * MIB, formats=("f32",), kv_cache_dtype="float16")


def test_16_bit_cache_that_would_fit_in_half_proposes_fp8():
    with pytest.raises(CapacityError) as caught:
        budget(available=550 * MIB)
    assert "--kv-cache-dtype fp8`, which needs 90.0 MiB" in caught.value.hint
    assert budget(available=550 * MIB, kv_cache_dtype="fp8").num_blocks == blocks_for(8192, 32)


def test_weights_larger_than_memory_are_an_error_with_the_figures():
    with pytest.raises(CapacityError, match=r"needs 4\.00 GiB for weights.*2\.00 GiB are available"):
        budget(available=2 * GIB, weights=4 * GIB)


def test_workspace_that_does_not_fit_proposes_a_step_that_does():
    with pytest.raises(CapacityError) as caught:
        budget(available=700 * MIB, max_num_batched_tokens=65536)
    tokens = int(re.search(r"--max-num-batched-tokens (\d+)", caught.value.hint)[1])
    assert budget(available=700 * MIB, max_num_batched_tokens=tokens, max_model_len=512)


def test_length_beyond_the_models_context_is_refused_not_cut():
    with pytest.raises(CapacityError, match="the model's context is 8192"):
        budget(max_model_len=8193)


def test_asked_pool_is_taken_as_it_is():
    assert budget(num_gpu_blocks_override=300).num_blocks == 300
    assert budget(kv_cache_memory_bytes=1 * GIB).kv_bytes <= 1 * GIB
    assert budget(kv_cache_memory_bytes=1 * GIB).kv_bytes > 1 * GIB - budget().bytes_per_block


def test_asked_pool_too_small_for_one_sequence_is_an_error_with_a_length_that_fits():
    with pytest.raises(CapacityError, match="holds 320 tokens, one sequence may have 8192") as caught:
        budget(num_gpu_blocks_override=10)
    assert "--max-model-len 320" in caught.value.hint
    assert budget(num_gpu_blocks_override=10, max_model_len=320).num_blocks == 10


def test_asked_pool_larger_than_memory_is_an_error_with_the_most_that_fits():
    with pytest.raises(CapacityError) as caught:
        budget(num_gpu_blocks_override=1_000_000)
    most = int(re.search(r"(\d+) blocks fit", caught.value.hint)[1])
    assert budget(num_gpu_blocks_override=most).num_blocks == most


def test_two_sizes_for_one_pool_are_refused():
    with pytest.raises(UsageError, match="both size the KV cache"):
        budget(num_gpu_blocks_override=300, kv_cache_memory_bytes=GIB)


@pytest.mark.parametrize(
    ("options", "formats", "kind"),
    [
        ({}, ("f32",), "f32"),
        ({}, ("bf16",), "int16"),
        ({}, ("f16",), "int16"),
        ({}, ("bf16", "int4g32min"), "int16"),
        ({"kv_cache_dtype": "bfloat16"}, ("f16",), "bf16"),
        ({"kv_cache_dtype": "float32"}, ("int4g32",), "f32"),
        ({"kv_cache_dtype": "fp8"}, ("f32",), "fp8_e4m3"),
        ({"kv_cache_dtype": "fp8_e5m2"}, ("int4g32",), "fp8_e5m2"),
        ({"kv_cache_dtype": "int8"}, ("bf16",), "int8"),
    ],
)
def test_cache_format_follows_the_option_then_the_weights(options, formats, kind):
    assert choose_kv_format(EngineConfig(**options), formats) == KVFormat(kind)
    assert budget(formats=formats, **options).kv_format == kind


def test_skipped_layers_keep_the_full_format_and_are_counted_so():
    found = budget(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=("0", "29", "29"))
    assert found.kv_formats == ("int16", *("int8",) * 28, "int16")
    assert found.kv_bytes_per_token == 2 * 3 * (2 * 130 + 28 * 66)
    assert found.kv_format == "int8"


def test_layers_with_a_window_are_skipped_by_that_name():
    spec = msgspec.structs.replace(SPEC, windows=(512, 0, 512) * 10)
    found = budget(spec=spec, formats=("f32",), kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("sliding_window",))
    assert found.kv_formats == ("f32", "fp8_e4m3", "f32") * 10


@pytest.mark.parametrize(
    ("name", "hint"),
    [("30", "layers are 0 to 29"), ("-1", "0 to 29"), ("sliding_window", "none has a window"), ("all", "0 to 29")],
)
def test_a_skipped_layer_that_is_not_there_is_refused(name, hint):
    with pytest.raises(UsageError, match=f"--kv-cache-dtype-skip-layers names `{name}`") as caught:
        budget(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=("1", name))
    assert hint in caught.value.hint


def test_a_skipped_layer_with_more_digits_than_python_reads_is_refused_in_few():
    with pytest.raises(UsageError, match=r"names `9{40}\.\.\.`$"):
        budget(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=("9" * 5000,))


@pytest.mark.parametrize("kind", ["auto", "int16"])
def test_skipped_layers_of_a_cache_that_is_stored_as_auto_would_are_refused(kind):
    with pytest.raises(UsageError, match="has no effect: all layers are stored in int16"):
        budget(kv_cache_dtype=kind, kv_cache_dtype_skip_layers=("0",))


def test_more_tokens_sequences_or_vocabulary_need_more_workspace():
    workspace = budget().workspace
    assert budget(max_num_batched_tokens=2048).workspace > workspace
    assert budget(max_num_seqs=128).workspace > workspace
    assert budget(spec=msgspec.structs.replace(SPEC, vocab_size=SPEC.vocab_size * 4)).workspace > workspace


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (4096, "4.00 KiB"), (62_600_000, "59.7 MiB"), (1 << 30, "1.00 GiB")],
)
def test_sizes_read_in_binary_units(count, text):
    assert format_bytes(count) == text


GEMMA = msgspec.structs.replace(
    SPEC, num_layers=18, num_kv_heads=1, head_dim=256, context_length=32768, windows=((512,) * 5 + (0,)) * 3
)


def test_layers_with_a_window_keep_no_more_than_it():
    found = budget(spec=GEMMA, max_num_seqs=4)
    full, local = found.groups
    assert (len(full.layers), len(local.layers), local.window) == (3, 15, 512)
    per_layer = 2 * (256 * 2 + 2)
    assert (full.bytes_per_token, local.bytes_per_token) == (3 * per_layer, 15 * per_layer)
    assert found.sequence_bytes(256) == 256 * 18 * per_layer
    assert found.sequence_bytes(32768) == 32768 * 3 * per_layer + (512 // 32 + 3) * 32 * 15 * per_layer
    assert found.sequence_bytes(32768) < 0.2 * 32768 * 18 * per_layer
    assert found.kv_bytes == 32 * (full.num_blocks * full.bytes_per_token + local.num_blocks * local.bytes_per_token)
    assert found.sequences(32768) >= 1


def test_all_pools_run_out_at_about_the_same_time():
    found = budget(spec=GEMMA, available=4 * GIB, max_num_seqs=256)
    full, local = found.groups
    typical = 32768 // 4
    assert full.num_blocks // blocks_for(typical, 32) == pytest.approx(
        local.num_blocks / local.blocks_of(typical, 32), rel=0.05
    )
    room = found.available - found.weights - found.workspace - found.reserve
    assert 0.99 * room // 4 < found.kv_bytes <= room // 4


def test_swap_space_is_divided_as_sequences_of_a_typical_length_hold_their_blocks():
    found = memory_budget(GEMMA, MIB, ("int4g32",), EngineConfig(swap_space=1.0), 64 * GIB)
    full, local = found.groups
    assert GIB - found.swapped_bytes_per_block * 8 < found.tier_bytes <= GIB
    typical = found.max_model_len // 4
    share = local.blocks_of(typical, found.block_size) / blocks_for(typical, found.block_size)
    assert full.tier_blocks == 0 < local.tier_blocks == int(found.tier_blocks * share)
    one = memory_budget(GEMMA, MIB, ("int4g32",), EngineConfig(swap_space=1.0), 64 * GIB, split_windows=False)
    assert one.tier_bytes == one.tier_blocks * one.swapped_bytes_per_block <= GIB
    windows = msgspec.structs.replace(GEMMA, windows=(4096,) * 18)
    alone = memory_budget(windows, MIB, ("int4g32",), EngineConfig(swap_space=1.0), 64 * GIB)
    assert alone.swapped_bytes_per_block == 0 < alone.groups[1].tier_blocks < alone.tier_blocks


def test_short_sequences_or_who_asks_for_it_have_one_group():
    assert len(budget(spec=GEMMA, max_model_len=512).groups) == 1
    whole = memory_budget(GEMMA, MIB, ("int4g32",), EngineConfig(), 64 * GIB, split_windows=False)
    assert len(whole.groups) == 1 and whole.groups[0].layers == tuple(range(18))


def test_a_model_of_windows_alone_counts_blocks_that_take_no_memory():
    spec = msgspec.structs.replace(GEMMA, windows=(4096,) * 18)
    found = budget(spec=spec, max_num_seqs=2)
    full, local = found.groups
    assert full.layers == () and full.bytes_per_token == 0 and full.num_blocks == 2 * 1024
    assert local.num_blocks == 2 * (4096 // 32 + 3) + 512 // 32
    assert found.sequences(32768) == 2
    with pytest.raises(CapacityError, match="one sequence of 32768 tokens needs 83.0 MiB"):
        budget(spec=spec, available=500 * MIB)


def test_what_does_not_fit_is_shown_as_a_plan_that_adds_up():
    with pytest.raises(CapacityError) as caught:
        budget(available=550 * MIB)
    sizes = {}
    for line in caught.value.message.splitlines()[1:]:
        name, value, unit = re.match(r"  ([\w ]+?)  +([\d.]+) (\w+)", line).groups()
        sizes[name] = float(value) * {"KiB": 1 / 1024, "MiB": 1}[unit]
    assert list(sizes) == ["weights", "workspace", "KV cache", "reserve", "together", "available"]
    assert sizes["together"] == pytest.approx(sum(list(sizes.values())[:4]), rel=0.01)
    assert sizes["available"] == 550 and "less" in caught.value.message.splitlines()[-1]


def test_a_share_of_the_memory_that_is_too_small_proposes_the_smallest_that_fits():
    with pytest.raises(CapacityError, match="reserve .* what `--gpu-memory-utilization 0.02` leaves") as caught:
        budget(gpu_memory_utilization=0.02)
    share = float(re.search(r"--gpu-memory-utilization ([\d.]+)`", caught.value.hint)[1])
    assert budget(gpu_memory_utilization=share).sequences(8192) >= 1
    with pytest.raises(CapacityError):
        budget(gpu_memory_utilization=share - 0.01)
