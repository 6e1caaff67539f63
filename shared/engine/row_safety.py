"""Finds row counts at which this machine's kernels give each row the same bits as any other safe count does.

Matrix kernels treat remainder rows differently (which counts depends on library and processor), so counts are proven by
trial on first use: equal rows in, bitwise equal rows out, whatever the count and the row's place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shared.engine.errors import NumericsError

VARIANTS = 16
"""Different rows that a probe knows. Several, since a sum taken in another order often rounds to the same number."""

_REFERENCE_ROWS = 64
_SEARCH = 64
"""A safe count is expected at most this far above the count asked for."""

Probe = Callable[[torch.Tensor], torch.Tensor]
"""Runs a kernel on rows chosen by `variants` [n] (numbers below VARIANTS); returns [n, ...], one result a row."""


class RowSafety:
    """`pad(n)` is the smallest proven count that is at least `n`. Proofs are kept; each costs a few trials per probe."""

    def __init__(self, probes: list[Probe]) -> None:
        self._probes = probes
        self._references: list[torch.Tensor] | None = None
        self._proven: dict[int, bool] = {}
        self._pads: dict[int, int] = {}

    def pad(self, rows: int) -> int:
        """Raises NumericsError when no count near `rows` is safe."""
        found = self._pads.get(rows)
        if found is None:
            found = next((n for n in range(rows, rows + _SEARCH + 1) if self._is_safe(n)), None)
            if found is None:
                raise NumericsError(f"no batch-invariant row count from {rows} to {rows + _SEARCH} on this machine")
            self._pads[rows] = found
        return found

    def _is_safe(self, rows: int) -> bool:
        known = self._proven.get(rows)
        if known is None:
            if self._references is None:
                self._references = [_bits(probe(_variants(_REFERENCE_ROWS, 0)))[:VARIANTS] for probe in self._probes]
            # Few rows at a time show few variants, so a small count is tried often enough to show them all.
            trials = [_variants(rows, shift) for shift in range(0, VARIANTS, rows)]
            known = self._proven[rows] = all(
                bool((_bits(probe(variants)) == reference[variants]).all())
                for probe, reference in zip(self._probes, self._references, strict=True)
                for variants in trials
            )
        return known


def _variants(rows: int, shift: int) -> torch.Tensor:
    return (torch.arange(rows) + shift) % VARIANTS


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """Bits as integers: unlike ==, they tell -0 from 0 and one NaN is like itself."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.contiguous().view(as_int).cpu()
