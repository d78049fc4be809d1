"""Philox4x32-10, a counter-based random generator: any word of the stream is a pure function of its place.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 3.3 and table 2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32Array = npt.NDArray[np.uint32]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counters: U32Array, key: tuple[int, int]) -> U32Array:
    """Four random words for each counter [count, 4]."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        product0 = c0 * np.uint64(_MULTIPLIERS[0])
        product1 = c2 * np.uint64(_MULTIPLIERS[1])
        high0, low0 = product0 >> np.uint64(32), product0 & np.uint64(_MASK)
        high1, low1 = product1 >> np.uint64(32), product1 & np.uint64(_MASK)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def token_words(seed: int, position: int, vocab_size: int) -> U32Array:
    """One random word for each token id: lane id % 4 of the counter (id / 4, position, 0, 0), keyed by the seed."""
    counters = np.zeros((-(-vocab_size // 4), 4), np.uint32)
    counters[:, 0] = np.arange(counters.shape[0])
    counters[:, 1] = position
    return philox4x32(counters, (seed & _MASK, seed >> 32)).reshape(-1)[:vocab_size]


def gumbel(words: U32Array) -> npt.NDArray[np.float64]:
    """Gumbel noise -log(-log(u)) with u = (word + 1/2) / 2^32, which is never 0 or 1."""
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(u))
    return noise
