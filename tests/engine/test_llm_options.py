"""What scripts give `LLM` for options, as they become the engine's."""

import inspect
import re
from pathlib import Path

import pytest

from llmctl.engine import llm
from llmctl.engine.config import EngineConfig
from llmctl.engine.frontend import Generation, OnOutput
from llmctl.engine.request import Request, SamplingParams
from llmctl.kernels.errors import UsageError

from .tiny import write_checkpoint


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


def test_every_option_of_the_engine_is_one_of_llm_with_the_same_default() -> None:
    """The cache's size and eviction, the queue's policy and weights: what `serve` has flags for."""
    given = inspect.signature(llm.LLM.__init__).parameters
    assert set(EngineConfig.__struct_fields__) <= set(given)
    for name in ("cache_eviction", "cache_eviction_k", "scheduling_policy", "preemption_mode"):
        assert given[name].default == getattr(EngineConfig(), name)


def test_eviction_and_weights_of_tenants_reach_the_engine(launched: list[EngineConfig]) -> None:
    llm.LLM(cache_eviction="lru", cache_eviction_k=3, tenant_weights={"alice": 3, "bob": 0.5})
    config = launched[0]
    assert (config.cache_eviction, config.cache_eviction_k, config.eviction_k) == ("lru", 3, 1)
    assert config.tenant_weights == {"alice": 3.0, "bob": 0.5}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_eviction": "fifo"}, "--cache-eviction is `fifo`"),
        ({"cache_eviction_k": 17}, "--cache-eviction-k is 17"),
        ({"tenant_weights": {"alice": 0}}, "the weight of tenant `alice` is 0"),
        ({"tenant_weights": "alice=3"}, "tenant_weights is a str: 'alice=3'"),
        ({"tenant_weights": {"alice": "3"}}, "tenant_weights is {'alice': '3'}"),
        ({"tenant_weights": {"alice": 3}, "scheduling_policy": "fcfs"}, "has no effect with --scheduling-policy fcfs"),
    ],
)
def test_what_the_flags_refuse_llm_refuses(options: dict[str, object], said: str, launched: list[EngineConfig]) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        llm.LLM(**options)
    assert not launched


def test_prompts_are_counted_for_the_tenants_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_checkpoint(tmp_path, "qwen2"))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with llm.LLM(folder, max_model_len=64, tenant_weights={"alice": 3}) as engine:
        plain = engine.generate(["one", "two"], params)
        seen: list[str] = []
        submit = engine.frontend.open

        def noted(request: Request, on_output: OnOutput) -> Generation:
            seen.append(request.tenant)
            return submit(request, on_output)

        monkeypatch.setattr(engine.frontend, "open", noted)
        shared = engine.generate(["one", "two"], params, tenant=["alice", "bob"])
        engine.generate(["one", "two"], params, tenant="alice")
        with pytest.raises(UsageError, match="2 prompts but 1 tenants"):
            engine.generate(["one", "two"], params, tenant=["alice"])
        with pytest.raises(UsageError, match="tenant is a list"):
            engine.generate(["one", "two"], params, tenant=[1, 2])
    assert seen == ["alice", "bob", "alice", "alice"]
    assert [each.outputs for each in shared] == [each.outputs for each in plain]
