"""What comes out of a warm prefix cache has the same bits as what is computed cold, whatever else goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.engine import BadLogits, Engine
from shared.protocol.jobs import SamplingParams
from tests.unit.engine_harness import begin, drain, greedy, load, outputs, sampled, tiny_model

BLOCK = 16
SYSTEM = [(i * 37) % 250 for i in range(83)]
"""A beginning that many prompts share; it ends within a block."""

Logits = dict[tuple[str, int], bytes]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["fp32", "fp16-packed"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def recording(engine: Engine) -> Logits:
    """The logits that choose each token, by sequence and position, filled while the engine steps."""
    seen: Logits = {}
    finish = engine._finish_work

    def record(work: Any, logits: Any) -> Any:
        if work.samples:
            seen[work.sequence.seq_id, len(work.sequence.token_ids)] = logits[0].tobytes()
        return finish(work, logits)

    engine._finish_work = record  # type: ignore[method-assign]
    return seen


def prompts(seed: int) -> dict[str, list[int]]:
    """Some begin alike up to a block's end, some within a block, some are the same, one is new."""
    rng = random.Random(seed)
    tails = [[rng.randrange(250) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    cuts = [len(SYSTEM), 64, 48, 41]
    made = [[*SYSTEM[:cut], *tail] for cut, tail in zip(cuts, tails, strict=True)]
    made += [made[0], SYSTEM[:64], SYSTEM[:65], [rng.randrange(250) for _ in range(50)]]
    return {f"p{i}": prompt for i, prompt in enumerate(made)}


def alone(path: Path, asked: dict[str, list[int]], params: SamplingParams, **changes: Any) -> tuple[Any, Logits]:
    """Each prompt computed from nothing, without a neighbour."""
    engine = load(path, prefix_caching=False, block_tokens=BLOCK, **changes)
    logits, found = recording(engine), {}
    for name, prompt in asked.items():
        begin(engine, name, prompt, params)
        found |= outputs(drain(engine))
        engine.release(name)
    return found, logits


def equal(found: Logits, expected: Logits) -> None:
    assert found
    for place, bits in found.items():
        assert bits == expected[place], place


@pytest.mark.parametrize("params", [greedy(40), sampled(40, seed=3)], ids=["greedy", "sampled"])
def test_a_warm_cache_gives_the_bits_of_a_cold_one(model_path: Path, dtype: str, params: SamplingParams) -> None:
    """Steps of 40 tokens, so that chunks end within blocks, and neighbours of every age."""
    asked = prompts(1)
    expected, cold = alone(model_path, asked, params, dtype=dtype)
    engine = load(model_path, dtype=dtype, block_tokens=BLOCK, max_batch_tokens=40)
    for turn in range(3):
        seen = recording(engine)
        steps = []
        for name, prompt in random.Random(turn).sample(list(asked.items()), len(asked)):
            begin(engine, name, prompt, params)
            steps += engine.step()
        steps += drain(engine)
        assert outputs(steps) == expected
        equal(seen, cold)
        for name in asked:
            engine.release(name)
    assert engine.prefix_hits > engine.prefix_queries / 2
    assert engine.pool.num_used == 0


def test_preemption_amid_cache_hits_changes_no_bit(model_path: Path, dtype: str) -> None:
    asked = {f"p{i}": [*SYSTEM[: 20 * i], *[(i * 91 + j * 17) % 250 for j in range(20)]] for i in range(5)}
    params = sampled(60, seed=3)
    expected, cold = alone(model_path, asked, params, dtype=dtype)
    small = load(model_path, dtype=dtype, block_tokens=BLOCK).layout.block_bytes * 16
    engine = load(model_path, dtype=dtype, block_tokens=BLOCK, kv_memory_bytes=small)
    seen = recording(engine)
    steps, preempted, cached = [], 0, 0
    for _ in range(2):
        running = [begin(engine, name, prompt, params) for name, prompt in asked.items()]
        while engine.has_work:
            done = engine.step()
            steps += done
            for step in done:
                if step.finish_reason:
                    engine.release(step.seq_id)
        preempted += sum(s.preemptions for s in running)
        cached += sum(s.num_cached for s in running)
        assert outputs(steps) == expected
        steps = []
        equal(seen, cold)
    assert preempted
    assert cached
    assert engine.pool.num_used == 0


def test_drafts_and_neighbours_never_write_to_a_shared_block(model_path: Path, dtype: str) -> None:
    engine = load(model_path, dtype=dtype, block_tokens=BLOCK)
    first = begin(engine, "first", SYSTEM, greedy(30))
    drain(engine)
    shared = {b: engine.block_buffer(b).tobytes() for b in first.block_ids[: first.num_computed // BLOCK]}
    assert len(shared) == 7
    known = list(first.token_ids)
    asked = {str(cut): known[:cut] for cut in (64, 65, 79, 80, 83, 100)}
    expected, _ = alone(model_path, asked, greedy(20), dtype=dtype)
    for name, prompt in asked.items():
        follower = begin(engine, name, prompt, greedy(20))
        while follower.finish_reason is None:
            at = len(follower.token_ids)
            engine.propose(follower.seq_id, at, [*known[at : at + 2], 5, 5])
            engine.step()
        assert follower.num_cached == (len(prompt) - 1) // BLOCK * BLOCK
        assert follower.output_ids == expected[name]
    assert {b: engine.block_buffer(b).tobytes() for b in shared} == shared


def test_loaded_blocks_are_found_by_others_as_far_as_they_were_declared(model_path: Path, dtype: str) -> None:
    """Two of four blocks arrived; the third came damaged, and what stands in it must reach nobody."""
    expected, cold = alone(model_path, {"next": SYSTEM}, greedy(12), dtype=dtype)
    engine = load(model_path, dtype=dtype, block_tokens=BLOCK)
    source = begin(engine, "source", SYSTEM, greedy(1), prefill_only=True, salt="elsewhere")
    drain(engine)
    target = engine.new_sequence("target", SYSTEM, len(SYSTEM), greedy(12))
    engine.admit(target)
    assert target.num_computed == 0
    for index in range(2):
        engine.block_buffer(target.block_ids[index])[:] = engine.block_buffer(source.block_ids[index])
    engine.block_buffer(target.block_ids[2]).view(np.float32)[:] = 0.5
    engine.set_loaded(target, 2 * BLOCK)
    other = engine.new_sequence("next", SYSTEM, len(SYSTEM), greedy(12))
    engine.admit(other)
    assert other.block_ids[:2] == target.block_ids[:2]
    assert other.num_cached == 2 * BLOCK
    seen = recording(engine)
    engine.start(other)
    assert outputs(drain(engine)) == expected
    equal(seen, cold)


def test_a_block_is_shared_with_a_load_that_ends_later_and_is_not_loaded_twice(model_path: Path) -> None:
    engine = load(model_path, block_tokens=BLOCK)
    one, two = (engine.new_sequence(name, SYSTEM, len(SYSTEM), greedy(3)) for name in ("one", "two"))
    for sequence in (one, two):
        engine.admit(sequence)
    used = engine.pool.num_used
    for sequence in (one, two):
        engine.set_loaded(sequence, 80)
    assert one.block_ids[:5] == two.block_ids[:5]
    assert engine.pool.num_used == used - 5
    third = engine.new_sequence("three", SYSTEM, len(SYSTEM), greedy(3))
    engine.admit(third)
    engine.set_loaded(third, 16)
    assert third.num_computed == 80, "what was cached stays"


def test_what_a_poisoned_sequence_computed_reaches_nobody_after_it(model_path: Path, dtype: str) -> None:
    expected, _ = alone(model_path, {"healthy": SYSTEM}, greedy(10), dtype=dtype)
    engine = load(model_path, dtype=dtype, block_tokens=BLOCK)
    poisoned = engine.new_sequence("poisoned", SYSTEM, len(SYSTEM), sampled(10))
    engine.admit(poisoned)
    engine.block_buffer(poisoned.block_ids[0]).view(np.float32)[:] = np.nan
    engine.set_loaded(poisoned, 16)
    engine.start(poisoned)
    drain(engine)
    ((_, error),) = engine.take_failures()
    assert isinstance(error, BadLogits)
    healthy = begin(engine, "healthy", SYSTEM, greedy(10))
    assert outputs(drain(engine)) == expected
    assert healthy.num_cached == 0


def test_a_salt_keeps_tenants_apart(model_path: Path) -> None:
    engine = load(model_path, block_tokens=BLOCK)
    begin(engine, "a", SYSTEM, greedy(2), salt="a")
    drain(engine)
    b, again = (begin(engine, name, SYSTEM, greedy(2), salt=name[0]) for name in ("b", "again"))
    drain(engine)
    assert (b.num_cached, again.num_cached) == (0, 80)


def test_a_step_that_raises_leaves_only_what_was_final_before_it(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = alone(model_path, {"again": SYSTEM}, greedy(10))
    engine = load(model_path, block_tokens=BLOCK, max_batch_tokens=40)
    begin(engine, "broken", SYSTEM, greedy(10))
    engine.step()
    forward = engine._runner.forward

    def breaks(rows: Any) -> Any:
        forward(rows)
        engine._runner.cache.data[rows[0].block_ids[2]].fill_(7.0)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._runner, "forward", breaks)
    with pytest.raises(RuntimeError):
        engine.step()
    monkeypatch.undo()
    engine.release("broken")
    again = begin(engine, "again", SYSTEM, greedy(10))
    assert outputs(drain(engine)) == expected
    assert again.num_cached == 32
