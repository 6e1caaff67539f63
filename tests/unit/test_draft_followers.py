"""What usually follows two tokens, or one, is counted in text and found again."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from services.draft.followers import DOUBT, LEAST_COUNT, LEAST_PERCENT, Followers, count_followers
from shared.models.drafts import FOLLOWERS
from shared.models.errors import ModelUnusable

Text = tuple[list[int], list[bool]]


def counted(texts: list[Text]) -> Followers:
    return Followers(count_followers((np.array(t, np.int32), np.array(m, np.bool_)) for t, m in texts))


def expected(texts: list[Text], before: int, token: int) -> tuple[int, float]:
    """From the definition."""
    pairs: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens, made in texts:
        for i in range(2, len(tokens)):
            if made[i]:
                pairs[tokens[i - 2], tokens[i - 1]][tokens[i]] += 1
                pairs[(tokens[i - 1],)][tokens[i]] += 1
    for key, least in (((before, token), LEAST_COUNT), ((token,), 1)):
        found = pairs.get(key, Counter())
        total = sum(found.values())
        if found and total >= least:
            follower, count = min(found.items(), key=lambda item: (-item[1], item[0]))
            percent = 100 * count // (total + DOUBT)
            if percent >= LEAST_PERCENT:
                return follower, percent / 100
    return -1, 0.0


@st.composite
def texts(draw: st.DrawFn) -> list[Text]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, 3), max_size=60))
        found.append((tokens, [draw(st.booleans()) or draw(st.booleans()) for _ in tokens]))
    return found


@settings(deadline=None, max_examples=60)
@given(texts())
def test_the_commonest_follower_is_found_with_its_share(found: list[Text]) -> None:
    table = counted(found)
    every = np.arange(5)
    for before in range(5):
        following, chances = table.guess(before, every)
        told = list(zip(following.tolist(), chances.tolist(), strict=True))
        assert told == [expected(found, before, token) for token in range(5)]


def test_two_tokens_that_were_seen_often_tell_more_than_the_second_alone() -> None:
    rare, usual = [7, 1, 2] * LEAST_COUNT, [8, 1, 3] * 20
    text = rare + usual
    table = counted([(text, [True] * len(text))])
    following, chances = table.guess(7, np.array([1]))
    assert (following.tolist(), chances.tolist()) == ([2], [pytest.approx(0.71, abs=0.01)])
    assert table.guess(5, np.array([1]))[0].tolist() == [3], "with another token before it"
    seldom = [7, 1, 2] * (LEAST_COUNT - 1) + usual
    assert counted([(seldom, [True] * len(seldom))]).guess(7, np.array([1]))[0].tolist() == [3]


def test_what_the_target_was_told_counts_as_what_stands_before_only() -> None:
    text = [1, 2, 9] * 10
    made = [False, False, True] * 10
    table = counted([(text, made)])
    assert table.guess(1, np.array([2, 9]))[0].tolist() == [9, -1]


def test_ids_of_large_vocabularies_do_not_meet() -> None:
    a, b = 250_000, 2**31 - 2
    text = [a, b, 5] * 10 + [b, a, 6] * 10
    table = counted([(text, [True] * len(text))])
    assert table.guess(a, np.array([b]))[0].tolist() == [5]
    assert table.guess(b, np.array([a]))[0].tolist() == [6]


def test_nothing_counted_is_no_guess() -> None:
    table = counted([([1, 2], [True, True])])
    assert len(table) == 0
    following, chances = table.guess(1, np.array([2, 3]))
    assert (following.tolist(), chances.tolist()) == ([-1, -1], [0.0, 0.0])


def test_a_table_is_read_from_a_drafts_directory(tmp_path: Path) -> None:
    assert Followers.load(tmp_path) is None
    text = np.array([1, 2, 3] * 10, np.int32)
    save_file(count_followers([(text, np.ones(30, np.bool_))]), tmp_path / FOLLOWERS)
    table = Followers.load(tmp_path)
    assert table is not None
    assert table.guess(1, np.array([2]))[0].tolist() == [3]


@pytest.mark.parametrize(
    "changes",
    [
        {"next": np.zeros(1, np.int32)},
        {"percent": np.full(2, 101, np.uint8)},
        {"next": np.array([4, -1], np.int32)},
        {"keys": np.array([9, 3])},
        {"keys": np.array([3, 3])},
        {"percent": np.zeros(2, np.float32)},
        {"keys": np.zeros((2, 2), np.int64)},
        {"keys": np.array(3)},
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, changes: dict[str, np.ndarray]) -> None:
    good = {"keys": np.array([3, 9]), "next": np.array([4, 5], np.int32), "percent": np.array([20, 100], np.uint8)}
    save_file(good, tmp_path / FOLLOWERS)
    table = Followers.load(tmp_path)
    assert table is not None
    assert table.guess(0, np.array([9, 4]))[0].tolist() == [5, -1]
    save_file(good | changes, tmp_path / FOLLOWERS)
    with pytest.raises(ModelUnusable, match=FOLLOWERS):
        Followers.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no tensors", None])
def test_a_damaged_table_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        save_file({"keys": np.zeros(1, np.int64)}, tmp_path / FOLLOWERS)
    else:
        (tmp_path / FOLLOWERS).write_bytes(content)
    with pytest.raises(ModelUnusable, match=FOLLOWERS) as raised:
        Followers.load(tmp_path)
    assert "\n" not in str(raised.value)
