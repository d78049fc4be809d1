"""Engine options that cannot work are refused by name."""

import pytest

from llmctl.engine.config import EngineConfig, SpeculativeConfig
from llmctl.kernels.errors import UsageError


@pytest.mark.parametrize("name", ["max_num_seqs", "threads", "seed", "kv_cache_memory_bytes", "gpu_memory_utilization"])
def test_a_boolean_is_no_number(name):
    with pytest.raises(UsageError, match=f"{name} is True, it must be a number"):
        EngineConfig(**{name: True}).check()


def test_a_boolean_is_no_number_of_drafts():
    with pytest.raises(UsageError, match="num_speculative_tokens is True"):
        EngineConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=True)).check()
