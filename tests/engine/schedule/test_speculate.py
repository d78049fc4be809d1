"""Drafts in steps: who gets them, what rejected ones leave behind, and that nothing else changes by them."""

import random
from itertools import pairwise

import pytest

from llmctl.engine.config import NO_SPECULATION, SpeculativeConfig
from llmctl.engine.request import FinishReason
from llmctl.engine.schedule.draft_length import MAX_PAUSE
from llmctl.engine.schedule.step import ChunkResult, StepResult

from .builders import check_invariants, config, request
from .fake_runner import FakeModel, Loop, calm_run

THREE = SpeculativeConfig(num_speculative_tokens=3)
ROUND = [1, 2, 3, 4, 5, 6, 7, 8] * 2  # a prompt that runs in a circle


class Script(FakeModel):
    """Says what it is told: token i of the answer is `answer[i]`; histories in `bad` give NaN."""

    def __init__(self, prompt, answer, bad=()):
        super().__init__()
        history, said = 0x5EED, {}
        for token in prompt:
            history = hash((history, token))
        for place, token in enumerate(answer):
            said[history] = token
            if place in bad:
                said[history] = None
                break
            history = hash((history, token))
        object.__setattr__(self, "said", said)

    def finite(self, history):
        return self.said.get(history, 0) is not None

    def sample(self, history, last, seed, banned=()):
        return self.said.get(history, 99)


def loop_of(prompt, answer, bad=(), speculation=THREE, max_tokens=None, stop_ids=(), **limits):
    loop = Loop(config(speculation=speculation, **limits), Script(prompt, answer, bad))
    loop.add(request("a", prompt, max_tokens=max_tokens or len(answer), stop_ids=stop_ids))
    return loop


def drafts(loop):
    return [chunk.drafts for step in loop.steps for chunk in step.chunks]


def circle(count):
    return [1 + place % 8 for place in range(count)]


def test_drafts_that_stand_grow_and_give_several_tokens_a_step():
    loop = loop_of(ROUND, circle(20))
    assert loop.run()["a", 0].tokens == circle(20)
    assert [len(draft) for draft in drafts(loop)] == [2, 3, 3, 3, 3, 0]
    stats = loop.scheduler.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (5, 14, 14)


def test_rejected_drafts_shrink_and_pause_ever_longer():
    answer = [value for place in range(60) for value in (1, 2, 50 + place)]
    loop = loop_of([9, 1, 2, 10, 1, 2], answer, max_model_len=250)
    assert loop.run()["a", 0].tokens == answer
    made = [bool(draft) for draft in drafts(loop)]
    assert loop.scheduler.stats().accepted_tokens == 0
    assert 4 <= sum(made) <= 10
    tries = [place for place, draft in enumerate(made) if draft]
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps == sorted(gaps) and max(gaps) <= MAX_PAUSE + 3


def test_a_draft_that_stands_in_part_is_followed_by_what_the_model_says():
    answer = [1, 2, 3, 40, 41, 42, 43]
    loop = loop_of(ROUND, answer)
    assert loop.run()["a", 0].tokens == answer


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_an_answer_never_gets_longer_than_max_tokens(max_tokens):
    loop = loop_of(ROUND, circle(20), max_tokens=max_tokens)
    got = loop.run()["a", 0]
    assert (got.tokens, got.finish) == (circle(max_tokens), FinishReason.LENGTH)
    assert loop.runner.computed_tokens == len(ROUND) + max_tokens - 1


def test_drafts_end_with_the_context():
    loop = loop_of(ROUND, circle(20), max_model_len=22)
    got = loop.run()["a", 0]
    assert (got.tokens, got.finish) == (circle(6), FinishReason.LENGTH)


def test_a_stop_token_among_drafts_that_stand_ends_the_answer_there():
    loop = loop_of(ROUND, circle(20), stop_ids=(5,))
    got = loop.run()["a", 0]
    assert (got.tokens, got.finish) == ([1, 2, 3, 4, 5], FinishReason.STOP)
    assert any(5 in draft and draft[-1] != 5 for draft in drafts(loop))


