"""The engine as its users see it: drafts, resumption, ends, text, rewinding, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from shared.engine import (
    BadLogits,
    Engine,
    EngineConfig,
    EngineError,
    OutOfBlocks,
    PromptTooLong,
    SequenceTooLarge,
    UnknownSequence,
)
from shared.protocol.jobs import SamplingParams
from tests.unit.engine_harness import (
    EOS,
    begin,
    byte_level_tokenizer,
    drain,
    greedy,
    load,
    outputs,
    sampled,
    texts,
    tiny_model,
)

PROMPT = [(i * 37) % 250 for i in range(45)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> Engine:
    return load(model_path, dtype="fp16-packed")


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield loaded
    for seq_id in list(loaded._sequences):
        loaded.release(seq_id)
    assert loaded.pool.num_used == 0


def run_alone(engine: Engine, prompt: list[int], params: SamplingParams, **options: Any) -> list[int]:
    begin(engine, "alone", prompt, params, **options)
    found = outputs(drain(engine))["alone"]
    engine.release("alone")
    return found


@pytest.mark.parametrize("params", [greedy(40), sampled(40), sampled(40, top_k=20, min_p=0.02)])
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 5])
def test_drafts_change_no_token(engine: Engine, params: SamplingParams, wrong_every: int) -> None:
    expected = run_alone(engine, PROMPT, params, speculate=False)
    sequence = begin(engine, "drafted", PROMPT, params)
    begin(engine, "neighbour", PROMPT[:7], sampled(60, seed=9))
    drafted = accepted = steps = 0
    while sequence.finish_reason is None:
        known = len(sequence.token_ids) - len(PROMPT)
        guess = list(expected[known : known + 5])
        if wrong_every:
            guess = [(t + 1) % 250 if (known + i) % wrong_every == 0 else t for i, t in enumerate(guess)]
        engine.propose("drafted", len(sequence.token_ids), guess)
        for step in engine.step():
            if step.seq_id == "drafted":
                drafted, accepted, steps = drafted + step.drafted, accepted + step.accepted, steps + 1
                assert step.num_computed == sequence.num_computed <= len(sequence.token_ids)
    assert sequence.output_ids == expected
    assert drafted > 0
    if wrong_every == 0:
        assert accepted == drafted
        assert steps <= 40 / 6 + 2
    if wrong_every == 1:
        assert accepted == 0
        assert steps == 40
    drain(engine)


def test_a_proposal_that_overlaps_or_lags_is_used_as_far_as_it_agrees(engine: Engine) -> None:
    expected = run_alone(engine, PROMPT, greedy(12))
    sequence = begin(engine, "s", PROMPT, greedy(12))
    engine.step()
    engine.propose("s", 40, [*PROMPT[40:], *expected[:4]])
    (step,) = engine.step()
    assert (step.drafted, step.accepted) == (3, 3)
    engine.propose("s", len(sequence.token_ids) - 1, [(expected[4] + 1) % 250, 3, 3])
    engine.propose("s", len(sequence.token_ids) + 1, [3, 3])
    engine.propose("unknown", 0, [1])
    engine.propose("s", len(sequence.token_ids), [engine.vocab_size])
    (step,) = engine.step()
    assert step.drafted == 0
    drain(engine)
    assert sequence.output_ids == expected


def test_nothing_is_generated_beyond_max_tokens_even_from_drafts(engine: Engine) -> None:
    expected = run_alone(engine, PROMPT, greedy(6))
    sequence = begin(engine, "s", PROMPT, greedy(6))
    engine.step()
    engine.propose("s", len(PROMPT), [*expected, 1, 2, 3])
    (step,) = engine.step()
    assert step.finish_reason == "length"
    assert sequence.output_ids == expected
    assert not engine.has_work


@pytest.mark.parametrize("params", [greedy(30), sampled(30, stop=["\x00never\x00"])])
@pytest.mark.parametrize("known", [1, 13, 29])
def test_a_resumed_request_continues_with_the_same_tokens_and_text(
    engine: Engine, params: SamplingParams, known: int
) -> None:
    begin(engine, "first", PROMPT, params)
    steps = drain(engine)
    expected, text = outputs(steps)["first"], texts(steps)["first"]
    shown = "".join(s.text for s in steps if s.first_index < known)
    resumed = engine.new_sequence("resumed", PROMPT + expected[:known], len(PROMPT), params)
    engine.admit(resumed)
    engine.start(resumed)
    later = drain(engine)
    assert next(s.first_index for s in later if s.new_ids) == known
    assert expected[:known] + [t for s in later for t in s.new_ids] == expected
    assert shown + texts(later)["resumed"] == text


def test_known_output_that_already_ends_is_told_and_not_continued(engine: Engine) -> None:
    done = engine.new_sequence("done", [*PROMPT, 5, 6, 7], len(PROMPT), greedy(3))
    assert done.finish_reason == "length"
    with pytest.raises(EngineError, match="ended already"):
        engine.start(done)
    eos = next(iter(engine.eos_token_ids))
    ended = engine.new_sequence("ended", [*PROMPT, 5, eos], len(PROMPT), greedy(9, ignore_eos=False))
    assert ended.finish_reason == "stop"


def test_kv_written_from_outside_is_used_as_if_computed(engine: Engine) -> None:
    expected = run_alone(engine, PROMPT, greedy(20))
    source = begin(engine, "source", PROMPT, greedy(1), prefill_only=True)
    drain(engine)
    target = engine.new_sequence("target", PROMPT, len(PROMPT), greedy(20), salt="loads")
    engine.admit(target)
    assert not set(target.block_ids) & set(source.block_ids)
    for ours, theirs in zip(target.block_ids, source.block_ids, strict=False):
        buffer = engine.block_buffer(ours)
        assert buffer.nbytes == engine.layout.block_bytes
        buffer[:] = engine.block_buffer(theirs)
    engine.set_loaded(target, len(PROMPT))
    engine.start(target)
    (first,) = engine.step()
    assert first.num_computed == len(PROMPT)
    assert first.new_ids == expected[:1]
    drain(engine)
    assert target.output_ids == expected


def test_the_kv_is_really_read_from_the_blocks(engine: Engine) -> None:
    """Wrong bytes in a loaded block change the result, so equal results above mean something."""
    expected = run_alone(engine, PROMPT, greedy(20))
    target = engine.new_sequence("target", PROMPT, len(PROMPT), greedy(20), salt="loads what is wrong")
    engine.admit(target)
    engine.block_buffer(target.block_ids[0]).view(np.float32)[:] = 0.5
    engine.set_loaded(target, 16)
    engine.start(target)
    drain(engine)
    assert target.output_ids != expected


def test_prefill_only_pauses_after_one_token_and_keeps_its_blocks(engine: Engine) -> None:
    sequence = begin(engine, "s", PROMPT, greedy(20), prefill_only=True)
    steps = drain(engine)
    assert [s.finish_reason for s in steps] == [None] * len(steps)
    assert len(sequence.output_ids) == 1
    assert sequence.state == "paused"
    assert len(sequence.block_ids) * 16 >= len(PROMPT)
    one = begin(engine, "one", PROMPT, greedy(1), prefill_only=True)
    assert drain(engine)[-1].finish_reason == "length"
    assert one.state == "finished"


def test_a_prompt_longer_than_the_budget_is_told_chunk_by_chunk(engine: Engine) -> None:
    begin(engine, "long", PROMPT * 7, greedy(1), salt="long")
    steps = drain(engine)
    assert [s.num_computed for s in steps] == [128, 256, 315]
    assert [len(s.new_ids) for s in steps] == [0, 0, 1]


def stop_case(engine: Engine, **changes: Any) -> tuple[list[int], str, str | None]:
    begin(engine, "s", PROMPT, greedy(40, **changes))
    steps = drain(engine)
    engine.release("s")
    return outputs(steps)["s"], texts(steps)["s"], steps[-1].finish_reason


def test_what_is_ahead_is_computed_before_what_came_earlier(model_path: Path) -> None:
    engine = load(model_path, max_batch_tokens=16)
    for n, seq_id in enumerate(("first", "second", "ahead", "ahead later")):
        begin(engine, seq_id, [n + 1] * 32, greedy(4), prefill_only=True, ahead=seq_id.startswith("ahead"))
    ended = [step.seq_id for step in drain(engine) if step.new_ids]
    assert ended == ["ahead", "ahead later", "first", "second"]


def test_stop_ids_end_the_output_and_add_no_text(engine: Engine) -> None:
    ids, text, reason = stop_case(engine)
    assert reason == "length"
    stop_id = ids[9]
    cut = ids.index(stop_id)
    found, found_text, reason = stop_case(engine, stop_token_ids=[stop_id])
    assert (found, reason) == (ids[: cut + 1], "stop")
    assert found_text == byte_level_tokenizer().decode(ids[:cut])
    assert text.startswith(found_text.rstrip("\ufffd"))


def test_eos_ends_the_output_unless_ignored(engine: Engine, tmp_path: Path) -> None:
    ids, _, _ = stop_case(engine)
    config = transformers.GenerationConfig(eos_token_id=[ids[3], 255])
    path = tiny_model(tmp_path)
    config.save_pretrained(path)
    other = load(path, dtype="fp16-packed")
    assert {ids[3], 255, byte_level_tokenizer().token_to_id(EOS)} == other.eos_token_ids
    found, _, reason = stop_case(other, ignore_eos=False)
    assert (found, reason) == (ids[: ids.index(ids[3]) + 1], "stop")
    assert stop_case(other)[0] == ids


def test_a_stop_string_ends_the_output_within_an_accepted_run_and_is_not_shown(engine: Engine) -> None:
    ids, text, _ = stop_case(engine)
    decoded = byte_level_tokenizer().decode(ids)
    assert text == decoded
    at = next(i for i in range(5, len(decoded) - 2) if "\ufffd" not in decoded[i : i + 2])
    stop = decoded[at : at + 2]
    sequence = begin(engine, "s", PROMPT, greedy(40, stop=[stop]))
    steps = []
    while sequence.finish_reason is None:
        engine.propose("s", len(PROMPT), ids)
        steps += engine.step()
    assert sequence.finish_reason == "stop"
    assert texts(steps)["s"] == decoded[: decoded.index(stop)]
    assert sequence.output_ids == ids[: len(sequence.output_ids)]
    assert stop in byte_level_tokenizer().decode(sequence.output_ids)
    assert stop not in byte_level_tokenizer().decode(sequence.output_ids[:-1])


@pytest.mark.parametrize("unknown", [-1, 2**31 - 1])
def test_rewinding_to_tokens_that_the_model_does_not_have_is_refused_and_harms_nothing(
    engine: Engine, unknown: int
) -> None:
    sequence = begin(engine, "draft", PROMPT, sampled(60, seed=5), pause_after=4, text=False)
    drain(engine)
    before = list(sequence.token_ids)
    with pytest.raises(EngineError, match="token ids must lie in"):
        engine.rewind(sequence, [*PROMPT, unknown], pause_after=3)
    assert sequence.token_ids == before
    assert drain(engine) == []


def test_rewinding_keeps_the_common_beginning_and_continues_from_the_new_tokens(engine: Engine) -> None:
    params = sampled(60, seed=5)
    sequence = begin(engine, "draft", PROMPT, params, pause_after=4, text=False)
    drain(engine)
    assert len(sequence.output_ids) == 4
    confirmed = [*PROMPT, *sequence.output_ids[:2], (sequence.output_ids[2] + 1) % 250]
    engine.rewind(sequence, confirmed, pause_after=3)
    assert sequence.num_computed == len(PROMPT) + 2
    drain(engine)
    guessed = sequence.token_ids[len(confirmed) :]
    fresh = engine.new_sequence("fresh", confirmed, len(PROMPT), params)
    engine.start(fresh)
    drain(engine)
    assert guessed == fresh.token_ids[len(confirmed) : len(confirmed) + 3]
    engine.rewind(sequence, sequence.token_ids, pause_after=1)
    (step,) = drain(engine)
    assert step.new_ids == [fresh.token_ids[len(confirmed) + 3]]


def test_a_drafter_with_the_target_model_is_always_right(model_path: Path, engine: Engine) -> None:
    """Coupled noise: the same logits, seed and position give the same token in another engine."""
    params = sampled(40, seed=77)
    drafter = load(model_path, dtype="fp16-packed", max_batch_tokens=64)
    draft = drafter.new_sequence("d", PROMPT, len(PROMPT), sampled(500, seed=77), pause_after=4, text=False)
    drafter.start(draft)
    drain(drafter)
    target = begin(engine, "t", PROMPT, params)
    drafted = accepted = 0
    while target.finish_reason is None:
        engine.propose("t", len(PROMPT), draft.output_ids)
        for step in engine.step():
            drafted, accepted = drafted + step.drafted, accepted + step.accepted
        if target.finish_reason is None and len(target.token_ids) >= len(draft.token_ids):
            drafter.rewind(draft, target.token_ids, pause_after=4)
            drain(drafter)
    assert drafted == accepted > 20


def test_requests_that_never_fit_are_refused_by_name(engine: Engine) -> None:
    capacity = engine.pool.num_blocks * engine.config.block_tokens
    with pytest.raises(PromptTooLong):
        engine.new_sequence("s", [1] * 1024, 1024, greedy(1))
    for bad in ([], [-1], [engine.vocab_size]):
        with pytest.raises(EngineError):
            engine.new_sequence("s", bad, len(bad), greedy(1))
    engine.new_sequence("s", [1], 1, greedy(1))
    with pytest.raises(EngineError, match="exists already"):
        engine.new_sequence("s", [1], 1, greedy(1))
    assert capacity > 1024


def test_a_sequence_larger_than_the_cache_is_refused_and_room_is_not_taken_twice(model_path: Path) -> None:
    small = load(model_path, kv_memory_bytes=12 * 16 * 2 * 2 * 2 * 8 * 4)
    assert small.pool.num_blocks == 12
    with pytest.raises(SequenceTooLarge):
        small.new_sequence("s", [1] * 10, 10, greedy(183))
    first = small.new_sequence("a", [1] * 100, 100, greedy(50))
    second = small.new_sequence("b", [1] * 100, 100, greedy(50))
    small.admit(first)
    small.admit(first)
    assert small.pool.num_used == 7
    with pytest.raises(OutOfBlocks):
        small.admit(second)
    assert second.block_ids == []
    small.release("a")
    small.release("a")
    small.admit(second)


def test_a_new_holder_finds_its_blocks_zeroed(model_path: Path) -> None:
    small = load(model_path, kv_memory_bytes=12 * 16 * 2 * 2 * 2 * 8 * 4)
    for block_id in range(small.pool.num_blocks):
        small.block_buffer(block_id)[:] = 255
    sequence = small.new_sequence("s", [1] * 190, 190, greedy(1))
    small.admit(sequence)
    assert len(sequence.block_ids) == 12
    assert not any(small.block_buffer(block_id).any() for block_id in sequence.block_ids)


def test_calls_in_the_wrong_state_are_refused(engine: Engine) -> None:
    sequence = begin(engine, "s", PROMPT, greedy(5))
    with pytest.raises(UnknownSequence):
        engine.start(sequence)
    with pytest.raises(EngineError):
        engine.set_loaded(sequence, 1000)
    engine.release("s")
    for call in (engine.start, engine.admit):
        with pytest.raises(UnknownSequence):
            call(sequence)
    with pytest.raises(UnknownSequence):
        engine.pin("s")
    engine.unpin("s")


def test_pins_bar_preemption_and_show_only_full_blocks(model_path: Path) -> None:
    small = load(model_path, kv_memory_bytes=12 * 16 * 2 * 2 * 2 * 8 * 4)
    begin(small, "old", [1] * 60, greedy(80))
    young = begin(small, "young", [2] * 60, greedy(80))
    small.step()
    held = small.pin("young")
    assert held == young.block_ids[: len(held)]
    assert len(held) == young.num_computed // 16 == 3  # of four, the last of them half full
    assert len(young.block_ids) > 3
    for _ in range(100):
        small.step()
    assert young.block_ids[: len(held)] == held
    small.unpin("young")
    ended = set()
    while small.has_work:
        for step in small.step():
            if step.finish_reason:
                ended.add(step.seq_id)
                small.release(step.seq_id)
    assert ended == {"old", "young"}


def test_a_sequence_with_unusable_logits_fails_alone(engine: Engine) -> None:
    expected = run_alone(engine, PROMPT, greedy(10))
    poisoned = engine.new_sequence("poisoned", PROMPT, len(PROMPT), sampled(10), salt="poison")
    engine.admit(poisoned)
    engine.block_buffer(poisoned.block_ids[0]).view(np.float32)[:] = np.nan
    engine.set_loaded(poisoned, 16)
    engine.start(poisoned)
    begin(engine, "healthy", PROMPT, greedy(10))
    assert outputs(drain(engine))["healthy"] == expected
    ((seq_id, error),) = engine.take_failures()
    assert seq_id == "poisoned"
    assert isinstance(error, BadLogits)
    assert engine.take_failures() == []
    engine.release("poisoned")
    assert run_alone(engine, PROMPT, greedy(10)) == expected


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("dtype", "bf16", "bf16"), ("threads", 0, "threads"), ("max_running", 999, "max_batch_tokens")],
)
def test_impossible_configurations_are_refused_by_field(field: str, value: object, reason: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model_path": tmp_path,
        "model_name": "m",
        "fingerprint": "f",
        "kv_memory_bytes": 1,
        field: value,
    }
    with pytest.raises(ValueError, match=reason):
        EngineConfig(**fields)


def test_a_cache_too_small_for_anything_is_refused(model_path: Path) -> None:
    with pytest.raises(EngineError, match="KV blocks"):
        load(model_path, kv_memory_bytes=4096)
