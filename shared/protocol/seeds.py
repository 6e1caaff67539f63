"""Seeds of the further answers of one request (`n` above 1). Never change the function: answers must be repeatable."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def derived_seed(seed: int, choice: int) -> int:
    """The seed of answer `choice` of a request with `seed`; the first answer has the request's own.

    Output `choice` of a SplitMix64 stream (Steele, Lea, Flood 2014) that starts at the mixed seed, so that neighbouring
    seeds share no answers. Below 2**53 (but for the request's own), so that it is exact in any JSON reader, and a
    request with `n` 1 and this seed gives the same answer. Raises ValueError for a negative choice.
    """
    if choice < 0:
        raise ValueError(f"choice must not be negative, got {choice}")
    if choice == 0:
        return seed
    return _mix(_mix((seed + _GOLDEN) & _MASK) + choice * _GOLDEN) >> 11


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
