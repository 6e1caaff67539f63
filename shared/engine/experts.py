"""Makes mixtures of experts exact: the rows that an expert sees depend on the batch, the bits that it gives must not.

Each expert works on a row count that is proven safe, and a row's chosen experts are added in the order in which that
row ranked them. The block around them (router, shared expert) is padded to a safe row count as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shared.engine.errors import UnsupportedModel
from shared.engine.packed_linear import MakeLinear, plain_linear
from shared.engine.row_safety import VARIANTS, Probe, SafeSize, safe_rows

_ALIGNED_BYTES = 64
"""Each expert's weight starts at such an address, as torch's own do, so that one expert's proof holds for all."""

_TRIAL_ROWS = 9


class ExactExperts(nn.Module):
    """Stands for an experts module of Transformers: `down(act(gate(x)) * up(x))` for each expert that a row chose."""

    def __init__(self, experts: Any, make_linear: MakeLinear, rows: SafeSize | None, device: torch.device) -> None:
        """`experts` describes itself in the fields that Transformers' `use_experts_implementation` gives it.

        `rows` are proofs of a module with the same shapes; None begins new ones, on `device`.
        """
        super().__init__()
        self._gated = bool(experts.has_gate)
        self.up = nn.ModuleList(_linears(experts, "gate_up_proj" if self._gated else "up_proj", make_linear))
        self.down = nn.ModuleList(_linears(experts, "down_proj", make_linear))
        self.act_fn = experts.act_fn
        self.rows = rows or safe_rows("row count in an expert", [self._probe(experts, device)])

    def _probe(self, experts: Any, device: torch.device) -> Probe:
        known = _random_rows((VARIANTS, _hidden_size(experts)), experts.down_proj.dtype, device)
        return Probe(lambda variants: self._expert(0, known.index_select(0, variants.to(device))))

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]"""
        y = self.up[expert](x)
        if self._gated:
            gate, up = y.chunk(2, -1)
            y = self.act_fn(gate) * up
        else:
            y = self.act_fn(y)
        return self.down[expert](y)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden]; numbers and weights of the experts that each row chose [rows, ranks] -> [rows, hidden]"""
        rows, ranks = chosen.shape
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=len(self.up)).tolist()
        parts = x.new_empty((rows * ranks, x.shape[-1]))
        for expert, places in enumerate(torch.split(torch.argsort(flat, stable=True), counts)):
            count = counts[expert]
            if count:
                missing = self.rows.pad(count) - count
                taken = torch.cat((places, places[:1].expand(missing))) if missing else places
                y = self._expert(expert, x.index_select(0, taken // ranks))
                parts.index_copy_(0, places, y[:count])
        ranked = (parts.view(rows, ranks, -1) * weights[..., None]).unbind(1)
        total = ranked[0]
        for part in ranked[1:]:
            total = total + part
        return total.to(x.dtype)


class PaddedBlock(nn.Module):
    """A block with experts, given a safe number of rows: whatever it does beside them is the same at any of those."""

    def __init__(self, inner: nn.Module, rows: SafeSize | None, width: int, device: torch.device) -> None:
        """`width` is that of the hidden state; `rows` and `device` as in ExactExperts."""
        super().__init__()
        self.inner = inner
        self.rows = rows or safe_rows("row count beside experts", [self._probe(width, device)])

    def _probe(self, width: int, device: torch.device) -> Probe:
        known = _random_rows((VARIANTS, width), next(self.inner.parameters()).dtype, device)
        return Probe(lambda variants: self._run(known.index_select(0, variants.to(device))[None])[0])

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if not isinstance(y, torch.Tensor):
            raise UnsupportedModel(f"{type(self.inner).__name__} gives more than one result, which is not served")
        return y

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[1, rows, hidden] -> [1, rows, hidden]. Raises UnsupportedModel when the block takes or gives more."""
        if args or kwargs:
            raise UnsupportedModel(f"{type(self.inner).__name__} takes more than hidden states, which is not served")
        rows = x.shape[1]
        missing = self.rows.pad(rows) - rows
        return self._run(torch.cat((x, x[:, :1].expand(-1, missing, -1)), 1) if missing else x)[:, :rows]


class ColumnLinear(nn.Module):
    """A linear layer with one output, whose results stand apart in memory.

    Torch computes an activation of neighbours in whole vectors and the few left over differently. Of results with gaps
    between them, it computes each alone.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().repeat(2, 1), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().repeat(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., 1]"""
        return nn.functional.linear(x, self.weight, self.bias)[..., :1]


def replace_experts(model: nn.Module, model_type: str, make_linear: MakeLinear, device: torch.device) -> int:
    """Make each block with experts exact; returns their number. Other replacements come after this one.

    Needs `experts_implementation="eager"` to compare with. Raises UnsupportedModel for experts of another kind.
    """
    proofs: dict[Any, tuple[SafeSize, SafeSize]] = {}
    replaced = 0
    for parent in list(model.modules()):
        for name, block in list(parent.named_children()):
            found = [(n, m) for n, m in block.named_children() if hasattr(m, "is_concatenated")]
            if len(found) != 1 or any("Attention" in type(m).__name__ for m in block.children()):
                continue
            ((experts_name, experts),) = found
            key = (type(block), *(p.shape for p in block.parameters()))
            if key not in proofs:
                _check_formula(experts, model_type)
            for child_name, child in list(block.named_children()):
                if type(child) is nn.Linear and child.out_features == 1:
                    setattr(block, child_name, ColumnLinear(child))
            expert_rows, block_rows = proofs.get(key, (None, None))
            exact = ExactExperts(experts, make_linear, expert_rows, device)
            setattr(block, experts_name, exact)
            padded = PaddedBlock(block, block_rows, _hidden_size(experts), device)
            setattr(parent, name, padded)
            proofs[key] = (exact.rows, padded.rows)
            replaced += 1
    for module in model.modules():
        kind = type(module).__name__
        if "Expert" in kind and not isinstance(module, ExactExperts):
            raise UnsupportedModel(
                f"model type {model_type!r} is a mixture of experts of a kind that is not served: "
                f"with {kind} the batch decides how many rows an expert sees"
            )
    return replaced


def _check_formula(experts: Any, model_type: str) -> None:
    """Raises UnsupportedModel unless a trial gives what `experts` itself gives."""
    cpu, dtype = torch.device("cpu"), experts.down_proj.dtype
    x = _random_rows((_TRIAL_ROWS, _hidden_size(experts)), dtype, cpu)
    scores = _random_rows((_TRIAL_ROWS, experts.num_experts), dtype, cpu)
    weights, chosen = scores.softmax(-1).topk(min(2, experts.num_experts))
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    if hasattr(experts, "act_fn"):
        expected = experts(x, chosen, weights).float()
        found = ExactExperts(experts, plain_linear, None, cpu)(x, chosen, weights).float()
        if (found - expected).norm() <= tolerance * expected.norm():
            return
    raise UnsupportedModel(
        f"model type {model_type!r} is a mixture of experts of a kind that is not served: {type(experts).__name__} "
        "computes something else than down(act(gate(x)) * up(x))"
    )


def _linears(experts: Any, name: str, make_linear: MakeLinear) -> list[nn.Module]:
    """One layer for each expert from a parameter [experts, out, in], or [experts, in, out] where it is transposed."""
    weights = getattr(experts, name).detach()
    if experts.is_transposed:
        weights = weights.transpose(1, 2).contiguous()
    biases = getattr(experts, f"{name}_bias").detach().unbind() if experts.has_bias else [None] * len(weights)
    aligned = [w if w.data_ptr() % _ALIGNED_BYTES == 0 else w.clone() for w in weights.unbind()]
    return [make_linear(weight, bias) for weight, bias in zip(aligned, biases, strict=True)]


def _hidden_size(experts: Any) -> int:
    return int(experts.down_proj.shape[-1 if experts.is_transposed else -2])


def _random_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(20_25)).to(device, dtype)
