"""Runs forwards: a loaded model, its KV cache and the proofs that its rows do not depend on the batch."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shared.engine.attention import BATCH_KEY
from shared.engine.batch import TILE_TOKENS, Batch, BatchBuilder, SequenceRows
from shared.engine.config import EngineConfig
from shared.engine.errors import EngineError, NumericsError, UnsupportedModel
from shared.engine.kv_cache import KVCache
from shared.engine.loader import LoadedModel, load_model
from shared.engine.packed_linear import FusedPart
from shared.engine.rotary import RotaryTable
from shared.engine.row_safety import VARIANTS, Probe, RowSafety
from shared.protocol.blocks import KVLayout

_TRIAL_TOKENS = 53
"""Length of the first, checking forward. A prime, so that it is found in shapes; the row probes rely on that."""


class ModelRunner:
    """Owns weights and KV cache. `forward` is the only thing that computes; it must be called from one thread."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self.model = model
        self._device = next(model.module.parameters()).device
        self.cache = KVCache(model.layout, num_blocks, self._device)
        attention = RowSafety([self._attention_probe(tiles) for tiles in (1, 12)])
        plain = BatchBuilder(
            self.cache,
            model.query_heads,
            pad_rows=int,
            pad_head_rows=int,
            pad_query_rows=attention.pad,
        )
        rows, head = self._find_probes(plain)
        self._builder = BatchBuilder(
            self.cache,
            model.query_heads,
            pad_rows=RowSafety(rows).pad,
            pad_head_rows=RowSafety(head).pad,
            pad_query_rows=attention.pad,
        )
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
        rows = logits[0, : batch.num_logits].float().cpu().numpy()
        return rows  # type: ignore[no-any-return]

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
                seen.setdefault((type(layer), repr(layer), tuple(x.shape), layer is head), (layer, x.shape))

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
        known = torch.randn(sizes, generator=_generator()).to(self._device, dtype)

        def probe(variants: torch.Tensor) -> torch.Tensor:
            rows = len(variants)
            out: torch.Tensor = layer(known.index_select(axis, variants.to(self._device)))
            where = axis if out.shape[axis] == rows else list(out.shape).index(rows)
            return out.movedim(where, 0).reshape(rows, -1)

        return probe

    def _attention_probe(self, tiles: int) -> Probe:
        """The products and sums of one attention tile, `tiles` at once."""
        dim, dtype = self.cache.head_dim, self.cache.data.dtype
        generator = _generator()
        known, k, v = (
            torch.randn((n, dim), generator=generator).to(self._device, dtype) for n in (VARIANTS, TILE_TOKENS, TILE_TOKENS)
        )

        def probe(variants: torch.Tensor) -> torch.Tensor:
            tile_q = known[variants.to(self._device)].expand(tiles, -1, -1).contiguous()
            tile_k, tile_v = (t.expand(tiles, -1, -1).contiguous() for t in (k, v))
            scores = torch.bmm(tile_q, tile_k.transpose(1, 2)).float()
            weights = (scores - scores.amax(-1, keepdim=True)).exp_()
            out = torch.bmm(weights.to(dtype), tile_v).float()
            joined = torch.cat((scores, weights, weights.sum(-1, keepdim=True), out), -1)
            return joined.movedim(1, 0).reshape(len(variants), -1)

        return probe

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


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20_24)
