"""What scripts give `LLM` for options, as they become the engine's."""

import pytest

from llmctl.engine import llm
from llmctl.engine.config import EngineConfig
from llmctl.kernels.errors import UsageError


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The config of each engine that would have been started; what cannot be is refused as it would be there."""
    configs: list[EngineConfig] = []

    def launch(config: EngineConfig, process: bool) -> None:
        config.check()
        configs.append(config)

    monkeypatch.setattr(llm, "launch", launch)
    return configs


@pytest.mark.parametrize("layers", [[10], (10,), ["10"], "10", 10])
def test_layers_are_named_by_text_or_number_alone_or_in_a_list(layers: object, launched: list[EngineConfig]) -> None:
    llm.LLM(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=layers)
    assert launched[0].kv_cache_dtype_skip_layers == ("10",)


def test_a_size_given_as_a_text_is_refused_by_name(launched: list[EngineConfig]) -> None:
    with pytest.raises(UsageError, match="swap_space is '4'"):
        llm.LLM(swap_space="4")
