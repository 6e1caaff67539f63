"""Block keys and checksums."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import block_keys, checksum, checksums
from shared.blocks.checksum import INLINE_BYTES
from shared.transport import UnusableBuffer

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)
lengths = st.integers(1, 40)


@given(token_ids, lengths)
def test_keys_cover_all_tokens_and_only_the_last_block_is_partial(ids: list[int], block_tokens: int) -> None:
    keys = block_keys("layout", "tenant", ids, block_tokens)
    assert sum(key.n_tokens for key in keys) == len(ids)
    assert all(key.n_tokens == block_tokens for key in keys[:-1])
    assert all(len(key.key) == 16 for key in keys)
    assert len({key.key for key in keys}) == len(keys)


@given(token_ids, token_ids, lengths)
def test_equal_prefixes_share_keys_exactly_as_far_as_they_agree(
    ids: list[int], other: list[int], block_tokens: int
) -> None:
    agree = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
    mine, theirs = block_keys("l", "s", ids, block_tokens), block_keys("l", "s", other, block_tokens)
    shared = 0
    for a, b in zip(mine, theirs, strict=False):
        if a.key != b.key:
            break
        shared += 1
    expected = agree // block_tokens
    if ids == other:
        expected = len(mine)
    assert shared == expected


@given(token_ids.filter(bool), st.integers(0, 199), lengths)
def test_changing_one_token_changes_its_block_and_all_later_ones(ids: list[int], where: int, block_tokens: int) -> None:
    where %= len(ids)
    changed = [*ids[:where], (ids[where] + 1) % 2**32, *ids[where + 1 :]]
    before, after = block_keys("l", "s", ids, block_tokens), block_keys("l", "s", changed, block_tokens)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert (a.key == b.key) == (i < where // block_tokens)


@given(token_ids.filter(bool), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_layout_and_salt_separate_every_key(ids: list[int], l1: str, s1: str, l2: str, s2: str) -> None:
    mine = {key.key for key in block_keys(l1, s1, ids, 16)}
    theirs = {key.key for key in block_keys(l2, s2, ids, 16)}
    assert (mine == theirs) == ((l1, s1) == (l2, s2))
    assert (l1, s1) == (l2, s2) or not mine & theirs


def test_a_partial_block_is_not_the_full_one_that_it_grows_into() -> None:
    full = block_keys("l", "s", list(range(32)), 32)
    for n in range(1, 32):
        (partial,) = block_keys("l", "s", list(range(n)), 32)
        assert partial.n_tokens == n
        assert partial.key != full[0].key


def test_keys_are_the_same_in_every_process() -> None:
    code = "from shared.blocks.keys import block_keys; print(block_keys('l', 's', range(40), 32)[1].key.hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == block_keys("l", "s", range(40), 32)[1].key.hex()


@pytest.mark.parametrize("bad", [[-1], [2**32], [2**70], [0, -5, 3]])
def test_ids_that_do_not_fit_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        block_keys("l", "s", bad, 32)


def test_a_block_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        block_keys("l", "s", [1], 0)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 299), st.integers(1, 255))
def test_any_changed_byte_changes_the_checksum(data: bytes, where: int, flip: int) -> None:
    damaged = bytearray(data)
    damaged[where % len(data)] ^= flip
    assert checksum(data) != checksum(damaged)
    assert checksum(data) == checksum(np.frombuffer(data, np.uint8))


def test_the_checksum_is_xxh3_64() -> None:
    # From the reference implementation's published test vectors: the empty input with seed 0.
    assert checksum(b"") == 0x2D06800538D394C2


async def test_checksums_are_the_same_on_the_loop_and_in_a_thread() -> None:
    small = [np.full(1000, i, np.uint8) for i in range(4)]
    large = [np.full(INLINE_BYTES // 2 + 1, i, np.uint8) for i in range(2)]
    assert await checksums(small) == [checksum(b) for b in small]
    assert await checksums(large) == [checksum(b) for b in large]


def test_a_buffer_with_gaps_has_no_checksum() -> None:
    with pytest.raises(UnusableBuffer):
        checksum(np.zeros((8, 8), np.uint8)[:, ::2])
