"""Penalties, bias, `min_tokens` and log probabilities equal an obvious implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.engine import EngineError
from shared.engine.detokenizer import Detokenizer
from shared.engine.logit_rules import LogitRules
from shared.engine.logprobs import token_logprobs
from shared.engine.selection import largest
from shared.protocol.jobs import SamplingParams
from tests.unit.engine_harness import byte_level_tokenizer
from tests.unit.sampling_reference import reference_row

VOCABULARY = 400
STOP = frozenset({3, 17, VOCABULARY + 5})  # a request may name a stop id that the model lacks
IN_VOCABULARY = STOP - {VOCABULARY + 5}

tokens = st.integers(0, VOCABULARY - 1)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, seed=1, **changes)  # type: ignore[arg-type]


@st.composite
def asked(draw: st.DrawFn) -> SamplingParams:
    return params(
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.7, 2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2, 0.8, 2.0])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=5)),
        min_tokens=draw(st.sampled_from([0, 0, 2, 400])),
    )


def row_of(seed: int, size: int = VOCABULARY) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


@settings(deadline=None)
@given(
    asked(),
    st.lists(tokens, min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 60) | tokens, max_size=30), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_rules_give_the_row_of_the_definitions_after_every_token_and_restart(
    p: SamplingParams, prompt: list[int], outputs: list[list[int]], seed: int
) -> None:
    rules = LogitRules.of(p, prompt, STOP, VOCABULARY)
    row = row_of(seed)
    for output in outputs:
        for length in range(len(output) + 1):
            expected = reference_row(row, p, prompt, output[:length], IN_VOCABULARY)
            shaped = row if rules is None or not rules.active else rules.apply(row)
            np.testing.assert_allclose(shaped, expected, rtol=1e-12, atol=1e-12)
            if rules is not None and length < len(output):
                rules.add(output[length])
        if rules is not None:
            rules.restart()


def test_counts_of_more_tokens_than_the_first_room_are_kept() -> None:
    p = params(frequency_penalty=0.5, repetition_penalty=1.1)
    prompt, output = list(range(300)), [t for t in range(50, 1_900) for _ in range(2)]
    rules = LogitRules.of(p, prompt, frozenset(), 2_000)
    assert rules is not None
    for token in output:
        rules.add(token)
    row = row_of(3, 2_000)
    np.testing.assert_allclose(rules.apply(row), reference_row(row, p, prompt, output), rtol=1e-12, atol=1e-12)


def test_the_models_row_is_left_alone() -> None:
    rules = LogitRules.of(params(logit_bias={1: 5.0}, presence_penalty=1.0, min_tokens=3), [1], STOP, VOCABULARY)
    assert rules is not None
    rules.add(2)
    row = row_of(1)
    rules.apply(row)
    np.testing.assert_array_equal(row, row_of(1))


def test_no_bias_overrules_min_tokens() -> None:
    rules = LogitRules.of(params(logit_bias={3: 100.0}, min_tokens=1), [1], STOP, VOCABULARY)
    assert rules is not None
    assert rules.apply(row_of(1))[3] == -math.inf
    rules.add(5)
    assert rules.apply(row_of(1)).argmax() == 3


def test_a_request_that_asks_for_nothing_has_no_rules() -> None:
    assert LogitRules.of(params(), [1, 2], STOP, VOCABULARY) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {VOCABULARY: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"presence_penalty": math.inf},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"frequency_penalty": math.nan},
    ],
)
def test_numbers_that_cannot_be_applied_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EngineError):
        LogitRules.of(params(**wrong), [1], STOP, VOCABULARY)


# Log probabilities


@settings(deadline=None)
@given(st.integers(0, 99), st.sampled_from([1, 5, 64, 700]), st.sampled_from([0, 1, 5, 20, 5_000]), st.booleans())
def test_logprobs_are_the_log_softmax_and_alternatives_rank_by_it_then_by_id(
    seed: int, size: int, top: int, coarse: bool
) -> None:
    row = row_of(seed, size)
    row = np.round(row) if coarse else row
    token = seed % size
    found = token_logprobs(row, token, top)
    exact = row.astype(np.float64)
    normal = math.log(sum(math.exp(x) for x in exact.tolist()))
    ranked = sorted(range(size), key=lambda i: (-row[i], i))[:top]
    assert [i for i, _ in found.top] == ranked
    np.testing.assert_allclose([value for _, value in found.top], exact[ranked] - normal, atol=1e-9)
    assert found.logprob == pytest.approx(float(exact[token]) - normal, abs=1e-9)
    assert all(value == found.logprob for i, value in found.top if i == token)


def test_logprobs_of_large_logits_are_finite_and_those_of_ruled_out_tokens_are_not_reported() -> None:
    row = np.array([3e38, -np.inf, 3e38, -3e38], np.float32)
    found = token_logprobs(row, 0, 4)
    assert found.logprob == pytest.approx(-math.log(2))
    assert [i for i, _ in found.top] == [0, 2, 3]
    assert all(math.isfinite(value) for _, value in found.top)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3_000), st.integers(-1, 3_100), st.integers(0, 99), st.booleans())
def test_largest_finds_what_a_full_sort_finds(size: int, k: int, seed: int, coarse: bool) -> None:
    values = row_of(seed, size).astype(np.float64)
    values = np.round(values) if coarse else values
    expected = np.sort(np.argsort(-values, kind="stable")[: max(k, 0)])
    np.testing.assert_array_equal(largest(values, k), expected)


# Stop strings before `min_tokens`


def visible(stop: list[str], text: str, min_tokens: int) -> tuple[str, bool]:
    tokenizer = byte_level_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop, [], min_tokens)
    shown = ""
    for token in tokenizer.encode(text).ids:
        shown += detokenizer.push(token)
        if detokenizer.stopped:
            return shown, True
    return shown + detokenizer.finish(), False


@example("xyx", ["xyz", "y"], 2)  # "y" is held back as a beginning of "xyz", and was complete too early
@given(st.text("xyz", max_size=12), st.lists(st.text("xyz", min_size=1, max_size=3), max_size=3), st.integers(0, 14))
def test_a_stop_string_stops_only_when_a_token_behind_min_tokens_completes_it(
    text: str, stop: list[str], min_tokens: int
) -> None:
    """Each letter is one token here."""
    for end in range(min_tokens + 1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            assert visible(stop, text, min_tokens) == (text[: end - max(map(len, matches))], True)
            return
    assert visible(stop, text, min_tokens) == (text, False)
