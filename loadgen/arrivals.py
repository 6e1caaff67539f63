"""When requests arrive in an open loop: offsets in seconds from the start, ascending. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from loadgen.errors import BadSpec

Process = Literal["poisson", "constant"]


def arrivals(
    process: Process, rate_per_s: float, seed: int, *, duration_s: float | None, limit: int | None
) -> Iterator[float]:
    """Offsets of a Poisson process or of a steady beat, until `duration_s` or `limit` arrivals, whichever comes first.

    Raises BadSpec when the rate is not positive or neither bound is given.
    """
    if rate_per_s <= 0:
        raise BadSpec(f"the rate must be positive, not {rate_per_s:g}")
    if duration_s is None and limit is None:
        raise BadSpec("an open loop needs a duration or a number of requests")
    offsets = _poisson(rate_per_s, seed) if process == "poisson" else _constant(rate_per_s)
    if duration_s is not None:
        end_s = duration_s
        offsets = itertools.takewhile(lambda offset_s: offset_s < end_s, offsets)
    return offsets if limit is None else itertools.islice(offsets, limit)


def _poisson(rate_per_s: float, seed: int) -> Iterator[float]:
    rng = random.Random(f"arrivals:{seed}")
    offset_s = 0.0
    while True:
        offset_s += rng.expovariate(rate_per_s)
        yield offset_s


def _constant(rate_per_s: float) -> Iterator[float]:
    return (number / rate_per_s for number in itertools.count())
