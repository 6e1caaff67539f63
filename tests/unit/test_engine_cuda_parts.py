"""What the CUDA path is made of, as far as no GPU is needed: products in row tiles, trials of an attention, inputs of
fixed shape, whole rotary tables. Captures and replays are left to `make bench-gpu` and to the tests marked `gpu`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loadgen.gpu_mixer import mix
from shared.engine import EngineConfig, EngineError, NumericsError
from shared.engine.attention_choice import attention_candidates
from shared.engine.attention_trial import AttentionTrial
from shared.engine.batch import AttentionShape, Batch, BatchBuilder, SafeSizes, SequenceRows, Span
from shared.engine.cuda_graphs import GraphSet, StaticBackend, StaticBatch, fits
from shared.engine.cuda_products import LARGER_ROWS, TILE_ROWS, TiledLinear, prove_tiles
from shared.engine.device_rotary import WholeRotaryTable, make_tables_whole
from shared.engine.kv_cache import KVCache
from shared.engine.loader import load_model
from shared.engine.rotary import RotaryTable
from shared.engine.runner import ModelRunner
from shared.engine.torch_attention import TorchAttention
from shared.models import ModelFiles
from shared.protocol.blocks import KVLayout
from shared.settings import EngineSettings
from shared.worker.engine_host import BatchSizes, engine_config
from tests.unit.engine_harness import load_runner, tiny_model

CPU = torch.device("cpu")
LAYOUT = KVLayout("m", "f", "float32", 2, 2, 16, 16, "", "n")
PLAIN = AttentionShape(0.25, None, None)


def rows_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Products in row tiles


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 700])
def test_a_tiled_product_is_the_product(rows: int, bias: bool) -> None:
    weight, b = rows_of(23, 40), rows_of(23) if bias else None
    x = rows_of(2, rows, 80)[..., ::2]  # strided: what a fused product hands on
    layer = TiledLinear(weight, b)
    layer.sizes = (256, 128, TILE_ROWS)
    expected = nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=2e-5)


def test_only_proven_row_counts_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    product = nn.functional.linear

    def record(x: torch.Tensor, *args: Any) -> torch.Tensor:
        assert x.is_contiguous()
        seen.append(len(x))
        return product(x, *args)

    monkeypatch.setattr(nn.functional, "linear", record)
    layer = TiledLinear(rows_of(8, 8), None)
    layer.sizes = (256, TILE_ROWS)
    for rows in (1, 64, 130, 500, 1024):
        layer(rows_of(rows, 16)[:, ::2])
    assert set(seen) == {256, TILE_ROWS}
    assert seen == [64, 64, 64, 64, 64, 256, 256, 256, 256, 256, 256]


def test_larger_products_are_used_only_where_they_give_the_bits_of_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    product = nn.functional.linear

    def by_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        off = 1 + 1e-6 * (len(x) in (256, 1024) and len(weight) == 32)  # as if another kernel were chosen there
        return product(x.double(), weight.double()).float() * off

    monkeypatch.setattr(nn.functional, "linear", by_shape)
    model = nn.Sequential(TiledLinear(rows_of(32, 16), None), TiledLinear(rows_of(16, 32), None))
    assert prove_tiles(model) == {"16->32": (512, 128, TILE_ROWS), "32->16": (*LARGER_ROWS, TILE_ROWS)}
    assert model[0].sizes == (512, 128, TILE_ROWS)


def test_a_product_that_depends_on_the_place_of_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    product = nn.functional.linear

    def by_place(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return product(x, *args) * (1 + 1e-6 * (torch.arange(len(x)) % 64 >= 32))[:, None]

    monkeypatch.setattr(nn.functional, "linear", by_place)
    with pytest.raises(NumericsError, match="16->8"):
        prove_tiles(nn.Sequential(TiledLinear(rows_of(8, 16), None)))


def test_a_weight_that_the_embeddings_share_stays_shared() -> None:
    embeddings = nn.Embedding(10, 4)
    assert TiledLinear(embeddings.weight, None).weight is embeddings.weight


# Settings and choice


def config(**changes: Any) -> EngineConfig:
    fields = {"model_path": Path(), "model_name": "m", "fingerprint": "f", "kv_memory_bytes": 1, "dtype": "fp32"}
    return EngineConfig(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exactness": "fast"}, "cuda only"),
        ({"attention": "flash", "device": "cuda"}, "'fast'"),
        ({"attention": "triton", "dtype": "int8"}, "interpreter"),
        ({"attention": "kernels", "device": "cuda"}, "cpu only"),
        ({"dtype": "fp16-packed", "device": "cuda"}, "bf16"),
    ],
)
def test_settings_that_contradict_each_other_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_worker_hands_its_settings_to_the_engine() -> None:
    settings = EngineSettings(device="cuda", exactness="fast", attention="flash", cuda_graphs=False)
    made = engine_config(settings, ModelFiles("m", Path(), "f"), BatchSizes(sequences=4, tokens=64))
    assert (made.device, made.dtype) == ("cuda", "bf16")
    assert (made.exactness, made.attention, made.cuda_graphs) == ("fast", "flash", False)


def test_the_fastest_that_is_exact_is_tried_first(tmp_path: Path) -> None:
    model = load_runner(tiny_model(tmp_path), "fp32").model

    def names(**changes: Any) -> list[str]:
        return [candidate.name for candidate in attention_candidates(model, config(**changes))]

    assert names() == ["kernels"]
    assert names(device="cuda") == ["triton", "torch"]
    assert names(device="cuda", exactness="fast") == ["flash", "triton", "torch"]
    assert names(device="cuda", attention="torch") == ["torch"]
    assert names(device="cuda", attention="flash", exactness="fast") == ["flash"]


def test_an_attention_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="triton is not installed"):
        load_runner(tiny_model(tmp_path), "fp32", attention="triton")


# Trials


class Wrong(TorchAttention):
    """Attends right, except for what `spoil` does to the result."""

    def __init__(self, cache: KVCache, fault: str) -> None:
        super().__init__(cache, 4, 1024)
        self._fault = fault

    def attend(
        self, plan: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape
    ) -> torch.Tensor:
        if self._fault == "window" and shape.window is not None:
            shape = replace(shape, window=shape.window + 1)
        if self._fault == "softcap":
            shape = replace(shape, softcap=None)
        out = super().attend(plan, layer, q, k, v, shape)
        return out * (1 + 1e-6 * (q.shape[2] > 100)) if self._fault == "batch" else out


@pytest.mark.parametrize(
    ("fault", "shape", "message"),
    [
        ("window", AttentionShape(0.25, 5, None), "definition"),
        ("softcap", AttentionShape(0.25, None, 1.0), "definition"),
        ("batch", PLAIN, "neighbours"),
    ],
)
def test_a_trial_finds_what_is_wrong(fault: str, shape: AttentionShape, message: str) -> None:
    for name in ("", fault):
        trial = AttentionTrial(lambda cache, name=name: Wrong(cache, name), LAYOUT, 4, 150, CPU, exact=True)
        if not name:
            trial.check(shape)
            continue
        with pytest.raises(NumericsError, match=message):
            trial.check(shape)


def test_without_exactness_only_the_numbers_are_tried() -> None:
    AttentionTrial(lambda cache: Wrong(cache, "batch"), LAYOUT, 4, 150, CPU, exact=False).check(PLAIN)


def test_a_trial_ends_with_the_variants_that_are_right() -> None:
    class Variants(Wrong):
        variants: list[str]
        most_context = 200

        def __init__(self, cache: KVCache) -> None:
            super().__init__(cache, "")
            self.variants = ["first", "same", "off", "raises"]

        def plan_with(self, variant: str, spans: list[Span], padded: int) -> Any:
            if variant == "raises":
                raise RuntimeError("out of shared memory")
            self.used = variant
            return super().plan(spans, padded)

        def plan(self, spans: list[Span], padded: int) -> Any:
            return self.plan_with(self.variants[-1], spans, padded)

        def attend(self, *args: Any) -> torch.Tensor:
            return super().attend(*args) * (1 + 1e-6 * (self.used == "off"))

    trial = AttentionTrial(Variants, LAYOUT, 4, 150, CPU, exact=True)
    trial.check(PLAIN)
    assert trial.backend.variants == ["first", "same"]  # type: ignore[attr-defined]
    loose = AttentionTrial(Variants, LAYOUT, 4, 150, CPU, exact=False)
    loose.check(PLAIN)
    assert loose.backend.variants == ["first", "same", "off"]  # type: ignore[attr-defined]


# Inputs of fixed shape


class StaticTorch(TorchAttention):
    """Keeps a plan in one place and replaces what is in it: no use for a graph, but the same life of a plan."""

    def static_plan(self, padded: int) -> list[Any]:
        return [padded]

    def refill(self, plan: list[Any], spans: list[Span]) -> None:
        plan[1:] = [super().plan(spans, plan[0])]

    def attend(self, plan: Any, *args: Any) -> torch.Tensor:
        return super().attend(plan[1] if isinstance(plan, list) else plan, *args)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_a_batch_in_fixed_inputs_gives_the_bits_of_the_eager_pass(tmp_path: Path, kind: str) -> None:
    rng = random.Random(3)
    runner = load_runner(tiny_model(tmp_path, kind), "fp32", attention="torch")
    backend = StaticTorch(runner.cache, runner.model.query_heads, runner.model.context_length)
    assert isinstance(backend, StaticBackend)
    safe = SafeSizes(rows=lambda n: 16, head_rows=lambda n: 16)
    builder = BatchBuilder(backend, CPU, safe)
    static = StaticBatch(backend, 16, CPU)
    addresses = [t.data_ptr() for t in (static.batch.input_ids, static.batch.position_ids)]
    texts = [[rng.randrange(runner.model.vocab_size) for _ in range(60)] for _ in range(4)]
    blocks = [list(range(4 * i, 4 * i + 4)) for i in range(4)]
    with torch.inference_mode():
        runner.forward([SequenceRows(t[:40], 0, b, 0) for t, b in zip(texts, blocks, strict=True)])
        for parts in ([(0, 1)], [(2, 1), (0, 1), (3, 1)], [(1, 5), (3, 1), (0, 9)], [(3, 16)]):
            sequences = [
                SequenceRows(texts[i][40 - step : 40 - step + count], 40 - step, blocks[i], count)
                for step, (i, count) in enumerate(parts)
            ]
            assert fits(sequences)
            expected = run(runner.model.module, builder.build(sequences))
            count = static.fill(sequences)
            found = run(runner.model.module, static.batch)[:count]
            assert count == sum(n for _, n in parts)
            assert found.numpy().tobytes() == expected[:count].numpy().tobytes()
    assert addresses == [t.data_ptr() for t in (static.batch.input_ids, static.batch.position_ids)]


def run(module: nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "headrace_batch": batch}
    return module(**inputs, use_cache=False, logits_to_keep=batch.logit_rows).logits[0]  # type: ignore[no-any-return]


def test_prompts_do_not_fit_a_graph() -> None:
    decode, verify = SequenceRows([1], 9, [0], 1), SequenceRows([1, 2, 3], 9, [0], 3)
    assert fits([decode, verify])
    assert not fits([decode, SequenceRows([1, 2, 3], 0, [0], 1)])
    assert not fits([SequenceRows([1, 2, 3], 0, [0], 0)])


# Rotary tables


def test_whole_rotary_tables_give_the_same_bits_and_never_ask_for_a_number() -> None:
    class Rotary(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = positions[..., None].float() * torch.linspace(1, 0.01, 6)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryTable(Rotary(), 2500)

    holder, x = Holder(), torch.zeros(1)
    plain = holder.rotary
    make_tables_whole(holder)
    whole = holder.rotary
    assert type(whole) is WholeRotaryTable
    for positions in ([[3]], [[0, 2499, 1024, 1023]]):
        at = torch.tensor(positions)
        for expected, found in zip(plain(x, at), whole(x, at), strict=True):
            assert np.array_equal(expected.numpy(), found.numpy())
    with torch.device("meta"):
        # Shapes without numbers: asking for one would raise.
        whole._tables = {k: tuple(t.to("meta") for t in v) for k, v in whole._tables.items()}  # type: ignore[misc]
        assert whole(x, torch.zeros((1, 5), dtype=torch.long, device="meta"))[0].shape == (1, 5, 6)


# A model as a CUDA configuration prepares it, left on the CPU


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("exactness", ["exact", "fast"])
def test_a_model_prepared_for_cuda_computes_what_it_did(
    tmp_path: Path, kind: str, exactness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(tmp_path, kind)
    plain = load_runner(path, "fp32", attention="torch")
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    prepared = config(
        model_path=path, kv_memory_bytes=8 << 20, device="cuda", exactness=exactness, attention="torch", block_tokens=16
    )
    model = load_model(prepared)
    tables = [m for m in model.module.modules() if isinstance(m, RotaryTable)]
    assert all(type(table) is WholeRotaryTable for table in tables)
    products = [m for m in model.module.modules() if isinstance(m, TiledLinear)]
    assert bool(products) == (exactness == "exact")
    runner = ModelRunner(model, 100, prepared)
    assert runner.layout.numerics.startswith("cuda/fp32" + ("/fast" if exactness == "fast" else "/torch"))
    rng = random.Random(1)
    texts = [[rng.randrange(model.vocab_size) for _ in range(n)] for n in (1, 20, 70)]
    rows = [SequenceRows(texts[2], 0, [5, 1, 2, 8, 9], 70)]
    np.testing.assert_allclose(runner.forward(rows), plain.forward(rows), rtol=0, atol=5e-4)
    if exactness == "exact":
        assert mix(runner, texts, rounds=2, seed=1, most_rows=200).differing == 0


# Which graph serves a batch


class Capturing:
    """Stands in for torch.cuda's graphs: a replay runs what was captured again, into the same result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph: Any = None
        self.replayed: list[int] = []
        cuda = torch.cuda
        quiet = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(cuda, "Stream", lambda device: quiet)
        monkeypatch.setattr(cuda, "current_stream", lambda device=None: quiet)
        monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
        monkeypatch.setattr(cuda, "graph", self._capture)

    @contextlib.contextmanager
    def _capture(self, graph: Any, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        self.graph = graph
        yield
        self.graph = None

    def wrap(self, forward: Callable[[Batch], torch.Tensor]) -> Callable[[Batch], torch.Tensor]:
        def run(batch: Batch) -> torch.Tensor:
            out = forward(batch)
            if self.graph is not None:

                def replay() -> None:
                    self.replayed.append(batch.padded)
                    out.copy_(forward(batch))

                self.graph.replay = replay
            return out

        return run


@torch.inference_mode()
def test_the_smallest_graph_that_is_large_enough_serves_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_runner(tiny_model(tmp_path), "fp32", attention="torch")
    backend = StaticTorch(runner.cache, runner.model.query_heads, runner.model.context_length)
    text = [(3 * i) % 50 for i in range(30)]
    expected = runner.forward([SequenceRows(text, 0, [0, 1], 30)])
    capturing = Capturing(monkeypatch)

    def forward(batch: Batch) -> torch.Tensor:
        if len(batch.plan) == 1:  # a capture, before anything was filled in
            backend.refill(batch.plan, [Span(0, 0, 1, np.array([30]))])
        return run(runner.model.module, batch)[None]

    graphs = GraphSet()
    graphs.capture([16, 4, 8], capturing.wrap(forward), backend, CPU)
    assert graphs.row_counts == [4, 8, 16]
    for counts in ((1,), (4,), (1, 4), (16,), (3, 3, 3)):
        at = 30 - sum(counts)
        sequences, rows = [], []
        for count in counts:
            sequences.append(SequenceRows(text[at : at + count], at, [0, 1], count))
            rows += range(at, at + count)
            at += count
        found = graphs.run(sequences)
        assert found is not None
        np.testing.assert_allclose(found[0].numpy(), expected[rows], rtol=0, atol=1e-4)
    assert capturing.replayed == [4, 4, 8, 16, 16]
    assert graphs.run([SequenceRows(text[:17], 0, [0, 1], 17)]) is None
    assert graphs.run([SequenceRows(text[:4], 0, [0, 1], 1)]) is None


def test_captures_end_with_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.engine.cuda_graphs.CAPTURE_BUDGET_S", -1.0)
    Capturing(monkeypatch)
    graphs = GraphSet()
    graphs.capture([1, 2], lambda batch: torch.zeros(0), StaticTorch(KVCache(LAYOUT, 4, CPU), 4, 64), CPU)
    assert graphs.row_counts == []
    assert graphs.run([SequenceRows([1], 0, [0], 1)]) is None
