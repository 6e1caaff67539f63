"""Counter-based Gumbel noise: a pure function of (seed, absolute position, token id), on any subset of the vocabulary.

The generator is SplitMix64 (Steele, Lea, Flood 2014): its stream's start depends on seed and position, and the token id
is the index in the stream. Target and draft model draw the same noise, which couples their choices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _stream_start(seed: int, position: int) -> int:
    """Two mixing rounds keep neighbouring seeds and positions from sharing stretches of one stream."""
    return _mix(_mix((seed + _GOLDEN) & _MASK) ^ _mix((position * 0xD1342543DE82EF95 + _GOLDEN) & _MASK))


def uniform(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers strictly between 0 and 1, one per token id. Shape as `token_ids`."""
    x = token_ids.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(_stream_start(seed, position))
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(11)
    return (x.astype(np.float64) + 0.5) * 2.0**-53


def gumbel(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise, one per token id. `position` is the absolute index of the token being chosen."""
    noise = uniform(seed, position, token_ids)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
