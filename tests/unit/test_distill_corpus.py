"""The corpus on disk: whole shards or none, one recipe for a directory."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.draft.distill import corpus as corpus_module
from services.draft.distill.corpus import Corpus, Text, WrittenTurn
from services.draft.distill.errors import DistillError
from services.draft.distill.recipe import CorpusRecipe

RECIPE = CorpusRecipe("m", "f" * 32, "fp32", 1, top=3)


def opened(directory: Path, recipe: CorpusRecipe = RECIPE) -> Corpus:
    return Corpus(directory, recipe, itertools.count)


def text(number: int, made: int = 5) -> Text:
    random = np.random.default_rng(number)
    length = made + 2
    flags = np.ones(length, np.bool_)
    flags[:2] = False
    turns = (
        WrittenTurn("user", 2, 2 + made // 2, 1.0, 7),
        WrittenTurn("answer", 2 + made // 2, length, 0.7, (1 << 62) - number),
    )
    return Text(
        number,
        random.integers(0, 50_000, length).astype(np.int32),
        flags,
        random.integers(0, 50_000, (made, 3)).astype(np.int32),
        random.normal(size=(made, 3)).astype(np.float16),
        turns,
    )


def same(left: Text, right: Text) -> bool:
    arrays = ("tokens", "made", "top_ids", "top_logprobs")
    return (
        left.number == right.number
        and left.turns == right.turns
        and all(np.array_equal(getattr(left, name), getattr(right, name)) for name in arrays)
    )


def test_what_was_written_is_read_again_in_order_of_numbers(tmp_path: Path) -> None:
    corpus = opened(tmp_path)
    for number in (2, 0, 3):
        corpus.add(text(number))
    corpus.flush()
    corpus.add(text(1, made=9))
    corpus.flush()
    again = opened(tmp_path)
    assert again.num_made == 24
    found = again.read([0, 1, 2, 3])
    assert all(same(found[n], text(n, made=9 if n == 1 else 5)) for n in range(4))


def test_enough_is_counted_from_the_first_text_and_stops_at_a_missing_one(tmp_path: Path) -> None:
    corpus = opened(tmp_path)
    assert corpus.first_texts(1) is None
    for number in (0, 1, 3):
        corpus.add(text(number))
    assert corpus.first_texts(10) == [0, 1]
    assert corpus.first_texts(11) is None
    corpus.add(text(2))
    assert corpus.first_texts(11) == [0, 1, 2]
    assert corpus.first_texts(20) == [0, 1, 2, 3]
    assert corpus.first_texts(21) is None


def test_only_its_own_numbers_count(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, RECIPE, lambda: itertools.count(1, 2))
    corpus.add(text(3))
    assert corpus.first_texts(5) is None
    corpus.add(text(1))
    assert corpus.first_texts(10) == [1, 3]


def test_a_file_that_was_being_written_when_the_process_died_is_no_part_of_it(tmp_path: Path) -> None:
    corpus = opened(tmp_path)
    corpus.add(text(0))
    corpus.flush()
    (tmp_path / ".texts-00001.safetensors.unfinished").write_bytes(b"half")
    again = opened(tmp_path)
    assert 0 in again
    assert again.num_made == 5
    again.add(text(1))
    again.flush()
    assert len(opened(tmp_path).read([0, 1])) == 2


def test_a_process_that_dies_loses_a_bounded_number_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SHARD_TEXTS", 4)
    corpus = opened(tmp_path)
    for number in range(10):
        corpus.add(text(number))
    assert opened(tmp_path).num_made == 8 * 5
    monkeypatch.setattr(corpus_module, "SHARD_AGE_S", -1.0)
    corpus.add(text(10))
    assert opened(tmp_path).num_made == 11 * 5


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"held_out": True}, {"fingerprint": "0"}, {"prompts_sha256": "a"}, {"numerics": "int8"}]
)
def test_text_of_another_recipe_is_not_mixed_in(tmp_path: Path, change: dict[str, object]) -> None:
    opened(tmp_path)
    with pytest.raises(DistillError, match="another target, seed or prompts"):
        opened(tmp_path, msgspec.structs.replace(RECIPE, **change))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    corpus = opened(tmp_path)
    corpus.add(text(0))
    corpus.flush()
    (tmp_path / "texts-00000.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(DistillError, match=r"texts-00000\.safetensors is damaged"):
        opened(tmp_path)
