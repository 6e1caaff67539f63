"""Derived seeds: the first answer has the request's own, the others theirs, and none ever changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.seeds import derived_seed

seeds = st.integers(0, 2**64 - 1)


def test_derived_seeds_never_change() -> None:
    """A request that is sent again, after an update too, must get the same answers."""
    assert [derived_seed(1, i) for i in range(4)] == [1, 3316356330981164, 8498871037046174, 407638796292049]
    assert derived_seed(2**62 + 1, 3) == 2416898229996963
    assert derived_seed(0, 1) == 5876733520225071


@given(seeds, st.integers(1, 2**20))
def test_a_derived_seed_is_exact_in_json_and_the_first_is_the_requests_own(seed: int, choice: int) -> None:
    assert derived_seed(seed, 0) == seed
    assert 0 <= derived_seed(seed, choice) < 2**53


def test_neighbouring_seeds_and_choices_share_no_derived_seed() -> None:
    found = [derived_seed(seed, choice) for seed in range(300) for choice in range(1, 129)]
    assert len(set(found)) == len(found)
    assert abs(sum(found) / len(found) / 2**53 - 0.5) < 0.01


def test_a_negative_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        derived_seed(1, -1)
