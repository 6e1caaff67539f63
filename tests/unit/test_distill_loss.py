"""The loss, against its definition over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.draft.distill.loss import choose_columns, distillation_loss

VOCABULARY, POSITIONS, TOP = 60, 7, 5


def setting(seed: int) -> tuple[torch.Tensor, NDArray[np.int64], torch.Tensor, NDArray[np.int64], torch.Tensor]:
    """(student's logits, ids and log probabilities of the target's best, chosen tokens, the target's log softmax)"""
    torch.manual_seed(seed)
    ours = torch.randn(POSITIONS, VOCABULARY, dtype=torch.float64) * 2
    theirs = torch.log_softmax(torch.randn(POSITIONS, VOCABULARY, dtype=torch.float64) * 2, 1)
    best = theirs.topk(TOP, 1)
    return ours, best.indices.numpy(), best.values, theirs.argmax(1).numpy(), theirs


def loss_on(
    ours: torch.Tensor, ids: NDArray[np.int64], others: int, random: np.random.Generator, hard_share: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, logprobs, chosen, _ = setting(1)
    columns = choose_columns(ids, np.array([0, 1]), VOCABULARY, others, random)
    logits = ours[:, torch.from_numpy(columns.ids)] + torch.from_numpy(columns.log_weights)
    return distillation_loss(
        logits,
        torch.from_numpy(columns.places(ids)),
        logprobs,
        torch.from_numpy(columns.places(chosen)),
        hard_share,
    )


def defined(ours: torch.Tensor, ids: NDArray[np.int64], theirs: torch.Tensor) -> torch.Tensor:
    """Divergence of (best tokens, all others together), position by position."""
    p, q = theirs.exp(), torch.softmax(ours, 1)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(POSITIONS):
        best = torch.from_numpy(ids[row])
        p_best, q_best = p[row, best], q[row, best]
        total = total + (p_best * (p_best / q_best).log()).sum()
        total = total + (1 - p_best.sum()) * ((1 - p_best.sum()) / (1 - q_best.sum())).log()
    return total / POSITIONS


def test_with_every_column_it_is_the_divergence_and_its_gradient() -> None:
    ours, ids, _, _, theirs = setting(1)
    ours.requires_grad_(True)
    loss, divergence = loss_on(ours, ids, VOCABULARY, np.random.default_rng(0))
    expected = defined(ours, ids, theirs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(divergence, expected.detach())
    (found,) = torch.autograd.grad(loss, ours)
    (wanted,) = torch.autograd.grad(expected, ours)
    torch.testing.assert_close(found, wanted)


def test_the_targets_own_distribution_is_the_least() -> None:
    _, ids, _, _, theirs = setting(1)
    loss, _ = loss_on(theirs.clone(), ids, VOCABULARY, np.random.default_rng(0))
    assert abs(float(loss)) < 1e-9


def test_the_hard_share_adds_cross_entropy_of_the_chosen_token() -> None:
    ours, ids, _, chosen, _ = setting(1)
    soft, _ = loss_on(ours, ids, VOCABULARY, np.random.default_rng(0))
    both, _ = loss_on(ours, ids, VOCABULARY, np.random.default_rng(0), hard_share=0.3)
    hard = torch.nn.functional.cross_entropy(ours, torch.from_numpy(chosen))
    torch.testing.assert_close(both, soft + 0.3 * hard)


def test_random_columns_stand_for_the_rest() -> None:
    """Their weighted sum is the rest's in the mean, so the normaliser is right in the mean."""
    ours, ids, _, _, _ = setting(1)
    whole = ours.exp().sum(1)
    random = np.random.default_rng(3)
    found = []
    for _ in range(600):
        columns = choose_columns(ids, np.array([0, 1]), VOCABULARY, 10, random)
        found.append((ours[:, torch.from_numpy(columns.ids)] + torch.from_numpy(columns.log_weights)).exp().sum(1))
    assert torch.stack(found).mean(0).allclose(whole, rtol=0.05)


def test_each_column_is_there_once_and_needed_ones_are_exact() -> None:
    needed = np.array([[50, 3], [3, 9]])
    columns = choose_columns(needed, np.array([9, 20]), VOCABULARY, 8, np.random.default_rng(0))
    assert columns.ids[: columns.exact].tolist() == [3, 9, 20, 50]
    assert len(set(columns.ids.tolist())) == len(columns.ids) == 12
    assert columns.places(needed).tolist() == [[3, 0], [0, 1]]
    assert not columns.log_weights[:4].any()
    np.testing.assert_allclose(np.exp(columns.log_weights[4:]), 56 / 8)


def test_a_target_with_fewer_tokens_than_asked_for_is_understood() -> None:
    """-inf stands where there is no further token; its place may be anything."""
    ours = torch.zeros(1, 4, dtype=torch.float64)
    places = torch.tensor([[1, 2, 0, 0]])
    logprobs = torch.tensor([[0.75, 0.25, 0.0, 0.0]], dtype=torch.float64).log()
    loss, _ = distillation_loss(ours, places, logprobs, torch.tensor([1]), 0.0)
    expected = 0.75 * np.log(0.75 / 0.25) + 0.25 * np.log(0.25 / 0.25)
    assert abs(float(loss) - expected) < 1e-9
