"""The engine's benchmark: its clockwork, its arithmetic, and that peers do what they are timed for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.engine_bench.counting import causal_attention_flops, fit_line, product_flops
from loadgen.engine_bench.main import chosen_parts
from loadgen.engine_bench.memory import Weights, weight_bytes
from loadgen.engine_bench.prefill import prefill
from loadgen.engine_bench.products import Products
from loadgen.engine_bench.quality import Score
from loadgen.engine_bench.section import Line, Section, format_value, show
from loadgen.engine_bench.steps import has_room, sequences_at
from loadgen.engine_bench.timing import Contender, Times, interleave, p95, ratio
from loadgen.engine_bench.transformers_peer import ATTENTIONS, TransformersPeer
from shared.engine.batch import SequenceRows
from shared.engine.kernels import has_byte_products
from tests.unit.engine_harness import load_runner, tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("engine_bench") / "tiny", max_position_embeddings=4096)


class Stage:
    """A clock that only moves while somebody acts, and the order of the acts."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.acts: list[str] = []

    def act(self, name: str, durations_s: list[float]) -> Callable[[], None]:
        left = iter(durations_s)

        def run() -> None:
            self.acts.append(name)
            self.now_s += next(left)

        return run


def test_contenders_take_turns_and_neither_warm_up_nor_preparation_counts() -> None:
    stage = Stage()
    a = Contender(stage.act("a", [100, 1, 2, 9]), stage.act("before", [50, 50, 50, 50]))
    b = Contender(stage.act("b", [100, 2, 8, 9]))

    def wall() -> float:
        return 10 * stage.now_s

    times = interleave({"a": a, "b": b}, 3, threads=1, cpu_clock=lambda: stage.now_s, wall_clock=wall)
    assert stage.acts == ["before", "a", "b"] * 4
    assert times["a"].cpu_s == [1, 2, 9]
    assert times["b"].wall_s == [20, 80, 90]
    assert (times["a"].median_s, times["a"].cpu_ms, times["a"].wall_ms) == (2, 2_000, 20_000)
    assert ratio(times["b"], times["a"]) == 2  # of 2/1, 8/2, 9/9


def test_with_several_threads_the_caller_s_cpu_time_does_not_stand_for_the_work() -> None:
    times = Times(alone=False, cpu_s=[1.0], wall_s=[3.0])
    assert times.median_s == 3.0
    assert interleave({"a": Contender(lambda: None)}, 1, threads=2)["a"].alone is False


def test_p95_of_one_value_is_that_value() -> None:
    assert p95([7.0]) == 7.0
    assert p95([float(n) for n in range(101)]) == 95.0


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_attention_is_counted_over_the_pairs_that_causality_leaves(
    tokens: int, layers: int, heads: int, head_dim: int
) -> None:
    one_dot_product = 2 * head_dim
    pairs = sum(1 for query in range(tokens) for key in range(tokens) if key <= query)
    assert causal_attention_flops(tokens, layers, heads, head_dim) == layers * heads * pairs * 2 * one_dot_product


def test_a_line_is_found_with_its_worst_residual() -> None:
    fit = fit_line([1.0, 2.0, 4.0], [13.0, 16.0, 22.0])
    assert fit.slope == pytest.approx(3)
    assert fit.intercept == pytest.approx(10)
    assert fit.worst == pytest.approx(0, abs=1e-9)
    x = [0.0, 1.0, 2.0]
    bent = fit_line(x, [10.0, 11.0, 20.0])
    assert bent.worst == pytest.approx(
        max(abs(bent.slope * a + bent.intercept - y) / y for a, y in zip(x, [10, 11, 20], strict=True))
    )


def test_surprise_and_divergence_are_those_of_the_definitions() -> None:
    draw = np.random.default_rng(3)
    logits, reference = draw.normal(size=(2, 40, 11))
    targets = draw.integers(0, 11, 40)
    p = np.exp(reference) / np.exp(reference).sum(1, keepdims=True)
    q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    score = Score()
    for rows in (slice(0, 25), slice(25, 40)):
        score.add(*(torch.tensor(array[rows]) for array in (np.log(q), np.log(p), targets)))
    assert score.positions == 40
    assert score.perplexity == pytest.approx(math.exp(-np.log(q[np.arange(40), targets]).mean()))
    assert score.divergence == pytest.approx((p * np.log(p / q)).sum())
    assert score.moved == (p.argmax(1) != q.argmax(1)).sum()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("28.8298", "28.8298"),
        (16, "16"),
        (1917.4, "1,917"),
        (99.96, "100"),
        (58.84, "58.8"),
        (9.996, "10.0"),
        (1.4449, "1.44"),
        (0.0, "0.00"),
        (0.0132, "0.0132"),
        (-3e-6, "-3e-06"),
    ],
)
def test_figures_show_the_digits_that_count(value: float | str | None, text: str) -> None:
    assert format_value(value) == text


