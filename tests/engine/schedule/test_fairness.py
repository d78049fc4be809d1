"""Shares, order and waiting, in simulations of the whole scheduler; the clock counts steps."""

import random

from llmctl.engine.schedule.policy import MAX_WAIT

from .builders import config, request
from .fake_runner import FakeModel, Loop

MODEL = FakeModel(vocab=2)


def test_backlogged_tenants_get_equal_shares_whatever_their_load():
    random_ = random.Random(1)
    loop = Loop(config(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=32, enable_prefix_caching=False), MODEL)
    size: dict[str, int] = {}
    served = {"a": 0, "b": 0}
    number = 0
    for step in range(1500):
        waiting = {"a": 0, "b": 0}
        for state in loop.scheduler.states():
            waiting[state.request_id[0]] += state.slot < 0
        for tenant, depth in (("a", 50), ("b", 5)):
            for _ in range(depth - waiting[tenant]):
                name = f"{tenant}{number}"
                number += 1
                size[name] = random_.randrange(1, 30)
                loop.add(request(name, range(size[name]), max_tokens=random_.randrange(1, 20), tenant=tenant))
        for output in loop.step():
            if step >= 100:
                prompt = size[output.request_id] if output.first == 0 else 0
                served[output.request_id[0]] += prompt + len(output.tokens)
    assert abs(served["b"] / sum(served.values()) - 0.5) < 0.05


def mean_latency(policy):
    random_ = random.Random(2)
    loop = Loop(config(300, 4, 4, 16, max_model_len=256, policy=policy, enable_prefix_caching=False), MODEL)
    arrivals = sorted((random_.randrange(250), number) for number in range(120))
    started, ended = {}, {}
    step = 0
    while arrivals or loop.scheduler.has_work:
        while arrivals and arrivals[0][0] <= step:
            at, number = arrivals.pop(0)
            long = random_.random() < 0.1
            length, most = (150, 60) if long else (random_.randrange(1, 12), random_.randrange(1, 8))
            loop.add(request(f"{number}", range(length), max_tokens=most))
            started[f"{number}"] = at
        for output in loop.step():
            if output.finish is not None:
                ended[output.request_id] = step
        step += 1
    assert len(ended) == 120
    return sum(ended[name] - started[name] for name in ended) / len(ended)


def test_shortest_job_first_lowers_mean_latency_on_a_heavy_tailed_mix():
    assert mean_latency("hybrid") < 0.7 * mean_latency("fcfs")


def test_a_long_job_is_admitted_within_the_bound_under_an_endless_stream_of_short_ones():
    loop = Loop(config(100, 4, 1, 64, max_model_len=64, enable_prefix_caching=False), MODEL)
    loop.add(request("long", range(60), max_tokens=4))
    loop.add(request("s", [1], max_tokens=1))
    for step in range(MAX_WAIT + 2):
        loop.add(request(f"{step}", [1], max_tokens=1))
        outputs = loop.step()
        if any(output.request_id == "long" for output in outputs):
            assert step > 50, "it was not overtaken at all"
            return
    raise AssertionError("still waiting")
