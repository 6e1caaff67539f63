"""Batches and learning rate of a training run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.draft.distill.recipe import starting_layers
from services.draft.distill.schedule import batches, learning_rate


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=300), st.integers(1, 3), st.integers(0, 99))
def test_every_text_is_there_once_an_epoch_and_batches_keep_their_size(
    lengths: list[int], epochs: int, seed: int
) -> None:
    found = batches(lengths, epochs, 1024, seed)
    assert sorted(i for batch in found for i in batch) == sorted(list(range(len(lengths))) * epochs)
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 1024
    assert batches(lengths, epochs, 1024, seed) == found


def test_epochs_differ_and_the_first_ones_do_not_depend_on_how_many_follow() -> None:
    lengths = [10 + i % 50 for i in range(200)]
    one, two = batches(lengths, 1, 512, 1), batches(lengths, 2, 512, 1)
    assert two[: len(one)] == one
    assert two[len(one) :] != one


def test_little_of_a_batch_is_padding() -> None:
    lengths = [40 + (i * 7919) % 900 for i in range(400)]
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches(lengths, 1, 2048, 1))
    assert padded < 1.15 * sum(lengths)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, 2.0, 10) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert max(rates) == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert learning_rate(0, 1, 2.0, 50) > 0


def test_the_student_starts_from_the_first_layers() -> None:
    assert starting_layers(30, 1) == [0]
    assert starting_layers(30, 2) == [0, 1]
    assert starting_layers(30, 3) == [0, 1, 2]
    assert starting_layers(4, 3) == [0, 1, 2]
