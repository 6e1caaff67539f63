"""How long prompts and outputs are: distributions of token counts, written as short specs. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from loadgen.errors import BadSpec

MAX_TOKENS: Final = 1_000_000
FORMS: Final = "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX]"


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts between `low` and `high`; `median` and `sigma` are for a log-normal one.

    `spec` is what the user wrote and what the report repeats.
    """

    spec: str
    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    def sample(self, rng: random.Random) -> int:
        if self.median:
            drawn = round(self.median * math.exp(rng.gauss(0.0, self.sigma)))
            return min(max(drawn, self.low), self.high)
        return rng.randint(self.low, self.high)


def parse_lengths(spec: str) -> Lengths:
    """`128`, `uniform:16:256`, `lognormal:200:0.8` or `lognormal:200:0.8:1000`. Raises BadSpec."""
    kind, *rest = spec.strip().split(":")
    try:
        numbers = [float(part) for part in rest]
        if not rest:
            count = int(kind)
            return _checked(Lengths(spec, count, count))
        if kind == "uniform" and len(numbers) == 2:
            return _checked(Lengths(spec, int(numbers[0]), int(numbers[1])))
        if kind == "lognormal" and len(numbers) in (2, 3):
            high = int(numbers[2]) if len(numbers) == 3 else MAX_TOKENS
            return _checked(Lengths(spec, 1, high, median=numbers[0], sigma=numbers[1]))
    except (ValueError, OverflowError) as error:
        raise BadSpec(f"cannot read the length {spec!r}: write {FORMS}") from error
    raise BadSpec(f"cannot read the length {spec!r}: write {FORMS}")


def _checked(lengths: Lengths) -> Lengths:
    if not 1 <= lengths.low <= lengths.high <= MAX_TOKENS:
        raise BadSpec(f"the length {lengths.spec!r} must stay between 1 and {MAX_TOKENS}, the smaller bound first")
    if not (math.isfinite(lengths.median) and 0 <= lengths.sigma <= 10 and lengths.median >= 0):
        raise BadSpec(f"the length {lengths.spec!r} needs a positive median and a sigma between 0 and 10")
    return lengths
