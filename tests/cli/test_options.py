"""Options become records: human numbers, aliases, defaults, and what is refused."""

from typing import Annotated

import pytest
import typer

from llmctl.cli.expand import Built, expand
from llmctl.cli.options import (
    EngineOptions,
    SamplingOptions,
    memory_config,
    parse_count,
    parse_dtype,
    parse_length,
)
from llmctl.engine.config import EngineConfig, SpeculativeConfig
from llmctl.engine.request import SamplingParams
from llmctl.engine.rope_scaling import RopeScaling
from llmctl.kernels.errors import UsageError


def read(*line):
    """The (config, sampling) that a command with these options gets."""
    got = []

    def command(config: EngineOptions, sampling: SamplingOptions) -> None:
        got.append((config, sampling))

    app = typer.Typer(add_completion=False)
    app.command()(expand(command))
    with typer.main.get_command(app).make_context("x", list(line)) as context:
        context.command.invoke(context)
    return got[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("32k", 32000),
        ("32K", 32768),
        ("1.5k", 1500),
        ("2M", 2 << 20),
        ("2m", 2_000_000),
        ("1G", 1 << 30),
    ],
)
def test_small_suffix_is_decimal_and_large_is_binary(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "x", "1.5K", "1.5", "1.0005k", "-3", "3kk", "1e3"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(typer.BadParameter):
        parse_count(text)


def test_automatic_length_is_zero():
    assert parse_length("auto") == parse_length("-1") == 0


def test_names_of_types_from_other_tools_are_understood():
    assert [parse_dtype(name) for name in ("half", "bf16", "float", "auto", "int4")] == [
        "float16",
        "bfloat16",
        "float32",
        "auto",
        "int4",
    ]


def test_no_options_give_the_defaults_of_the_engine():
    config, sampling = read()
    assert config == EngineConfig()
    assert sampling.over(SamplingParams(top_k=5)) == SamplingParams(top_k=5)


def test_every_engine_option_reaches_the_config():
    line = (
        "m --dtype bf16 --kv-cache-dtype half --kv-cache-dtype-skip-layers 0 "
        "--kv-cache-dtype-skip-layers sliding_window --max-model-len 2k --max-num-seqs 3 --max-num-batched-tokens 1K "
        "--block-size 64 --num-gpu-blocks-override 7 --kv-cache-memory-bytes 1G --no-enable-prefix-caching "
        "--cache-eviction lru --cache-eviction-k 3 "
        "--scheduling-policy fair --tenant-weights a=3,b=0.5 --itl-target-ms 80 "
        "--threads 2 --seed 9 --async-depth 2 --kernels generic "
        '--speculative-config {"num_speculative_tokens":5,"prompt_lookup_max":6} '
        '--rope-scaling {"rope_type":"yarn","factor":2}'
    )
    config, sampling = read(*line.split())
    assert config == EngineConfig(
        model="m",
        dtype="bfloat16",
        kv_cache_dtype="float16",
        kv_cache_dtype_skip_layers=("0", "sliding_window"),
        max_model_len=2000,
        rope_scaling=RopeScaling(rope_type="yarn", factor=2.0),
        max_num_seqs=3,
        max_num_batched_tokens=1024,
        block_size=64,
        num_gpu_blocks_override=7,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        scheduling_policy="fair",
        tenant_weights={"a": 3.0, "b": 0.5},
        itl_target_ms=80.0,
        threads=2,
        seed=9,
        async_depth=2,
        cache_eviction="lru",
        cache_eviction_k=3,
        kernels="generic",
        speculative_config=SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=6),
    )
    assert sampling.seed == 9


def test_options_of_memory_are_those_that_a_plan_depends_on():
    import inspect

    names = set(inspect.signature(memory_config).parameters) - {"model_option"}
    left_out = {"enable_prefix_caching", "scheduling_policy", "threads", "seed", "async_depth", "kernels"}
    left_out |= {"attention_compute", "jit", "enforce_eager", "deterministic"}
    left_out |= {"tenant_weights", "itl_target_ms", "max_prefill_tokens_beside_decode"}
    left_out |= {"cache_eviction", "cache_eviction_k", "cache_audit", "preemption_mode"}
    assert names == set(EngineConfig.__struct_fields__) - left_out


