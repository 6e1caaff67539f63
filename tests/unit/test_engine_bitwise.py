"""A row's logits and KV have the same bits for any neighbours, chunking, drafted rows and blocks (tiny models)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.engine import Engine, NumericsError, Sequence, row_safety, runner
from shared.engine.activations import UniformActivation
from shared.engine.batch import SequenceRows
from shared.engine.draft_policy import DraftPolicy
from shared.engine.runner import ModelRunner
from tests.unit.engine_harness import (
    Mixer,
    begin,
    drain,
    greedy,
    kv_of,
    load,
    load_runner,
    outputs,
    sampled,
    tiny_model,
)

KINDS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 50},
    "gemma2": {"sliding_window": 150},
    "gemma3": {"sliding_window": 50},
    "gpt2": {},
    "gpt_neox": {},
    "mixtral": {"sliding_window": 150},
    "qwen2_moe": {},
    "qwen3_moe": {},
}
DTYPES = ("fp32", "fp16-packed", "int8")
LENGTHS = (1, 3, 9, 31, 64, 127, 128, 129, 200, 300)
RUNNERS = [(kind, dtype, "kernels") for kind in KINDS for dtype in DTYPES]
RUNNERS += [(kind, "fp32", "torch") for kind in ("llama", "gemma2", "gpt2")]


@pytest.fixture(scope="module", params=RUNNERS, ids="-".join)
def tiny_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    kind, dtype, attention = request.param
    path = tiny_model(tmp_path_factory.mktemp(kind), kind, **KINDS[kind])
    return load_runner(path, dtype, attention=attention)


@pytest.mark.parametrize("seed", range(4))
def test_bits_do_not_depend_on_neighbours_chunks_drafts_or_blocks(tiny_runner: ModelRunner, seed: int) -> None:
    lengths = random.Random(seed).sample(LENGTHS, 5)
    assert Mixer(tiny_runner, seed, lengths).run() > 20


def test_bits_do_not_depend_on_the_block_length(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    text = [(i * 37) % 250 for i in range(290)]
    found = []
    for block_tokens in (8, 16, 24, 100, 256):
        model = load_runner(path, "fp16-packed", block_tokens=block_tokens)
        blocks = list(range(-(-len(text) // block_tokens)))[::-1]
        logits = [
            model.forward([SequenceRows(text[a:b], a, blocks, 1)]).copy() for a, b in ((0, 70), (70, 289), (289, 290))
        ]
        found.append(np.concatenate(logits).tobytes() + kv_of(model, blocks, len(text)).tobytes())
    assert len(set(found)) == 1


def test_bits_do_not_depend_on_neighbours_with_two_threads(tmp_path: Path) -> None:
    model = load_runner(tiny_model(tmp_path), "fp16-packed", threads=2)
    try:
        assert Mixer(model, 1, [1, 40, 129, 200]).run() > 20
    finally:
        torch.set_num_threads(1)


def test_two_engines_of_the_same_model_agree_on_their_layout_and_other_dtypes_do_not(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    layouts = [load_runner(path, dtype).layout for dtype in ("fp32", "fp32", "fp16-packed")]
    assert layouts[0].layout_id == layouts[1].layout_id
    assert layouts[0].layout_id != layouts[2].layout_id


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_many_drafts_the_policy_verifies(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of right and wrong drafts in any step: every row that counts has the bits of undrafted decoding."""
    path = tiny_model(tmp_path)
    prompts = {f"s{i}": [(j * 37 + i) % 250 for j in range(20 + 9 * i)] for i in range(4)}
    plain = load(path, dtype=dtype)
    reference: dict[tuple[str, int], bytes] = {}
    found: dict[tuple[str, int], bytes] = {}
    seen = reference
    choose = Engine._choose

    def recorded(sequence: Sequence, logits: NDArray[np.float32]) -> int:
        seen[sequence.seq_id, len(sequence.token_ids)] = logits.tobytes()
        return choose(sequence, logits)

    monkeypatch.setattr(Engine, "_choose", staticmethod(recorded))
    for name, prompt in prompts.items():
        begin(plain, name, prompt, sampled(40))
    expected = outputs(drain(plain))
    rng = random.Random(4)
    monkeypatch.setattr(
        DraftPolicy,
        "choose",
        lambda self, candidates, *args, **options: [rng.randint(0, c.length) for c in candidates],
    )
    seen, engine = found, load(path, dtype=dtype, adaptive_drafts=True)
    steps = []
    for name, prompt in prompts.items():
        begin(engine, name, prompt, sampled(40))
    while engine.has_work:
        for name, ids in expected.items():
            known = len(engine._sequences[name].output_ids)
            guess = [t if rng.random() < 0.8 else (t + 1) % 250 for t in ids[known : known + 8]]
            engine.propose(name, len(prompts[name]) + known, guess)
        steps += engine.step()
    assert outputs(steps) == expected
    assert found == reference
    assert 0 < sum(s.accepted for s in steps) < sum(s.drafted for s in steps)


