"""Engine options that cannot work are refused by name."""

import pytest

from llmctl.engine.config import EngineConfig, SpeculativeConfig
from llmctl.kernels.errors import UsageError


@pytest.mark.parametrize("name", ["max_num_seqs", "threads", "seed", "kv_cache_memory_bytes", "gpu_memory_utilization"])
def test_a_boolean_is_no_number(name):
    with pytest.raises(UsageError, match=f"{name} is True, it must be a number"):
        EngineConfig(**{name: True}).check()


def test_a_speculative_config_that_names_a_model_means_a_draft_model():
    config = SpeculativeConfig.read({"model": "small", "num_speculative_tokens": 4})
    assert (config.method, config.max_sequences, config.max_rows) == ("draft_model", 4, 4 * 5)
    wider = SpeculativeConfig.read({"model": "small", "disable_by_batch_size": 32})
    assert wider.max_rows == 32 * 4
    assert EngineConfig(speculative_config=wider, max_num_seqs=32).max_logit_rows == 32 * 4


def test_sequences_share_the_rows_of_prompt_lookup_unless_their_number_is_given():
    assert SpeculativeConfig().max_rows == 4
    assert SpeculativeConfig(disable_by_batch_size=2).max_rows == 2 * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "draft_model"}, "names no model"),
        ({"method": "ngram", "model": "small"}, "its method `ngram` does not use"),
        ({"disable_by_batch_size": -1}, "disable_by_batch_size of --speculative-config is -1"),
    ],
)
def test_a_speculative_config_that_contradicts_itself_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        SpeculativeConfig.read(given)


def test_a_boolean_is_no_number_of_drafts():
    with pytest.raises(UsageError, match="num_speculative_tokens is True"):
        EngineConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=True)).check()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"swap_space": "4"}, "swap_space is '4': expected `float`, got `str`"),
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5: expected `int`, got `float`"),
        ({"kv_cache_dtype_skip_layers": (0,)}, "kv_cache_dtype_skip_layers is"),
        ({"tenant_weights": {"a": "much"}}, "tenant_weights is"),
        ({"speculative_config": "ngram"}, "speculative_config is 'ngram'"),
        ({"kv_cache_memory_bytes": -1}, "--kv-cache-memory-bytes is -1, it must be from 0"),
    ],
)
def test_a_value_of_another_type_or_below_its_range_is_refused_by_name(option, message):
    with pytest.raises(UsageError, match=message):
        EngineConfig(**option).check()


@pytest.mark.parametrize("weight", [5e-324, 1e300, float("nan"), float("inf"), -1.0])
def test_a_tenant_cannot_weigh_so_much_or_little_that_sums_of_tokens_are_lost(weight):
    with pytest.raises(UsageError, match="the weight of tenant `a` is .*, it must be from 1e-06"):
        EngineConfig(tenant_weights={"a": weight}).check()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"method": "none", "num_speculative_tokens": 5}, "num_speculative_tokens"),
        ({"model": "small", "prompt_lookup_max": 9}, "prompt_lookup_max"),
    ],
)
def test_what_the_method_does_not_use_is_refused(given, name):
    with pytest.raises(UsageError, match=f"`{name}` of --speculative-config has no meaning for the method"):
        SpeculativeConfig.read(given)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256, 512])
def test_every_power_of_two_from_8_to_512_is_a_block_size(size):
    EngineConfig(block_size=size).check()


@pytest.mark.parametrize("size", [0, 1, 4, 7, 24, 48, 500, 1024])
def test_no_other_number_is_a_block_size(size):
    with pytest.raises(UsageError, match=f"--block-size is {size}") as caught:
        EngineConfig(block_size=size).check()
    assert "power of two from 8 to 512" in caught.value.hint
