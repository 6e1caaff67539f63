"""What an expert gives a row does not depend on the other rows that chose it, nor on those beside it in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine import UnsupportedModel
from shared.engine.activations import replace_activations
from shared.engine.experts import ColumnLinear, ExactExperts, PaddedBlock, replace_experts
from shared.engine.packed_linear import linear_maker
from shared.engine.row_safety import bits

ROWS, EXPERTS, RANKS = 120, 6, 3
CPU = torch.device("cpu")


def a_block(dtype: str) -> Any:
    """A prepared block of Qwen2-MoE: a router, experts, a shared expert and its gate of one column."""
    torch.manual_seed(3)
    config = transformers.Qwen2MoeConfig(
        vocab_size=9,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_experts=EXPERTS,
        num_experts_per_tok=RANKS,
        moe_intermediate_size=37,
        shared_expert_intermediate_size=51,
        initializer_range=0.3,
        experts_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        assert replace_experts(model, "qwen2_moe", linear_maker(dtype, threads=1), CPU) == 1
    replace_activations(model)
    return model.model.layers[0].mlp


@pytest.fixture(scope="module", params=["fp32", "fp16-packed", "int8"])
def block(request: pytest.FixtureRequest) -> Any:
    return a_block(request.param)


def a_mixtral() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=9,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


X = torch.randn(ROWS, 48, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def whole(block: Any) -> torch.Tensor:
    """[ROWS, hidden]"""
    result: torch.Tensor = block(X[None])[0]
    return result


@given(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=70))
@settings(max_examples=150, deadline=None)
def test_a_row_has_its_bits_among_any_others(block: Any, whole: torch.Tensor, rows: list[int]) -> None:
    assert torch.equal(bits(block(X[rows][None])[0]), bits(whole[rows]))


def test_the_parts_of_the_block_are_those_meant(block: Any) -> None:
    assert isinstance(block, PaddedBlock)
    assert isinstance(block.inner.experts, ExactExperts)
    assert isinstance(block.inner.shared_expert_gate, ColumnLinear)
    assert len(block.inner.experts.up) == len(block.inner.experts.down) == EXPERTS


def test_experts_are_added_in_the_order_of_the_rows_own_choice(block: Any) -> None:
    """Beside rows that chose the same experts in another order, too."""
    experts = block.inner.experts
    x = X[:4]
    chosen = torch.tensor([[0, 1, 2], [2, 1, 0], [5, 0, 3], [3, 0, 5]])
    weights = torch.tensor([[0.5, 0.3, 0.2]] * 4)
    together = experts(x, chosen, weights)
    for row in range(4):
        alone = experts(x[row : row + 1], chosen[row : row + 1], weights[row : row + 1])
        assert torch.equal(bits(alone[0]), bits(together[row]))
        parts = [experts._expert(int(e), x[row : row + 1].expand(64, -1))[0] for e in chosen[row]]
        expected = parts[0] * 0.5 + parts[1] * 0.3 + parts[2] * 0.2
        torch.testing.assert_close(together[row], expected)


def test_a_row_that_is_no_number_changes_no_other(block: Any) -> None:
    poisoned = X[:30].clone()
    poisoned[7] = float("nan")
    expected, found = block(X[None, :30])[0], block(poisoned[None])[0]
    kept = [i for i in range(30) if i != 7]
    assert torch.equal(bits(found[kept]), bits(expected[kept]))
    assert found[7].isnan().all()


def test_a_column_gets_the_same_activation_wherever_a_row_stands() -> None:
    """Torch computes neighbours in whole vectors otherwise than those left over."""
    linear = torch.nn.Linear(48, 1)
    x = torch.randn(1, 48).expand(300, -1) * torch.linspace(-2, 2, 300)[:, None]
    column = ColumnLinear(linear)(x)
    torch.testing.assert_close(column, linear(x))
    whole = column.sigmoid()
    for rows in range(1, 70):
        part = torch.empty(rows, 2)
        part[:, :1] = column[:rows]
        assert torch.equal(bits(part[:, :1].sigmoid()), bits(whole[:rows]))


def test_a_proof_serves_all_layers_of_the_same_shape() -> None:
    model = a_mixtral()
    assert replace_experts(model, "mixtral", linear_maker("fp32", threads=1), CPU) == 3
    blocks = [layer.mlp for layer in model.model.layers]
    assert len({id(b.rows) for b in blocks}) == len({id(b.inner.experts.rows) for b in blocks}) == 1


def test_experts_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_mixtral()
    kind = type(model.model.layers[0].mlp.experts)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *inputs: 1.01 * original(self, *inputs))
    with pytest.raises(UnsupportedModel, match=r"'mixtral' .* MixtralExperts computes something else"):
        replace_experts(model, "mixtral", linear_maker("fp32", threads=1), CPU)
