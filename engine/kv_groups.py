"""Which layers share a KV pool, what a token takes in it, and how many blocks of it a sequence holds.

Layers that see everything keep everything and form the first group. Layers with a window form one group for each
window, whose blocks go when the window has passed them, as long as that is less than a whole sequence. The first group
is there also when no layer is in it: its blocks, which then take no memory, are what the prefix tree counts in.
"""

from __future__ import annotations

import msgspec

from ..kernels.formats import KVFormat
from .models.arch import DecoderSpec
from .schedule.windows import blocks_behind


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with one block table per sequence. `window` 0: all positions are kept.

    `tier_blocks` are blocks of a group with a window that the swap space takes.
    """

    layers: tuple[int, ...]
    bytes_per_token: int
    window: int = 0
    num_blocks: int = 0
    tier_blocks: int = 0

    def blocks_of(self, length: int, block_size: int) -> int:
        """Blocks that a sequence of this length holds, when it decodes."""
        blocks = -(-length // block_size)
        return min(blocks, blocks_behind(self.window, block_size)) if self.window else blocks


def kv_groups(
    spec: DecoderSpec, formats: tuple[KVFormat, ...], length: int, block_size: int, split: bool
) -> tuple[KVGroup, ...]:
    """The groups of a model whose sequences have at most `length` tokens, without their pools' sizes.

    `formats` has one for each layer. Without `split` there is one group, for who keeps blocks as they come.
    """
    layers: dict[int, list[int]] = {0: []}
    for layer in range(spec.num_layers):
        window = spec.window(layer)
        whole = not split or blocks_behind(window, block_size) >= -(-length // block_size)
        layers.setdefault(0 if whole else window, []).append(layer)
    return tuple(
        KVGroup(
            layers=tuple(members),
            bytes_per_token=sum(kv_layer_bytes(spec, formats[layer]) for layer in members),
            window=window,
        )
        for window, members in sorted(layers.items())
    )


def kv_layer_bytes(spec: DecoderSpec, kv: KVFormat) -> int:
    """Bytes of K and V of one token in one layer, scales included; or of its latent and rotated key."""
    if spec.latent is not None:
        return (spec.latent.kv_rank + spec.latent.rope_dim) * kv.bytes_per_value
    return 2 * spec.num_kv_heads * kv.head_bytes(spec.head_dim)
