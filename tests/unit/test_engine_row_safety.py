"""Sizes are used only after a proof: the smallest proven one, each proven once, none without a proof."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.errors import NumericsError
from shared.engine.row_safety import VARIANTS, Probe, SafeSize, bits, safe_rows


@given(st.sets(st.integers(1, 200)), st.integers(1, 150), st.sampled_from([1, 8]))
def test_the_smallest_safe_multiple_is_found_or_the_search_says_so(safe: set[int], wanted: int, step: int) -> None:
    size = SafeSize("row count", safe.__contains__, step=step)
    first = -(-wanted // step)
    expected = [n for n in sorted(safe) if n % step == 0 and first <= n // step <= first + 64]
    if expected:
        assert size.pad(wanted) == expected[0]
    else:
        with pytest.raises(NumericsError, match="row count"):
            size.pad(wanted)


def test_each_size_is_proven_once() -> None:
    tried: list[int] = []

    def is_safe(size: int) -> bool:
        tried.append(size)
        return size >= 5

    size = SafeSize("row count", is_safe)
    assert [size.pad(n) for n in (3, 3, 4, 5, 9, 3)] == [5, 5, 5, 5, 9, 5]
    assert tried == [3, 4, 5, 9]


def kernel(*, odd_counts: set[int] = frozenset(), odd_place: int | None = None) -> Probe:  # type: ignore[assignment]
    """Sums rows in fp32; in another order at some counts, or for the row at some place of a batch of 12."""
    known = torch.randn(VARIANTS, 33, generator=torch.Generator().manual_seed(1))

    def run(variants: torch.Tensor) -> torch.Tensor:
        rows = known[variants]
        sums = torch.stack([_sum(row, forward=len(rows) not in odd_counts) for row in rows])
        if odd_place is not None and len(rows) == 12:
            sums[odd_place] = _sum(rows[odd_place], forward=False)
        return sums[:, None]

    return Probe(run)


def _sum(row: torch.Tensor, *, forward: bool) -> torch.Tensor:
    total = torch.zeros(())
    for value in row if forward else row.flip(0):
        total = total + value
    return total


def test_counts_at_which_sums_are_taken_in_another_order_are_passed_over() -> None:
    size = safe_rows("row count", [kernel(), kernel(odd_counts={1, 2, 7})])
    assert [size.pad(n) for n in (1, 2, 3, 6, 7, 8)] == [3, 3, 3, 6, 8, 8]


def test_a_single_place_that_differs_spoils_a_count() -> None:
    different = [place for place in range(12) if safe_rows("row count", [kernel(odd_place=place)]).pad(12) != 12]
    assert len(different) >= 8, "sums in another order round alike only sometimes"


def test_bits_tell_zeros_apart_and_find_a_nan_like_itself() -> None:
    assert not torch.equal(bits(torch.tensor([0.0])), bits(torch.tensor([-0.0])))
    assert torch.equal(bits(torch.tensor([float("nan")])), bits(torch.tensor([float("nan")])))
    assert bits(torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.int16
