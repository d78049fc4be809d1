"""Too little memory, clients that leave, and several steps in flight: the tokens stay those of a calm run."""

import random

import pytest

from llmctl.engine.request import FinishReason
from llmctl.engine.schedule.sequence import Phase

from .builders import check_invariants, config, request
from .fake_runner import FakeModel, Loop, calm_run


def load(count=12, seed=0, max_tokens=24):
    random_ = random.Random(seed)
    return [
        request(
            f"{i}",
            [random_.randrange(4) for _ in range(random_.randrange(1, 30))],
            max_tokens=max_tokens,
            n=random_.choice((1, 1, 3)),
            stop_ids=(0,) if i % 2 else (),
            seed=i,
        )
        for i in range(count)
    ]


def expect_calm(asked, received, limit=128, model=None):
    for each in asked:
        for index in range(each.sampling.n):
            got = received[each.id, index]
            assert (got.tokens, got.finish) == calm_run(each, index, limit, model or FakeModel())


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["hybrid", "fcfs"])
def test_with_a_third_of_the_memory_needed_everything_ends_with_the_same_tokens(caching, depth, policy):
    asked = load()
    demand = sum(-(-(len(each.prompt) + each.max_tokens) // 4) for each in asked)
    loop = Loop(config(demand * 3 // 10, max_num_seqs=16, depth=depth, enable_prefix_caching=caching, policy=policy))
    loop.add(*asked)
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    expect_calm(asked, loop.received)


def run_until_preempted(loop, max_steps=200):
    for _ in range(max_steps):
        loop.step()
        preempted = [state for state in loop.scheduler.states() if state.phase is Phase.PREEMPTED]
        if preempted:
            return preempted
    raise AssertionError("nothing was preempted")


def test_preempted_sequence_resumes_with_same_tokens_and_before_new_ones():
    loop = Loop(config(num_blocks=8, max_num_seqs=2, max_model_len=32))
    asked = [request("a", range(8), max_tokens=20), request("b", range(10, 18), max_tokens=20)]
    loop.add(*asked)
    loop.step()
    late = request("c", [1], max_tokens=2)
    loop.add(late)
    (preempted,) = run_until_preempted(loop)
    assert preempted.request_id == "b"
    resumed = None
    while resumed is None:
        loop.step()
        step = loop.steps[-1]
        resumed = next((admit for admit in step.admit), None)
    assert resumed.prompt_len == 8 and len(resumed.tokens) // 4 == 8 + preempted.generated_tokens
    loop.run()
    expect_calm([*asked, late], loop.received)


def test_resuming_is_cheap_while_the_blocks_are_still_cached():
    for caching in (True, False):
        loop = Loop(config(num_blocks=8, max_num_seqs=2, max_model_len=32, enable_prefix_caching=caching))
        loop.add(request("a", range(8), max_tokens=12), request("b", range(10, 18), max_tokens=12))
        loop.run()
        stats = loop.scheduler.stats()
        assert stats.preemptions == 1
        assert (stats.recomputed_tokens < 8) == caching
        assert stats.scheduled_tokens == loop.runner.computed_tokens == 38 + stats.recomputed_tokens


def test_the_victim_is_who_loses_least():
    loop = Loop(config(num_blocks=12, max_num_seqs=3, max_model_len=48, enable_prefix_caching=False))
    loop.add(request("first", range(8), max_tokens=40))
    loop.add(request("small", range(20, 24), max_tokens=40))
    loop.add(request("large", range(30, 42), max_tokens=30))
    preempted = run_until_preempted(loop)
    assert [state.request_id for state in preempted] == ["small"]


def test_the_less_important_is_preempted_first():
    loop = Loop(config(num_blocks=12, max_num_seqs=3, max_model_len=48, enable_prefix_caching=False))
    loop.add(request("low", range(20, 32), max_tokens=30, priority=1))
    loop.add(request("a", range(8), max_tokens=40))
    loop.add(request("b", range(30, 34), max_tokens=40))
    preempted = run_until_preempted(loop)
    assert [state.request_id for state in preempted] == ["low"]


def test_the_first_in_rank_is_never_preempted_and_gets_a_token_in_every_step():
    loop = Loop(config(num_blocks=12, max_num_seqs=6, max_model_len=48, policy="fcfs"))
    loop.add(*(request(f"{i}", [i] * 3, max_tokens=40) for i in range(6)))
    while ("0", 0) not in loop.received or loop.received["0", 0].finish is None:
        outputs = loop.step()
        assert "0" in {output.request_id for output in outputs}
    assert loop.scheduler.stats().preemptions > 0
    loop.run()


def test_cached_leaves_go_before_anybody_is_preempted():
    loop = Loop(config(num_blocks=16))
    loop.add(request("old", range(40), max_tokens=1))
    loop.run()
    loop.add(request("a", range(50, 62), max_tokens=20), request("b", range(70, 82), max_tokens=16))
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.preemptions == 0 and stats.evictions > 0


def test_admission_keeps_preemptions_rare():
    asked = load(count=60, max_tokens=40, seed=3)
    loop = Loop(config(24, 16, max_num_seqs=32))
    loop.add(*asked)
    loop.run()
    stats = loop.scheduler.stats()
    sequences = sum(each.sampling.n for each in asked)
    assert 0 < stats.preemptions < sequences / 5
    assert stats.recomputed_tokens < stats.scheduled_tokens / 10
    expect_calm(asked, loop.received)


def test_a_preempted_sequence_keeps_the_token_of_the_step_in_flight():
    seen = 0
    for seed in range(30):
        asked = [request(f"{i}", [seed, i, 1, 1], max_tokens=20, seed=seed) for i in range(4)]
        loop = Loop(config(num_blocks=14, max_num_seqs=4, max_model_len=48, depth=2))
        loop.add(*asked)
        while loop.scheduler.has_work:
            loop.launch()
            flying = {row.seq for flight in loop.scheduler._in_flight for row in flight.rows}
            seen += any(seq.phase is Phase.PREEMPTED for seq in flying)
            if len(loop.results) == 2 or not loop.launch():
                loop.deliver()
        expect_calm(asked, loop.received)
    assert seen > 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("vocab", [3, 16])
def test_more_steps_in_flight_give_the_same_outputs(caching, vocab):
    model = FakeModel(vocab=vocab, bad_every=40)
    asked = load(count=10, seed=vocab)
    seen = []
    for depth in (1, 2, 3):
        loop = Loop(config(30, max_num_seqs=5, depth=depth, enable_prefix_caching=caching), model)
        loop.add(*asked)
        received = loop.run()
        expect_calm(asked, received, model=model)
        seen.append({key: (got.tokens, got.finish) for key, got in received.items()})
    assert seen[0] == seen[1] == seen[2]


def test_with_two_steps_in_flight_a_decode_is_scheduled_before_its_token_is_known():
    loop = Loop(config(depth=2))
    loop.add(request("a", [1, 2, 3], max_tokens=3))
    assert loop.launch().chunks[0].start == 0
    assert loop.launch().chunks[0].start == 3
    assert loop.launch() is None
    loop.deliver()
    assert loop.launch().chunks[0].start == 4
    loop.deliver()
    assert loop.launch() is None  # the third and last token is in flight already
    loop.deliver()
    assert loop.received["a", 0].finish is FinishReason.LENGTH and loop.launch() is None


def test_a_slot_is_reused_only_after_the_last_result_that_is_read_from_it():
    loop = Loop(config(depth=2, max_num_seqs=1, policy="fcfs"))
    loop.add(request("a", [1], max_tokens=50), request("b", [2], max_tokens=1))
    loop.launch()
    loop.launch()
    loop.abort("a")
    assert loop.scheduler.stats().blocks_active == 0
    assert loop.launch() is None
    loop.deliver()
    assert loop.launch() is None
    loop.deliver()
    step = loop.launch()
    assert (step.drop, step.admit[0].slot) == ((0,), 0)
    loop.run()
    assert loop.received["a", 0].finish is FinishReason.ABORT


def waiting(loop):
    loop.add(*(request(f"other{i}", [i], max_tokens=9) for i in range(4)))
    loop.step()
    loop.add(request("a", range(9)))


def in_its_prompt(loop):
    loop.add(request("a", range(100)))
    loop.step()


def decoding(loop):
    loop.add(request("a", range(9), max_tokens=9))
    for _ in range(3):
        loop.step()


def in_flight(loop):
    loop.add(request("a", range(9), max_tokens=9))
    loop.launch()


def sampling_many(loop):
    loop.add(request("a", range(9), max_tokens=9, n=6))
    for _ in range(3):
        loop.step()


def before_its_samples_started(loop):
    loop.add(request("a", range(100), max_tokens=9, n=3))
    loop.step()


def preempted(loop):
    loop.add(request("first", range(40, 52), max_tokens=60), request("a", range(9), max_tokens=60))
    run_until_preempted(loop)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "phase", [waiting, in_its_prompt, decoding, in_flight, sampling_many, before_its_samples_started, preempted]
)
def test_an_abort_frees_blocks_at_once_in_every_phase(phase, depth):
    loop = Loop(config(num_blocks=26, max_num_batched_tokens=32, max_model_len=104, depth=depth))
    phase(loop)
    count = sum(state.request_id == "a" for state in loop.scheduler.states())
    assert count
    outputs = loop.scheduler.abort("a")
    loop.take(outputs)
    assert [output.finish for output in outputs] == [FinishReason.ABORT] * count
    check_invariants(loop.scheduler)
    assert all(state.request_id != "a" for state in loop.scheduler.states())
    held = sum(state.blocks for state in loop.scheduler.states())
    assert loop.scheduler.stats().blocks_active == held
    assert loop.scheduler.abort("a") == () == loop.scheduler.abort("never there")
    loop.run()
    check_invariants(loop.scheduler)
    assert loop.scheduler.stats().blocks_active == 0
    assert len(loop.scheduler._roster.slots._free) == 4


def test_an_abort_storm_leaks_nothing():
    random_ = random.Random(9)
    loop = Loop(config(num_blocks=24, max_num_seqs=6, depth=2))
    for number in range(300):
        loop.add(request(f"{number}", [random_.randrange(3) for _ in range(random_.randrange(1, 20))], n=2))
        if random_.random() < 0.7:
            loop.abort(f"{random_.randrange(number + 1)}")
        if random_.random() < 0.5:
            loop.step()
    for number in range(300):
        loop.abort(f"{number}")
    loop.run()
    check_invariants(loop.scheduler)
    stats = loop.scheduler.stats()
    assert (stats.waiting, stats.running, stats.blocks_active) == (0, 0, 0)
    assert len(loop.scheduler._roster.queue) == 0


def test_the_first_in_rank_is_no_victim_though_it_would_lose_least():
    loop = Loop(config(num_blocks=12, max_num_seqs=3, max_model_len=48, enable_prefix_caching=False))
    loop.add(request("first", range(20, 24), max_tokens=40))
    loop.add(request("a", range(8), max_tokens=40))
    loop.add(request("b", range(30, 42), max_tokens=30))
    preempted = run_until_preempted(loop)
    assert [state.request_id for state in preempted] == ["a"]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_important_prompt_goes_on_in_every_step_though_decodes_eat_its_memory(depth):
    loop = Loop(config(num_blocks=10, max_num_seqs=2, max_num_batched_tokens=3, max_model_len=40, depth=depth))
    loop.add(request("low", [0], max_tokens=40, priority=1))
    loop.step()
    loop.add(request("long", range(10, 38), max_tokens=2))
    states = {}
    while "long" not in states or states["long"].slot < 0:
        loop.step()
        states = {state.request_id: state for state in loop.scheduler.states()}
    slot = states["long"].slot
    while ("long", 0) not in loop.received:
        loop.step()
        assert slot in {chunk.slot for chunk in loop.steps[-1].chunks}
    assert loop.scheduler.stats().preemptions > 0
    loop.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_twins_cached_block_above_blocks_in_use_can_still_be_had(depth):
    loop = Loop(config(num_blocks=8, max_model_len=64, depth=depth))
    loop.add(request("a", range(8), max_tokens=3), request("b", range(8), max_tokens=24, seed=2))
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    stats = loop.scheduler.stats()
    assert (stats.preemptions, stats.recomputed_tokens) == (0, 0)
    assert len(loop.received["b", 0].tokens) == 24
    loop.add(request("c", [*range(8), *loop.received["b", 0].tokens[:20]], max_tokens=1))
    assert loop.run()["c", 0].cached_tokens == 27  # what b kept for itself is known after all
