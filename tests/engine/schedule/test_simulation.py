"""What users see of scheduling, in virtual seconds: pauses, latencies, order, shares, waiting."""

import random
from itertools import pairwise

import msgspec
import pytest

from llmctl.engine.config import POLICIES
from llmctl.engine.request import FinishReason
from llmctl.engine.schedule.pace import PaceConfig
from llmctl.engine.schedule.sequence import Phase

from .builders import config, request
from .virtual import Cost, Simulation


def limits(**changes):
    given = {"num_blocks": 600, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    return config(**{**given, "max_model_len": 4096, "enable_prefix_caching": False, **changes})


def mixed(count, seed):
    random_ = random.Random(seed)
    return [
        request(f"{i}", range(int(33 * 15 ** random_.random())), max_tokens=int(16 * 14 ** random_.random()))
        for i in range(count)
    ]


def served(pace):
    simulation = Simulation(limits(pace=pace))
    simulation.run([(0.0, each) for each in mixed(16, 1)])
    return simulation


def test_prompts_beside_decodes_are_cut_so_that_pauses_stay_short_and_throughput_does_not_fall():
    free, paced = served(None), served(PaceConfig())
    p99 = [each.pauses[int(len(each.pauses) * 0.99)] for each in (free, paced)]
    assert p99[0] > 0.3 and p99[1] < 0.1
    assert paced.now < 1.03 * free.now


def test_the_target_for_pauses_is_met_within_a_tenth_once_costs_are_known():
    paced = served(PaceConfig(target_s=0.06))
    assert paced.pauses[int(len(paced.pauses) * 0.99)] < 0.066
    assert max(sum(chunk.count for chunk in step.chunks) for step in paced.steps) > 200, "alone, prompts have it all"


def test_a_count_of_prompt_tokens_beside_decodes_is_kept_in_every_step():
    paced = served(PaceConfig(tokens=40))
    for step in paced.steps:
        counts = [chunk.count for chunk in step.chunks]
        if 1 in counts:
            assert sum(count for count in counts if count > 1) <= 40


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_request_beside_one_that_generates_2000_tokens_takes_hardly_longer_than_alone(policy):
    latencies = []
    for beside in ((), (request("long", range(50), max_tokens=2000),)):
        simulation = Simulation(limits(policy=policy, pace=PaceConfig()), Cost(decode=0.001))
        for each in beside:
            simulation.add(each)
            for _ in range(50):
                simulation.step()
        simulation.add(request("short", range(10), max_tokens=10))
        while "short" not in simulation.ended:
            simulation.step()
        latencies.append(simulation.latency("short"))
    assert latencies[1] <= 1.3 * latencies[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_request_beside_a_prompt_of_2000_tokens_begins_within_steps_where_short_ones_may_pass(policy):
    simulation = Simulation(limits(policy=policy, pace=PaceConfig(tokens=64)))
    simulation.add(request("decode", range(5), max_tokens=500))
    simulation.add(request("long", range(2000), max_tokens=2))
    for _ in range(3):
        simulation.step()
    simulation.add(request("short", range(10), max_tokens=10))
    begun = len(simulation.steps)
    while "short" not in simulation.came:
        simulation.step()
    passes = policy in ("hybrid", "sjf", "fair")
    assert (len(simulation.steps) - begun == 1) == passes
    assert ("long" in simulation.came) != passes


def order(policy):
    simulation = Simulation(limits(policy=policy, max_num_seqs=1))
    simulation.run([(0.0, request("first", range(9), max_tokens=2))])
    asked = [("a", 60, 0), ("a", 5, 1), ("a", 30, 0), ("b", 70, 0), ("b", 10, 0)]
    for name, (tenant, length, priority) in enumerate(asked):
        simulation.add(request(str(name), range(length), max_tokens=1, tenant=tenant, priority=priority))
    while simulation.engine.has_work:
        simulation.step()
    return "".join(list(simulation.ended)[1:])


def test_the_policy_that_is_named_decides_the_order():
    assert {policy: order(policy) for policy in POLICIES} == {
        "hybrid": "24301",
        "fcfs": "01234",
        "sjf": "42031",
        "fair": "03241",
        "priority": "02341",
    }


def mean_latency(policy):
    random_ = random.Random(2)
    simulation = Simulation(limits(policy=policy, max_num_seqs=4))
    arrivals = []
    for number in range(150):
        long = random_.random() < 0.1
        length, most = (800, 100) if long else (random_.randrange(1, 60), random_.randrange(1, 12))
        arrivals.append((random_.random() * 12, request(f"{number}", range(length), max_tokens=most)))
    simulation.run(arrivals)
    assert len(simulation.ended) == 150
    return sum(map(simulation.latency, simulation.ended)) / 150


def test_shortest_job_first_lowers_mean_latency_on_a_heavy_tailed_mix():
    first_come = mean_latency("fcfs")
    assert mean_latency("sjf") < 0.8 * first_come
    assert mean_latency("hybrid") < 0.8 * first_come


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_can_wait_so_long_begins_by_then_or_is_ended_then(policy):
    random_ = random.Random(3)
    simulation = Simulation(limits(policy=policy, max_num_seqs=2))
    arrivals, can_wait = [], {}
    for number in range(120):
        asked = request(f"{number}", range(random_.randrange(1, 300)), max_tokens=random_.randrange(1, 60))
        wait = random_.choice((None, 0.0, 0.5, 2.0))
        can_wait[asked.id] = wait
        arrivals.append((random_.random() * 10, with_wait(asked, wait)))
    simulation.run(arrivals)
    longest = 0.005 + 0.0008 * 512  # of a step: nobody is looked at meanwhile
    finishes = {name: output.finish for name, output in simulation.ended.items()}
    assert len(finishes) == 120 and set(finishes.values()) == {FinishReason.LENGTH, FinishReason.OVERDUE}
    for name, finish in finishes.items():
        wait = can_wait[name]
        if finish is FinishReason.OVERDUE:
            assert wait is not None and wait <= simulation.latency(name) <= wait + longest
            assert simulation.ended[name].error.endswith(f"within the {wait:g} s that the request could wait")
        elif wait is not None:
            begun = simulation.came[name][0] - simulation.arrived[name]
            assert begun <= wait + 3 * longest, "it began too late, besides the steps of its own prompt"


def test_a_request_that_cannot_wait_at_all_runs_if_there_is_a_place():
    simulation = Simulation(limits(max_num_seqs=1))
    simulation.add(with_wait(request("a", range(9), max_tokens=9), 0.0))
    simulation.step()
    simulation.add(with_wait(request("b", range(9)), 0.0))
    simulation.run()
    assert [simulation.ended[name].finish for name in "ab"] == [FinishReason.LENGTH, FinishReason.OVERDUE]


def with_wait(asked, seconds):
    return msgspec.structs.replace(asked, max_wait_s=seconds)


def test_a_request_that_can_wait_less_goes_before_those_that_can_wait():
    begun = {}
    for wait in (None, 1.0):
        simulation = Simulation(limits(max_num_seqs=1))
        simulation.add(request("running", range(9), max_tokens=20))
        simulation.step()
        simulation.add(with_wait(request("late", range(900), max_tokens=3), wait))
        for number in range(100):
            simulation.add(request(f"{number}", range(40), max_tokens=3))
            simulation.step()
        while "late" not in simulation.ended:
            simulation.step()
        assert simulation.ended["late"].finish is FinishReason.LENGTH
        begun[wait] = simulation.came["late"][0] - simulation.arrived["late"]
    its_prompt = 900 * 0.0008
    assert 0.5 < begun[1.0] - its_prompt < 1.0 < 1.5 * begun[1.0] < begun[None]


def test_served_tokens_of_backlogged_tenants_never_differ_by_more_than_the_bound():
    """The bound of virtual token counters: twice the larger of one prompt and what memory holds at once."""
    weights = {"a": 1.0, "b": 2.0}
    simulation = Simulation(limits(max_num_seqs=4, policy="fair", tenant_weights=tuple(weights.items())))
    random_ = random.Random(4)
    served, waiting, size = {"a": 0, "b": 0}, {"a": 0, "b": 0}, {}
    differences = []
    for number in range(4000):
        for tenant, depth in (("a", 20), ("b", 2)):  # ten times the load
            while waiting[tenant] < depth:
                name = f"{tenant}{number}.{waiting[tenant]}"
                size[name] = random_.randrange(1, 200)
                simulation.add(request(name, range(size[name]), max_tokens=random_.randrange(1, 100), tenant=tenant))
                waiting[tenant] += 1
        for output in simulation.step():
            tenant = output.request_id[0]
            if output.first == 0:
                waiting[tenant] -= 1
                served[tenant] += size[output.request_id]
            served[tenant] += len(output.tokens)
        differences.append(served["a"] / weights["a"] - served["b"] / weights["b"])
    at_once = 4 * 300  # tokens of four sequences of the longest kind
    assert max(differences) - min(differences) <= 2 * at_once
    assert abs(served["b"] / sum(served.values()) - 2 / 3) < 0.05


def test_never_more_run_than_max_num_seqs_and_the_surplus_is_counted_as_waiting():
    simulation = Simulation(limits(max_num_seqs=5))
    for each in mixed(12, 2):
        simulation.add(each)
    while simulation.engine.has_work:
        simulation.step()
        stats, left = simulation.engine.stats(), 12 - len(simulation.ended)
        assert (stats.running, stats.waiting) == (min(5, left), max(0, left - 5)) or stats.running < 5
        assert stats.running <= 5 and stats.running + stats.waiting == left


def test_only_tokens_that_are_needed_are_scheduled():
    simulation = Simulation(limits(pace=PaceConfig()))
    asked = mixed(16, 5)
    simulation.run([(0.0, each) for each in asked])
    needed = sum(len(each.prompt) + each.max_tokens - 1 for each in asked)
    assert simulation.engine.stats().scheduled_tokens == needed
    assert sum(chunk.count for step in simulation.steps for chunk in step.chunks) == needed


def test_a_prompt_of_8k_takes_steps_of_the_budget_while_decodes_get_a_token_in_each():
    simulation = Simulation(limits(max_num_batched_tokens=1024, max_model_len=9000))
    simulation.add(request("short", range(5), max_tokens=30))
    simulation.step()
    simulation.add(request("long", range(8192), max_tokens=1))
    while "long" not in simulation.ended:
        before = len(simulation.came["short"])
        simulation.step()
        assert len(simulation.came["short"]) == before + 1
    assert sum(any(chunk.slot == 1 for chunk in step.chunks) for step in simulation.steps) == 9


def test_time_in_the_scheduler_is_told_beside_that_of_the_steps():
    simulation = Simulation(limits())
    ticks = iter(range(10**6))
    simulation.engine._clock = lambda: float(next(ticks))
    simulation.add(request("a", range(5), max_tokens=4))
    simulation.run()
    stats = simulation.engine.stats()
    assert (stats.scheduler_s, stats.step_s) == (4 * 2.0, 4 * 4.0)


LEGAL = {
    Phase.WAITING: {Phase.RUNNING, Phase.FINISHED},
    Phase.RUNNING: {Phase.PREEMPTED, Phase.FINISHED},
    Phase.PREEMPTED: {Phase.RUNNING, Phase.FINISHED},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_leaves_a_legal_and_complete_trace_of_its_states(policy):
    """Under memory for a third of the load, with aborts, samples, priorities and limits to waiting."""
    random_ = random.Random(6)
    simulation = Simulation(limits(num_blocks=32, max_num_seqs=12, max_model_len=500, policy=policy))
    asked = {}
    for number in range(60):
        each = request(
            f"{number}", range(random_.randrange(1, 60)), max_tokens=random_.randrange(1, 250),
            n=random_.choice((1, 1, 3)), priority=random_.randrange(3), tenant=random_.choice("ab"),
        )  # fmt: skip
        asked[each.id] = with_wait(each, random_.choice((None, None, 0.3)))
        simulation.add(asked[each.id])
        simulation.step()
        if random_.random() < 0.2:
            simulation.engine.abort(random_.choice(list(asked)))
    while simulation.engine.has_work:
        unfinished = [state for state in simulation.engine.states() if state.finish is None]
        for state in unfinished:
            assert (state.phase is Phase.RUNNING) == (state.doing is not None) == (state.slot >= 0 and state.blocks > 0)
        simulation.step()
    ended = simulation.engine.states()
    assert sorted((state.request_id, state.index) for state in ended) == sorted(
        (name, index) for name, each in asked.items() for index in range(each.sampling.n)
    )
    for state in ended:
        phases = [change.phase for change in state.trace]
        steps = [change.step for change in state.trace]
        assert phases[0] is Phase.WAITING and phases[-1] is Phase.FINISHED is state.phase and steps == sorted(steps)
        assert all(after in LEGAL[before] for before, after in pairwise(phases))
        if state.finish in (FinishReason.STOP, FinishReason.LENGTH):
            assert Phase.RUNNING in phases and state.generated_tokens == asked[state.request_id].max_tokens
        if state.finish is FinishReason.OVERDUE:
            assert phases == [Phase.WAITING, Phase.FINISHED]
    finishes = {state.finish for state in ended}
    assert finishes == {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.OVERDUE}
    assert any(Phase.PREEMPTED in (change.phase for change in state.trace) for state in ended)


def test_what_a_running_request_is_doing_is_told_apart():
    simulation = Simulation(limits(max_num_batched_tokens=32, enable_prefix_caching=True))
    simulation.add(request("a", range(60), max_tokens=3))
    seen = []
    for each in ("a", "b"):
        while simulation.engine.has_work:
            simulation.step()
            seen += [(each, str(state.doing)) for state in simulation.engine.states() if state.finish is None]
        if each == "a":
            simulation.add(request("b", range(200), max_tokens=2))
    assert list(dict.fromkeys(seen)) == [("a", "prefill"), ("a", "decode"), ("b", "extend"), ("b", "decode")]
