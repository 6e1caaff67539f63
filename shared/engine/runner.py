"""Runs forwards: a loaded model, its KV cache and the proofs that its rows do not depend on the batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shared.engine.activations import UniformActivation
from shared.engine.attention import BATCH_KEY, attend
from shared.engine.batch import TILE_TOKENS, Batch, BatchBuilder, QueryGroup, SafeSizes, SequenceRows
from shared.engine.config import EngineConfig
from shared.engine.direct_calls import call_directly
from shared.engine.errors import EngineError, NumericsError, UnsupportedModel
from shared.engine.kv_cache import KVCache
from shared.engine.loader import LoadedModel, load_model
from shared.engine.norms import FusedRMSNorm
from shared.engine.packed_linear import FusedPart, PackedLinear
from shared.engine.rotary import RotaryTable
from shared.engine.row_safety import VARIANTS, Probe, SafeSize, bits, safe_rows
from shared.protocol.blocks import KVLayout

_TRIAL_TOKENS = 53
"""Length of the first, checking forward. A prime, so that it is found in shapes; the row probes rely on that."""

_REFERENCE_CONTEXT = 8192
"""Context length, if the model has as many positions, to which the others are compared."""


class ModelRunner:
    """Owns weights and KV cache. `forward` is the only thing that computes; it must be called from one thread."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self.model = model
        self._device = next(model.module.parameters()).device
        block_tokens = model.layout.block_tokens
        self.cache = KVCache(model.layout, num_blocks, self._device, read_tokens=math.gcd(block_tokens, TILE_TOKENS))
        query_rows = safe_rows("row count in attention", [self._attention_rows_probe(n) for n in (1, 3)])
        context = SafeSize("context length", self._is_safe_context(query_rows.pad(4)), step=TILE_TOKENS)
        trial = SafeSizes(rows=int, head_rows=int, query_rows=query_rows.pad, context=context.pad)
        body, head = self._find_probes(BatchBuilder(self.cache, model.query_heads, trial))
        safe = SafeSizes(
            rows=safe_rows("row count", body).pad,
            head_rows=safe_rows("row count in the head", head).pad,
            query_rows=query_rows.pad,
            context=context.pad,
        )
        self._builder = BatchBuilder(self.cache, model.query_heads, safe)
        call_directly(model.module, (PackedLinear, FusedPart, FusedRMSNorm, UniformActivation))
        self.layout = self._check_numerics()

    @classmethod
    def load(cls, config: EngineConfig) -> ModelRunner:
        """Raises UnsupportedModel, NumericsError, EngineError (memory too small for one block)."""
        torch.set_num_threads(config.threads)
        model = load_model(config)
        num_blocks = config.kv_memory_bytes // model.layout.block_bytes
        needed = -(-2 * _TRIAL_TOKENS // config.block_tokens) + 2
        if num_blocks < needed:
            raise EngineError(
                f"{config.kv_memory_bytes} bytes hold {num_blocks} KV blocks of {model.layout.block_bytes} bytes; "
                f"at least {needed} are needed"
            )
        return cls(model, num_blocks)

    @torch.inference_mode()
    def forward(self, sequences: list[SequenceRows]) -> NDArray[np.float32]:
        """One pass. Returns the logits of each sequence's last `num_logits` rows, in order: [rows, vocabulary]."""
        batch = self._builder.build(sequences)
        return self._run(batch)

    def _run(self, batch: Batch) -> NDArray[np.float32]:
        inputs: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "use_cache": False,
            BATCH_KEY: batch,
        }
        if not batch.num_logits:
            self.model.module.base_model(**inputs)  # type: ignore[operator]
            return np.empty((0, self.model.vocab_size), np.float32)
        logits = self.model.module(**inputs, logits_to_keep=batch.logit_rows).logits
        return logits[0, : batch.num_logits].float().cpu().numpy()  # type: ignore[no-any-return]

    # Proofs at load

    @torch.inference_mode()
    def _find_probes(self, builder: BatchBuilder) -> tuple[list[Probe], list[Probe]]:
        """Run a trial forward and make a row probe of each kind of layer that it passed: (body, head)."""
        module = self.model.module
        head = module.get_output_embeddings()  # type: ignore[operator]
        seen: dict[tuple[Any, ...], tuple[nn.Module, torch.Size]] = {}

        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            if x is None or not isinstance(output, torch.Tensor) or not x.is_floating_point():
                return
            if list(x.shape).count(_TRIAL_TOKENS) == 1 and list(output.shape).count(_TRIAL_TOKENS) == 1:
                seen.setdefault((type(layer), x.shape, output.shape, layer is head), (layer, x.shape))

        skipped = (nn.Embedding, nn.Dropout, RotaryTable, FusedPart)
        leaves = [m for m in module.modules() if not any(True for _ in m.children()) and not isinstance(m, skipped)]
        hooks = [leaf.register_forward_hook(record, with_kwargs=True) for leaf in leaves]
        try:
            batch = builder.build([self._trial_rows(0, _TRIAL_TOKENS, list(range(self._trial_blocks())))])
            batch.logit_rows = torch.arange(_TRIAL_TOKENS, device=self._device)
            batch.num_logits = _TRIAL_TOKENS
            self._run(batch)
        except UnsupportedModel:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UnsupportedModel(
                f"{type(module).__name__} does not run on the paged cache: {' '.join(str(error).split())[:200]}"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        if batch.layers_seen != self.model.layout.layers:
            raise UnsupportedModel(
                f"{type(module).__name__} has {self.model.layout.layers} layers but {batch.layers_seen} of them use "
                "Transformers' attention interface"
            )
        body = [self._row_probe(layer, shape) for layer, shape in seen.values() if layer is not head]
        return body, [self._row_probe(layer, shape) for layer, shape in seen.values() if layer is head]

    def _row_probe(self, layer: nn.Module, shape: torch.Size) -> Probe:
        """Feeds `layer` inputs of `shape`, except that the trial's token axis has as many rows as are probed."""
        axis = list(shape).index(_TRIAL_TOKENS)
        dtype = next(self.model.module.parameters()).dtype
        sizes = [VARIANTS if i == axis else n for i, n in enumerate(shape)]
        known = self._random(tuple(sizes)).to(dtype)

        def probe(variants: torch.Tensor) -> torch.Tensor:
            rows = len(variants)
            out: torch.Tensor = layer(known.index_select(axis, variants.to(self._device)))
            where = axis if out.shape[axis] == rows else list(out.shape).index(rows)
            return out.movedim(where, 0).reshape(rows, -1)

        return Probe(probe, 1 if isinstance(layer, (nn.Linear, PackedLinear)) else VARIANTS)

    def _attention_rows_probe(self, sequences: int) -> Probe:
        """`attend` over two tiles of random K and V, the same for each of `sequences`."""
        heads, dim, context = self.cache.kv_heads, self.cache.head_dim, 2 * TILE_TOKENS
        q, k, v = (
            self._random((VARIANTS, dim)),
            self._random((1, context, heads, dim)),
            self._random((1, context, heads, dim)),
        )

        def probe(variants: torch.Tensor) -> torch.Tensor:
            rows = len(variants)
            positions = (variants * 5 + TILE_TOKENS).to(self._device)
            group = QueryGroup(
                q_rows=variants.repeat(heads * sequences).to(self._device),
                sequences=sequences,
                rows=rows,
                context=context,
                visible=TILE_TOKENS,
                row_positions=positions[None, :, None].expand(sequences, -1, -1),
            )
            tiled = [t.expand(sequences, -1, -1, -1).contiguous() for t in (k, v)]
            out = attend(q, tiled[0], tiled[1], group, None, None).view(heads, sequences, rows, dim)
            return out.movedim(2, 0).reshape(rows, -1)

        return Probe(probe)

    def _is_safe_context(self, rows: int) -> Callable[[int], bool]:
        """Says whether attention over `context` tokens gives the bits that it gives over the reference length.

        Keys beyond the shorter of both are hidden, so this tells whether hidden padding changes anything. The reference
        depends on the model alone: all workers must agree.
        """
        heads, dim = min(2, self.cache.kv_heads), self.cache.head_dim
        reference = -(-min(self.model.context_length, _REFERENCE_CONTEXT) // TILE_TOKENS) * TILE_TOKENS
        known: list[torch.Tensor] = []

        def run(context: int, positions: torch.Tensor) -> torch.Tensor:
            group = QueryGroup(
                q_rows=torch.arange(rows, device=self._device).repeat(heads),
                sequences=1,
                rows=rows,
                context=context,
                visible=0,
                row_positions=positions[None, :, None],
            )
            beyond = (0, 0, 0, 0, 0, max(0, context - reference))
            k, v = (nn.functional.pad(t[:, :context], beyond) for t in known[1:])
            return attend(known[0], k, v, group, None, None)

        def is_safe(context: int) -> bool:
            if not known:
                shape = (1, reference, heads, dim)
                known.extend((self._random((rows, dim)), self._random(shape), self._random(shape)))
            last = min(context, reference) - 1
            positions = (last - 7 * torch.arange(rows, device=self._device)).clamp_(min=0)
            return bool((bits(run(context, positions)) == bits(run(reference, positions))).all())

        return is_safe

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(20_24)
        return torch.randn(shape, generator=generator).to(self._device, self.cache.data.dtype)

    def _trial_blocks(self) -> int:
        return -(-_TRIAL_TOKENS // self.cache.block_tokens)

    def _trial_rows(self, start: int, count: int, block_ids: list[int]) -> SequenceRows:
        tokens = [(i * 7919 + 11) % self.model.vocab_size for i in range(start, start + count)]
        return SequenceRows(tokens, start, block_ids, num_logits=1)

    def _check_numerics(self) -> KVLayout:
        """Compute one text whole and in pieces beside a neighbour; both must agree bitwise, in logits and KV.

        The digest of that KV goes into the layout: workers whose kernels round differently refuse each other's blocks.
        """
        need = self._trial_blocks()
        whole, pieces = list(range(need)), list(range(need, 2 * need))[::-1]
        expected = self.forward([self._trial_rows(0, _TRIAL_TOKENS, whole)])[0].copy()
        start = 0
        for count in (19, 1, 5, 1, 9, _TRIAL_TOKENS - 35):
            neighbour = self._trial_rows(start, 1, whole)
            found = self.forward([neighbour, self._trial_rows(start, count, pieces)])[1].copy()
            start += count
        digests = {self._kv_digest(blocks) for blocks in (whole, pieces)}
        if len(digests) != 1 or expected.tobytes() != found.tobytes():
            raise NumericsError("the same text gave different bits in one chunk and in several on this machine")
        self.cache.clear(whole + pieces)
        layout = self.model.layout
        torch_version = str(torch.__version__).partition("+")[0]
        return msgspec.structs.replace(layout, numerics=f"{layout.numerics}/torch-{torch_version}/{digests.pop()}")

    def _kv_digest(self, block_ids: list[int]) -> str:
        tokens = self.cache.data[torch.tensor(block_ids, device=self._device)].movedim(0, 2)
        flat = tokens.reshape(*tokens.shape[:2], -1, *tokens.shape[4:])[:, :, :_TRIAL_TOKENS]
        raw = flat.contiguous().view(torch.uint8).cpu().numpy()
        return hashlib.sha256(raw.tobytes()).hexdigest()[:12]
