"""Runs forwards: a loaded model, its KV cache and the proofs that its rows do not depend on the batch."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import nn

from shared.engine.activations import UniformActivation
from shared.engine.attention import BATCH_KEY
from shared.engine.attention_choice import Candidate, attention_candidates
from shared.engine.attention_trial import AttentionTrial, VariantBackend
from shared.engine.batch import AttentionBackend, AttentionShape, Batch, BatchBuilder, SafeSizes, SequenceRows
from shared.engine.config import EngineConfig
from shared.engine.cuda_graphs import GRAPH_ROWS, GraphSet, StaticBackend
from shared.engine.cuda_products import TILE_ROWS, TiledLinear, prepare_device, prove_tiles
from shared.engine.direct_calls import call_directly
from shared.engine.errors import EngineError, NumericsError, UnsupportedModel
from shared.engine.fusion import FusionTrial
from shared.engine.kernel_attention import KernelAttention
from shared.engine.kv_cache import KVCache
from shared.engine.loader import LoadedModel, load_model
from shared.engine.norms import KernelRMSNorm
from shared.engine.packed_linear import ByteLinear, FusedPart, HalfLinear, Int8Linear, PackedLinear
from shared.engine.rotary import RotaryTable
from shared.engine.row_safety import VARIANTS, Probe, safe_rows
from shared.protocol.blocks import KVLayout

_TRIAL_TOKENS = 53
"""Length of the first, checking forward. A prime, so that it is found in shapes; the row probes rely on that."""

_FUSED_TOLERANCE = {"fp32": 1e-3, "fp16-packed": 1e-2, "int8": 1e-1}
"""Largest difference of logits, relative to the largest, that fusing layers may make. Each was compared closely before;
this is for what only shows in the whole, such as a layer's input that is used again."""

_FAST_TOLERANCE = 0.1
"""Largest difference of logits, relative to the largest, that the cutting of a text may make where exactness was given
up. What is wrong altogether gives differences of the size of the logits."""

_log = structlog.get_logger(__name__)


@dataclass
class _Trial:
    """What the first forward showed: every kind of layer of rows, what decoder layers did, and the logits."""

    fusion: FusionTrial
    kinds: dict[tuple[Any, ...], tuple[nn.Module, torch.Size]] = field(default_factory=dict)
    logits: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))


