"""Steps as they are made: batching, budgets, chunks, ends, limits."""

import pytest

from llmctl.engine.request import FinishReason, TokenLogprobs
from llmctl.engine.schedule.scheduler import Scheduler
from llmctl.engine.schedule.sequence import Phase
from llmctl.engine.schedule.step import ChunkResult, StepResult
from llmctl.kernels.errors import CapacityError, UsageError

from .builders import config, request
from .fake_runner import FakeModel, Loop, calm_run


def chunks(step):
    return [(chunk.slot, chunk.start, chunk.count, chunk.logits_from) for chunk in step.chunks]


def test_a_finished_sequence_makes_room_for_the_next_in_the_very_next_step():
    loop = Loop(config(max_num_seqs=4))
    loop.add(*(request(name, [index], max_tokens=2 if name == "A" else 5) for index, name in enumerate("ABCDE")))
    loop.step()
    loop.step()  # A's second and last token
    assert loop.received["A", 0].finish is FinishReason.LENGTH
    assert {state.request_id: state.phase for state in loop.scheduler.states()} == {
        "B": Phase.RUNNING,
        "C": Phase.RUNNING,
        "D": Phase.RUNNING,
        "E": Phase.WAITING,
    }
    loop.step()
    first, second, third = loop.steps
    assert [admit.slot for admit in first.admit] == [0, 1, 2, 3]
    assert (second.drop, second.admit, len(second.chunks)) == ((), (), 4)
    assert (third.drop, [admit.slot for admit in third.admit]) == ((0,), [0])
    assert sorted(chunks(third)) == [(0, 0, 1, 0), (1, 2, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)]


def test_a_step_never_has_more_tokens_than_the_budget_and_decodes_go_on_beside_a_long_prompt():
    loop = Loop(config(num_blocks=64, max_num_batched_tokens=8, max_model_len=200))
    loop.add(request("short", [1], max_tokens=30))
    loop.step()
    loop.add(request("long", range(2, 72), max_tokens=2))
    for _ in range(10):
        loop.step()
        kinds = {chunk.slot: chunk.count for chunk in loop.steps[-1].chunks}
        assert kinds == {0: 1, 1: 7}
    assert loop.received["long", 0].tokens
    assert [step.chunks[1].logits_from for step in loop.steps[1:11]] == [7] * 9 + [6]
    loop.run()
    assert max(sum(chunk.count for chunk in step.chunks) for step in loop.steps) == 8


def test_a_short_prompt_passes_a_long_one_under_way_but_not_under_fcfs():
    for policy, expected in (("hybrid", 2), ("fcfs", 8)):
        loop = Loop(config(max_num_batched_tokens=16, policy=policy))
        loop.add(request("long", range(100, 220), max_tokens=2))
        loop.step()
        loop.add(request("short", [1, 2, 3], max_tokens=2))
        while ("short", 0) not in loop.received:
            loop.step()
        assert len(loop.steps) == expected
        if policy == "hybrid":
            assert {chunk.slot: chunk.count for chunk in loop.steps[-1].chunks} == {1: 3, 0: 13}


def test_a_long_prompt_keeps_half_of_the_budget_under_a_flood_of_short_ones():
    loop = Loop(config(max_num_batched_tokens=16, max_num_seqs=16))
    loop.add(request("long", range(100, 200), max_tokens=1))
    loop.step()
    for step in range(9):
        for name in range(6):
            loop.add(request(f"{step}.{name}", [step, name, 1, 1], max_tokens=1))
        loop.step()
        assert {chunk.slot: chunk.count for chunk in loop.steps[-1].chunks}[0] >= 8
    assert sum(got.finish is not None for got in loop.received.values()) >= 18


def test_admitted_tokens_are_int32_little_endian():
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1, 70000]))
    step = scheduler.schedule()
    assert step.admit[0].tokens == b"\x01\x00\x00\x00\x70\x11\x01\x00"
    assert step.admit[0].prompt_len == 2


