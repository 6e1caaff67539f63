"""A fork goes on as a sequence of its own with the same tokens would, and computes nothing that its source has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.engine import Engine, EngineError, OutOfBlocks
from shared.protocol.jobs import SamplingParams
from tests.unit.engine_harness import begin, drain, greedy, load, sampled, tiny_model

PROMPT = [(i * 37 + i * i) % 250 for i in range(45)]
RULED = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {3: 4.0}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def loaded(path: Path) -> Engine:
    return load(path)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield loaded
    for seq_id in list(loaded._sequences):
        loaded.release(seq_id)
    assert loaded.pool.num_used == 0


def fresh(engine: Engine, tokens: list[int], params: SamplingParams, count: int) -> list[int]:
    """What a sequence with these tokens goes on with."""
    sequence = engine.new_sequence("fresh", tokens, len(PROMPT), params, pause_after=count, salt="fresh")
    engine.start(sequence)
    drain(engine)
    found = sequence.token_ids[len(tokens) :]
    engine.release("fresh")
    return found


@pytest.mark.parametrize("params", [greedy(60), sampled(60, seed=5), sampled(60, seed=6, **RULED)])
@pytest.mark.parametrize("output", [0, 1, 3, 12, 19, 20])
def test_a_fork_goes_on_as_a_fresh_sequence_with_its_tokens(
    engine: Engine, params: SamplingParams, output: int
) -> None:
    """Within a block, at its end, at the source's end, and where the source has gone on since."""
    source = begin(engine, "source", PROMPT, params, pause_after=20, runners_up=2)
    drain(engine)
    length = len(PROMPT) + output
    tokens = [*source.token_ids[:length], 7]
    fork = engine.fork(source, "fork", length, 7, pause_after=6)
    assert fork.num_pending == (1 if output < 20 else 2)  # the source's last token was never fed
    engine.start(fork)
    engine.start(source, pause_after=9)
    drain(engine)
    assert fork.token_ids == [*tokens, *fresh(engine, tokens, params, 6)]
    assert source.token_ids == [*PROMPT, *fresh(engine, PROMPT, params, 29)]


def test_what_source_and_fork_have_in_common_is_held_once(engine: Engine) -> None:
    source = begin(engine, "source", PROMPT, greedy(60), pause_after=5)
    drain(engine)
    used = engine.pool.num_used
    fork = engine.fork(source, "fork", len(PROMPT) + 1, 7, pause_after=1)
    assert fork.block_ids[:2] == source.block_ids[:2]
    assert engine.pool.num_used == used + 1
    engine.release("source")
    engine.start(fork)
    drain(engine)
    assert fork.token_ids[-1:] == fresh(engine, fork.token_ids[:-1], greedy(60), 1)


def test_without_room_there_is_no_fork_and_nothing_is_held(path: Path) -> None:
    small = load(path, kv_memory_bytes=100_000)
    source = begin(small, "source", PROMPT, greedy(60), pause_after=5)
    drain(small)
    forks = small.pool.num_free // 2  # each has a copied block, and one for what it has not computed yet
    assert forks
    for number in range(forks):
        small.fork(source, f"fork-{number}", len(PROMPT) + 1, 7, pause_after=3)
    with pytest.raises(OutOfBlocks):
        small.fork(source, "one too many", len(PROMPT) + 1, 7, pause_after=3)
    assert len(small._sequences) == 1 + forks
    for seq_id in list(small._sequences):
        small.release(seq_id)
    assert small.pool.num_used == 0


@pytest.mark.parametrize("length", [len(PROMPT) - 1, len(PROMPT) + 6])
def test_a_fork_begins_within_the_output(engine: Engine, length: int) -> None:
    source = begin(engine, "source", PROMPT, greedy(60), pause_after=5)
    drain(engine)
    with pytest.raises(EngineError, match="has no"):
        engine.fork(source, "fork", length, 7, pause_after=3)
    assert list(engine._sequences) == ["source"]


def test_rankings_are_kept_of_what_was_sampled_lately(engine: Engine) -> None:
    plain = begin(engine, "plain", PROMPT, sampled(200, seed=5, top_p=1.0))
    drain(engine)
    asked = begin(engine, "asked", PROMPT, sampled(200, seed=5, top_p=1.0), runners_up=3)
    alone = begin(engine, "alone", PROMPT, sampled(200, seed=5, top_p=1.0), runners_up=0)
    drain(engine)
    assert asked.token_ids == alone.token_ids == plain.token_ids
    assert not plain.rankings
    assert list(asked.rankings) == list(range(len(asked.token_ids) - 64, len(asked.token_ids)))
    for position, (tokens, chances) in asked.rankings.items():
        assert tokens[0] == asked.token_ids[position]
        assert len(set(tokens)) == len(chances) == 4
        assert sorted(chances, reverse=True) == chances
        assert alone.rankings[position] == (tokens[:1], chances[:1])
    engine.rewind(plain, PROMPT + plain.output_ids[:9], pause_after=1)
    engine.rewind(asked, PROMPT + plain.output_ids[:9], pause_after=1)
    drain(engine)
    assert list(asked.rankings) == [len(PROMPT) + 9]