class ModelRunner:
    """Owns weights and KV cache. `forward` is the only thing that computes; it must be called from one thread."""

    def __init__(self, model: LoadedModel, num_blocks: int, config: EngineConfig) -> None:
        self.model = model
        self._config = config
        self._device = next(model.module.parameters()).device
        self._exact = config.exactness == "exact"
        self._on_cuda = self._device.type == "cuda"
        self._graphs = GraphSet()
        self._host_logits = torch.empty(0)
        self.attention: AttentionBackend
        self.cache = KVCache(model.layout, num_blocks, self._device)
        products = prove_tiles(model.module)
        self.attention_name, trial, batch = self._choose_attention()
        head = model.module.get_output_embeddings()  # type: ignore[operator]
        probes = {layer is head: [] for layer in (None, head)}  # type: dict[bool, list[Probe]]
        for layer, shape in trial.kinds.values():
            probes[layer is head].append(self._row_probe(layer, shape))
        self.fused_layers = self._fuse_layers(trial, batch)
        safe = self._safe_sizes(probes)
        self._safe = safe
        self._builder = BatchBuilder(self.attention, self._device, safe)
        leaves = (
            HalfLinear,
            PackedLinear,
            ByteLinear,
            Int8Linear,
            TiledLinear,
            FusedPart,
            KernelRMSNorm,
            UniformActivation,
        )
        call_directly(model.module, leaves)
        self.layout = self._check_numerics()
        if self._on_cuda:
            self._capture_graphs(sorted({safe.rows(rows) for rows in GRAPH_ROWS}))
            _log.info("cuda_ready", exactness=config.exactness, graphs=self._graphs.row_counts, products=str(products))

    @classmethod
    def load(cls, config: EngineConfig) -> ModelRunner:
        """Raises UnsupportedModel, NumericsError, EngineError (memory too small for one block)."""
        torch.set_num_threads(config.threads)
        if config.device == "cuda":
            prepare_device()
        model = load_model(config)
        num_blocks = config.kv_memory_bytes // model.layout.block_bytes
        needed = -(-2 * _TRIAL_TOKENS // config.block_tokens) + 2
        if num_blocks < needed:
            raise EngineError(
                f"{config.kv_memory_bytes} bytes hold {num_blocks} KV blocks of {model.layout.block_bytes} bytes; "
                f"at least {needed} are needed"
            )
        runner = cls(model, num_blocks, config)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: what packing and the trial used goes back
        if trim is not None:
            trim(0)
        return runner

    @torch.inference_mode()
    def forward(self, sequences: list[SequenceRows]) -> NDArray[np.float32]:
        """One pass. Returns the logits of each sequence's last `num_logits` rows, in order: [rows, vocabulary].

        A token that a short head leaves out has -inf. On CUDA they lie in memory that the next pass uses again.
        """
        logits = self._forward(sequences)
        kept = self.model.head_tokens
        if kept is None or not len(logits):
            return logits
        whole = np.full((len(logits), self.model.vocab_size), -np.inf, np.float32)
        whole[:, kept] = logits
        return whole

    def _forward(self, sequences: list[SequenceRows]) -> NDArray[np.float32]:
        """The same, [rows, tokens of the head]."""
        logits = self._graphs.run(sequences)
        return self._run(self._builder.build(sequences)) if logits is None else self._to_host(logits)

    def padded_rows(self, rows: int) -> int:
        """How many rows a decode step or verification of so many computes. Quick for those that a forward has had."""
        return self._graphs.size_for(rows) or self._safe.rows(rows)

    @property
    def graph_rows(self) -> list[int]:
        """Row counts that were captured; none on CPU."""
        return self._graphs.row_counts

    def _run(self, batch: Batch) -> NDArray[np.float32]:
        if batch.num_logits:
            return self._to_host(self._compute(batch)[:, : batch.num_logits])
        self.model.module.base_model(**self._inputs(batch))  # type: ignore[operator]
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()  # a step is over when its KV is there, for whoever reads blocks
        return np.empty((0, self.model.vocab_size), np.float32)

    def _compute(self, batch: Batch) -> torch.Tensor:
        """Logits [1, logit rows, vocabulary] on the device, in the model's dtype."""
        logits: torch.Tensor = self.model.module(**self._inputs(batch), logits_to_keep=batch.logit_rows).logits
        return logits

    @staticmethod
    def _inputs(batch: Batch) -> dict[str, Any]:
        return {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "use_cache": False,
            BATCH_KEY: batch,
        }

    def _to_host(self, logits: torch.Tensor) -> NDArray[np.float32]:
        """[1, rows, vocabulary] -> [rows, vocabulary] fp32; from a GPU into pinned memory, several times as fast."""
        wanted = logits[0].float()
        if not self._on_cuda:
            return wanted.numpy()
        if self._host_logits.numel() < wanted.numel():
            self._host_logits = torch.empty(wanted.numel(), pin_memory=True)
        found = self._host_logits[: wanted.numel()].view(wanted.shape)
        found.copy_(wanted, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return found.numpy()

    # Proofs at load

    def _choose_attention(self) -> tuple[str, _Trial, Batch]:
        """Take the first candidate that is there and right for this model; its name, and what the first forward showed.

        Raises UnsupportedModel, and EngineError when no candidate is left.
        """
        rejected: list[str] = []
        for candidate in attention_candidates(self.model, self._config):
            try:
                self.attention = candidate.make(self.cache)
                trial, batch = self._try_attention(candidate)
            except UnsupportedModel:
                raise
            except Exception as error:
                # Compilers and libraries fail in many ways; the next candidate is as right, only slower.
                if not candidate.on_trial:
                    raise
                rejected.append(f"{candidate.name}: {' '.join(str(error).split())[:200]}")
                continue
            if candidate.on_trial or rejected:
                _log.info("attention_chosen", attention=candidate.name, rejected=rejected)
            return candidate.name, trial, batch
        raise EngineError(f"no attention can serve this model here: {'; '.join(rejected)}")

    @torch.inference_mode()
    def _try_attention(self, candidate: Candidate) -> tuple[_Trial, Batch]:
        """The first forward, once the candidate's numbers are right for an ordinary layer; then for all of them."""
        if not candidate.on_trial:
            return self._run_trial()
        layout, attention = self.model.layout, self.attention
        heads, positions = self.model.query_heads, self.model.context_length
        tried = AttentionTrial(candidate.make, layout, heads, positions, self._device, exact=self._exact)
        tried.check(AttentionShape(layout.head_dim**-0.5, None, None))
        trial, batch = self._run_trial()
        for shape in sorted(set(batch.shapes_seen.values()), key=repr):
            tried.check(shape)
        if isinstance(attention, VariantBackend) and isinstance(tried.backend, VariantBackend):
            attention.variants = tried.backend.variants
        return trial, batch

    def _safe_sizes(self, probes: dict[bool, list[Probe]]) -> SafeSizes:
        """How batches are padded: to proven row counts, on CUDA whole tiles of the products; not at all in `fast`."""
        if not self._exact:
            return SafeSizes(rows=int, head_rows=int)
        step = TILE_ROWS if self._on_cuda else 1
        rows, head_rows = (
            _in_steps(safe_rows(what, probes[is_head]).pad, step)
            for what, is_head in (("row count", False), ("row count in the head", True))
        )
        return SafeSizes(rows=rows, head_rows=head_rows)

    @torch.inference_mode()
    def _capture_graphs(self, row_counts: list[int]) -> None:
        """Capture decode-like batches and compare each graph with the eager pass, which serves where graphs cannot."""
        attention = self.attention
        if not self._config.cuda_graphs or not isinstance(attention, StaticBackend):
            return
        try:
            self._graphs.capture(row_counts, self._compute, attention, self._device)
        except RuntimeError as error:  # a model that asks the device for a number, as mixtures of experts do
            self._graphs = GraphSet()
            _log.warning("graphs_unusable", reason=" ".join(str(error).split())[:200])
            return
        blocks = list(range(self._trial_blocks()))
        self._run(self._builder.build([self._trial_rows(0, _TRIAL_TOKENS, blocks)]))
        for rows in self._graphs.row_counts:
            first = max(0, _TRIAL_TOKENS - rows)
            sequences = [self._trial_rows(start, 1, blocks) for start in range(first, _TRIAL_TOKENS)]
            expected = self._run(self._builder.build(sequences)).copy()
            if not self._agree(expected, self._forward(sequences)):
                self._graphs = GraphSet()
                _log.warning("graphs_unusable", reason=f"the one of {rows} rows gave other bits than the eager pass")
                break
        self.cache.clear(blocks)

    @torch.inference_mode()
    def _run_trial(self) -> tuple[_Trial, Batch]:
        """One forward through all layers as they were loaded. Raises UnsupportedModel when they cannot be served."""
        module = self.model.module
        trial = _Trial(FusionTrial(module))
        head = module.get_output_embeddings()  # type: ignore[operator]

        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            if x is None or not isinstance(output, torch.Tensor) or not x.is_floating_point():
                return
            if list(x.shape).count(_TRIAL_TOKENS) == 1 and list(output.shape).count(_TRIAL_TOKENS) == 1:
                trial.kinds.setdefault((type(layer), x.shape, output.shape, layer is head), (layer, x.shape))

        skipped = (nn.Embedding, nn.Dropout, RotaryTable, FusedPart, TiledLinear)  # the last have proofs of their own
        leaves = [m for m in module.modules() if not any(True for _ in m.children()) and not isinstance(m, skipped)]
        hooks = [leaf.register_forward_hook(record, with_kwargs=True) for leaf in leaves]
        if isinstance(self.attention, KernelAttention):
            trial.fusion.watch()
        builder = BatchBuilder(self.attention, self._device, SafeSizes(rows=int, head_rows=int))
        try:
            batch = builder.build([self._trial_rows(0, _TRIAL_TOKENS, list(range(self._trial_blocks())))])
            batch.logit_rows = torch.arange(_TRIAL_TOKENS, device=self._device)
            batch.num_logits = _TRIAL_TOKENS
            trial.logits = self._run(batch).copy()
        except UnsupportedModel:
            raise
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UnsupportedModel(
                f"{type(module).__name__} does not run on the paged cache: {' '.join(str(error).split())[:200]}"
            ) from error
        finally:
            trial.fusion.unwatch()
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
        """Fuse the layers that the trial shows to be of the known form. Returns how many.

        At last the trial forward is repeated: should its logits differ, no layer is fused.
        """
        if not isinstance(self.attention, KernelAttention):
            return 0
        replaced = trial.fusion.fuse(batch.shapes_seen, self.attention, self._config.dtype)
        found = self._run(batch)
        allowed = _FUSED_TOLERANCE[self._config.dtype] * np.abs(trial.logits).max()
        if np.abs(found - trial.logits).max() <= allowed:
            return len(replaced)
        for parent, name, layer in replaced:
            setattr(parent, name, layer)
        return 0

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

        products = (nn.Linear, HalfLinear, PackedLinear, ByteLinear, Int8Linear)
        wide_product = isinstance(layer, products) and layer.out_features >= VARIANTS
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
        """Compute one text whole and in pieces beside a neighbour; both must agree, bit by bit where all is exact.

        The digest of that KV goes into the layout: workers whose kernels round differently refuse each other's blocks.
        """
        need = self._trial_blocks()
        whole, pieces = list(range(need)), list(range(need, 2 * need))[::-1]
        expected = self._forward([self._trial_rows(0, _TRIAL_TOKENS, whole)])[0].copy()
        start = 0
        for count in (19, 1, 5, 1, 9, _TRIAL_TOKENS - 35):
            neighbour = self._trial_rows(start, 1, whole)
            found = self._forward([neighbour, self._trial_rows(start, count, pieces)])[1].copy()
            start += count
        digest, other = (self._kv_digest(blocks) for blocks in (whole, pieces))
        if not self._agree(expected, found) or (self._exact and digest != other):
            raise NumericsError("the same text gave different bits in one chunk and in several on this machine")
        self.cache.clear(whole + pieces)
        layout = self.model.layout
        torch_version = str(torch.__version__).partition("+")[0]
        return msgspec.structs.replace(layout, numerics=f"{layout.numerics}/torch-{torch_version}/{digest}")

    def _agree(self, expected: NDArray[np.float32], found: NDArray[np.float32]) -> bool:
        if self._exact:
            return expected.tobytes() == found.tobytes()
        return bool(np.abs(expected - found).max() <= _FAST_TOLERANCE * np.abs(expected).max())

    def _kv_digest(self, block_ids: list[int]) -> str:
        tokens = self.cache.data[torch.tensor(block_ids, device=self._device)].movedim(0, 2)
        flat = tokens.reshape(*tokens.shape[:2], -1, *tokens.shape[4:])[:, :, :_TRIAL_TOKENS]
        raw = flat.contiguous().view(torch.uint8).cpu().numpy()
        return hashlib.sha256(raw.tobytes()).hexdigest()[:12]


def _in_steps(pad: Callable[[int], int], step: int) -> Callable[[int], int]:
    """`pad` after rounding up to a multiple of `step`."""
    return lambda size: pad(-(-size // step) * step)
