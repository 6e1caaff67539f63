"""Sampling: filters equal an obvious implementation, frequencies match the distribution, drafters change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.engine.logit_rules import LogitRules
from shared.engine.noise import gumbel, uniform
from shared.engine.sampler import candidates, choose_token, rank_tokens
from shared.engine.verification import verify
from shared.protocol.jobs import SamplingParams
from tests.unit.sampling_reference import (
    chi_square,
    reference_candidates,
    reference_choice,
    reference_distribution,
    reference_ranking,
    reference_row,
    reference_values,
)

DRAWS = 20_000


def params(seed: int = 11, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=seed, **changes)  # type: ignore[arg-type]


@st.composite
def rows(draw: st.DrawFn) -> NDArray[np.float32]:
    """Coarse values, so that ties occur at every border; some tokens are ruled out."""
    size = draw(st.sampled_from([1, 2, 63, 300, 700, 5_000]) | st.integers(1, 700))
    spread = draw(st.sampled_from([0.0, 0.01, 0.5, 2.0, 8.0]))
    steps = draw(st.sampled_from([4, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = (np.round(rng.standard_normal(size) * spread * steps) / steps).astype(np.float32)
    if draw(st.booleans()):
        row[rng.integers(0, size, size // 3)] = -np.inf
        row[rng.integers(0, size)] = 0.25
    return row


filters = st.builds(
    lambda temperature, top_k, top_p, min_p: params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
    st.sampled_from([1e-300, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 40, 1000]),
    st.sampled_from([1.0, 1 - 1e-9, 0.999, 0.9, 0.5, 0.05, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(deadline=None, max_examples=400)
@given(rows(), filters)
def test_candidates_equal_those_of_a_full_sort(row: NDArray[np.float32], p: SamplingParams) -> None:
    ids, scaled = candidates(row, p)
    assert ids.tolist() == reference_candidates(row, p)
    values = row.astype(np.float64)
    np.testing.assert_array_equal(scaled, ((values - values.max()) / p.temperature)[ids])
    assert choose_token(row, p, 5) == reference_choice(row, p, 5)


@settings(deadline=None, max_examples=400)
@given(rows(), filters | st.just(params(temperature=0.0)), st.integers(0, 7))
def test_runners_up_are_the_next_of_the_same_values_and_change_no_choice(
    row: NDArray[np.float32], p: SamplingParams, count: int
) -> None:
    before = row.copy()
    assert rank_tokens(row, p, 5, runners_up=count).token_ids == reference_ranking(row, p, 5)[: 1 + count]
    assert choose_token(row, p, 5) == reference_ranking(row, p, 5)[0]
    np.testing.assert_array_equal(row, before)


@settings(deadline=None, max_examples=200)
@given(rows(), filters | st.just(params(temperature=0.0)), st.integers(0, 7))
def test_chances_are_the_softmax_of_the_values_that_were_ranked(
    row: NDArray[np.float32], p: SamplingParams, count: int
) -> None:
    ids, values = reference_values(row, p, 5)
    shares = np.exp(values - values.max())
    expected = dict(zip(ids, shares / shares.sum(), strict=True))
    every = rank_tokens(row, p, 5, runners_up=len(row))
    assert sum(every.chances) == pytest.approx(1, rel=1e-4)
    assert sorted(every.chances, reverse=True) == every.chances
    assert every.chances == pytest.approx([expected[token] for token in every.token_ids], rel=1e-4)
    some = rank_tokens(row, p, 5, runners_up=count)
    assert some == (every.token_ids[: 1 + count], every.chances[: 1 + count])


def test_rules_shape_the_ranking_as_they_do_the_choice() -> None:
    p = params(**CASES["all"])
    rules = rules_behind(p, OUTPUT)
    row = reference_row(LOGITS, p, PROMPT, OUTPUT, STOP)
    for position in range(50):
        found = rank_tokens(LOGITS, p, position, rules, runners_up=3)
        assert found.token_ids == reference_ranking(row, p, position)[:4]
        assert found.token_ids[0] == choose_token(LOGITS, p, position, rules)


@given(rows(), filters, st.integers(0, 2**32))
@settings(deadline=None)
def test_tokens_that_are_ruled_out_change_nothing_for_the_others(
    row: NDArray[np.float32], p: SamplingParams, seed: int
) -> None:
    """As behind a short head: the rest is chosen from as if it were all, with the noise of its own ids."""
    kept = np.sort(np.random.default_rng(seed).choice(3 * len(row), len(row), replace=False))
    wide = np.full(3 * len(row), -np.inf, np.float32)
    wide[kept] = row
    ids, scaled = candidates(wide, p)
    alone, expected = candidates(row, p)
    np.testing.assert_array_equal(ids, kept[alone])
    np.testing.assert_array_equal(scaled, expected)
    assert np.isfinite(wide[ids]).all()
    ranking = rank_tokens(wide, p, 5, runners_up=4)
    assert ranking.token_ids == reference_ranking(wide, p, 5)[:5]
    assert ranking.token_ids[0] == choose_token(wide, p, 5)
    assert all(0 <= chance <= 1 for chance in ranking.chances)


@pytest.mark.parametrize("p", [params(temperature=0.0), params(temperature=1.0)])
def test_where_one_token_is_left_it_is_certain(p: SamplingParams) -> None:
    row = np.full(20, -np.inf, np.float32)
    row[7] = -3.0
    assert rank_tokens(row, p, 3, runners_up=5) == ([7], [1.0])


@given(rows(), st.sampled_from([1 - 2**-53, 1 - 2**-50]))
def test_a_top_p_that_rounding_cannot_tell_from_1_drops_nothing_that_counts(row: NDArray[np.float32], p: float) -> None:
    ids, scaled = candidates(row, params(top_p=p))
    every = np.exp(row.astype(np.float64) - row.max())
    assert np.exp(scaled).sum() >= every.sum() * (1 - 1e-12)
    assert every[ids].min() > 0


@given(rows())
def test_temperature_zero_takes_the_lowest_id_of_the_largest_logit(row: NDArray[np.float32]) -> None:
    assert choose_token(row, params(temperature=0.0), 3) == min(np.flatnonzero(row == row.max()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    row = np.zeros(20, np.float32)
    row[7] = bad
    barred = params(temperature=0.0, min_tokens=1)
    for p in (params(temperature=0.0), params(temperature=1.0), barred):
        with pytest.raises(FloatingPointError):
            choose_token(row, p, 3, LogitRules.of(p, [1], frozenset({7}), 20))
        with pytest.raises(FloatingPointError):
            rank_tokens(row, p, 3, LogitRules.of(p, [1], frozenset({7}), 20), runners_up=2)
    with pytest.raises(FloatingPointError):
        choose_token(np.full(20, -np.inf, np.float32), params(temperature=1.0), 3)


def test_a_row_of_which_the_rules_leave_nothing_is_refused() -> None:
    p = params(temperature=1.0, min_tokens=1)
    with pytest.raises(FloatingPointError):
        choose_token(np.zeros(3, np.float32), p, 3, LogitRules.of(p, [1], frozenset({0, 1, 2}), 3))


# Frequencies

LOGITS = (np.random.default_rng(5).standard_normal(40) * 1.5).astype(np.float32)
PROMPT, OUTPUT, STOP = [3, 3, 8, 21], [3, 5, 5, 5, 30], frozenset({9})

CASES: dict[str, dict[str, object]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.8},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-p": {"temperature": 0.8, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.1},
    "filters": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {3: 2.0, 12: -1.5, 9: 4.0}, "min_tokens": 6},
    "all": {
        "temperature": 0.9,
        "top_p": 0.95,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 0.9,
        "logit_bias": {7: 3.0},
    },
}


def rules_behind(p: SamplingParams, output: list[int]) -> LogitRules | None:
    rules = LogitRules.of(p, PROMPT, STOP, len(LOGITS))
    for token in output if rules is not None else []:
        rules.add(token)
    return rules


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("varied", ["position", "seed"])
def test_frequencies_match_the_distribution(case: str, varied: str) -> None:
    p = params(**CASES[case])
    rules = rules_behind(p, OUTPUT)
    target = reference_distribution(reference_row(LOGITS, p, PROMPT, OUTPUT, STOP), p)
    counts = dict.fromkeys(target, 0)
    for i in range(DRAWS):
        one, position = (p, i) if varied == "position" else (params(seed=i, **CASES[case]), 17)
        counts[choose_token(LOGITS, one, position, rules)] += 1
    statistic, limit = chi_square(np.array(list(counts.values())), np.array(list(target.values())))
    assert statistic < limit


# Runs of tokens, drafted and not: the logits depend on the token before, the rules on all of them.

SMALL, LENGTH = 9, 3
TARGET = (np.random.default_rng(1).standard_normal((SMALL, SMALL)) * 1.3).astype(np.float32)
DRAFTER = TARGET + (np.random.default_rng(2).standard_normal((SMALL, SMALL)) * 0.5).astype(np.float32)
START = [4, 2, 2]
ENDS = frozenset({0})

RUNS: dict[str, dict[str, object]] = {
    "plain": {},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "penalties and bias": {
        "temperature": 0.9,
        "top_p": 0.95,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {2: 1.0, 5: -1.5},
        "min_tokens": 2,
    },
}


def joint_distribution(p: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of each run of LENGTH tokens behind START, by the obvious implementation."""

    @cache
    def behind(output: tuple[int, ...]) -> dict[int, float]:
        last = [*START, *output][-1]
        return reference_distribution(reference_row(TARGET[last], p, START, output, ENDS), p)

    found = {}
    for run in itertools.product(range(SMALL), repeat=LENGTH):
        share = 1.0
        for i, token in enumerate(run):
            share *= behind(run[:i]).get(token, 0.0)
        if share:
            found[run] = share
    return found


