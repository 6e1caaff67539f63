"""A sequence that is paused computes nothing and keeps what it has; when it goes on it goes on as if nothing was."""

from __future__ import annotations

import pytest

from shared.engine import Engine
from tests.unit.engine_harness import begin, drain, load, outputs, sampled, tiny_model

PROMPT = [(i * 37) % 250 for i in range(300)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(tiny_model(tmp_path_factory.mktemp("llama")), prefix_caching=False)


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_a_paused_sequence_keeps_its_blocks_and_goes_on_where_it_stood(engine: Engine, steps: int) -> None:
    begin(engine, "undisturbed", PROMPT, sampled(20))
    expected = outputs(drain(engine))["undisturbed"]
    engine.release("undisturbed")

    sequence = begin(engine, "s", PROMPT, sampled(20))
    seen = [step for _ in range(steps) for step in engine.step()]
    engine.pause("s")
    engine.pause("s")
    assert not engine.has_work
    assert engine.step() == []
    begin(engine, "other", PROMPT[::-1], sampled(5))
    others = drain(engine)
    assert {step.seq_id for step in others} == {"other"}
    assert len(sequence.block_ids) * 16 >= sequence.num_computed

    engine.start(sequence)
    assert outputs([*seen, *drain(engine)])["s"] == expected
    engine.release("s")
    engine.release("other")
    assert engine.pool.num_used == 0


def test_a_paused_sequence_that_is_released_leaves_nothing(engine: Engine) -> None:
    begin(engine, "s", PROMPT, sampled(20))
    engine.step()
    assert engine.pool.num_used > 0
    engine.pause("s")
    assert engine.pool.num_used > 0
    engine.release("s")
    assert engine.pool.num_used == 0


def test_pausing_what_is_not_in_the_batch_changes_nothing(engine: Engine) -> None:
    engine.pause("nobody")
    sequence = engine.new_sequence("s", PROMPT, len(PROMPT), sampled(1))
    engine.admit(sequence)
    engine.pause("s")
    assert sequence.state == "admitted"
    engine.start(sequence)
    drain(engine)
    engine.pause("s")
    assert sequence.state == "finished"
    engine.release("s")
