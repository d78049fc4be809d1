"""Every sampler draws from the distribution that was asked for, and gives the same bits whatever happens around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmctl.kernels import _cpu, registry
from llmctl.kernels.ops import MAX_TOP, SAMPLE_ROW, SampleArgs
from llmctl.kernels.reference.philox import gumbel, philox4x32

ENTRIES = [entry for entry in registry.entries(include_reference=True) if entry.op == "sample"]
DEFAULTS = {
    "logprobs": -1,
    "temperature": 1.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}


@pytest.fixture(params=ENTRIES, ids=lambda entry: entry.bits)
def entry(request):
    return request.param


class Draw:
    """Sampled rows and the arrays that they were sampled from. `logits` is [rows, vocab] or one row for all."""

    def __init__(self, entry, logits, rows=None, *, tokens=(), prompt_len=0, bias=None, **params):
        logits = np.atleast_2d(np.asarray(logits, np.float32))
        count = logits.shape[0] if rows is None else rows
        vocab = logits.shape[1]
        self.padded = np.full((count, -(-vocab // 16) * 16), np.nan, np.float32)  # the padding is scratch
        self.padded[:, :vocab] = logits
        self.tokens = np.asarray(tokens, np.int32)
        self.bias_ids = np.asarray(list(bias or {}), np.int32)
        self.bias_values = np.asarray(list((bias or {}).values()), np.float32)
        records = np.zeros(count, SAMPLE_ROW)
        records["tokens"] = self.tokens.ctypes.data
        records["length"], records["prompt_len"] = len(self.tokens), prompt_len
        records["bias_ids"], records["bias_values"] = self.bias_ids.ctypes.data, self.bias_values.ctypes.data
        records["num_bias"] = len(self.bias_ids)
        for name, value in (DEFAULTS | {"seed": np.arange(count)} | params).items():
            records[name] = value
        self.args = SampleArgs(
            self.padded,
            vocab,
            records,
            np.zeros(count, np.int32),
            np.zeros(count, np.float32),
            np.zeros((count, MAX_TOP), np.int32),
            np.zeros((count, MAX_TOP), np.float32),
            np.zeros(count, np.uint8),
        )
        before = self.padded.copy()
        refusal = entry.accepts(self.args)
        assert refusal is None, refusal
        self.run = entry.build(self.args)
        self.run(count)
        assert self.padded.tobytes() == before.tobytes(), "logits were changed"

    @property
    def token(self):
        return self.args.token

    def outputs(self):
        a = self.args
        return [x.tobytes() for x in (a.token, a.logprob, a.top_ids, a.top_logprobs, a.finite)]


def random_logits(vocab: int, seed: int, spread: float = 2.0, rows: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def test_philox_gives_the_known_answers():
    assert [hex(w) for w in philox4x32(np.zeros((1, 4), np.uint32), (0, 0))[0]] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]
    ones = np.full((1, 4), 0xFFFFFFFF, np.uint32)
    assert [hex(w) for w in philox4x32(ones, (0xFFFFFFFF, 0xFFFFFFFF))[0]] == [
        "0x408f276d",
        "0x41c83b0e",
        "0xa20bc7c6",
        "0x6d5451fd",
    ]


def test_noise_is_finite_and_precise_at_both_ends():
    ends = gumbel(np.array([0, 0xFFFFFFFF], np.uint32))
    assert np.allclose(ends, [-np.log(33 * np.log(2)), 33 * np.log(2)], rtol=1e-12)


def expected_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by its definition, in float64."""
    scores = logits.astype(np.float64) / temperature
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if top_k:
        order = order[:top_k]
    probability = np.exp(scores[order] - scores[order[0]])
    probability /= probability.sum()
    count = int(np.searchsorted(np.cumsum(probability), np.float32(top_p))) + 1 if top_p < 1 else len(order)
    kept = [i for i, p in zip(order[:count], probability[:count]) if p >= min_p * probability[0]]
    result = np.zeros(len(scores))
    result[kept] = np.exp(scores[kept] - scores[order[0]])
    return result / result.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_asked_for(entry, params):
    logits = random_logits(61, seed=5)[0]
    expected = expected_distribution(logits, **params)
    assert_drawn_from(expected, Draw(entry, logits, 6000, **params).token)


