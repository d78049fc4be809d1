"""Teacher-forced logits from our runner, driven by hand-made Steps."""

from __future__ import annotations

import numpy as np

from llmctl.engine.runner.runner import Runner
from llmctl.engine.schedule.step import Admit, Chunk, SlotSampling, Step, TableDelta

GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, -1)


def forced_logits(runner: Runner, tokens: list[int], vocab_size: int, chunk: int, block_size: int) -> np.ndarray:
    """Logits [len(tokens), vocab] at every position, computed in chunks of at most `chunk` tokens in slot 0."""
    packed = np.array(tokens, "<i4").tobytes()
    blocks = -(-len(tokens) // block_size)
    tables = tuple(  # in a group with a window blocks come again when it has passed them
        TableDelta(0, index, tuple(block % cache.group.num_blocks for block in range(blocks)))
        for index, cache in enumerate(runner.groups)
    )
    rows = []
    for index, start in enumerate(range(0, len(tokens), chunk)):
        count = min(chunk, len(tokens) - start)
        step = Step(
            index,
            drop=(0,) if index else (),
            admit=(Admit(0, packed, len(tokens), GREEDY),),
            tables=tables,
            chunks=(Chunk(0, start, count, 0),),
        )
        runner.execute(step)
        rows.append(runner.decoder.logits[:count, :vocab_size].copy())
    return np.concatenate(rows)
