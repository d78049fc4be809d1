import itertools

import pytest

from llmctl.engine.request import Request, SamplingParams
from llmctl.engine.schedule.blocks import IllegalTransition
from llmctl.engine.schedule.sequence import Phase, Sequence, mix_seed, slot_sampling

from .builders import request

LEGAL = {
    (Phase.WAITING, Phase.RUNNING),
    (Phase.WAITING, Phase.FINISHED),
    (Phase.RUNNING, Phase.PREEMPTED),
    (Phase.RUNNING, Phase.FINISHED),
    (Phase.PREEMPTED, Phase.RUNNING),
    (Phase.PREEMPTED, Phase.FINISHED),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Phase, Phase)))
def test_only_the_legal_phase_changes_are_possible(before, after):
    seq = Sequence(request("a", [1]), 0, 0, 100)
    seq.phase = before
    if (before, after) in LEGAL:
        seq.move(after, 7)
        assert seq.phase is after and seq.trace == [(Phase.WAITING, 0), (after, 7)]
    else:
        with pytest.raises(IllegalTransition, match="cannot go from"):
            seq.move(after, 7)


def test_mix_seed_is_splitmix64_and_keeps_seeds_and_samples_apart():
    assert mix_seed(0, 0) == 0xA706DD2F4D197E6F  # splitmix64(0xE220A8397B1DCDAF)
    seeds = {mix_seed(seed, index) for seed in range(-50, 50) for index in range(128)}
    assert len(seeds) == 100 * 128
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert mix_seed(-1, 3) == mix_seed((1 << 64) - 1, 3)


def test_sampling_is_resolved_for_one_sequence():
    asked = Request(
        id="a",
        prompt=(1,),
        sampling=SamplingParams(top_k=-1, logit_bias={7: 1.5, 3: -2.0}, min_tokens=2, logprobs=None),
        seed=5,
        stop_ids=(9, 8),
        max_tokens=4,
    )
    slot = slot_sampling(asked, 2)
    assert slot.seed == mix_seed(5, 2)
    assert (slot.top_k, slot.logprobs) == (0, -1)
    assert (slot.bias_ids, slot.bias_values) == ((3, 7), (-2.0, 1.5))
    assert (slot.banned_until, slot.banned_ids) == (2, (9, 8))


def test_without_min_tokens_nothing_is_banned():
    slot = slot_sampling(request("a", [1], stop_ids=(9,)), 0)
    assert (slot.banned_until, slot.banned_ids) == (0, ())