def assert_drawn_from(expected, tokens):
    """A chi-square test whose draws are seeded, so that it always ends alike."""
    draws = len(tokens)
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4, (chi_square, freedom)


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.5},
        {
            "repetition_penalty": 0.8,
            "presence_penalty": -0.4,
            "frequency_penalty": 0.3,
            "temperature": 1.3,
            "top_k": 30,
        },
    ],
    ids=str,
)
def test_penalties_shape_the_distribution_as_they_are_defined(entry, penalties):
    logits = random_logits(61, seed=5)[0]
    tokens, prompt_len, bias = [1, 2, 2, 40, 1, 7, 7, 7], 3, {9: 1.5, 12: -2.0}
    scores = logits.astype(np.float64)
    given = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0} | penalties
    for token in set(tokens):
        factor = given["repetition_penalty"]
        scores[token] *= 1 / factor if scores[token] > 0 else factor
    for token in tokens[prompt_len:]:
        scores[token] -= given["frequency_penalty"]
    for token in set(tokens[prompt_len:]):
        scores[token] -= given["presence_penalty"]
    for token, value in bias.items():
        scores[token] += value
    truncation = {name: value for name, value in penalties.items() if name in ("temperature", "top_k")}
    expected = expected_distribution(scores, **truncation)
    draw = Draw(entry, logits, 6000, tokens=tokens, prompt_len=prompt_len, bias=bias, **penalties)
    assert_drawn_from(expected, draw.token)


def test_positions_are_as_independent_as_seeds(entry):
    logits = np.zeros(8, np.float32)
    counts = np.zeros((8, 8))
    previous = None
    for position in range(400):
        token = int(Draw(entry, logits, 1, tokens=np.zeros(position, np.int32), seed=9).token[0])
        if previous is not None:
            counts[previous, token] += 1
        previous = token
    expected = 399 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(126)


