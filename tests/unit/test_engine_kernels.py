"""The CPU kernels compute what their formulas say, each row alone, with the same bits on every processor."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from shared.engine.batch import AttentionShape, Span
from shared.engine.errors import EngineError
from shared.engine.fused_layer import FusedDecoderLayer
from shared.engine.kernel_attention import KernelAttention
from shared.engine.kernels import SequenceTable, best_variant, has_byte_products, library, path_of
from shared.engine.kernels.build import variants
from shared.engine.kv_cache import KVCache
from shared.engine.packed_linear import ByteLinear, HalfLinear, Int8Linear, MakeLinear, PackedLinear
from shared.engine.torch_attention import TorchAttention
from shared.protocol.blocks import KVLayout
from tests.unit.engine_harness import load_runner, tiny_model

CPU = torch.device("cpu")

NEEDS_BYTE_PRODUCTS = pytest.mark.skipif(not has_byte_products(), reason="this processor has no AVX-512 VNNI")
EIGHT_BITS = [Int8Linear, pytest.param(ByteLinear, marks=NEEDS_BYTE_PRODUCTS)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layout(kv_heads: int, head_dim: int, block_tokens: int, kv_dtype: str) -> KVLayout:
    return KVLayout("m", "f", kv_dtype, 2, kv_heads, head_dim, block_tokens, "", "n")


def filled_cache(
    kv_heads: int, head_dim: int, block_tokens: int, kv_dtype: str = "float32", tokens: int = 700
) -> KVCache:
    cache = KVCache(layout(kv_heads, head_dim, block_tokens, kv_dtype), -(-tokens // block_tokens) + 3, CPU)
    cache.data.copy_(random(*cache.data.shape))
    return cache


def spans_of(cache: KVCache, parts: list[tuple[int, int]]) -> list[Span]:
    """(new tokens, start) of each sequence; blocks are dealt from a shuffled pool."""
    free = np.random.default_rng(3).permutation(cache.num_blocks).astype(np.int64)
    spans, row, used = [], 0, 0
    for count, start in parts:
        blocks = -(-(start + count) // cache.block_tokens)
        spans.append(Span(row, start, count, free[used : used + blocks]))
        row, used = row + count, used + blocks
    return spans


def expected_attention(cache: KVCache, span: Span, layer: int, q: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """In double precision, from the definition. q [count, query_heads, head_dim]"""
    blocks = cache.data[torch.from_numpy(span.blocks)].double()
    keys, values = (blocks[:, kv, layer].reshape(-1, cache.kv_heads, cache.head_dim)[: span.context] for kv in (0, 1))
    share = q.shape[1] // cache.kv_heads
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * shape.scaling
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    at = torch.arange(span.start, span.context)[:, None]
    key = torch.arange(span.context)[None]
    hidden = key > at
    if shape.window:
        hidden |= key <= at - shape.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


PARTS = [(1, 0), (1, 131), (5, 60), (70, 40), (1, 31), (9, 0)]


@pytest.mark.parametrize("block_tokens", [7, 32])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize(("kv_heads", "share", "head_dim"), [(3, 3, 64), (1, 7, 20), (6, 1, 8), (2, 4, 80)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (33, None), (None, 5.0), (1, 2.0)])
def test_attention_is_its_definition(
    kv_heads: int,
    share: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    kv_dtype: str,
    block_tokens: int,
) -> None:
    cache = filled_cache(kv_heads, head_dim, block_tokens, kv_dtype)
    backend = KernelAttention(cache, kv_heads * share)
    shape = AttentionShape(head_dim**-0.5, window, softcap)
    spans = spans_of(cache, PARTS)
    rows = sum(count for count, _ in PARTS)
    q, k, v = (
        random(1, heads, rows + 2, head_dim, seed=i) for i, heads in enumerate((kv_heads * share, kv_heads, kv_heads))
    )
    found = backend.attend(backend.plan(spans, rows + 2), 1, q, k, v, shape)
    assert not found[:, rows:].any()
    for span in spans:
        at = slice(span.first, span.first + span.count)
        written = cache.token_rows(span.blocks, np.arange(span.start, span.context))
        stored = cache.data.view(-1, kv_heads, head_dim)[torch.from_numpy(written) + cache.block_tokens]
        torch.testing.assert_close(stored, k[0, :, at].transpose(0, 1).to(stored.dtype), rtol=0, atol=0)
        expected = expected_attention(cache, span, 1, q[0, :, at].transpose(0, 1), shape)
        torch.testing.assert_close(found[0, at].double(), expected, rtol=0, atol=2e-6)


def test_both_attentions_agree() -> None:
    shape = AttentionShape(0.2, 100, 30.0)
    q, k, v = (random(1, heads, 87, 16, seed=i) for i, heads in enumerate((6, 2, 2)))
    found = []
    for kind in (KernelAttention, lambda cache, heads: TorchAttention(cache, heads, 1024)):
        cache = filled_cache(2, 16, 16)
        backend = kind(cache, 6)
        found.append(backend.attend(backend.plan(spans_of(cache, PARTS), 87), 0, q, k, v, shape))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_the_work_and_change_no_bit(threads: int) -> None:
    parts = [(1, 1300), (1, 9), (300, 100), (5, 700)]
    q, k, v = (random(1, heads, 307, 16, seed=i) for i, heads in enumerate((6, 2, 2)))
    found = []
    for count in (1, threads):
        cache = filled_cache(2, 16, 16, tokens=3000)
        backend = KernelAttention(cache, 6, count)
        found.append(
            backend.attend(backend.plan(spans_of(cache, parts), 307), 0, q, k, v, AttentionShape(0.2, None, None))
        )
    assert found[0].numpy().tobytes() == found[1].numpy().tobytes()


def test_what_a_row_may_not_see_cannot_reach_it() -> None:
    """Numbers that are none in later rows of the same sequence, in other sequences and in free blocks."""
    clean, spoilt = filled_cache(2, 16, 8), filled_cache(2, 16, 8)
    spans = spans_of(clean, [(4, 20), (1, 9)])
    q, k, v = (random(1, heads, 5, 16, seed=i) for i, heads in enumerate((4, 2, 2)))
    shape = AttentionShape(0.25, None, None)
    expected = KernelAttention(clean, 4).attend(KernelAttention(clean, 4).plan(spans, 5), 0, q, k, v, shape)
    mine = set(spans[0].blocks.tolist())
    for block in range(spoilt.num_blocks):
        if block not in mine:
            spoilt.data[block].fill_(torch.nan)
    k[:, :, 2:4], v[:, :, 2:4] = torch.nan, torch.inf
    backend = KernelAttention(spoilt, 4)
    found = backend.attend(backend.plan(spans, 5), 0, q, k, v, shape)
    assert found[0, :2].numpy().tobytes() == expected[0, :2].numpy().tobytes()
    assert found[0, 2:].isnan().all(-1).any()


def test_16_bit_caches_hold_the_largest_number_instead_of_infinity() -> None:
    cache = filled_cache(1, 16, 8, "float16")
    backend = KernelAttention(cache, 1)
    spans = spans_of(cache, [(1, 0)])
    k = torch.full((1, 1, 1, 16), 1e6)
    backend.attend(backend.plan(spans, 1), 0, random(1, 1, 1, 16), k, -k, AttentionShape(1.0, None, None))
    block = cache.data[int(spans[0].blocks[0])]
    assert (block[0, 0, 0] == 65504).all()
    assert (block[1, 0, 0] == -65504).all()


def test_every_variant_gives_the_same_bits() -> None:
    """Workers on older and newer processors may then share what does not pass through a library's products."""
    names = [n for n in variants() if n == best_variant() or n != "cpu_v4.so"]
    assert all(path_of(n).is_file() for n in variants())
    if len(names) < 2:
        pytest.skip("this processor runs one variant only")
    x, weight, gate_up = random(9, 101), random(101), 3 * random(9, 202)
    q, k, v = (random(82, heads * 24, seed=i) for i, heads in enumerate((6, 2, 2)))
    found = []
    for name in names:
        kernels = library(name)
        cache = filled_cache(2, 24, 16)
        backend = KernelAttention(cache, 6)
        described = ctypes.addressof(backend.layer_cache(0, AttentionShape(0.2, 90, 20.0)))
        table: SequenceTable = backend.plan(spans_of(cache, [(1, 131), (11, 60), (70, 40)]), 82)
        out = [torch.zeros(82, 6 * 24), torch.empty_like(x), torch.empty(9, 101)]
        kernels.hr_write_kv(described, table.address, k.data_ptr(), v.data_ptr(), 48, 24)
        kernels.hr_attend(described, table.address, q.data_ptr(), 144, 24, out[0].data_ptr(), 0, 1)
        kernels.hr_rms_norm(x.data_ptr(), None, weight.data_ptr(), 1e-5, out[1].data_ptr(), 9, 101)
        kernels.hr_silu_mul(gate_up.data_ptr(), out[2].data_ptr(), 9, 101)
        found.append(b"".join(t.numpy().tobytes() for t in out))
    assert len(set(found)) == 1


