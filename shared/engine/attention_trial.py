"""Tries an attention at load, on a small cache of random numbers: against attention's definition in double precision,
and, where exactness is promised, bit by bit however a sequence is cut and whoever stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from shared.engine.batch import AttentionBackend, AttentionShape, Span
from shared.engine.errors import NumericsError
from shared.engine.kv_cache import Index, KVCache
from shared.engine.row_safety import bits
from shared.protocol.blocks import KVLayout

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest difference from the definition. The values that are summed are about 1 in size."""

_ROWS = 70
"""Query rows of the trial, the last ones of its sequence."""

_CUTS: tuple[tuple[int, ...], ...] = ((_ROWS,), (1, 1, 4, 17, 1, 46), (33, 37))

_PADDED = (_ROWS + 9, 320)
"""Row counts of the batches; an attention may work differently in small and in large ones."""

_MIN_CONTEXT = 1100


@runtime_checkable
class VariantBackend(AttentionBackend, Protocol):
    """An attention that can deal its work out in several ways. The first way is always there."""

    variants: list[Any]
    most_context: int
    """Tokens from which on nothing new happens: one that is tried over so many is tried whole."""

    def plan_with(self, variant: Any, spans: list[Span], padded: int) -> Any: ...


class AttentionTrial:
    """One attention, made by `make` over a cache of one layer like that of `layout`, on `device`."""

    def __init__(
        self,
        make: Callable[[KVCache], AttentionBackend],
        layout: KVLayout,
        query_heads: int,
        context_length: int,
        device: torch.device,
        *,
        exact: bool,
    ) -> None:
        self._exact = exact
        generator = torch.Generator().manual_seed(20_27)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, getattr(torch, layout.kv_dtype))

        one_layer = msgspec.structs.replace(layout, layers=1)
        self.backend = make(KVCache(one_layer, 1, device))
        longest = self.backend.most_context if isinstance(self.backend, VariantBackend) else 0
        self._context = min(max(_MIN_CONTEXT, longest), context_length)
        self._rows = min(_ROWS, self._context)
        blocks = -(-self._context // layout.block_tokens)
        self._cache = KVCache(one_layer, 2 * blocks + 1, device)
        self.backend = make(self._cache)
        order = np.random.default_rng(5).permutation(2 * blocks + 1)[: 2 * blocks].astype(np.int64)
        self._copies: list[Index] = [order[:blocks], order[blocks:]]
        self._cache.data.fill_(torch.nan)  # what belongs to nobody must not be read
        known = random(blocks, *self._cache.data.shape[1:])
        for copy in self._copies:
            self._cache.data[torch.from_numpy(copy).to(device)] = known
        self._known = known
        self._q, self._k, self._v = (
            random(1, heads, self._rows, layout.head_dim) for heads in (query_heads, layout.kv_heads, layout.kv_heads)
        )

    def check(self, shape: AttentionShape) -> None:
        """Keep the backend's variants that are right for `shape`. Raises NumericsError when it is wrong altogether."""
        backend = self.backend
        expected = self._definition(shape)
        reference: torch.Tensor | None = None
        if isinstance(backend, VariantBackend):
            first, others = backend.variants[0], backend.variants[1:]
            reference = self._outputs(shape, lambda spans, padded: backend.plan_with(first, spans, padded))
            backend.variants = [first, *(v for v in others if self._agrees(v, shape, reference, expected))]
        for padded in _PADDED:
            for number, cuts in enumerate(_CUTS if self._exact else _CUTS[:1]):
                found = self._outputs(shape, backend.plan, cuts, padded, number % 2)
                self._compare(found, expected)
                reference = found if reference is None else reference
                if self._exact and not torch.equal(bits(found), bits(reference)):
                    raise NumericsError("a row's bits depend on how its sequence is cut, or on its neighbours")

    def _agrees(self, variant: Any, shape: AttentionShape, reference: torch.Tensor, expected: torch.Tensor) -> bool:
        backend = self.backend
        assert isinstance(backend, VariantBackend)  # noqa: S101 - for the type checker
        try:
            found = self._outputs(shape, lambda spans, padded: backend.plan_with(variant, spans, padded))
            self._compare(found, expected)
        except Exception:  # a variant that does not compile, or does not fit the device, is one that is not used
            return False
        return not self._exact or torch.equal(bits(found), bits(reference))

    def _compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        off = float((found.double() - expected).abs().max())
        if not off <= _TOLERANCE[found.dtype]:
            raise NumericsError(f"results differ from the definition of attention by {off:.1e}")

    def _outputs(
        self,
        shape: AttentionShape,
        plan: Callable[[list[Span], int], Any],
        cuts: tuple[int, ...] = (_ROWS,),
        padded: int = _PADDED[0],
        copy: int = 0,
    ) -> torch.Tensor:
        """[rows, query_heads, head_dim], fed in pieces; in each batch a row of the other copy comes first."""
        found: list[torch.Tensor] = []
        at = 0
        for cut in cuts:
            count = min(cut, self._rows - at)
            if count < 1:
                break
            start = self._context - self._rows + at
            spans = [Span(0, start, 1, self._copies[1 - copy]), Span(1, start, count, self._copies[copy])]
            rows = torch.tensor([at, *range(at, at + count), *[at] * (padded - count - 1)])
            q, k, v = (t.index_select(2, rows.to(t.device)) for t in (self._q, self._k, self._v))
            out = self.backend.attend(plan(spans, padded), 0, q, k, v, shape)
            found.append(out[0, 1 : 1 + count])
            at += count
        return torch.cat(found)

    def _definition(self, shape: AttentionShape) -> torch.Tensor:
        """Softmax of masked q.k times v: [rows, query_heads, head_dim], float64."""
        old = self._context - self._rows
        keys, values = (self._known[:, kv, 0].flatten(0, 1)[:old].double() for kv in (0, 1))
        keys, values = (torch.cat((a, b[0].transpose(0, 1).double())) for a, b in ((keys, self._k), (values, self._v)))
        q = self._q[0].transpose(0, 1).double()
        share = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * shape.scaling
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        key = torch.arange(self._context, device=q.device)
        at = key[old:, None]
        hidden = key > at
        if shape.window is not None:
            hidden |= key <= at - shape.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