def chooser(
    p: SamplingParams, tokens: list[int], table: NDArray[np.float32], rules: LogitRules | None
) -> Callable[..., int]:
    """What the engine does with a row: choose, then append, so that the next choice knows it."""

    def choose(_row: int = 0) -> int:
        token = choose_token(table[tokens[-1]], p, len(tokens), rules)
        tokens.append(token)
        if rules is not None:
            rules.add(token)
        return token

    return choose


def run_plain(p: SamplingParams) -> list[int]:
    tokens = list(START)
    choose = chooser(p, tokens, TARGET, LogitRules.of(p, START, ENDS, SMALL))
    return [choose() for _ in range(LENGTH)]


def run_drafted(p: SamplingParams) -> tuple[list[int], int, int]:
    """(output, drafts right, drafts tried). The drafter has the target's noise, other logits, and knows no rules."""
    tokens = list(START)
    choose = chooser(p, tokens, TARGET, LogitRules.of(p, START, ENDS, SMALL))
    right = tried = 0
    while len(tokens) < len(START) + LENGTH:
        guess = chooser(p, list(tokens), DRAFTER, None)
        drafts = [guess() for _ in range(len(START) + LENGTH - len(tokens) - 1)]
        _, accepted = verify(drafts, choose)
        right, tried = right + accepted, tried + min(accepted + 1, len(drafts))
    return tokens[len(START) :], right, tried