@pytest.mark.parametrize("vocab", [5, 16, 4099, 49152])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {},
        {"temperature": 0.7, "top_k": 40},
        {"top_k": 1000},
        {"top_p": 0.95},
        {"top_p": 0.3, "temperature": 1.7},
        {"top_k": 3000, "top_p": 0.99, "min_p": 0.001},
        {"min_p": 0.05},
    ],
    ids=str,
)
def test_every_sampler_takes_the_token_of_the_reference(entry, vocab, params):
    logits = random_logits(vocab, seed=vocab, spread=3.0, rows=6)
    given = {"tokens": [1, 2, 3, 1, 4], "prompt_len": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    given |= {"presence_penalty": 0.2, "bias": {0: 1.5, 2: -3.0}, "seed": 2**63 + 7 + np.arange(6, dtype=np.uint64)}
    given |= {"logprobs": 5} | params
    ours, reference = Draw(entry, logits, **given), Draw(ENTRIES[-1], logits, **given)
    assert ours.token.tolist() == reference.token.tolist()
    assert ours.args.top_ids.tolist() == reference.args.top_ids.tolist()
    assert np.allclose(ours.args.logprob, reference.args.logprob, atol=1e-5)


@pytest.mark.parametrize("params", [{"top_k": 700}, {"top_p": 0.9}, {"top_k": 700, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("shape", ["equal", "two values", "steps", "one far below", "one far above", "wide"])
def test_hard_rows_are_truncated_like_the_reference(entry, shape, params):
    logits = random_logits(2000, seed=1, spread=0.01)
    if shape == "equal":
        logits[:] = 0.25
    elif shape == "two values":
        logits[:] = np.arange(2000) % 2
    elif shape == "steps":
        logits[:] = np.arange(2000) // 100
    elif shape == "one far below":
        logits[0, 7] = -3e4
    elif shape == "one far above":
        logits[0, 7] = 40
    else:
        logits *= 1e6
    rows = 24
    ours, reference = Draw(entry, logits, rows, **params), Draw(ENTRIES[-1], logits, rows, **params)
    assert ours.token.tolist() == reference.token.tolist()


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(entry):
    logits = random_logits(3000, seed=2)
    first, again = (Draw(entry, logits, 32, logprobs=3) for _ in range(2))
    assert first.outputs() == again.outputs()
    assert first.token.tolist() != Draw(entry, logits, 32, seed=1000 + np.arange(32)).token.tolist()


def test_a_row_gives_the_same_bits_alone_and_in_company(entry):
    logits = random_logits(1003, seed=3, rows=9)
    together = Draw(entry, logits, seed=77, logprobs=4, top_p=0.9, tokens=[4, 5], repetition_penalty=1.3)
    for row in range(9):
        alone = Draw(entry, logits[row], seed=77, logprobs=4, top_p=0.9, tokens=[4, 5], repetition_penalty=1.3)
        assert alone.token[0] == together.token[row]
        assert alone.args.logprob[0].tobytes() == together.args.logprob[row].tobytes()
        assert alone.args.top_logprobs[0].tobytes() == together.args.top_logprobs[row].tobytes()


def test_the_number_of_threads_changes_no_bit():
    logits = random_logits(2003, seed=12, rows=13)
    native = [entry for entry in ENTRIES if entry.bits.startswith("cpu-")]
    before = _cpu.threads()
    for entry in native:
        outputs = []
        for threads in (1, 2, 5):
            _cpu.set_threads(threads)
            outputs.append(
                Draw(entry, logits, logprobs=3, top_p=0.9, top_k=500, tokens=[1, 1], presence_penalty=1).outputs()
            )
        assert outputs[0] == outputs[1] == outputs[2]
    _cpu.set_threads(before)


def test_sampling_twice_with_one_sampler_leaves_nothing_behind(entry):
    draw = Draw(entry, random_logits(500, seed=4, rows=3), tokens=[7, 7, 8], prompt_len=1, frequency_penalty=1.5)
    first = draw.outputs()
    draw.run(3)
    assert draw.outputs() == first


def test_ties_go_to_the_lower_id(entry):
    logits = np.zeros(40, np.float32)
    logits[[9, 21, 33]] = 5
    greedy = Draw(entry, logits, temperature=0, logprobs=4)
    assert greedy.token[0] == 9
    assert greedy.args.top_ids[0, :4].tolist() == [9, 21, 33, 0]
    assert set(Draw(entry, logits, 200, top_k=2).token.tolist()) == {9, 21}
    assert set(Draw(entry, logits, 200, top_p=0.5).token.tolist()) == {9, 21}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 34])
def test_a_row_that_is_not_finite_is_reported_and_its_neighbours_are_not_touched(entry, bad, place):
    logits = random_logits(35, seed=6, rows=3)
    clean = Draw(entry, logits, logprobs=2)
    logits[1, place] = bad
    draw = Draw(entry, logits, logprobs=2)
    assert draw.args.finite.tolist() == [1, 0, 1]
    assert draw.token.tolist() == [clean.token[0], -1, clean.token[2]]


def test_logprobs_are_those_of_the_raw_logits(entry):
    logits = random_logits(49155, seed=7, spread=4.0, rows=2)
    draw = Draw(entry, logits, logprobs=MAX_TOP, temperature=0.3, top_k=5, bias={3: 2.0})
    expected = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    top = torch.topk(expected, MAX_TOP, dim=-1)
    assert draw.args.top_ids.tolist() == top.indices.tolist()
    assert np.allclose(draw.args.top_logprobs, top.values.numpy(), atol=1e-5)
    for row in range(2):
        assert draw.args.logprob[row] == pytest.approx(expected[row, draw.token[row]].item(), abs=1e-5)


def test_unused_top_entries_are_marked(entry):
    draw = Draw(entry, random_logits(3, seed=8), logprobs=6)
    assert (draw.args.top_ids[0, 3:] == -1).all() and np.isneginf(draw.args.top_logprobs[0, 3:]).all()


def test_penalties_count_what_they_should(entry):
    logits = np.array([2.0, 1.9, -1.0, 0.0, 0.0], np.float32)
    base = {"temperature": 0, "tokens": [0, 3, 3, 1], "prompt_len": 1}
    assert Draw(entry, logits, **base).token[0] == 0
    assert Draw(entry, logits, **base, presence_penalty=-0.2).token[0] == 1  # the prompt's token 0 is not output
    assert Draw(entry, logits, **base, frequency_penalty=-0.96).token[0] == 1
    assert Draw(entry, logits, **base, frequency_penalty=-2.0).token[0] == 3  # 2 x 2.0 beats 1.9 + 2.0
    assert (
        Draw(entry, [2.0, 1.9, 1.8], temperature=0, tokens=[0, 1], prompt_len=1, repetition_penalty=1.2).token[0] == 2
    )
    # a negative logit is multiplied, so that it too becomes less likely
    assert Draw(entry, [-1.0, -1.1], temperature=0, tokens=[0], prompt_len=1, repetition_penalty=1.2).token[0] == 1


def test_a_ban_holds_and_a_bias_moves_the_choice(entry):
    logits = random_logits(50, seed=9)[0]
    best = int(logits.argmax())
    assert Draw(entry, logits, temperature=0, bias={best: -np.inf}).token[0] != best
    assert best not in Draw(entry, logits, 300, bias={best: -np.inf}, top_p=0.9).token
    assert Draw(entry, logits, temperature=0, bias={13: 100.0}).token[0] == 13


def test_when_every_token_is_banned_the_lowest_is_taken(entry):
    logits = random_logits(6, seed=10)
    bias = dict.fromkeys(range(6), -np.inf)
    assert Draw(entry, logits, bias=bias, top_p=0.5, top_k=3).token[0] == 0
    assert Draw(entry, logits, bias=bias, temperature=0).token[0] == 0


def test_tokens_outside_the_vocabulary_are_passed_over(entry):
    draw = Draw(entry, random_logits(20, seed=11), tokens=[25, -1, 3], repetition_penalty=1.5, bias={21: 5.0})
    assert 0 <= draw.token[0] < 20