def test_no_engine_field_lacks_an_option():
    import inspect

    from llmctl.cli.options import engine_config

    names = set(inspect.signature(engine_config).parameters)
    assert set(EngineConfig.__struct_fields__) <= names


@pytest.mark.parametrize("alias", ["--max-model-len", "--context-length", "--ctx-size", "-c"])
def test_names_from_other_tools_set_the_same_option(alias):
    assert read(alias, "1024")[0].max_model_len == 1024


def test_model_is_an_argument_or_an_option():
    assert read("a")[0].model == read("-m", "a")[0].model == read("a", "--model", "a")[0].model == "a"
    with pytest.raises(UsageError, match="`a` and `b`"):
        read("a", "-m", "b")


def test_value_that_cannot_work_is_refused_before_anything_is_loaded():
    with pytest.raises(UsageError, match="--block-size is 48"):
        read("--block-size", "48")


def test_sampling_options_replace_only_what_was_given():
    line = (
        "--temperature 0 --top-p 0.5 --top-k 4 --min-p 0.1 --repetition-penalty 1.2 --max-tokens 1k --stop a --stop b"
    )
    assert read(*line.split())[1].over(SamplingParams(presence_penalty=1.0)) == SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.2,
        max_tokens=1000,
        stop=("a", "b"),
        presence_penalty=1.0,
    )


def test_seed_zero_is_a_seed_for_sampling():
    assert read("--seed", "0")[1].over(SamplingParams()).seed == 0


def test_builders_that_disagree_about_an_option_are_a_bug():
    def one(size: int = 1) -> int:
        return size

    def two(size: str = "1") -> str:
        return size

    def command(a: Annotated[int, Built(one)], b: Annotated[str, Built(two)]) -> None: ...

    with pytest.raises(AssertionError, match="two meanings of option size"):
        expand(command)


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ("none", SpeculativeConfig(method="none")),
        ("ngram", SpeculativeConfig()),
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 3}',
         SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=5, prompt_lookup_min=3)),
        (str(SpeculativeConfig(num_speculative_tokens=9)), SpeculativeConfig(num_speculative_tokens=9)),
    ],
)  # fmt: skip
def test_speculation_is_a_name_or_json(given, config):
    assert read("--speculative-config", given)[0].speculative_config == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens of --speculative-config is 0"),
        ('{"prompt_lookup_min": 3, "prompt_lookup_max": 2}', "prompt_lookup_max of --speculative-config is 2"),
        ('{"num_speculative_tokens": "4"}', "cannot be"),
        ("[]", "cannot be"),
        ('{"drafts": 2}', "no key `drafts`"),
        ('{"method": "draft_model"}', "names no model"),
    ],
)
def test_speculation_that_cannot_work_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        read("--speculative-config", given)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tenant-weights alice", "no name with a weight"),
        ("--tenant-weights =3", "no name with a weight"),
        ("--tenant-weights alice=0", "the weight of tenant `alice` is 0"),
        ("--tenant-weights alice=2,alice=3", "gives tenant `alice` two weights"),
        ("--tenant-weights alice=2 --scheduling-policy sjf", "no effect with --scheduling-policy sjf"),
        ("--itl-target-ms -1", "0 or more milliseconds"),
        ("--itl-target-ms 50 --max-prefill-tokens-beside-decode 64", "--itl-target-ms is 50"),
        ("--scheduling-policy best", "--scheduling-policy is `best`"),
    ],
)
def test_scheduling_options_that_cannot_work_are_refused_with_their_value(line, message):
    with pytest.raises(UsageError, match=message):
        read(*line.split())


def test_an_unknown_policy_is_an_error_that_names_the_choices():
    with pytest.raises(UsageError) as error:
        read("--scheduling-policy", "best")
    assert error.value.hint == "choose one of: hybrid, fcfs, sjf, fair, priority"
