"""Finds sizes at which this machine's kernels give each row the same bits as at any other safe size.

Matrix kernels treat remainder rows differently (which counts depends on library and processor), and sums may be cut
differently for different lengths. So sizes are proven by trial on first use, never assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.engine.errors import NumericsError

VARIANTS = 16
"""Different rows that a probe knows."""

_REFERENCE_ROWS = 64
_SEARCH = 64


@dataclass(frozen=True)
class Probe:
    """`run` computes rows chosen by `variants` [n] (numbers below VARIANTS); it returns [n, ...], one result a row.

    A sum taken in another order often rounds to the same number. So at least `rows_needed` rows are tried at each
    count: many where a row's result rests on one sum (a norm), one where it holds hundreds of them (a product).
    """

    run: Callable[[torch.Tensor], torch.Tensor]
    rows_needed: int = VARIANTS


class SafeSize:
    """`pad(n)` is the smallest multiple of `step`, at least `n`, that `is_safe` accepts. Answers are kept."""

    def __init__(self, what: str, is_safe: Callable[[int], bool], *, step: int = 1) -> None:
        self._what = what
        self._is_safe = is_safe
        self._step = step
        self._proven: dict[int, bool] = {}
        self._pads: dict[int, int] = {}

    def pad(self, size: int) -> int:
        """Raises NumericsError when no size near is safe."""
        found = self._pads.get(size)
        if found is None:
            start = -(-size // self._step)
            candidates = (n * self._step for n in range(start, start + _SEARCH + 1))
            found = next((n for n in candidates if self._check(n)), None)
            if found is None:
                raise NumericsError(f"no batch-invariant {self._what} from {size} on for this machine's kernels")
            self._pads[size] = found
        return found

    def _check(self, size: int) -> bool:
        known = self._proven.get(size)
        if known is None:
            known = self._proven[size] = self._is_safe(size)
        return known


def safe_rows(what: str, probes: list[Probe]) -> SafeSize:
    """Row counts at which every probe gives each row, wherever it stands, the bits it has among 64 rows."""
    references: list[torch.Tensor] = []

    def is_safe(rows: int) -> bool:
        if not references:
            references.extend(bits(probe.run(_variants(_REFERENCE_ROWS, 0)))[:VARIANTS] for probe in probes)
        return all(
            bool((bits(probe.run(variants)) == reference[variants]).all())
            for probe, reference in zip(probes, references, strict=True)
            for variants in (_variants(rows, shift) for shift in range(0, probe.rows_needed, rows))
        )

    return SafeSize(what, is_safe)


def _variants(rows: int, shift: int) -> torch.Tensor:
    return (torch.arange(rows) + shift) % VARIANTS


def bits(rows: torch.Tensor) -> torch.Tensor:
    """Bits as integers: unlike ==, they tell -0 from 0 and one NaN is like itself."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.contiguous().view(as_int).cpu()
