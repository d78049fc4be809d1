"""Logprobs of a prompt's tokens: all of them, once, whatever the chunks, the cache and preemption do."""

from __future__ import annotations

import random

import pytest

from llmctl.engine.request import FinishReason

from .builders import check_invariants, config, request
from .fake_runner import START, FakeModel, Loop, calm_run, extend, known_logprob


def expected(prompt) -> tuple[float, ...]:
    history, values = START, []
    for token in prompt:
        history = extend(history, token)
        values.append(known_logprob(history))
    return tuple(values[1:])


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", [1, 2, 9, 40])
@pytest.mark.parametrize("rows", [0, 1, 3, 7])
def test_every_prompt_token_after_the_first_has_its_logprob(rows, prompt, max_tokens):
    loop = Loop(config(max_num_batched_tokens=16, max_num_seqs=3, max_logit_rows=max(rows, 3) if rows != 1 else 1))
    asked = request("a", range(prompt), max_tokens=max_tokens, prompt_logprobs=0)
    loop.add(asked, request("b", range(5), max_tokens=4))
    received = loop.run()["a", 0]
    assert received.prompt_logprobs == expected(range(prompt))
    assert received.finish is FinishReason.LENGTH
    assert received.tokens == calm_run(asked, 0, 128, FakeModel())[0]
    assert loop.runner.computed_tokens <= prompt + max(max_tokens - 1, 0) + 5 + 3


def test_a_cached_prefix_is_not_used_and_then_serves_others_again():
    loop = Loop(config())
    loop.add(request("a", range(20), max_tokens=1))
    loop.run()
    loop.add(request("b", range(20), max_tokens=1, prompt_logprobs=2))
    loop.run()
    loop.add(request("c", range(20), max_tokens=1))
    received = loop.run()
    assert [received[name, 0].cached_tokens for name in "abc"] == [0, 0, 19]
    assert received["b", 0].prompt_logprobs == expected(range(20))
    assert received["b", 0].tokens == received["a", 0].tokens
    check_invariants(loop.scheduler)


def test_samples_share_the_prompt_whose_logprobs_come_once():
    loop = Loop(config())
    loop.add(request("a", range(18), max_tokens=3, n=3, prompt_logprobs=0))
    received = loop.run()
    assert [received["a", index].prompt_logprobs for index in range(3)] == [expected(range(18)), (), ()]
    assert loop.runner.computed_tokens == 18 + 2 + 3 * 2


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_loses_and_repeats_none(caching, depth):
    rng = random.Random(3)
    for _ in range(20):
        loop = Loop(config(60, 4, 4, 12, max_logit_rows=5, enable_prefix_caching=caching, depth=depth))
        prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(5)]
        for number, prompt in enumerate(prompts):
            loop.add(request(str(number), prompt, max_tokens=number, prompt_logprobs=number % 2 or None))
        while loop.scheduler.has_work:
            running = list(loop.scheduler._roster.running.values())
            if running and rng.random() < 0.3:
                loop.scheduler._roster.preempt(rng.choice(running))
            loop.step()
            check_invariants(loop.scheduler)
        for number, prompt in enumerate(prompts):
            got = loop.received[str(number), 0].prompt_logprobs
            assert got == (expected(prompt) if number % 2 else ())
