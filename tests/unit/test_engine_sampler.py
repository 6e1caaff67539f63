"""Sampling: filters equal a naive full sort, frequencies match the distribution, a coupled drafter changes nothing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.engine.noise import gumbel, uniform
from shared.engine.sampler import candidates, choose_token
from shared.engine.verification import verify
from shared.protocol.jobs import SamplingParams

DRAWS = 20_000


def params(**changes: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=int(changes.pop("seed", 11)), **changes)  # type: ignore[arg-type]


def naive_candidates(logits: NDArray[np.float32], p: SamplingParams) -> set[int]:
    """The definition: rank by (logit down, id up); top-k, top-p of what is left, min-p against the best."""
    scaled = logits.astype(np.float64) / p.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if p.top_k:
        order = order[: p.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    if p.top_p < 1:
        share, count = 0.0, 0
        while count < len(order) and share < p.top_p * weights.sum():
            share += weights[count]
            count += 1
        order = order[:count]
    return {i for i in order if scaled[i] >= scaled[order[0]] + np.log(p.min_p)} if p.min_p else set(order)


@st.composite
def rows(draw: st.DrawFn) -> NDArray[np.float32]:
    """Coarse values, so that ties occur at every border."""
    size = draw(st.integers(1, 700))
    spread = draw(st.sampled_from([0.0, 0.5, 2.0, 8.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return (np.round(rng.standard_normal(size) * spread * 4) / 4).astype(np.float32)


@settings(deadline=None, max_examples=300)
@given(
    rows(),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05, 0.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_candidates_equal_those_of_a_full_sort(
    row: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    p = params(temperature=temperature, top_k=top_k, top_p=max(top_p, 1e-6), min_p=min_p)
    ids, scaled = candidates(row, p)
    assert len(set(ids.tolist())) == len(ids)
    assert set(ids.tolist()) == naive_candidates(row, p)
    np.testing.assert_array_equal(scaled, row[ids].astype(np.float64) / temperature)


@given(rows())
def test_temperature_zero_takes_the_lowest_id_of_the_largest_logit(row: NDArray[np.float32]) -> None:
    assert choose_token(row, params(temperature=0.0), 3) == min(np.flatnonzero(row == row.max()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    row = np.zeros(20, np.float32)
    row[7] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError):
            choose_token(row, params(temperature=temperature), 3)
    with pytest.raises(FloatingPointError):
        choose_token(np.full(20, -np.inf, np.float32), params(temperature=1.0), 3)


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> tuple[float, float]:
    """(statistic, the value that it exceeds once in 10,000 times): Wilson and Hilferty's approximation."""
    expected = probabilities * counts.sum()
    freedom = len(counts) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


def distribution(logits: NDArray[np.float32], p: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids = np.array(sorted(naive_candidates(logits, p)))
    weights = np.exp(logits[ids].astype(np.float64) / p.temperature)
    return ids, weights / weights.sum()


LOGITS = (np.random.default_rng(5).standard_normal(40) * 1.5).astype(np.float32)

CASES = {
    "plain": params(temperature=1.0),
    "hot": params(temperature=1.8),
    "top-k": params(temperature=1.0, top_k=7),
    "top-p": params(temperature=0.8, top_p=0.8),
    "min-p": params(temperature=1.2, min_p=0.1),
    "all": params(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("varied", ["position", "seed"])
def test_frequencies_match_the_distribution(case: str, varied: str) -> None:
    p = CASES[case]
    ids, probabilities = distribution(LOGITS, p)
    counts = dict.fromkeys(ids.tolist(), 0)
    for i in range(DRAWS):
        one = p if varied == "position" else params(**{**_fields(p), "seed": i})
        counts[choose_token(LOGITS, one, i if varied == "position" else 17)] += 1
    statistic, limit = chi_square(np.array([counts[i] for i in ids.tolist()]), probabilities)
    assert statistic < limit


def _fields(p: SamplingParams) -> dict[str, float]:
    return {"temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k, "min_p": p.min_p}


def choice_behind(p: SamplingParams, position: int, count: int) -> int:
    return choose_token(LOGITS, p, position + count)


def test_a_coupled_drafter_leaves_the_frequencies_alone_and_is_mostly_right() -> None:
    p = params(temperature=1.0)
    draft_logits = LOGITS + (np.random.default_rng(6).standard_normal(40) * 0.4).astype(np.float32)
    ids, probabilities = distribution(LOGITS, p)
    _, guessed = distribution(draft_logits, p)
    counts = np.zeros(len(ids), np.int64)
    accepted = 0
    for position in range(DRAWS):
        draft = choose_token(draft_logits, p, position)
        chosen, right = verify([draft], partial(choice_behind, p, position))
        counts[chosen[0]] += 1
        accepted += right
    statistic, limit = chi_square(counts, probabilities)
    assert statistic < limit
    best_possible = np.minimum(probabilities, guessed).sum()
    assert accepted / DRAWS > 0.85 * best_possible
    assert accepted / DRAWS <= best_possible + 0.01


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.lists(st.integers(0, 200_000), min_size=1, max_size=50))
def test_noise_of_a_token_does_not_depend_on_the_other_candidates(seed: int, position: int, ids: list[int]) -> None:
    together = gumbel(seed, position, np.array(ids))
    alone = [gumbel(seed, position, np.array([i]))[0] for i in ids]
    assert together.tolist() == alone
    assert np.isfinite(together).all()


def test_noise_is_uniform_and_uncorrelated_across_seeds_positions_and_tokens() -> None:
    tokens = np.arange(50_000)
    base = uniform(3, 100, tokens)
    counts, _ = np.histogram(base, bins=50, range=(0, 1))
    statistic, limit = chi_square(counts, np.full(50, 1 / 50))
    assert statistic < limit
    for other in (uniform(4, 100, tokens), uniform(3, 101, tokens), uniform(3, 100, tokens + 1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.02
    over_positions = np.array([uniform(3, p, tokens[:1])[0] for p in range(5_000)])
    assert abs(np.corrcoef(over_positions[:-1], over_positions[1:])[0, 1]) < 0.06


def test_noise_never_changes() -> None:
    """Every worker must draw the same numbers, now and after an update: a running request moves between them."""
    expected = [0.862650498913454, 3.185789301585829, -0.43685118014801577]
    np.testing.assert_allclose(gumbel(2**62 + 1, 77, np.array([0, 1, 49_151])), expected, rtol=1e-12)