@pytest.mark.parametrize("size", [1, 15, 16, 48, 101, 576])
def test_norms_and_activations_are_their_definitions(size: int) -> None:
    kernels = library()
    x, delta, weight = random(5, size), random(5, size, seed=1), random(size, seed=2)
    moved, out = x.clone(), torch.empty_like(x)
    kernels.hr_rms_norm(moved.data_ptr(), delta.data_ptr(), weight.data_ptr(), 1e-5, out.data_ptr(), 5, size)
    assert moved.numpy().tobytes() == (x + delta).numpy().tobytes()
    expected = torch.nn.functional.rms_norm((x + delta).double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=1e-6)
    gate_up = torch.cat((20 * random(5, size, seed=3), random(5, size, seed=4)), 1)
    kernels.hr_silu_mul(gate_up.data_ptr(), out.data_ptr(), 5, size)
    gate, up = gate_up.double().chunk(2, 1)
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (20, 20), (80, 32)])
def test_rotation_turns_the_first_numbers_of_a_head_and_no_others(head_dim: int, rotary: int) -> None:
    x, angle = random(7, 3 * head_dim), random(7, rotary // 2, seed=1)
    cos, sin = (torch.cat((t, t), 1).contiguous() for t in (angle.cos(), angle.sin()))
    turned = x.clone()
    library().hr_rotate(turned.data_ptr(), cos.data_ptr(), sin.data_ptr(), 7, 3 * head_dim, 2, head_dim, rotary)
    heads = x.view(7, 3, head_dim)
    low, high = heads[:, :2, : rotary // 2], heads[:, :2, rotary // 2 : rotary]
    expected = heads.clone()
    expected[:, :2, : rotary // 2] = low * angle.cos()[:, None] - high * angle.sin()[:, None]
    expected[:, :2, rotary // 2 : rotary] = high * angle.cos()[:, None] + low * angle.sin()[:, None]
    torch.testing.assert_close(turned.view(7, 3, head_dim), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(101, 48), (64, 576), (96, 1536), (1, 7)])
def test_a_16_bit_product_has_the_bits_of_the_librarys_at_any_number_of_rows(shape: tuple[int, int]) -> None:
    """So workers with one thread and with several understand each other's KV blocks."""
    weight, bias = random(*shape), random(shape[0], seed=1)
    weight[0, 0] = 1e6  # beyond 16 bits
    ours, library_product = HalfLinear(weight, bias), PackedLinear(weight, bias)
    x = random(1, 64, shape[1], seed=2)
    whole = ours(x)
    rounded = weight.clamp(-65504, 65504).half()
    torch.testing.assert_close(whole.double(), x.double() @ rounded.double().T + bias, rtol=1e-5, atol=1e-4)
    for rows in (*range(1, 14), 24, 25, 64):
        assert ours(x[:, :rows]).numpy().tobytes() == whole[:, :rows].numpy().tobytes()
        safe = rows if torch.backends.cpu.get_cpu_capability() == "AVX512" else 64
        assert library_product(x[:, :safe]).numpy().tobytes() == whole[:, :safe].numpy().tobytes()


def test_a_torch_without_the_librarys_products_is_named_and_one_thread_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on processors that are not x86."""
    path = tiny_model(tmp_path)
    monkeypatch.setattr(torch._C, "_supported_qengines", list)
    assert load_runner(path, "fp16-packed").fused_layers == 2
    if has_byte_products():
        assert load_runner(path, "int8").fused_layers == 2
    try:
        for dtype in ("fp16-packed", "int8"):
            with pytest.raises(EngineError, match="without fbgemm"):
                load_runner(path, dtype, threads=2)
    finally:
        torch.set_num_threads(1)


def test_one_thread_and_several_agree_on_their_layout(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    try:
        layouts = [load_runner(path, "fp16-packed", threads=threads).layout for threads in (1, 2)]
    finally:
        torch.set_num_threads(1)
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("make", EIGHT_BITS)
def test_an_8_bit_product_is_near_and_a_row_has_a_scale_of_its_own(make: MakeLinear) -> None:
    weight, bias = random(48, 101), random(48, seed=1)
    x = random(6, 101, seed=2) * torch.tensor([1.0, 1e-3, 1e3, 0.0, 1.0, 1.0])[:, None]
    linear = make(weight, bias)
    found = linear(x)
    exact = x.double() @ weight.double().T
    error = (found.double() - bias - exact).abs().amax(1)
    assert (error <= 0.02 * x.abs().amax(1) * 101**0.5 + 1e-6).all()
    for row in range(6):
        assert linear(x[row : row + 1]).numpy().tobytes() == found[row : row + 1].numpy().tobytes()


@NEEDS_BYTE_PRODUCTS
@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("depth", [1, 3, 4, 17, 64, 101])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_bytes_are_exact(size: int, depth: int, with_bias: bool) -> None:
    """Of the steps that weights and inputs were rounded to, whose largest sums need 26 bits here."""
    weight, bias = random(size, depth), random(size, seed=1) if with_bias else None
    linear = ByteLinear(weight, bias)
    x = random(29, depth, seed=2)
    x[5], x[6] = x[5].abs().max(), -x[6].abs().max()
    steps = weight.abs().amax(1) / 127
    row_steps = x.abs().amax(1) / 127
    weight_bytes = (weight / steps[:, None]).round().double()
    x_bytes = (x * (127 / x.abs().amax(1))[:, None]).round().double()
    expected = (x_bytes @ weight_bytes.T) * (steps[None] * row_steps[:, None]).double()
    if bias is not None:
        expected += bias.double()
    found = linear(x)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
    for rows in (1, 2, 11, 12, 13, 24, 25):
        assert linear(x[:rows]).numpy().tobytes() == found[:rows].numpy().tobytes()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16-packed", "int8"])
def test_layers_of_the_llama_family_are_fused(tmp_path: Path, kind: str, dtype: str) -> None:
    runner = load_runner(tiny_model(tmp_path, kind), dtype)
    assert runner.fused_layers == 2
    assert sum(isinstance(m, FusedDecoderLayer) for m in runner.model.module.modules()) == 2


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"hidden_act": "relu"}),
        ("gemma", {}),
        ("helium", {}),
        ("ernie4_5", {}),
        ("gemma2", {}),
        ("olmo2", {}),
        ("gpt2", {}),
    ],
)
def test_layers_that_only_look_like_it_are_left_alone(
    tmp_path: Path, kind: str, changes: dict[str, str], dtype: str
) -> None:
    """Other activations and rotary pairs, in models as they are initialised, where layers add little to their input."""
    assert load_runner(tiny_model(tmp_path, kind, initializer_range=0.02, **changes), dtype).fused_layers == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16-packed", "int8"])
def test_layers_are_told_apart_beside_a_huge_activation(tmp_path: Path, dtype: str) -> None:
    """Half of the layers have no rotary positions; the first token of real models has such numbers."""
    path = tiny_model(tmp_path, "smollm3", initializer_range=0.02, no_rope_layers=[1, 0, 1, 0], num_hidden_layers=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] *= 1000
    model.save_pretrained(path)
    assert load_runner(path, dtype).fused_layers == 2


def test_kernels_of_another_source_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.engine.kernels.source_number", lambda: 1)
    library.cache_clear()
    try:
        with pytest.raises(EngineError, match="compiled from another"):
            library()
    finally:
        library.cache_clear()


@pytest.mark.parametrize("make", EIGHT_BITS)
@pytest.mark.parametrize("at", range(40))
def test_a_number_that_is_none_goes_through_an_8_bit_product(make: MakeLinear, at: int) -> None:
    x = random(3, 40)
    x[1, at] = torch.nan
    found = make(random(48, 40, seed=1), None)(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_missing_kernels_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shared.engine.kernels.path_of", lambda name: tmp_path / name)
    library.cache_clear()
    try:
        with pytest.raises(EngineError, match="make install"):
            library()
    finally:
        library.cache_clear()