def test_a_section_shows_every_figure_with_its_unit_and_column() -> None:
    console = Console(width=116, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    section = Section(
        "s", "steps", ["batch 1", "batch 4"], [Line("step", "ms", [1.5, None]), Line("n", "", [3, 4])], ["x"]
    )
    show(console, section)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == "steps batch 1 batch 4"
    assert [line for line in lines[2:] if line] == ["step, ms 1.50", "n 3 4", "x"]


def test_parts_are_chosen_by_name_and_measured_in_the_order_of_the_table() -> None:
    assert chosen_parts("") == chosen_parts("loops,peers,quality,startup,context,prefill,sampling,verify,decode")
    assert chosen_parts(" prefill, decode") == ["decode", "prefill"]
    with pytest.raises(typer.BadParameter, match="no part 'speed'; choose from decode"):
        chosen_parts("decode,speed")


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("fp16-packed", 2), ("int8", 1)])
def test_products_and_weights_are_counted_once_each(tiny: Path, dtype: str, width: int) -> None:
    runner = load_runner(tiny, dtype)
    hidden, inner, kv, vocab = 48, 101, 16, runner.model.vocab_size
    layer = hidden * (hidden + 2 * kv) + hidden * hidden + 2 * hidden * inner + inner * hidden
    products = Products(runner)
    assert products.flops(7, 2) == product_flops(7, 1, 2 * layer) + product_flops(2, hidden, vocab)
    products.call(7, 2)()
    norms = 5 * hidden * 4
    scales = 4 * (2 * (hidden + 2 * kv + hidden + 2 * inner + hidden) + vocab) if dtype == "int8" else 0
    packed = ("panels", "scales", "sums")
    rotary = sum(b.nbytes for name, b in runner.model.module.named_buffers() if not name.endswith(packed))
    outside = vocab * hidden * 4 + norms + scales + rotary  # the embedding too
    found = weight_bytes(runner.model.module)
    assert found.plain == (2 * layer + vocab * hidden) * width + outside
    sizes = {(hidden + 2 * kv, hidden): 2, (hidden, hidden): 2, (2 * inner, hidden): 2, (hidden, inner): 2}
    sizes[vocab, hidden] = 1
    if dtype == "int8" and has_byte_products():  # weights, a scale and a sum of each output, both of 4 bytes
        padded = sum(n * -(-out // 32) * 32 * (-(-depth // 4) * 4 + 8) for (out, depth), n in sizes.items())
        assert found.held == padded + outside - scales
        return
    if dtype != "fp16-packed":
        assert found.held == found.plain
        return
    assert found.held == sum(n * width * -(-out // 32) * 32 * depth for (out, depth), n in sizes.items()) + outside
    library_packed = weight_bytes(load_runner(tiny, dtype, threads=2).model.module)
    torch.set_num_threads(1)
    assert library_packed == Weights(
        found.plain, sum(n * width * -(-out // 16) * 16 * 512 for (out, _), n in sizes.items()) + outside
    )


def test_sequences_in_mid_life_own_distinct_blocks_for_all_their_tokens(tiny: Path) -> None:
    runner = load_runner(tiny, "fp16-packed")
    assert has_room(runner, 3, 40)
    assert not has_room(runner, runner.cache.num_blocks, runner.cache.block_tokens + 1)
    assert not has_room(runner, 1, runner.model.context_length + 1)
    sequences = sequences_at(runner, 3, 35, rows=5)
    blocks = [block for sequence in sequences for block in sequence.block_ids]
    assert len(set(blocks)) == len(blocks) == 3 * math.ceil(40 / runner.cache.block_tokens)
    assert all(runner.cache.data[block].abs().sum() > 0 for block in blocks)
    assert runner.forward(sequences).shape == (15, runner.model.vocab_size)


def test_a_prompt_is_fed_in_chunks_and_one_row_goes_through_the_head(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_runner(tiny, "fp32")
    fed: list[tuple[list[int], int, int]] = []
    forward = runner.forward

    def record(sequences: list[SequenceRows]) -> object:
        logits = forward(sequences)
        fed.extend((s.token_ids, s.start, len(logits)) for s in sequences)
        return logits

    monkeypatch.setattr(runner, "forward", record)
    prefill(runner, list(range(70)), 32)
    assert fed == [(list(range(32)), 0, 0), (list(range(32, 64)), 32, 0), (list(range(64, 70)), 64, 1)]


def test_the_transformers_peer_decodes_again_and_again_behind_the_same_context(tiny: Path) -> None:
    peer = TransformersPeer(tiny)
    seen: list[tuple[str, list[int], int]] = []

    def record(module: torch.nn.Module, args: object, kwargs: dict[str, object]) -> None:
        ids, cache = kwargs["input_ids"], kwargs["cache"]
        attention = module.config._attn_implementation  # type: ignore[union-attr]
        seen.append((attention, list(ids.shape), cache.get_seq_length()))  # type: ignore[attr-defined]

    contenders = [peer.step(name, 3, list(range(20))) for name in ATTENTIONS]
    peer.model.register_forward_pre_hook(record, with_kwargs=True)
    for _ in range(2):
        for contender in contenders:
            contender.before()
            contender.run()
    assert seen == [(name, [3, 1], 20) for name in ATTENTIONS] * 2
    assert len(peer.generate(list(range(20)), 5)) == 5


def test_the_shipped_text_is_long_enough_for_what_is_measured_on_it() -> None:
    text = files("loadgen.engine_bench").joinpath("prose.txt").read_text(encoding="utf-8")
    assert text.isascii()
    assert 2_200 < len(re.findall(r"\w+", text)) < 3_000
