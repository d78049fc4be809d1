"""The fixed workload has the lengths that its names say, and a file may bring another one."""

import json

import pytest

from llmctl.cli.bench.compare.scenarios import LENGTHS, NAMES, choose, make_prompts, read_prompts
from llmctl.kernels.errors import UsageError


def test_shapes_are_those_of_the_names(tokenizer):
    prompts = make_prompts(tokenizer, NAMES)
    found = {scenario.name: scenario for scenario in prompts.scenarios}
    assert tuple(found) == NAMES
    assert [len(item.prompt) for item in found["prefill-512"].items] == [512] * 3
    assert [(len(item.prompt), item.max_tokens) for item in found["decode-2048"].items] == [(2048, 64)]
    assert [(len(item.prompt), item.max_tokens) for item in found["decode-128"].items] == [(128, 128)]
    assert [(len(item.prompt), item.max_tokens) for item in found["mixed-64"].items] == list(LENGTHS)
    assert found["mixed-16"].items == found["mixed-64"].items[:16] and found["mixed-16"].at_once == 16
    assert [name for name, scenario in found.items() if scenario.alone] == ["mixed-64", "startup"]
    assert all(scenario.at_once == 1 for scenario in found.values() if scenario.kind != "mixed")


def test_the_fixed_workload_is_what_it_was():
    assert len(LENGTHS) == 64
    assert [sum(column) for column in zip(*LENGTHS[:16], strict=True)] == [3391, 1668]
    assert [sum(column) for column in zip(*LENGTHS, strict=True)] == [15517, 8363]


def test_prompts_are_the_same_whenever_they_are_made(tokenizer):
    everything = {scenario.name: scenario.items for scenario in make_prompts(tokenizer, NAMES).scenarios}
    (alone,) = make_prompts(tokenizer, ("copy",)).scenarios
    assert alone.items == everything["copy"]


def test_copy_prompts_hold_a_passage_twice(tokenizer):
    (copy,) = make_prompts(tokenizer, ("copy",)).scenarios
    for item in copy.items:
        text = tokenizer.decode(list(item.prompt))
        first, again = text.removeprefix("First: ").removesuffix("\nAgain:").split("\nAgain: ")
        assert first == again and len(first.split()) == 120


def test_a_file_brings_requests_and_the_tokens_of_all_other_prompts(tmp_path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"requests": [{"prompt_token_ids": [5, 6, 7], "max_tokens": 4, "prompt": "x"}] * 20}))
    prompts = read_prompts(path, NAMES)
    found = {scenario.name: scenario for scenario in prompts.scenarios}
    assert len(found["mixed-16"].items) == 16 and len(found["mixed-64"].items) == 20
    assert found["mixed-64"].items[0].prompt == (5, 6, 7) and prompts.pool == (5, 6, 7)
    assert len(found["prefill-512"].items[2].prompt) == 512 and len(found["decode-2048"].items[0].prompt) == 2048
    assert len(found["copy"].items[0].prompt) == 240


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is no workload"),
        ("{}", "KeyError 'requests'"),
        ('{"requests": [{"prompt_token_ids": ["x"], "max_tokens": 1}]}', "ValueError"),
        ('{"requests": []}', "none at all"),
        ('{"requests": [{"prompt_token_ids": [], "max_tokens": 1}]}', "a request without tokens"),
    ],
)
def test_a_file_that_is_no_workload_is_refused(tmp_path, content, message):
    path = tmp_path / "w.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_prompts(path, NAMES)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read `.*none"):
        read_prompts(tmp_path / "none", NAMES)


def test_scenarios_are_chosen_by_name_in_their_own_order():
    assert choose("") == NAMES and choose("copy, prefill-512") == ("prefill-512", "copy")
    with pytest.raises(UsageError, match="--only has `decode`"):
        choose("decode")
