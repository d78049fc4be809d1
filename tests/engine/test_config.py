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