@pytest.fixture
def unsafe_path(tmp_path: Path) -> Path:
    """A model for which this machine's kernels are known to treat some row counts differently."""
    path = tiny_model(tmp_path)
    safe = load_runner(path, "fp32")._builder._safe
    if all(safe.rows(n) == n and safe.query_rows(n) == n for n in range(1, 20)):
        pytest.skip("every row count is safe on this machine")
    return path


def test_unsafe_row_counts_are_noticed_at_load(unsafe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_safety.SafeSize, "_check", lambda self, size: True)
    with pytest.raises(NumericsError, match="different bits"):
        load_runner(unsafe_path, "fp32")


def test_the_mix_sees_unsafe_row_counts_too(unsafe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_safety.SafeSize, "_check", lambda self, size: True)
    monkeypatch.setattr(ModelRunner, "_check_numerics", lambda self: self.model.layout)
    with pytest.raises(AssertionError, match="not equal"):
        Mixer(load_runner(unsafe_path, "fp32"), 0, [9, 31, 127, 200]).run()


@pytest.mark.parametrize("width", [5, 101, 64])
@pytest.mark.parametrize("kind", [torch.nn.SiLU, torch.nn.GELU])
def test_an_activation_gives_an_element_the_same_bits_wherever_it_stands(
    kind: type[torch.nn.Module], width: int
) -> None:
    """Torch alone does not on most processors: the elements at the end of a run go another way."""
    x = torch.randn(700, width, generator=torch.Generator().manual_seed(0)) * 3
    uniform = UniformActivation(kind())
    whole = uniform(x)
    for rows in (1, 2, 3, 7, 50):
        for start in range(0, 700 - rows, 13):
            part = uniform(x[start : start + rows].clone())
            assert part.numpy().tobytes() == whole[start : start + rows].numpy().tobytes()


def test_a_neighbour_whose_numbers_overflow_changes_nothing(tmp_path: Path) -> None:
    model = load_runner(tiny_model(tmp_path), "fp32")
    text = [5, 6, 7, 8]
    expected = model.forward([SequenceRows(text, 0, [3], 4)]).copy()
    model.cache.data[9].fill_(float("nan"))
    poisoned = SequenceRows([1], 15, [9], 1)
    logits = model.forward([poisoned, SequenceRows(text, 0, [4], 4)])
    assert np.isnan(logits[0]).any()
    np.testing.assert_array_equal(logits[1:], expected)


@pytest.mark.parametrize("params", [greedy(60), sampled(60, seed=3)], ids=["greedy", "sampled"])
def test_preemption_and_resumption_change_no_token(tmp_path: Path, params: object) -> None:
    """The small cache holds two of the four sequences at their full length."""
    path = tiny_model(tmp_path)
    prompts = {f"p{i}": [(i * 91 + j * 17) % 250 for j in range(10 + 30 * i)] for i in range(4)}
    roomy = load(path, dtype="fp16-packed")
    for name, prompt in prompts.items():
        begin(roomy, name, prompt, params)  # type: ignore[arg-type]
    expected = outputs(drain(roomy))
    block_bytes = roomy.layout.block_bytes
    tight = load(path, dtype="fp16-packed", kv_memory_bytes=15 * block_bytes)
    for name, prompt in prompts.items():
        begin(tight, name, prompt, params)  # type: ignore[arg-type]
    preempted, ended = 0, {}
    steps = []
    for _ in range(2_000):
        if not tight.has_work:
            break
        before = {s: tight.pin(s) for s in tight.active_ids()}
        for s in before:
            tight.unpin(s)
        done = tight.step()
        steps += done
        for step in done:
            if step.finish_reason:
                ended[step.seq_id] = step
                tight.release(step.seq_id)
        for s in tight.active_ids():
            preempted += bool(before.get(s)) and not tight.pin(s)
            tight.unpin(s)
    assert preempted > 0
    assert outputs(steps) == expected
    assert tight.pool.num_used == 0


def test_the_probes_cover_the_layers_that_a_forward_passes(tmp_path: Path) -> None:
    seen: list[int] = []
    original = row_safety.safe_rows

    def spy(what: str, probes: list[row_safety.Probe]) -> row_safety.SafeSize:
        seen.append(len(probes))
        return original(what, probes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "safe_rows", spy)
        load_runner(tiny_model(tmp_path), "fp16-packed")
    body, head = seen
    assert body == 5  # q/k/v, o, gate/up, down, norm
    assert head == 1
