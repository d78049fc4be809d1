"""A trial of a model at load: does a prompt give the same logits however it is computed?

Our own decoder keeps that promise by construction. For modules of others it is tried: a short prompt in one chunk,
token by token, and as parts beside another sequence, compared bit for bit. A model whose results differ by more than
rounding keeps state besides attention's, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...kernels.errors import UnsupportedModel
from ...kernels.ops import F32Array
from ..plan import Plan
from ..schedule.step import Admit, Chunk, SlotSampling, Step, TableDelta
from .runner import Runner

TOKENS = 12
ROUNDING = 0.05  # of the largest logit: more than the rounding of a half-precision cache can do

_GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, -1)
_Part = tuple[int, int, int]  # slot, first position, count


@dataclass(frozen=True, slots=True)
class Trial:
    """Whether all ways gave the same bits, how many there were, and if not, what was found."""

    same: bool
    ways: int
    finding: str = ""


def try_bits(runner: Runner, plan: Plan, vocab_size: int) -> Trial:
    """The trial's result; UnsupportedModel if the ways differ by more than rounding.

    The runner must not have run anything. Slots 0 and 1 are used and freed again.
    """
    count = min(TOKENS, plan.max_num_batched_tokens, plan.max_model_len - 1)
    if count < 2:
        return Trial(False, 1, "steps of one token leave nothing to compare")
    ways = {"token by token": [[(0, place, 1)] for place in range(count)]}
    blocks = -(-count // plan.block_size)
    if plan.max_num_seqs > 1 and plan.num_blocks >= 2 * blocks:
        half = count // 2
        ways["beside another sequence"] = [[(1, 0, half), (0, 0, half)], [(0, half, count - half), (1, half, 1)]]
    expected = _last_logits(runner, [[(0, 0, count)]], count, blocks, vocab_size)
    finding = ""
    for way, steps in ways.items():
        logits = _last_logits(runner, steps, count, blocks, vocab_size)
        difference, largest = float(np.abs(logits - expected).max()), float(np.abs(expected).max())
        if not difference <= ROUNDING * largest:
            raise UnsupportedModel(
                f"`{plan.model}` gives other logits {way} than at once: by {difference:.3g} of {largest:.3g}",
                "it keeps state besides that of attention, which the engine cannot page",
            )
        if logits.tobytes() != expected.tobytes():
            finding = finding or f"{way} logits differ from those at once by {difference:.1e}"
    return Trial(not finding, 1 + len(ways), finding)


def _last_logits(runner: Runner, steps: Iterable[list[_Part]], count: int, blocks: int, vocab_size: int) -> F32Array:
    """Logits of slot 0's last position after these steps, the only one that asks for any in the last of them."""
    tokens = {slot: (np.arange(count, dtype="<i4") * (7 + 4 * slot) + 3) % vocab_size for slot in (0, 1)}
    slots = {slot for parts in steps for slot, _, _ in parts}
    runner.execute(
        Step(
            0,
            admit=tuple(Admit(slot, tokens[slot].astype("<i4").tobytes(), count, _GREEDY) for slot in slots),
            tables=tuple(
                TableDelta(slot, group, tuple(range(slot * blocks, (slot + 1) * blocks)))
                for slot in slots
                for group in range(len(runner.groups))
            ),
        )
    )
    for parts in steps:
        chunks = tuple(
            Chunk(slot, first, length, length - 1 if slot == 0 and first + length == count else length)
            for slot, first, length in parts
        )
        runner.execute(Step(0, chunks=chunks))
    logits = runner.decoder.logits[0, :vocab_size].copy()
    runner.execute(Step(0, drop=tuple(slots)))
    return logits