def test_logprobs_after_a_stop_token_among_the_drafts_are_dropped():
    loop = Loop(config(speculation=THREE))
    loop.add(request("a", ROUND, max_tokens=9, stop_ids=(2,), logprobs=0))
    step = loop.scheduler.schedule()
    assert step.chunks[0].drafts == (1, 2)
    result = ChunkResult(0, (1, 2, 3), True, (-1.0, -2.0, -3.0), ((), (), ()), ((), (), ()))
    (output,) = loop.scheduler.update(StepResult(step.index, (result,)))
    assert output.tokens == (1, 2) and [entry.logprob for entry in output.logprobs] == [-1.0, -2.0]
    assert output.finish is FinishReason.STOP


def test_a_value_that_is_not_finite_beside_drafts_is_computed_again_without_them():
    loop = loop_of(ROUND, circle(20), bad=(6,))
    got = loop.run()["a", 0]
    assert (got.tokens, got.finish) == (circle(6), FinishReason.ERROR)
    assert f"at position {len(ROUND) + 5}" in got.error
    assert drafts(loop)[-2] and not drafts(loop)[-1]


def test_only_verified_tokens_are_found_in_the_cache_again():
    answer = [1, 2, 3, 40, 41, 42, 43, 44]
    loop = loop_of(ROUND, answer, block_size=2)
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    true = [*ROUND, *answer]
    assert len(loop.scheduler._memory.tree.find("", true, 99).nodes) == (len(true) - 1) // 2
    assert len(loop.scheduler._memory.tree.find("", [*ROUND, 1, 2, 3, 4, 5], 99).nodes) == len(ROUND) // 2 + 1


def test_company_leaves_fewer_drafts_and_then_none():
    for company, most in ((1, 3), (2, 2), (3, 1), (4, 0)):
        loop = Loop(config(num_blocks=200, max_num_seqs=8, speculation=THREE), FakeModel(repeats=8))
        loop.add(*(request(f"{name}", [*ROUND, name], max_tokens=40) for name in range(company)))
        loop.run()
        full = [step for step in loop.steps[1:] if len(step.chunks) == company]
        assert max(len(chunk.drafts) for step in full for chunk in step.chunks) == most
        assert all(
            sum(1 + len(c.drafts) for c in step.chunks) <= 4 for step in full if any(c.drafts for c in step.chunks)
        )


def test_drafts_take_only_the_tokens_that_a_prompt_leaves():
    loop = loop_of(ROUND, circle(60), max_num_batched_tokens=16, max_tokens=60)
    loop.step()
    loop.add(request("b", range(100, 140), max_tokens=1))
    loop.step()
    (decode, prompt) = loop.steps[-1].chunks
    assert (decode.count, decode.drafts, prompt.count) == (1, (), 15)


def test_drafts_take_no_block_that_a_running_sequence_may_need_next():
    loop = loop_of(ROUND, circle(60), num_blocks=6, max_tokens=8)  # four for the prompt, two more for the answer
    loop.launch()
    assert loop.steps[0].chunks[0].drafts == (1, 2) and loop.scheduler.stats().blocks_active == 5
    tight = loop_of(ROUND, circle(60), num_blocks=5, max_tokens=4)
    tight.launch()
    assert tight.steps[0].chunks[0].drafts == () and tight.scheduler.stats().blocks_active == 4


@pytest.mark.parametrize("depth", [2, 3])
def test_a_sequence_that_repeats_nothing_is_pipelined_and_one_that_does_waits_for_its_drafts(depth):
    plain = loop_of(list(range(20, 30)), list(range(40, 60)), depth=depth)
    plain.launch()
    assert plain.launch() is not None
    loop = loop_of(ROUND, circle(20), depth=depth)
    assert loop.launch().chunks[0].drafts
    assert loop.launch() is None
    loop.deliver()
    assert loop.launch().chunks[0].drafts
    assert loop.run()["a", 0].tokens == circle(20)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_while_drafts_are_verified_frees_everything(depth):
    loop = loop_of(ROUND, circle(20), depth=depth)
    loop.step()
    assert loop.launch().chunks[0].drafts
    loop.abort("a")
    check_invariants(loop.scheduler)
    loop.run()
    stats = loop.scheduler.stats()
    assert (stats.blocks_active, len(loop.scheduler._roster.slots._free)) == (0, 4)
    loop.scheduler.add(request("b", [*ROUND, 1, 2, 3, 9], max_tokens=1))
    loop.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_speculation_changes_no_token_of_samples_under_preemption(depth, seed):
    model = FakeModel(vocab=8, repeats=7)
    asked = [request(f"{i}", [i, *ROUND[: i + 4]], max_tokens=30, n=1 + i % 2, seed=seed + i) for i in range(4)]
    results = []
    for speculation in (NO_SPECULATION, SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_min=1)):
        loop = Loop(config(num_blocks=14, max_num_seqs=5, depth=depth, speculation=speculation), model)
        loop.add(*asked)
        received = loop.run()
        results.append(received)
        for each in asked:
            for index in range(each.sampling.n):
                got = received[each.id, index]
                assert (got.tokens, got.finish) == calm_run(each, index, 56, model)
    assert loop.scheduler.stats().accepted_tokens > 0
    assert results[0] == results[1]


