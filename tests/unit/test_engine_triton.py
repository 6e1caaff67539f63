"""The Triton attention computes what attention is, with the same bits however the work is dealt out.

Without a GPU the kernels run in Triton's interpreter (which knows no bf16) and are compiled for several GPUs.
"""

# ruff: noqa: E402 - without triton these modules cannot be imported
from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed: it comes with CUDA builds of torch")

from shared.engine.attention_trial import AttentionTrial, VariantBackend
from shared.engine.batch import AttentionShape, BatchBuilder, SafeSizes, SequenceRows, Span
from shared.engine.cuda_graphs import StaticBackend, StaticBatch
from shared.engine.errors import EngineError
from shared.engine.kv_cache import KVCache
from shared.engine.triton_attention import SPLIT_ROWS, TritonAttention
from shared.protocol.blocks import KVLayout
from tests.unit.engine_harness import kv_of, load_runner, tiny_model
from tests.unit.test_engine_kernels import expected_attention, layout

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of infinities in the interpreter

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PARTS = [(1, 0), (1, 131), (5, 60), (9, 0), (3, 520), (1, 511), (1, 512)]
"""(new tokens, start): first tokens, the edges of tiles of 128 and of sections of 512 keys, drafts, a short prompt."""

LAYER = 1


def rows_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def filled_cache(kv_heads: int, head_dim: int, block_tokens: int, kv_dtype: str = "float32") -> KVCache:
    blocks = sum(-(-(start + count) // block_tokens) for count, start in PARTS) + 3
    cache = KVCache(layout(kv_heads, head_dim, block_tokens, kv_dtype), blocks, DEVICE)
    cache.data.copy_(rows_of(*cache.data.shape))
    return cache


def spans_of(cache: KVCache, parts: list[tuple[int, int]], seed: int = 3) -> list[Span]:
    free = np.random.default_rng(seed).permutation(cache.num_blocks).astype(np.int64)
    spans, row, used = [], 0, 0
    for count, start in parts:
        blocks = -(-(start + count) // cache.block_tokens)
        spans.append(Span(row, start, count, free[used : used + blocks]))
        row, used = row + count, used + blocks
    return spans


def qkv(cache: KVCache, query_heads: int, rows: int) -> list[torch.Tensor]:
    heads = (query_heads, cache.kv_heads, cache.kv_heads)
    return [rows_of(1, n, rows, cache.head_dim, seed=i, dtype=cache.data.dtype) for i, n in enumerate(heads)]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("kv_heads", "share", "head_dim", "block_tokens"), [(3, 3, 64, 32), (1, 7, 20, 7), (2, 1, 8, 16), (1, 4, 80, 32)]
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (10, None), (None, 5.0), (600, 2.0), (1, None)])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_attention_is_its_definition_and_every_variant_gives_the_same_bits(
    kv_heads: int,
    share: int,
    head_dim: int,
    block_tokens: int,
    window: int | None,
    softcap: float | None,
    kv_dtype: str,
) -> None:
    cache = filled_cache(kv_heads, head_dim, block_tokens, kv_dtype)
    backend = TritonAttention(cache, kv_heads * share, 2048)
    shape = AttentionShape(head_dim**-0.5, window, softcap)
    spans = spans_of(cache, PARTS)
    rows = sum(count for count, _ in PARTS)
    q, k, v = qkv(cache, kv_heads * share, rows + 2)
    results = []
    for variant in backend.variants:
        found = backend.attend(backend.plan_with(variant, spans, rows + 2), LAYER, q, k, v, shape)
        results.append(raw(found))
        assert not found[:, rows:].any()
        for span in spans:
            at = slice(span.first, span.first + span.count)
            written = torch.from_numpy(cache.token_rows(span.blocks, np.arange(span.start, span.context)))
            token_rows = cache.data.view(-1, kv_heads, head_dim)
            for kv, new in enumerate((k, v)):
                stored = token_rows[written.to(DEVICE) + (kv * cache.layers + LAYER) * block_tokens]
                assert raw(stored) == raw(new[0, :, at].transpose(0, 1))
            expected = expected_attention(on_host(cache), span, LAYER, q[0, :, at].transpose(0, 1).cpu(), shape)
            atol = 2e-5 if kv_dtype == "float32" else 3e-3
            torch.testing.assert_close(found[0, at].double().cpu(), expected, rtol=0, atol=atol)
    assert len(set(results)) == 1


def on_host(cache: KVCache) -> KVCache:
    copied = KVCache(layout(cache.kv_heads, cache.head_dim, cache.block_tokens, "float32"), 1, torch.device("cpu"))
    copied.data = cache.data.float().cpu()
    return copied


def test_a_row_has_the_same_bits_alone_and_in_any_company() -> None:
    """Random cuts of one sequence, beside random neighbours, over every kind of plan."""
    rng = random.Random(5)
    cache = filled_cache(2, 16, 16)
    backend = TritonAttention(cache, 6, 2048)
    shape = AttentionShape(0.25, 300, None)
    total, blocks = 40, np.arange(36, dtype=np.int64)
    start = 530
    q, k, v = qkv(cache, 6, total)
    alone = []
    for row in range(total):
        at = slice(row, row + 1)
        plan = backend.plan_with(backend.variants[0], [Span(0, start + row, 1, blocks)], 1)
        alone.append(raw(backend.attend(plan, 0, q[:, :, at], k[:, :, at], v[:, :, at], shape)[0, 0]))
    for _ in range(4):
        row = 0
        while row < total:
            count = min(rng.choice([1, 2, 5, 17]), total - row)
            before = rng.choice([0, 1, 3])
            spans = [Span(i, 100 + 37 * i, 1, np.arange(40, 55, dtype=np.int64)) for i in range(before)]
            spans.append(Span(before, start + row, count, blocks))
            rows = torch.tensor([*range(before), *range(row, row + count), 0])
            picked = [t.index_select(2, rows.to(DEVICE)) for t in (q, k, v)]
            plan = backend.plan_with(rng.choice(backend.variants), spans, len(rows))
            found = backend.attend(plan, 0, *picked, shape)
            assert [raw(r) for r in found[0, before : before + count]] == alone[row : row + count]
            row += count


def test_what_a_row_may_not_see_cannot_reach_it() -> None:
    """Numbers that are none in later rows of the same sequence, in other sequences, past its end and in free blocks."""
    clean, spoilt = filled_cache(2, 16, 8), filled_cache(2, 16, 8)
    spans = spans_of(clean, [(4, 20), (1, 9)])
    q, k, v = qkv(clean, 4, 5)
    shape = AttentionShape(0.25, None, None)
    expected = TritonAttention(clean, 4, 2048)
    rows = expected.attend(expected.plan(spans, 5), 0, q, k, v, shape)
    mine = set(spans[0].blocks.tolist())
    for block in range(spoilt.num_blocks):
        if block not in mine:
            spoilt.data[block].fill_(torch.nan)
    backend = TritonAttention(spoilt, 4, 2048)
    for spoilt_k, spoilt_v in ((torch.nan, 1.0), (1.0, torch.nan), (1.0, torch.inf)):
        new_k, new_v = k.clone(), v.clone()
        new_k[:, :, 2:4] *= spoilt_k
        new_v[:, :, 2:4] *= spoilt_v
        for variant in backend.variants:
            found = backend.attend(backend.plan_with(variant, spans, 5), 0, q, new_k, new_v, shape)
            assert raw(found[0, :2]) == raw(rows[0, :2])
            assert found[0, 2:].isnan().any(-1).all()


def test_a_plan_that_is_refilled_in_place_is_like_a_new_one() -> None:
    cache = filled_cache(2, 16, 16)
    backend = TritonAttention(cache, 6, 1024)
    assert isinstance(backend, StaticBackend)
    assert isinstance(backend, VariantBackend)
    shape = AttentionShape(0.25, None, None)
    q, k, v = qkv(cache, 6, 12)
    plan = backend.static_plan(12)
    assert not backend.attend(plan, 0, q, k, v, shape).any()
    addresses = [plan.rows.data_ptr(), plan.table.data_ptr()]
    for parts in ([(1, 700), (1, 3)], [(5, 600), (3, 0), (4, 130)], [(12, 40)], [(1, 0)]):
        spans = spans_of(cache, parts, seed=len(parts))
        backend.refill(plan, spans)
        found = raw(backend.attend(plan, 0, q, k, v, shape))
        assert found == raw(backend.attend(backend.plan(spans, 12), 0, q, k, v, shape))
    assert addresses == [plan.rows.data_ptr(), plan.table.data_ptr()]
    with pytest.raises(EngineError, match=str(SPLIT_ROWS)):
        backend.static_plan(SPLIT_ROWS + 1)


def test_a_model_is_served_with_it_and_fixed_inputs_give_the_bits_of_the_eager_pass(tmp_path: Path) -> None:
    if HAS_GPU:
        pytest.skip("on a GPU the tests marked gpu do this with real captures")
    path = tiny_model(tmp_path, num_attention_heads=4, hidden_size=32, max_position_embeddings=64)
    runner = load_runner(path, "fp32", attention="triton")
    plain = load_runner(path, "fp32", attention="torch")
    assert isinstance(runner.attention, TritonAttention)
    assert runner.layout.numerics != plain.layout.numerics
    text = [(7 * i) % 100 for i in range(60)]
    blocks = [3, 0, 2, 1]
    rows = [SequenceRows(text[:50], 0, blocks, 50)]
    np.testing.assert_allclose(runner.forward(rows), plain.forward(rows), rtol=0, atol=2e-4)
    np.testing.assert_allclose(kv_of(runner, blocks, 50), kv_of(plain, blocks, 50), rtol=0, atol=1e-4)
    builder = BatchBuilder(runner.attention, DEVICE, SafeSizes(rows=lambda n: 8, head_rows=lambda n: 8))
    static = StaticBatch(runner.attention, 8, DEVICE)
    for sequences in (
        [SequenceRows(text[50:53], 50, blocks, 3)],
        [SequenceRows(text[i : i + 1], i, blocks, 1) for i in (9, 4)],
    ):
        with torch.inference_mode():
            expected = runner._compute(builder.build(sequences))
            count = static.fill(sequences)
            found = runner._compute(static.batch)
        assert raw(found[0, :count]) == raw(expected[0, :count])


# The other users of its plans and kernels


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """What flash-attn's documentation says of its function, as plainly as possible."""
    assert causal
    assert k_cache.shape[1] % 256 == 0
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    out = torch.zeros_like(q)
    for n, length in enumerate(cache_seqlens.tolist()):
        keys, values = (t[block_table[n].long()].flatten(0, 1)[:length].double() for t in (k_cache, v_cache))
        share = q.shape[2] // keys.shape[1]
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        for i in range(q.shape[1]):
            last = i + length - q.shape[1]
            first = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            if last < 0:
                continue
            scores = torch.einsum("hd,khd->hk", q[n, i].double(), keys[first : last + 1]) * softmax_scale
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            out[n, i] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[first : last + 1]).to(q.dtype)
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Callable[[KVCache], Any]:
    library = ModuleType("flash_attn")
    library.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.delitem(sys.modules, "shared.engine.flash_attention", raising=False)
    from shared.engine.flash_attention import FlashAttention  # noqa: PLC0415 - after its library stands in

    return lambda cache: FlashAttention(cache, 6, 600)