def test_blocks_are_taken_as_tokens_come_and_not_for_max_tokens():
    model = FakeModel(vocab=6)
    loop = Loop(config(num_blocks=64, max_model_len=250), model)
    asked = request("a", range(5), max_tokens=200, stop_ids=(0,), seed=4)
    loop.add(asked)
    tokens, _ = calm_run(asked, 0, 250, model)
    most = 0
    while loop.scheduler.has_work:
        loop.step()
        most = max(most, loop.scheduler.stats().blocks_active)
    assert len(tokens) < 40
    assert most <= -(-(5 + len(tokens)) // 4)


def test_the_stop_token_ends_the_sequence_and_is_part_of_its_tokens():
    model = FakeModel(vocab=4)
    asked = request("a", [1, 2], max_tokens=60, stop_ids=(3,))
    loop = Loop(config(), model)
    loop.add(asked)
    got = loop.run()["a", 0]
    assert got.finish is FinishReason.STOP and got.tokens[-1] == 3 and 3 not in got.tokens[:-1]


def test_min_tokens_bans_the_stop_tokens_until_then():
    loop = Loop(config(), FakeModel(vocab=3))
    loop.add(request("a", [1, 2], max_tokens=60, stop_ids=(0, 1), min_tokens=9))
    got = loop.run()["a", 0]
    assert got.finish is FinishReason.STOP
    assert got.tokens[:9] == [2] * 9


def test_the_context_ends_a_sequence_with_length():
    loop = Loop(config(max_model_len=10))
    loop.add(request("a", range(6), max_tokens=100))
    got = loop.run()["a", 0]
    assert (len(got.tokens), got.finish) == (4, FinishReason.LENGTH)
    assert loop.runner.computed_tokens == 9  # the last token's KV is never needed


@pytest.mark.parametrize("n", [1, 3])
def test_max_tokens_zero_computes_the_prompt_and_samples_nothing(n):
    loop = Loop(config())
    loop.add(request("a", range(6), max_tokens=0, n=n))
    received = loop.run()
    assert [(got.tokens, got.finish) for got in received.values()] == [([], FinishReason.LENGTH)] * n
    assert all(chunk.logits_from == chunk.count for step in loop.steps for chunk in step.chunks)


def test_a_row_that_is_not_finite_ends_its_sequence_only_and_leaves_nothing_in_the_cache():
    model = FakeModel(bad_every=5)
    loop = Loop(config(num_blocks=64, max_num_seqs=8), model)
    asked = [request(f"{i}", [i, *range(9)], max_tokens=3) for i in range(8)]
    loop.add(*asked)
    received = loop.run()
    ends = {received[each.id, 0].finish for each in asked}
    assert ends == {FinishReason.ERROR, FinishReason.LENGTH}
    for each in asked:
        got = received[each.id, 0]
        assert (got.tokens, got.finish) == calm_run(each, 0, 128, model)
        known = loop.scheduler._memory.tree.find("", each.prompt, 100)
        if got.finish is FinishReason.ERROR:
            assert "NaN or Inf at position" in got.error
            assert not known.nodes and known.partial is None
        else:
            assert len(known.nodes) == 2


def test_logprobs_are_handed_on_with_their_tokens():
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1], max_tokens=1, logprobs=2))
    step = scheduler.schedule()
    result = ChunkResult(0, (7,), True, (-0.5,), ((7, 3),), ((-0.5, -1.0),))
    (output,) = scheduler.update(StepResult(step.index, (result,)))
    assert output.logprobs == (TokenLogprobs(-0.5, (7, 3), (-0.5, -1.0)),)


def test_what_can_never_run_is_refused_with_numbers_and_a_hint():
    scheduler = Scheduler(config(num_blocks=8, max_model_len=20))
    with pytest.raises(CapacityError) as error:
        scheduler.add(request("a", range(20)))
    assert "20 tokens" in error.value.message and "--max-model-len" in error.value.hint
    scheduler.add(request("b", range(19)))
    scheduler.add(request("b0", range(20), max_tokens=0))
    scheduler = Scheduler(config(num_blocks=2, max_model_len=20))
    with pytest.raises(CapacityError) as error:
        scheduler.add(request("a", range(8)))
    assert "3 KV blocks of 4 tokens, there are 2" in error.value.message
    assert not scheduler.has_work


def test_an_id_in_use_and_an_empty_prompt_are_usage_errors():
    scheduler = Scheduler(config())
    scheduler.add(request("a", [1]))
    with pytest.raises(UsageError, match="in use"):
        scheduler.add(request("a", [1]))
    with pytest.raises(UsageError, match="no tokens"):
        scheduler.add(request("b", []))


def test_an_id_can_be_used_again_once_its_request_has_ended():
    loop = Loop(config())
    loop.add(request("a", [1]))
    loop.run()
    loop.received.clear()
    loop.add(request("a", [1]))
    assert loop.run()["a", 0].finish is FinishReason.LENGTH


def test_nothing_to_do_is_no_step():
    loop = Loop(config())
    assert loop.scheduler.schedule() is None and not loop.scheduler.has_work
    loop.add(request("a", [1], max_tokens=1))
    assert loop.launch() is not None
    assert loop.launch() is None and loop.scheduler.has_work
    loop.deliver()
    assert loop.launch() is None and not loop.scheduler.has_work


def test_more_sequences_than_budget_tokens_do_not_starve_each_other():
    loop = Loop(config(max_num_seqs=8, max_num_batched_tokens=3))
    loop.add(*(request(f"{i}", [i], max_tokens=20) for i in range(8)))
    loop.run()
    assert max(len(step.chunks) for step in loop.steps) == 3


def test_output_names_the_engine_start_and_the_first_token_index():
    loop = Loop(config(epoch=7))
    loop.add(request("a", [1], max_tokens=3))
    outputs = [loop.step()[0] for _ in range(3)]
    assert [(output.epoch, output.first, len(output.tokens)) for output in outputs] == [(7, 0, 1), (7, 1, 1), (7, 2, 1)]


def test_memory_promised_to_a_prompt_is_promised_once():
    loop = Loop(config(num_blocks=13, max_num_batched_tokens=26, max_model_len=52, policy="fcfs"))
    loop.add(request("a", range(40), max_tokens=1), request("b", range(50, 58), max_tokens=1))
    loop.step()
    loop.step()
    assert [(chunk.slot, chunk.count) for chunk in loop.steps[1].chunks] == [(0, 14), (1, 8)]