class Guesser:
    """Says anything: any number of tokens up to what is wanted, in any step."""

    cost = 0.2
    seconds = 0.0

    def __init__(self, seed, vocab):
        self.rng, self.vocab = random.Random(seed), vocab
        self.asked = self.forgotten = 0

    def foresees(self, seq):
        return self.rng.random() < 0.8

    def propose(self, wanted):
        self.asked += len(wanted)
        for seq, count in wanted:
            assert count > 0 and seq.scheduled + count <= min(seq.goal, 4 * len(seq.blocks))
        return [
            tuple(self.rng.randrange(self.vocab) for _ in range(self.rng.randrange(count + 1))) for _, count in wanted
        ]

    def forget(self, seq):
        self.forgotten += 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_whoever_guesses_and_whatever_changes_no_token(depth, seed):
    model, guesser = FakeModel(vocab=2), Guesser(seed, 2)
    asked = [request(f"{i}", [i, *ROUND[: i + 4]], max_tokens=30, n=1 + i % 2, seed=seed + i) for i in range(5)]
    speculation = SpeculativeConfig(
        method="draft_model", model="any", num_speculative_tokens=4, disable_by_batch_size=5
    )
    loop = Loop(config(num_blocks=14, max_num_seqs=5, depth=depth, speculation=speculation), model, guesser)
    loop.add(*asked)
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    for each in asked:
        for index in range(each.sampling.n):
            got = loop.received[each.id, index]
            assert (got.tokens, got.finish) == calm_run(each, index, 56, model)
    stats = loop.scheduler.stats()
    assert stats.draft_tokens > stats.accepted_tokens == sum(stats.accepted_per_position) > 0
    assert stats.preemptions > 0 and guesser.asked > stats.drafts and guesser.forgotten == 7


def test_every_sequence_has_its_full_draft_where_a_draft_model_may_serve_so_many():
    speculation = SpeculativeConfig(method="draft_model", model="any", num_speculative_tokens=3)
    for running, most in ((1, 3), (4, 3), (5, 0)):
        model = FakeModel(repeats=8)
        guesser = Guesser(0, 8)
        guesser.foresees = lambda seq: True
        guesser.propose = lambda wanted: [(1,) * count for _, count in wanted]
        loop = Loop(config(num_blocks=200, max_num_seqs=8, speculation=speculation), model, guesser)
        loop.add(*(request(f"{i}", [*ROUND, i], max_tokens=20) for i in range(running)))
        while loop.scheduler.has_work:
            loop.step()
        full = [step for step in loop.steps if len(step.chunks) == running]
        widest = max(min(len(chunk.drafts) for chunk in step.chunks) for step in full)
        assert widest == min(most, 2), "drafts begin with two tokens and these never stand"


def test_tenants_are_charged_for_tokens_that_stood_and_not_for_drafts():
    served = []
    for speculation in (NO_SPECULATION, THREE):
        loop = loop_of(ROUND, [1, 2, 3, 4, 30, 31, 32, 33], speculation=speculation)
        total = 0
        account = loop.scheduler._roster.queue.served

        def count(tenant, tokens, account=account):
            nonlocal total
            total += tokens
            account(tenant, tokens)

        loop.scheduler._roster.queue.served = count
        loop.run()
        served.append(total)
        assert loop.scheduler.stats().recomputed_tokens == 0
    assert served[0] == served[1]
