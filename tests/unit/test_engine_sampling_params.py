"""Every sampling parameter in a whole engine: the tokens and log probabilities that the definitions give, always.

Always means: with right and wrong drafts, resumed behind any token, preempted, and after a rewind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.engine import Engine, EngineError, SequenceStep
from shared.engine.batch import SequenceRows
from shared.protocol.jobs import SamplingParams
from shared.protocol.records import TokenLogprobs
from tests.unit.engine_harness import (
    EOS,
    begin,
    byte_level_tokenizer,
    drain,
    greedy,
    load,
    load_runner,
    outputs,
    sampled,
    tiny_model,
)
from tests.unit.sampling_reference import reference_choice, reference_row

PROMPT = [(i * 37) % 90 for i in range(45)]
LENGTH = 24
LOUD = [5, 17, 60]

PENALTIES: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.8, "repetition_penalty": 1.3}

CASES: dict[str, SamplingParams] = {
    "greedy": greedy(LENGTH, logprobs=3),
    "greedy, penalties": greedy(LENGTH, **PENALTIES, logprobs=0),
    "greedy, frequency": greedy(LENGTH, frequency_penalty=-1.0, logprobs=2),
    "greedy, bias": greedy(LENGTH, logit_bias={5: 100.0, 17: 99.5, 60: -100.0}, presence_penalty=1.0),
    "top-p, penalties": sampled(LENGTH, **PENALTIES, logprobs=5),
    "top-k, repetition": sampled(LENGTH, top_k=20, repetition_penalty=0.7),
    "min-p, presence": sampled(LENGTH, top_p=1.0, min_p=0.05, presence_penalty=-1.0, seed=3),
    "hot, all": sampled(
        LENGTH, temperature=1.6, top_k=100, top_p=0.98, min_p=0.001, **PENALTIES, logit_bias={7: 2.0}, logprobs=1
    ),
    # The bias makes the stop ids likely, so that `min_tokens` bars them and one comes soon after.
    "min tokens": sampled(
        LENGTH, stop_token_ids=LOUD, min_tokens=9, logit_bias=dict.fromkeys(LOUD, 4.0), ignore_eos=False, logprobs=4
    ),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> Engine:
    return load(model_path)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield loaded
    for seq_id in list(loaded._sequences):
        loaded.release(seq_id)
    assert loaded.pool.num_used == 0


Answer = tuple[list[int], list[TokenLogprobs]]


def answer(steps: list[SequenceStep], seq_id: str) -> Answer:
    """What the sequence said in these steps; fails where log probabilities and tokens do not pair up."""
    logprobs: list[TokenLogprobs] = []
    for step in steps:
        if step.seq_id == seq_id:
            assert len(step.logprobs) in (0, len(step.new_ids))
            logprobs += step.logprobs
    return outputs([s for s in steps if s.seq_id == seq_id]).get(seq_id, []), logprobs


def plain(engine: Engine, params: SamplingParams) -> Answer:
    begin(engine, "plain", PROMPT, params, speculate=False)
    found = answer(drain(engine), "plain")
    engine.release("plain")
    return found


@pytest.fixture(scope="module")
def rows_behind(model_path: Path) -> Any:
    """The model's own logits after `tokens`, from a forward of its own."""
    runner = load_runner(model_path, "fp32")

    def logits(tokens: list[int], count: int) -> NDArray[np.float32]:
        blocks = list(range(-(-len(tokens) // 16)))
        return runner.forward([SequenceRows(tokens, 0, blocks, count)]).copy()

    return logits


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_the_definitions(case: str, engine: Engine, rows_behind: Any) -> None:
    params = CASES[case]
    ids, logprobs = plain(engine, params)
    stops = {*params.stop_token_ids, *(set() if params.ignore_eos else engine.eos_token_ids)}
    rows = rows_behind([*PROMPT, *ids[:-1]], len(ids))
    for i, (token, row) in enumerate(zip(ids, rows, strict=True)):
        shaped = reference_row(row, params, PROMPT, ids[:i], stops)
        assert token == reference_choice(shaped, params, len(PROMPT) + i)
        if params.logprobs is not None:
            exact = row.astype(np.float64)
            exact -= exact.max() + math.log(np.exp(exact - exact.max()).sum())
            ranked = sorted(range(len(row)), key=lambda t: (-exact[t], t))[: params.logprobs]
            assert [t for t, _ in logprobs[i].top] == ranked
            np.testing.assert_allclose([value for _, value in logprobs[i].top], exact[ranked], atol=1e-9)
            assert logprobs[i].logprob == pytest.approx(exact[token], abs=1e-9)
    assert len(logprobs) == (0 if params.logprobs is None else len(ids))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrong_every", [0, 1, 3])
def test_drafts_change_neither_tokens_nor_logprobs(case: str, wrong_every: int, engine: Engine) -> None:
    params = CASES[case]
    expected = plain(engine, params)
    sequence = begin(engine, "s", PROMPT, params)
    steps: list[SequenceStep] = []
    while sequence.finish_reason is None:
        known = len(sequence.output_ids)
        guess = [*expected[0][known : known + 5], 1, 2]  # the last guesses lie behind the end
        if wrong_every:
            guess = [(t + 1) % 90 if (known + i) % wrong_every == 0 else t for i, t in enumerate(guess)]
        engine.propose("s", len(sequence.token_ids), guess)
        steps += engine.step()
    assert answer(steps, "s") == expected
    assert sum(step.drafted for step in steps) > 0
    assert (sum(step.accepted for step in steps) == 0) == (wrong_every == 1)
    engine.release("s")


@pytest.mark.parametrize("case", CASES)
def test_resumption_behind_any_token_goes_on_with_the_same_tokens_and_logprobs(case: str, engine: Engine) -> None:
    params = CASES[case]
    ids, logprobs = plain(engine, params)
    for known in range(1, len(ids)):
        sequence = engine.new_sequence("s", [*PROMPT, *ids[:known]], len(PROMPT), params)
        engine.start(sequence)
        engine.propose("s", len(PROMPT), [*ids[:-1], 3])
        steps = drain(engine)
        assert sequence.output_ids == ids
        assert [p for step in steps for p in step.logprobs] == logprobs[known:]
        engine.release("s")


@pytest.mark.parametrize("case", CASES)
def test_a_rewound_sequence_counts_only_the_tokens_that_it_kept(case: str, engine: Engine) -> None:
    params = CASES[case]
    ids, logprobs = plain(engine, params)
    sequence = begin(engine, "s", PROMPT, params)
    drain(engine)
    for kept in (5, len(ids) - 1, 0):
        engine.rewind(sequence, [*PROMPT, *ids[:kept], *([11, 11, 11] if kept == 5 else [])])
        drain(engine)
        engine.rewind(sequence, [*PROMPT, *ids[:kept]])
        steps = drain(engine)
        assert sequence.output_ids == ids
        assert [p for step in steps for p in step.logprobs] == logprobs[kept:]


def test_preempted_sequences_end_with_the_same_tokens_and_logprobs(model_path: Path, engine: Engine) -> None:
    """Many sequences, blocks for two: all that the definitions look at survives the loss of the blocks."""
    params = [p for p in CASES.values() if p.logprobs is not None]
    expected = [plain(engine, p) for p in params]
    tight = load(model_path, kv_memory_bytes=9 * engine.layout.block_bytes)
    for i, p in enumerate(params):
        begin(tight, f"s{i}", PROMPT, p)
    steps: list[SequenceStep] = []
    lost = 0
    for _ in range(2_000):
        held = {s: len(tight._sequences[s].block_ids) for s in tight.active_ids()}
        for i, (ids, _logprobs) in enumerate(expected):
            tight.propose(f"s{i}", len(PROMPT), [*ids[:-1], 3])
        steps += tight.step()
        lost += sum(len(tight._sequences[s].block_ids) < count for s, count in held.items())
        for seq_id in held.keys() - set(tight.active_ids()):
            tight.release(seq_id)
    assert lost > 0
    for i, answered in enumerate(expected):
        assert answer(steps, f"s{i}") == answered


def test_each_rule_changes_the_answer(engine: Engine) -> None:
    """Else the tests above would hold for an engine that ignores them."""
    base = plain(engine, greedy(LENGTH))[0]
    changes: list[dict[str, Any]] = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {base[0]: -100.0}},
        {"stop_token_ids": [base[2]], "min_tokens": 4},
    ]
    for change in changes:
        assert plain(engine, greedy(LENGTH, **change))[0] != base


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it(engine: Engine) -> None:
    assert plain(engine, sampled(8, logit_bias={42: 100.0}))[0] == [42] * 8
    likely = plain(engine, sampled(30))[0]
    banned = dict.fromkeys(likely, -100.0)
    assert not set(plain(engine, sampled(30, logit_bias=banned))[0]) & set(likely)


@pytest.mark.parametrize("end", ["eos", "stop id"])
def test_no_end_is_chosen_before_min_tokens(end: str, engine: Engine) -> None:
    token = byte_level_tokenizer().token_to_id(EOS) if end == "eos" else 33
    changes: dict[str, Any] = {"ignore_eos": end != "eos", "stop_token_ids": [] if end == "eos" else [33]}
    forced = greedy(20, logit_bias={token: 100.0}, **changes)
    for min_tokens in (0, 1, 7):
        sequence = begin(engine, "s", PROMPT, SamplingParams(**{**_fields(forced), "min_tokens": min_tokens}))
        drain(engine)
        assert len(sequence.output_ids) == min_tokens + 1
        assert sequence.output_ids.index(token) == min_tokens
        assert sequence.finish_reason == "stop"
        engine.release("s")


def test_min_tokens_does_not_bar_an_end_of_sequence_that_is_ignored(engine: Engine) -> None:
    eos = byte_level_tokenizer().token_to_id(EOS)
    assert plain(engine, greedy(6, logit_bias={eos: 100.0}, min_tokens=4, ignore_eos=True))[0] == [eos] * 6


def test_a_stop_string_counts_only_behind_min_tokens(engine: Engine) -> None:
    letter = byte_level_tokenizer().token_to_id("x")
    params = greedy(20, logit_bias={letter: 100.0}, stop=["xxx"], min_tokens=5)
    sequence = begin(engine, "s", PROMPT, params)
    steps = drain(engine)
    assert len(sequence.output_ids) == 6
    assert "".join(step.text for step in steps) == "xxx"
    assert sequence.finish_reason == "stop"


def test_a_request_whose_rules_cannot_be_applied_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="logit_bias"):
        engine.new_sequence("s", PROMPT, len(PROMPT), greedy(4, logit_bias={engine.vocab_size: 1.0}))


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}
