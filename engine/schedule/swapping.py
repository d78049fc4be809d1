"""Whether a preempted sequence's blocks are worth tier 2: the cost of moving one there and back, or of computing it.

Both are measured while the engine runs, as running means over the last steps. Only steps of many tokens count for the
price of a computed one: a step of a few decodes costs as much as one of many. Before anything was moved, swapping is
tried, which gives its price. The figures decide only where KV comes from, never what it is.
"""

from __future__ import annotations

MANY_TOKENS = 16
READ_US = 10_000  # that a step may spend on reading: others wait for it

_FIRST_READ = 16  # blocks, before it is known how long they take

_SHARE = 0.1  # of the newest figure in the mean


class SwapCost:
    """The running means, and what follows from them for a preemption mode."""

    def __init__(self, mode: str, block_size: int) -> None:
        self._mode, self._block_size = mode, block_size
        self._block_us = 0.0  # to move one block, one way
        self._token_us = 0.0  # to compute one token of a prompt

    @property
    def swap_is_cheaper(self) -> bool:
        """Whether to move a block there and back rather than to compute its tokens again."""
        if self._mode != "auto":
            return self._mode == "swap"
        if not self._block_us or not self._token_us:
            return True
        return 2 * self._block_us < self._block_size * self._token_us

    @property
    def blocks_at_once(self) -> int:
        """Blocks to read in one step."""
        return max(1, int(READ_US / self._block_us)) if self._block_us else _FIRST_READ

    def learn(self, swap_us: int, moves: int, compute_us: int, tokens: int) -> None:
        """A step moved so many blocks and computed so many tokens, in so many microseconds."""
        if moves and swap_us:
            self._block_us = _mean(self._block_us, swap_us / moves)
        if tokens >= MANY_TOKENS and compute_us:
            self._token_us = _mean(self._token_us, compute_us / tokens)


def _mean(mean: float, figure: float) -> float:
    return mean + _SHARE * (figure - mean) if mean else figure