@pytest.mark.parametrize("shape", [AttentionShape(0.25, None, None), AttentionShape(0.3, 40, 5.0)])
def test_flash_attention_is_asked_as_it_documents_itself(
    flash: Callable[[KVCache], Any], shape: AttentionShape
) -> None:
    if HAS_GPU:
        pytest.skip("stands in for a library that is not there")
    paged = KVLayout("m", "f", "float32", 1, 2, 16, 256, "", "n")
    AttentionTrial(flash, paged, 6, 600, DEVICE, exact=False).check(shape)
    cache = KVCache(paged, 8, DEVICE)
    cache.data.copy_(rows_of(*cache.data.shape))
    backend = flash(cache)
    q, k, v = qkv(cache, 6, 24)
    plan = backend.static_plan(24)
    for parts in ([(1, 300), (20, 7)], [(3, 250), (1, 0)]):
        spans = spans_of(cache, parts)
        backend.refill(plan, spans)
        found = backend.attend(plan, 0, q, k, v, shape)
        expected = backend.attend(backend.plan(spans, 24), 0, q, k, v, shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert found[:, sum(n for n, _ in parts) :].abs().max() == 0


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shared.engine import triton_kernels as kernels
from shared.engine.triton_attention import tile_tokens

POINTERS = {"table": "*i32", "row_sequence": "*i32", "row_position": "*i32", "group_first": "*i32",
            "group_count": "*i32", "part_top": "*fp32", "part_norm": "*fp32", "part_acc": "*fp32",
            "scale": "fp32", "softcap": "fp32"}
DATA = {"q", "k", "v", "keys", "values", "out"}

def build(kernel, capability, dtype, **constants):
    constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
    types = {n: "constexpr" if n in constants else POINTERS.get(n, "*" + dtype if n in DATA else "i32")
             for n in kernel.arg_names}
    where = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    return triton.compile(ASTSource(kernel, types, where), target=GPUTarget("cuda", capability, 32), options=options)

sizes = dict(KV_HEADS=8, SHARE=3, SHARE_PAD=4, HEAD_DIM=80, DIM_PAD=128, BLOCK_TOKENS=32, SECTION_TOKENS=512,
             WINDOW=4096, CAPPED=True)
capability = int(sys.argv[1])
for dtype, rows, split in (("bf16", 16, True), ("bf16", 64, False), ("fp32", 16, False)):
    tile = tile_tokens(sizes["DIM_PAD"], 2 if dtype == "bf16" else 4)
    built = build(kernels.attend_kernel, capability, dtype, TILE_ROWS=rows, TILE_TOKENS=tile, SPLIT=split, **sizes)
    assert built.metadata.shared <= 99 * 1024, built.metadata.shared
    print(dtype, rows, split, "tensor cores" if "mma" in built.asm["ptx"] else "plain", len(built.asm["cubin"]))
for kernel in (kernels.write_kernel, kernels.merge_kernel):
    build(kernel, capability, "bf16", **sizes)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability: int, tmp_path: Path) -> None:
    """bf16 on tensor cores, within the shared memory of the smallest Ampere."""
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[2]), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("bf16 16 True tensor cores") == 1
