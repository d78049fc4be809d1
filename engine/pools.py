"""How many blocks the pools of all KV groups have, beside each other."""

from __future__ import annotations

import msgspec

from .config import EngineConfig
from .kv_groups import KVGroup


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that hold `length` tokens."""
    return -(-length // block_size)


class Pools:
    """How the pools of all groups grow together, by the blocks of the first.

    Where there is one sequence's worth of it, the others have what that sequence needs while it is prefilled. From
    twice that on they have what sequences of a typical length, a quarter of the longest, hold beside it, so that all
    groups run out at once; and never more than all sequences need.
    """

    def __init__(self, groups: tuple[KVGroup, ...], length: int, config: EngineConfig, beside: int = 0) -> None:
        """`beside` are the bytes of a token that another model keeps in blocks of the first group's numbers."""
        self._groups = groups
        self._beside = beside
        self._block_size = config.block_size
        self.one = blocks_for(length, config.block_size)
        self.most = config.max_num_seqs * self.one
        self.step_blocks = blocks_for(config.max_num_batched_tokens * config.depth, config.block_size)
        self._typical = blocks_for(-(-length // 4), config.block_size)
        self._limits = tuple(
            (
                group.blocks_of(length // 4, config.block_size),
                min(self.one, group.blocks_of(length, config.block_size) + self.step_blocks),
                config.max_num_seqs * group.blocks_of(length, config.block_size) + self.step_blocks,
            )
            for group in groups[1:]
        )

    def sized(self, num_blocks: int) -> tuple[KVGroup, ...]:
        """All groups, the first with so many blocks."""
        beyond = max(0, num_blocks - self.one)
        rest = [
            min(
                max(least, -(-num_blocks * share // self._typical)),
                least + -(-2 * beyond * share // self._typical),
                max(least, num_blocks),
                most,
            )
            for share, least, most in self._limits
        ]
        return tuple(
            msgspec.structs.replace(group, num_blocks=count)
            for group, count in zip(self._groups, (num_blocks, *rest), strict=True)
        )

    def bytes(self, num_blocks: int) -> int:
        """What they take then."""
        own = sum(each.num_blocks * each.bytes_per_token for each in self.sized(num_blocks))
        return (own + num_blocks * self._beside) * self._block_size

    def fitting(self, room: int) -> int:
        """The most blocks of the first group with which all fit into so many bytes; 0 if none do."""
        if not self._groups[0].bytes_per_token + self._beside and self.bytes(self.most) <= room:
            return self.most
        low, high = 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= room else (low, middle)
        return low
