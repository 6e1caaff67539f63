"""Runs forwards: a loaded model, its KV cache and the proofs that its rows do not depend on the batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shared.engine.activations import UniformActivation
from shared.engine.attention import BATCH_KEY
from shared.engine.batch import AttentionBackend, Batch, BatchBuilder, SafeSizes, SequenceRows
from shared.engine.config import EngineConfig
from shared.engine.direct_calls import call_directly
from shared.engine.errors import EngineError, NumericsError, UnsupportedModel
from shared.engine.fused_layer import FusedDecoderLayer, is_fusable
from shared.engine.kernel_attention import KernelAttention
from shared.engine.kv_cache import KVCache
from shared.engine.loader import LoadedModel, load_model
from shared.engine.norms import KernelRMSNorm
from shared.engine.packed_linear import FusedPart, Int8Linear, PackedLinear
from shared.engine.rotary import RotaryTable
from shared.engine.row_safety import VARIANTS, Probe, safe_rows
from shared.engine.torch_attention import TorchAttention
from shared.protocol.blocks import KVLayout

_TRIAL_TOKENS = 53
"""Length of the first, checking forward. A prime, so that it is found in shapes; the row probes rely on that."""

_FUSION_TOLERANCE = {"fp32": 1e-4, "fp16-packed": 1e-3, "int8": 5e-2}
"""Largest difference between a layer and its fused form, relative to the largest output, by dtype. A part that is
missing or exchanged gives differences of the size of the output."""


@dataclass
class _Trial:
    """What the first forward showed: every kind of layer of rows, and the input and output of each decoder layer."""

    kinds: dict[tuple[Any, ...], tuple[nn.Module, torch.Size]] = field(default_factory=dict)
    layers: dict[nn.Module, tuple[torch.Tensor, dict[str, Any], torch.Tensor]] = field(default_factory=dict)


class ModelRunner:
    """Owns weights and KV cache. `forward` is the only thing that computes; it must be called from one thread."""

    def __init__(self, model: LoadedModel, num_blocks: int, config: EngineConfig) -> None:
        self.model = model
        self._config = config
        self._device = next(model.module.parameters()).device
        self.cache = KVCache(model.layout, num_blocks, self._device)
        self.attention = self._attention_backend()
        trial, batch = self._run_trial()
        head = model.module.get_output_embeddings()  # type: ignore[operator]
        probes = {layer is head: [] for layer in (None, head)}  # type: dict[bool, list[Probe]]
        for layer, shape in trial.kinds.values():
            probes[layer is head].append(self._row_probe(layer, shape))
        self.fused_layers = self._fuse_layers(trial, batch)
        rows = safe_rows("row count", probes[False])
        safe = SafeSizes(rows=rows.pad, head_rows=safe_rows("row count in the head", probes[True]).pad)
        self._builder = BatchBuilder(self.attention, self._device, safe)
        call_directly(model.module, (PackedLinear, Int8Linear, FusedPart, KernelRMSNorm, UniformActivation))
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
        return cls(model, num_blocks, config)

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

    def _attention_backend(self) -> AttentionBackend:
        kernels = self._device.type == "cpu" and self._config.attention != "torch"
        if kernels:
            return KernelAttention(self.cache, self.model.query_heads, self._config.threads)
        return TorchAttention(self.cache, self.model.query_heads, self.model.context_length)

    @torch.inference_mode()
    def _run_trial(self) -> tuple[_Trial, Batch]:
        """One forward through all layers as they were loaded. Raises UnsupportedModel when they cannot be served."""
        module = self.model.module
        trial = _Trial()
        head = module.get_output_embeddings()  # type: ignore[operator]

        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            if x is None or not isinstance(output, torch.Tensor) or not x.is_floating_point():
                return
            if list(x.shape).count(_TRIAL_TOKENS) == 1 and list(output.shape).count(_TRIAL_TOKENS) == 1:
                trial.kinds.setdefault((type(layer), x.shape, output.shape, layer is head), (layer, x.shape))

        def record_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if len(args) == 1 and isinstance(output, torch.Tensor):
                trial.layers[layer] = (args[0].clone(), kwargs, output.clone())

        skipped = (nn.Embedding, nn.Dropout, RotaryTable, FusedPart)
        leaves = [m for m in module.modules() if not any(True for _ in m.children()) and not isinstance(m, skipped)]
        hooks = [leaf.register_forward_hook(record, with_kwargs=True) for leaf in leaves]
        if isinstance(self.attention, KernelAttention):
            fusable = [m for m in module.modules() if is_fusable(m)]
            hooks += [layer.register_forward_hook(record_layer, with_kwargs=True) for layer in fusable]
        builder = BatchBuilder(self.attention, self._device, SafeSizes(rows=int, head_rows=int))
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
        if len(batch.shapes_seen) != self.model.layout.layers:
            raise UnsupportedModel(
                f"{type(module).__name__} has {self.model.layout.layers} layers but {len(batch.shapes_seen)} of them "
                "use Transformers' attention interface"
            )
        return trial, batch

    @torch.inference_mode()
    def _fuse_layers(self, trial: _Trial, batch: Batch) -> int:
        """Put a fused layer where one gives what the layer itself gave in the trial. Returns how many it replaced."""
        if not isinstance(self.attention, KernelAttention):
            return 0
        fused = 0
        for parent in list(self.model.module.modules()):
            for name, layer in list(parent.named_children()):
                if layer not in trial.layers:
                    continue
                x, kwargs, expected = trial.layers[layer]
                number = int(layer.self_attn.layer_idx)  # type: ignore[union-attr, arg-type]
                candidate = FusedDecoderLayer(layer, number, batch.shapes_seen[number], self.attention)
                found = candidate(x, **kwargs)
                if (found - expected).abs().max() <= _FUSION_TOLERANCE[self._config.dtype] * expected.abs().max():
                    setattr(parent, name, candidate)
                    fused += 1
        return fused

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

        wide_product = isinstance(layer, (nn.Linear, PackedLinear, Int8Linear)) and layer.out_features >= VARIANTS
        return Probe(probe, 1 if wide_product else VARIANTS)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(20_24)
        return torch.randn(shape, generator=generator).to(self._device)

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