@pytest.mark.parametrize("case", RUNS)
def test_runs_follow_the_distribution_and_are_the_same_with_a_coupled_drafter(case: str) -> None:
    joint = joint_distribution(params(**RUNS[case]))
    counts = dict.fromkeys(joint, 0)
    right = tried = 0
    for seed in range(DRAWS):
        p = params(seed=seed, **RUNS[case])
        drafted, accepted, verified = run_drafted(p)
        assert drafted == run_plain(p)
        counts[tuple(drafted)] += 1
        right, tried = right + accepted, tried + verified
    statistic, limit = chi_square(np.array(list(counts.values())), np.array(list(joint.values())))
    assert statistic < limit
    assert 0.5 < right / tried < 0.95  # the drafter is neither perfect nor useless


def test_a_coupled_drafter_is_right_nearly_as_often_as_any_could_be() -> None:
    p = params(temperature=1.0)
    draft_logits = LOGITS + (np.random.default_rng(6).standard_normal(40) * 0.4).astype(np.float32)
    accepted = sum(choose_token(draft_logits, p, i) == choose_token(LOGITS, p, i) for i in range(DRAWS))
    ours, theirs = reference_distribution(LOGITS, p), reference_distribution(draft_logits, p)
    best_possible = sum(min(ours[i], theirs[i]) for i in ours)
    assert 0.85 * best_possible < accepted / DRAWS < best_possible + 0.01


# Noise


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
